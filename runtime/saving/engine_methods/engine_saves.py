"""Saving and loading of an engine's state in every format: `engine.saves`. All ranks make the same calls.

state_dict          this rank's shards            load_state_dict, load_state_files (of any mesh)
full_state_dict     full tensors                  load_full_state_dict
save_dcp            PyTorch's distributed format  load_dcp
save_pretrained     transformers' folders         load_pretrained

`EngineState` has the methods of `engine.weights` and `engine.saves` on the engine itself.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from operator import attrgetter
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from quintsched.check_call_arguments import MAPPING, PATH, shown, takes
from quintsched.errors import MisfitError, UsageError
from quintsched.plan import Plan

from ...comm import Transport
from ...comm.host_collectives import CALLS
from ...weights_and_gradients.rank_state_dict import list_states
from ..dcp import load_dcp, save_dcp
from ..index_ranges_in_full_tensors import LAYOUT, RUN
from ..load_state import StateLoader
from ..pretrained.load_pretrained import LoadedWeights, load_pretrained
from ..pretrained.save_pretrained import save_pretrained
from ..rank_tensor_inventory import RankTensors, apart, full_state, sizes_of
from ..saved_state import MODEL, STEP, SavedState
from .engine_weights import EngineWeights


def _require_plain(beside: Mapping[str, object]) -> None:
    """Raise `UsageError` for a value that no load would read, as it is no plain data."""
    for name, value in beside.items():
        held = io.BytesIO()
        try:
            torch.save(value, held)
            torch.load(io.BytesIO(held.getvalue()), weights_only=True)
        except Exception as error:
            raise UsageError(
                f"save_dcp: beside[{name!r}] is {shown(value)} that is no plain data, which no load would read; give "
                "numbers, text, tensors, and lists and dicts of these"
            ) from error


@dataclass(frozen=True)
class EngineSaves:
    """Saves and loads the state of one rank of an engine.

    Attributes:
        rank: its tensors.
        run_id: a number that no other run has.
        accumulates: returns whether gradients are accumulated for a later optimizer step.
    """

    rank: RankTensors
    run_id: int
    accumulates: Callable[[], bool]

    @property
    def plan(self) -> Plan:
        """Plan of the engine."""
        return self.rank.model.plan

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's shards: weights as "model.<name>", optimizer state as "optimizer.<name>.<key>".

        Also "engine.step", the number of steps made, which dropout masks depend on; "ema.…", the averages;
        "engine.states", the list of the optimizers' states; "engine.optimizer.…" and "engine.module.…", further state
        of optimizers and modules. Raises `UsageError` for optimizer state that no file can hold.
        """
        progress = self._progress()
        state = apart({**self.rank.tensors(), **self.rank.training.beside.read_tensors(), **progress})
        return {**state, **list_states(state)}

    @takes("engine.load_state_dict(state)", state=MAPPING)
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state_dict` of the same mesh (collective with ZeRO); else raises `MisfitError`."""
        if STEP not in state:
            raise MisfitError(
                f"the state has no {STEP!r}, and is not what state_dict gave; for weights alone, give full tensors to "
                "engine.set_weights"
            )
        self._load("load_state_dict", SavedState.of_tensors(dict(state), self.rank.layout(sizes_of(state))))

    def state_metadata(self, state: Mapping[str, Tensor] | None = None) -> dict[str, str]:
        """Return the metadata for a file of this rank's `state_dict`, with which any mesh can read it.

        safetensors.torch.save_file(engine.state_dict(), path, metadata=engine.state_metadata()); `state` is the present
        one where it is at hand.
        """
        layout = self.rank.layout(sizes_of(self.rank.tensors() if state is None else state))
        return {LAYOUT: layout.to_text(), RUN: f"{self.run_id:016x}"}

    def load_state_files(self, paths: Sequence[str | Path], *, are_own: bool = False) -> None:
        """Load the files that all ranks of a run have saved, on whatever mesh (collective).

        `paths` are their files, of `state_dict` with `state_metadata`. Each rank reads its part of them. Raises,
        on all ranks alike, `InputError` for files that are damaged or not all there, `MisfitError` for those of
        another model, of several steps or runs, or where state of an optimizer cannot be resharded.
        With `are_own` they have just this rank's shards, as they are here, and need no layout.
        """
        files, layout_of = [Path(path) for path in paths], self.rank.layout if are_own else None
        saved = self.rank.everyone.together(lambda: SavedState.of_files(files, layout_of))
        if saved.unplaced:
            raise MisfitError(f"{saved.unplaced[0]}: the file does not say where its tensors lie")
        self._load("load_state_files", saved, self.rank.everyone.together)

    def holds_file(self, path: Path) -> bool:
        """Whether a file has exactly this rank's weights, sharded as here: then no other has to be read.

        A file without a layout is assumed to match. One without the number of steps is part of what
        `checkpoint reshard` wrote, where another rank's file has it. Raises `InputError` for a file of another kind.
        """
        saved = SavedState.of_files([path])
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

    @takes("engine.load_full_state_dict(state)", state=MAPPING)
    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load this rank's slices of a `full_state_dict` of any mesh (collective with ZeRO).

        `state` has at least this rank's blocks. Where it has weights alone, the optimizer's state stays. Raises
        `MisfitError` for weights that are missing, or of other shapes.
        """
        self._load("load_full_state_dict", SavedState.of_tensors(state))

    def _load(
        self, verb: str, saved: SavedState, together: Callable[[Callable[[], None]], None] = lambda work: work()
    ) -> None:
        self.rank.averages.require_none_applied(verb)
        StateLoader(saved, self.rank).load_state(together)
        self.rank.take_progress(saved)

    def _progress(self) -> dict[str, Tensor]:
        """Return the number of steps and the loss scale; raises `UsageError` while the state is incomplete."""
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
        """Load weights and buffers from a safetensors folder; each rank reads its own slices (collective).

        For an engine that has not stepped yet: the optimizer's state stays.

        Args:
            path: a file, an index, or the folder of either.
            names: our names ("3.attn.weight") to those in the checkpoint. None: the model's own where blocks come from
                `split`, GPT-2's for a built-in GPT of that shape, else ours; with or without a first part ("model.").
            fresh: patterns on names of weights that the checkpoint need not have: they keep their initial values.
            strict: whether a tensor that no weight takes is an error.

        Returns the weights that stayed fresh, and the tensors that were not used.

        Raises, on all ranks alike, `UsageError` where there is no such folder, `InputError` for a file that is damaged
        or lacks a tensor, `MisfitError` for other shapes, or tensors beyond the model's.
        """
        return load_pretrained(Path(path), self.rank, given=names, fresh=fresh, strict=strict)

    @takes("engine.save_pretrained(path)", path=PATH)
    def save_pretrained(
        self, path: str | Path, *, dtype: torch.dtype | None = None, max_file_bytes: int = 5 * 10**9
    ) -> None:
        """Write a folder that `from_pretrained` of transformers reads: weights and buffers under their own names.

        Of a model with an adapter of PEFT, the adapter alone, as `PeftModel.from_pretrained(base, folder)` reads it.

        Collective. Tensors are gathered one by one, by the first rank of each pipeline coordinate, which writes
        them; tied weights are saved once. The folder's old content stays until the new files are complete;
        files of other names stay after it.

        Args:
            path: the folder.
            dtype: the dtype of floating-point weights; None: the one that blocks compute with. With bf16, float32 gives
                the master weights.
            max_file_bytes: weights are split into several files beyond this size, and between pipeline coordinates.

        Raises `UsageError` on all ranks where it cannot be written.
        """
        save_pretrained(Path(path), self.rank, dtype, max_file_bytes)

    @takes("engine.save_dcp(path)", path=PATH, beside=MAPPING)
    def save_dcp(self, path: str | Path, *, beside: Mapping[str, object] | None = None) -> None:
        """Write weights and optimizer state as `torch.distributed.checkpoint` does, each rank its shards (collective).

        Any mesh loads it, and so does PyTorch without this package: see docs/checkpoints.md. The folder's old content
        stays until the new files are complete. `beside` are further values by name, plain data; where several ranks
        have the same name, the first one's counts.

        Raises, on all ranks alike, `UsageError` where it cannot be written, `MisfitError` for optimizer state that is
        neither of its weight's shape nor whole.
        """
        self.rank.everyone.together(lambda: _require_plain(beside or {}))
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
        """Load a checkpoint of `torch.distributed.checkpoint`, of whatever mesh or program (collective).

        Its table is a pickle, which is read without running code; values are read as plain data only.

        Args:
            path: the folder.
            fresh: patterns on names of weights that the checkpoint need not have: they keep their initial values.
            strict: whether a tensor that no weight takes is an error.
            optimizer: whether the optimizer's state, if saved, is loaded too; settings of groups are not.
            beside: names of further values to return, as `save_dcp` took them.

        Returns the weights that stayed fresh, the tensors that were not used, and the values beside.

        Raises, on all ranks alike, `UsageError` where there is no such folder, `InputError` for one that is damaged or
        lacks a tensor, `MisfitError` for other shapes, or tensors beyond the model's.
        """
        return load_dcp(Path(path), self.rank, fresh=fresh, strict=strict, optimizer=optimizer, beside=beside)


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Owner = TypeVar("Owner")


def _passed(
    method: Callable[Concatenate[Owner, Arguments], Result],
    owner: Callable[[WeightState], Owner],
    *,
    of_all: bool = False,
) -> Callable[Concatenate[WeightState, Arguments], Result]:
    """Return a method of an engine that calls `method` on one of its objects; it keeps signature and docstring.

    `of_all`: all ranks call it, and are told by its name where some call another method.
    """

    def passed(engine: WeightState, /, *given: Arguments.args, **named: Arguments.kwargs) -> Result:
        if of_all:
            engine.transport.waits.call = CALLS.index(method.__name__)
        return method(owner(engine), *given, **named)

    update_wrapper(passed, method)
    return passed


_weights: Callable[[WeightState], EngineWeights] = attrgetter("weights")
_saves: Callable[[WeightState], EngineSaves] = attrgetter("saves")


def _shown(read: Callable[[EngineWeights], Result], like: object) -> Result:
    return cast(Result, property(lambda engine: read(engine.weights), doc=like.__doc__))


class WeightState:
    """Mixin that forwards public methods to `weights` and `saves`, which document them: weights, trained or not."""

    transport: Transport
    weights: EngineWeights
    saves: EngineSaves

    stages = _shown(lambda weights: weights.stages, EngineWeights.stages)
    gathered = _passed(EngineWeights.gathered, _weights)
    full_weights = _passed(EngineWeights.full_weights, _weights)
    set_weights = _passed(EngineWeights.set_weights, _weights)
    state_bytes = _passed(EngineWeights.state_bytes, _weights)

    load_state_dict = _passed(EngineSaves.load_state_dict, _saves)
    load_state_files = _passed(EngineSaves.load_state_files, _saves, of_all=True)
    load_full_state_dict = _passed(EngineSaves.load_full_state_dict, _saves)
    load_pretrained = _passed(EngineSaves.load_pretrained, _saves, of_all=True)
    save_pretrained = _passed(EngineSaves.save_pretrained, _saves, of_all=True)
    load_dcp = _passed(EngineSaves.load_dcp, _saves, of_all=True)


class EngineState(WeightState):
    """Passes on what users call of the state of a training besides."""

    optimizers = _shown(lambda weights: weights.optimizers, EngineWeights.optimizers)
    optimizer = _shown(lambda weights: weights.optimizer, EngineWeights.optimizer)
    zero_split = _shown(lambda weights: weights.zero_split, EngineWeights.zero_split)
    masters = _shown(lambda weights: weights.masters, EngineWeights.masters)
    lr_schedulers = _passed(EngineWeights.lr_schedulers, _weights)
    ema = _passed(EngineWeights.ema, _weights)

    state_dict = _passed(EngineSaves.state_dict, _saves)
    state_metadata = _passed(EngineSaves.state_metadata, _saves)
    full_state_dict = _passed(EngineSaves.full_state_dict, _saves, of_all=True)
    save_dcp = _passed(EngineSaves.save_dcp, _saves, of_all=True)
