"""What goes between an engine and files that other libraries read and write; all ranks call each method together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from ..comm.control import ControlGroup
from ..optim.own_state import BESIDE as OPTIMIZERS
from ..parallel.mesh_groups import MeshGroups
from ..stage.rank_model import RankModel
from ..state.state_dict import require_alike
from ..state.training_state import TrainingState
from .held import HeldTensor, held_tensors
from .load_dcp import load_dcp
from .load_pretrained import LoadedWeights, load_pretrained
from .model_names import ModelNames
from .save_dcp import BESIDE, Kept, SavedWeight, save_dcp
from .save_pretrained import save_pretrained


class Steps(Protocol):
    """How many steps were made: in this run, and before it."""

    before: int
    in_run: int

    @property
    def total(self) -> int:
        """All of them."""


@dataclass(frozen=True)
class Exchange:
    """One rank's side of it."""

    model: RankModel
    state: TrainingState
    groups: MeshGroups
    names: ModelNames
    steps: Steps

    @property
    def everyone(self) -> ControlGroup:
        """All ranks."""
        return ControlGroup(self.groups.world)

    def held(self) -> list[HeldTensor]:
        """Return what this rank holds of the model, when all of it has arrived."""
        self.state.weights.settle()
        return list(held_tensors(self.model.stages, self.state.masters, self.groups))

    @contextmanager
    def writing(self) -> Iterator[list[HeldTensor]]:
        """A context in which this rank's tensors are written; blocks have the same numbers after it."""
        yield self.held()
        self.state.masters.publish(list(self.model.stages))
        self.state.weights.gather_again()

    def load_pretrained(
        self, path: str | Path, given: Mapping[str, str] | None, fresh: Sequence[str], *, strict: bool
    ) -> LoadedWeights:
        """See `CheckpointFiles.load_pretrained`."""
        with self.writing() as held:
            return load_pretrained(Path(path), self.names, held, self.everyone, given=given, fresh=fresh, strict=strict)

    def save_dcp(self, path: str | Path, beside: Mapping[str, object]) -> None:
        """See `CheckpointFiles.save_dcp`; `beside` are values of this rank's own, by name."""
        weights = self._weights(self.held())
        kept_beside = self.everyone.together(self.state.read_beside)
        require_alike(kept_beside, self.groups.world)
        save_dcp(Path(path), weights, self.steps.total, kept_beside, beside, self.everyone, self.groups.world.index)

    def load_dcp(
        self, path: str | Path, fresh: Sequence[str], *, strict: bool, optimizer: bool, beside: Sequence[str]
    ) -> LoadedWeights:
        """See `CheckpointFiles.load_dcp`."""
        with self.writing() as held:
            loaded, step, found = load_dcp(
                Path(path),
                self._weights(held),
                self.everyone,
                fresh=self.names.may_stay(fresh),
                strict=strict,
                optimizer=optimizer,
                beside=beside,
            )
            self.everyone.together(lambda: self._load_beside(found, optimizer=optimizer))
        self.steps.before = step - self.steps.in_run
        return loaded

    def _load_beside(self, found: Mapping[str, Tensor], *, optimizer: bool) -> None:
        """Take over what modules and optimizers kept beside; a checkpoint of others lacks it, and theirs stays."""
        mine = self.state.read_beside()
        taken = {name: tensor for name, tensor in found.items() if optimizer or not name.startswith(OPTIMIZERS)}
        has = tuple(kind for kind in BESIDE if any(name.startswith(kind) for name in taken))
        self.state.load_beside({**{n: t for n, t in mine.items() if not n.startswith(has)}, **taken})

    def _weights(self, held: Sequence[HeldTensor]) -> list[SavedWeight]:
        """Return this rank's tensors, each by all names that it has in the model; of copies, the first one speaks."""
        names, twins = self.names.dcp_names(), self.model.plan.layout.twins
        further = {name for group in self.names.same() for name in group[1:]}
        firsts = {id(one.tensor): one for one in reversed(held)}
        firsts |= {id(one.tensor): one for one in reversed(held) if one.name not in further}
        found = []
        for one in firsts.values():
            speaks = one.speaks and one.name not in further and twins(one.stage)[:1] in ((), (one.stage,))
            found.append(SavedWeight(replace(one, speaks=speaks), names[one.name], self._kept(one, speaks)))
        return found

    def _kept(self, one: HeldTensor, speaks: bool) -> Kept | None:
        """Return what an optimizer keeps for a weight; of a matrix that tp gathers for it, the first rank speaks."""
        if not isinstance(one.numbers, nn.Parameter):
            return None
        for stepper in self.state.steppers.values():
            found = stepper.group_of(one.numbers)
            if found is not None:
                stepped, group = found
                placement = one.placement
                if stepped is not one.numbers:
                    placement, speaks = placement.gathered(), speaks and self.groups.tensor.index == 0
                return Kept(stepper.state_of(one.numbers), placement, tuple(stepped.shape), speaks, group)
        return None

    def save_pretrained(self, path: str | Path, dtype: torch.dtype | None, max_file_bytes: int) -> None:
        """See `CheckpointFiles.save_pretrained`."""
        save_pretrained(Path(path), self.names, self.held(), self.model, self.groups, dtype, max_file_bytes)


