"""The state of an engine, as it is saved and loaded in every format: `engine.saves`. All ranks make the same calls.

state_dict          this rank's shards            load_state_dict, load_state_files (of any mesh)
full_state_dict     full tensors                  load_full_state_dict
save_dcp            PyTorch's distributed format  load_dcp
save_pretrained     transformers' folders         load_pretrained

The verbs of `engine.weights` and `engine.saves`, on the engine itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from quintsched.errors import MisfitError, UsageError
from quintsched.plan import Plan

from ...state.state_dict import list_states
from ..dcp import load_dcp, save_dcp
from ..load_state import StateLoader
from ..placement import LAYOUT, RUN
from ..pretrained.load_pretrained import LoadedWeights, load_pretrained
from ..pretrained.save_pretrained import save_pretrained
from ..rank_tensors import RankTensors, apart, full_state, sizes_of
from ..saved_state import MODEL, STEP, SavedState
from .engine_weights import EngineWeights


@dataclass(frozen=True)
class EngineSaves:
    """Saves and loads the state of one rank of an engine.

    Attributes:
        rank: what it has.
        run_id: a number that no other run has.
        accumulates: whether gradients wait for the next call of a step.
    """

    rank: RankTensors
    run_id: int
    accumulates: Callable[[], bool]

    @property
    def plan(self) -> Plan:
        """The plan of the engine."""
        return self.rank.model.plan

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's shards: weights as "model.<name>", optimizer state as "optimizer.<name>.<key>".

        Beside them "engine.step" says how many steps were made, which the masks of dropouts depend on, "ema.…" are
        averages, "engine.states" lists what optimizers keep, and "engine.optimizer.…" and "engine.module.…" are what
        optimizers and modules keep elsewhere. Raises `UsageError` for what an optimizer keeps if no file can hold it.
        """
        progress = self._progress()
        state = apart({**self.rank.tensors(), **self.rank.training.beside.read(), **progress})
        return {**state, **list_states(state)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` gave here on the same mesh (collective with ZeRO); else raises `MisfitError`."""
        if STEP not in state:
            raise MisfitError(
                f"the state has no {STEP!r}, and is not what state_dict gave; for weights alone, give full tensors to "
                "engine.set_weights"
            )
        tensors = dict(state)
        self._load("load_state_dict", SavedState.of_tensors(tensors, self.rank.layout(sizes_of(tensors))))

    def state_metadata(self, state: Mapping[str, Tensor] | None = None) -> dict[str, str]:
        """Return what a file of this rank's `state_dict` has to say of itself, so that any mesh can read it.

        safetensors.torch.save_file(engine.state_dict(), path, metadata=engine.state_metadata()); `state` is that of
        now where it is at hand.
        """
        layout = self.rank.layout(sizes_of(self.rank.tensors() if state is None else state))
        return {LAYOUT: layout.to_text(), RUN: f"{self.run_id:016x}"}

    def load_state_files(self, paths: Sequence[str | Path], *, are_own: bool = False) -> None:
        """Take over what all ranks of a run have saved, on whatever mesh (collective).

        `paths` are their files, of `state_dict` with `state_metadata`. Each rank reads what it holds of them. Raises,
        on all ranks alike, `InputError` for files that are damaged or not all there, `MisfitError` for those of
        another model, of several steps or runs, or where state of an optimizer cannot be cut otherwise than it was.
        With `are_own` they have what this rank holds, cut as it is here, and need not say so.
        """
        files, layout_of = [Path(path) for path in paths], self.rank.layout if are_own else None
        with self.rank.everyone.together(lambda: SavedState.of_files(files, layout_of)) as saved:
            if saved.unplaced:
                raise MisfitError(f"{saved.unplaced[0]}: the file does not say where its tensors lie")
            self._load("load_state_files", saved, is_collective=True)

    def holds_file(self, path: Path) -> bool:
        """Whether a file has just this rank's weights, cut as they are here: no other has to be read.

        One that does not say how its tensors lie is taken to have them so. One without the number of steps is part of
        what `checkpoint reshard` wrote, where another rank's file has it. Raises `InputError` for what is no such file.
        """
        with SavedState.of_files([path]) as saved:
            if saved.unplaced:
                return True
            mine = {MODEL + one.name: one.placement.held for one in self.rank.held() if one.numbers is not None}
            names = {name for name in saved.pieces if name.startswith(MODEL)}
            is_alike = saved.layouts[0].holds_as(self.rank.layout(mine))
            return is_alike and names == mine.keys() and STEP in saved.pieces

    def full_state_dict(self, *, all_blocks: bool = False) -> dict[str, Tensor]:
        """Return the names of `state_dict` with full tensors, on the CPU, which any mesh can load (collective).

        Those of this rank's blocks, or of all blocks, then on every rank. Weights are float32 masters where there are.
        """
        progress = self._progress()
        return {**full_state(self.rank, all_blocks=all_blocks), **progress}

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's slices of what `full_state_dict` gave on any mesh (collective with ZeRO).

        `state` has at least this rank's blocks. Where it has weights alone, the optimizer's state stays. Raises
        `MisfitError` for weights that are missing, or of other shapes.
        """
        self._load("load_full_state_dict", SavedState.of_tensors(state))

    def _load(self, verb: str, saved: SavedState, *, is_collective: bool = False) -> None:
        self.rank.averages.require_none_applied(verb)
        loader = StateLoader(saved, self.rank)
        if is_collective:
            loader.load(self.rank.everyone.together)
        else:
            loader.load()
        self.rank.take_progress(saved)

    def _progress(self) -> dict[str, Tensor]:
        """Return what belongs to a state beside tensors of weights; raises `UsageError` where that is not all."""
        self.rank.averages.require_none_applied("saving")
        if self.accumulates():
            raise UsageError("gradients wait for engine.step(…, last=True), and no state has them; save after that")
        return {STEP: torch.tensor(self.rank.steps.total), **self.rank.scale.state_dict()}

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
        return load_pretrained(Path(path), self.rank, given=names, fresh=fresh, strict=strict)

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
        save_pretrained(Path(path), self.rank, dtype, max_file_bytes)

    def save_dcp(self, path: str | Path, *, beside: Mapping[str, object] | None = None) -> None:
        """Write weights and optimizer state as `torch.distributed.checkpoint` does, each rank its shards (collective).

        Any mesh loads it, and so does PyTorch without us: see docs/checkpoints.md. What was in the folder before stays
        until the new files are whole. `beside` are further values by name, plain data; where several ranks have the
        same name, the first one's counts.

        Raises, on all ranks alike, `UsageError` where it cannot be written, `MisfitError` for optimizer state that is
        neither a weight's shape nor whole.
        """
        save_dcp(Path(path), self.rank, beside or {})

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
        return load_dcp(Path(path), self.rank, fresh=fresh, strict=strict, optimizer=optimizer, beside=beside)


Given = ParamSpec("Given")
Found = TypeVar("Found")
Owner = TypeVar("Owner")


def _passed(
    method: Callable[Concatenate[Owner, Given], Found], owner: Callable[[WeightState], Owner]
) -> Callable[Concatenate[WeightState, Given], Found]:
    """Return a method of an engine that is one of its object's; it has the same description."""

    def passed(engine: WeightState, /, *given: Given.args, **named: Given.kwargs) -> Found:
        return method(owner(engine), *given, **named)

    update_wrapper(passed, method)
    return passed


def _weights(engine: WeightState) -> EngineWeights:
    return engine.weights


def _saves(engine: WeightState) -> EngineSaves:
    return engine.saves


def _shown(read: Callable[[EngineWeights], Found]) -> Found:
    return cast(Found, property(lambda engine: read(engine.weights)))


class WeightState:
    """Passes on what users call of weights, trained or not; each is described where it is done."""

    weights: EngineWeights
    saves: EngineSaves

    stages = _shown(lambda weights: weights.stages)
    gathered = _passed(EngineWeights.gathered, _weights)
    full_weights = _passed(EngineWeights.full_weights, _weights)
    set_weights = _passed(EngineWeights.set_weights, _weights)
    state_bytes = _passed(EngineWeights.state_bytes, _weights)

    load_state_dict = _passed(EngineSaves.load_state_dict, _saves)
    load_state_files = _passed(EngineSaves.load_state_files, _saves)
    load_full_state_dict = _passed(EngineSaves.load_full_state_dict, _saves)
    load_pretrained = _passed(EngineSaves.load_pretrained, _saves)
    save_pretrained = _passed(EngineSaves.save_pretrained, _saves)
    load_dcp = _passed(EngineSaves.load_dcp, _saves)


class EngineState(WeightState):
    """Passes on what users call of the state of a training besides."""

    optimizers = _shown(lambda weights: weights.optimizers)
    optimizer = _shown(lambda weights: weights.optimizer)
    zero_split = _shown(lambda weights: weights.zero_split)
    masters = _shown(lambda weights: weights.masters)
    lr_schedulers = _passed(EngineWeights.lr_schedulers, _weights)
    ema = _passed(EngineWeights.ema, _weights)

    state_dict = _passed(EngineSaves.state_dict, _saves)
    state_metadata = _passed(EngineSaves.state_metadata, _saves)
    full_state_dict = _passed(EngineSaves.full_state_dict, _saves)
    save_dcp = _passed(EngineSaves.save_dcp, _saves)
