"""What goes between an engine and files that other libraries read and write; all ranks call each method together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from ..comm.control import ControlGroup
from ..parallel.mesh_groups import MeshGroups
from ..stage.rank_model import RankModel
from ..state.training_state import TrainingState
from .held import HeldTensor, held_tensors
from .load_dcp import load_dcp
from .load_pretrained import LoadedWeights, load_pretrained
from .model_names import ModelNames
from .save_dcp import Kept, SavedWeight, save_dcp
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
    def _everyone(self) -> ControlGroup:
        return ControlGroup(self.groups.world)

    def _held(self) -> list[HeldTensor]:
        self.state.weights.settle()
        return list(held_tensors(self.model.stages, self.state.masters, self.groups))

    @contextmanager
    def _writing(self) -> Iterator[list[HeldTensor]]:
        """A context in which this rank's tensors are written; blocks have the same numbers after it."""
        yield self._held()
        self.state.masters.publish(list(self.model.stages))
        self.state.weights.gather_again()

    def load_pretrained(
        self, path: str | Path, given: Mapping[str, str] | None, fresh: Sequence[str], *, strict: bool
    ) -> LoadedWeights:
        """See `CheckpointFiles.load_pretrained`."""
        with self._writing() as held:
            return load_pretrained(
                Path(path), self.names, held, self._everyone, given=given, fresh=fresh, strict=strict
            )

    def save_dcp(self, path: str | Path, beside: Mapping[str, object]) -> None:
        """See `CheckpointFiles.save_dcp`; `beside` are values of this rank's own, by name."""
        weights = self._weights(self._held())
        save_dcp(Path(path), weights, self.steps.total, beside, self._everyone, self.groups.world.index)

    def load_dcp(
        self, path: str | Path, fresh: Sequence[str], *, strict: bool, optimizer: bool, beside: Sequence[str] = ()
    ) -> tuple[LoadedWeights, Mapping[str, object]]:
        """See `CheckpointFiles.load_dcp`; return also the values of these names, None where there is none."""
        with self._writing() as held:
            loaded = load_dcp(
                Path(path),
                self._weights(held),
                self._everyone,
                fresh=fresh,
                strict=strict,
                optimizer=optimizer,
                beside=beside,
            )
        self.steps.before = loaded.step - self.steps.in_run
        return loaded.weights, loaded.beside

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
        master = one.numbers
        for optimizer in self.state.optimizers.values():
            for group in optimizer.param_groups:
                if master is not None and any(master is parameter for parameter in group["params"]):
                    return Kept(optimizer.state[master], one.placement, tuple(master.shape), speaks, group)
        return None

    def save_pretrained(self, path: str | Path, dtype: torch.dtype | None, max_file_bytes: int) -> None:
        """See `CheckpointFiles.save_pretrained`."""
        save_pretrained(Path(path), self.names, self._held(), self.model, self.groups, dtype, max_file_bytes)