class CheckpointFiles:
    """Reads and writes folders of safetensors, and PyTorch's distributed checkpoints."""

    _exchange: Exchange

    def load_pretrained(
        self,
        path: str | Path,
        *,
        names: Mapping[str, str] | None = None,
        fresh: Sequence[str] = (),
        strict: bool = True,
    ) -> LoadedWeights:
        """Let weights and buffers be those of a safetensors folder; each rank reads its own slices (collective).

        It is meant for an engine that has not stepped yet: the optimizer's state stays.

        Args:
            path: a file, an index, or the folder of either.
            names: our names ("3.attn.weight") to those in the checkpoint. None: the model's own where blocks come from
                `split`, GPT-2's for a built-in GPT of that shape, else ours; with or without a first part ("model.").
            fresh: patterns on names of weights that the checkpoint need not have: they keep their initial values.
            strict: whether a tensor that no weight takes is an error.

        Returns what stayed fresh, and what was not used.

        Raises, on all ranks alike, `UsageError` where there is no such folder, `InputError` for a file that is damaged
        or lacks a tensor, `MisfitError` for other shapes, or tensors beyond the model's.
        """
        return self._exchange.load_pretrained(path, names, fresh, strict=strict)

    def save_pretrained(
        self, path: str | Path, *, dtype: torch.dtype | None = None, max_file_bytes: int = 5 * 10**9
    ) -> None:
        """Write a folder that `from_pretrained` of transformers reads: weights and buffers under their own names.

        Collective. Tensors are gathered one by one, by the first rank of each pipeline coordinate, which writes
        them; weights that are tied are saved once. What was in the folder before stays until the new files are whole;
        files of other names stay after it.

        Args:
            path: the folder.
            dtype: the type of floating-point weights; None: the one that blocks compute with. With bf16, float32 gives
                the masters that the optimizer works on.
            max_file_bytes: weights are cut into several files beyond this size, and between pipeline coordinates.

        Raises `UsageError` on all ranks where it cannot be written.
        """
        self._exchange.save_pretrained(path, dtype, max_file_bytes)

    def save_dcp(self, path: str | Path, *, beside: Mapping[str, object] | None = None) -> None:
        """Write weights and optimizer state as `torch.distributed.checkpoint` does, each rank its shards (collective).

        Any mesh loads it, and so does PyTorch without us: see docs/checkpoints.md. What was in the folder before stays
        until the new files are whole. `beside` are further values by name, plain data; where several ranks have the
        same name, the first one's counts.

        Raises, on all ranks alike, `UsageError` where it cannot be written, `MisfitError` for optimizer state that is
        neither a weight's shape nor whole.
        """
        self._exchange.save_dcp(path, beside or {})

    def load_dcp(
        self,
        path: str | Path,
        *,
        fresh: Sequence[str] = (),
        strict: bool = True,
        optimizer: bool = True,
        beside: Sequence[str] = (),
    ) -> LoadedWeights:
        """Take over a checkpoint of `torch.distributed.checkpoint`, of whatever mesh or program (collective).

        Its table is a pickle, which is read without running anything; values are read as plain data only.

        Args:
            path: the folder.
            fresh: patterns on names of weights that the checkpoint need not have: they keep their initial values.
            strict: whether a tensor that no weight takes is an error.
            optimizer: whether the optimizer's state is taken over too, where there is one; settings of groups are not.
            beside: names of further values that are wanted, as `save_dcp` took them.

        Returns what stayed fresh, what was not used, and the values beside.

        Raises, on all ranks alike, `UsageError` where there is no such folder, `InputError` for one that is damaged or
        lacks a tensor, `MisfitError` for other shapes, or tensors beyond the model's.
        """
        return self._exchange.load_dcp(path, fresh, strict=strict, optimizer=optimizer, beside=beside)
