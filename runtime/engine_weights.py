"""What an engine has from step to step, as its users see it: weights, optimizers, averages, and their state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from quintsched.errors import MisfitError, UsageError

from .blocks.module_state import saved_tensors
from .interchange.exchange import Exchange
from .interchange.save_dcp import STEP
from .interpreter.plan_runner import PlanRunner
from .optim.chained import LRSchedulers
from .optim.loss_scale import LossScale
from .parallel.mesh_groups import MeshGroups
from .resharding.layout import LAYOUT, RUN, StateLayout, layout_of
from .resharding.load_saved import load_saved
from .resharding.saved_state import SavedState
from .stage.build import Stage
from .stage.rank_model import RankModel
from .state.master_weights import Masters
from .state.memory_stats import StateBytes
from .state.state_dict import list_states
from .state.training_state import TrainingState
from .weights.access import WeightAccess
from .weights.average import Averages, Decay, WeightAverage
from .weights.full_state import FullState


class EngineWeights:
    """The part of `Engine` that is about its weights."""

    _model: RankModel
    _state: TrainingState
    _groups: MeshGroups
    _runner: PlanRunner
    _scale: LossScale
    _access: WeightAccess
    _averages: Averages
    _exchange: Exchange
    _run_id: int

    @property
    def stages(self) -> Mapping[int, Stage]:
        """This rank's stages: their blocks, as they are cut, by their numbers in the whole model.

        With ZeRO-1 and 2 this waits for weights that are being gathered; with ZeRO-3 use `gathered`. Where collectives
        are spelled out in messages, all ranks have to look at the same point.
        """
        return self._access.fresh()

    def gathered(self, *, write: bool = False) -> AbstractContextManager[Mapping[int, Stage]]:
        """A context in which this rank's stages show full weights, with ZeRO-3 too (collective).

        With `write`, what is changed in them, on all replicas alike, goes into what the optimizer works on.
        """
        return self._access.gathered(write=write)

    @property
    def optimizers(self) -> dict[tuple[int, ...], Optimizer]:
        """This rank's optimizers, each by the stages that it steps; several as one (`optim.chained`)."""
        return self._state.optimizers

    @property
    def optimizer(self) -> Optimizer:
        """This rank's optimizer; raises `UsageError` where the plan gives it none or several (see `optimizers`)."""
        if len(self.optimizers) != 1:
            raise UsageError(f"this rank has {len(self.optimizers)} optimizers; use engine.optimizers")
        return next(iter(self.optimizers.values()))

    def lr_schedulers(self, make: Callable[[Optimizer], Any]) -> LRSchedulers:
        """Return a learning-rate scheduler for each of this rank's optimizers: `make` builds it.

        schedulers = engine.lr_schedulers(lambda optimizer: CosineAnnealingLR(optimizer, 1000)); then schedulers.step()
        """
        return LRSchedulers(make, self.optimizers.values())

    @property
    def zero_split(self) -> str | None:
        """What ZeRO gives to replicas as whole parameters, and how unevenly, in a line; None where that is nothing."""
        return self._state.zero_split

    @property
    def masters(self) -> Masters:
        """The weights that the optimizer works on, where they are not those that blocks compute with."""
        return self._state.masters

    @property
    def usual_samples(self) -> int:
        """For how many samples a loss weighs 1 that has no weight of its own: those of the largest microbatch at first.

        0 before the first step; a run that goes on sets it to what it was.
        """
        return self._runner.usual_samples

    @usual_samples.setter
    def usual_samples(self, number: int) -> None:
        self._runner.usual_samples = number

    @property
    def loss_is_bare(self) -> bool:
        """Whether the loss, where this rank has found it, had no weight of its own."""
        return self._runner.losses.loss.is_bare

    def ema(self, decay: Decay) -> WeightAverage:
        """Return a moving average of the weights, float32 or wider, which takes in every step from now on.

        `decay` is the share that stays of it, or a function of how many steps it has taken in. See `WeightAverage`.
        """
        average = WeightAverage(self._state, decay)
        self._averages.all.append(average)
        return average

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's shards: weights as "model.<name>", optimizer state as "optimizer.<name>.<key>".

        Beside them "engine.step" says how many steps were made, which the masks of dropouts depend on, "ema.…" are
        averages, "engine.states" lists what optimizers keep, and "engine.optimizer.…" and "engine.module.…" are what
        optimizers and modules keep elsewhere. Raises `UsageError` for what an optimizer keeps if no file can hold it.
        """
        state = {**self._state.read(), **self._averages.state_dict(), **self._progress()}
        return {**state, **list_states(state)}

    def require_loadable(self, state: Mapping[str, Tensor]) -> None:
        """Raise `MisfitError` unless names, shapes and types are those that `load_state_dict` takes here."""
        if STEP not in state:
            raise MisfitError(
                f"the state has no {STEP!r}, and is not what state_dict gave; for weights alone, give full tensors to "
                "engine.set_weights"
            )
        self._averages.require_loadable(state)
        self._state.require_loadable(state)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` gave here on the same mesh (collective with ZeRO); else raises `MisfitError`."""
        self._averages.require_none_applied("load_state_dict")
        self.require_loadable(state)
        self._state.load(state)
        self._averages.load_state_dict(state)
        self._load_progress(state)

    def state_metadata(self) -> dict[str, str]:
        """Return what a file of this rank's `state_dict` has to say of itself, so that any mesh can read it.

        safetensors.torch.save_file(engine.state_dict(), path, metadata=engine.state_metadata())
        """
        return {LAYOUT: layout_of(self._exchange, self._averages.all).to_text(), RUN: f"{self._run_id:016x}"}

    def load_state_files(self, paths: Sequence[str | Path]) -> None:
        """Take over what all ranks of a run have saved, on whatever mesh (collective).

        `paths` are their files, of `state_dict` with `state_metadata`. Each rank reads what it holds of them. Raises,
        on all ranks alike, `InputError` for files that are damaged or not all there, `MisfitError` for those of
        another model, of several steps or runs, or where state of an optimizer cannot be cut otherwise than it was.
        """
        self._averages.require_none_applied("load_state_files")
        with self._exchange.everyone.together(lambda: SavedState([Path(path) for path in paths])) as saved:
            if saved.unplaced:
                raise MisfitError(f"{saved.unplaced[0]}: the file does not say where its tensors lie")
            self._load_progress(load_saved(saved, self._exchange, self._averages.all))

    def fits_state(self, state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bool:
        """Whether a file has just this rank's weights, cut as they are here, so that `load_state_dict` can take it.

        One that does not say how its tensors lie is taken to have them so. One without the number of steps is part of
        what `checkpoint reshard` wrote, where another rank's file has it.
        """
        theirs = StateLayout.of_metadata(metadata)
        mine = {f"model.{one.name}" for one in self._exchange.held() if one.numbers is not None}
        if theirs is None:
            return True
        names = {name for name in state if name.startswith("model.")}
        return names == mine and STEP in state and theirs.holds_as(layout_of(self._exchange, []))

    def full_weights(self) -> dict[str, Tensor]:
        """Return the full weights of this rank's blocks (collective over tp, and replicas that hold shards).

        With ZeRO-3 the blocks themselves show them only while a step uses them.
        """
        return self._state.full_weights()

    def full_state_dict(self, *, all_blocks: bool = False) -> dict[str, Tensor]:
        """Return the names of `state_dict` with full tensors, on the CPU, which any mesh can load (collective).

        Those of this rank's blocks, or of all blocks, then on every rank. Weights are float32 masters where there are.
        """
        full = self._full_state()
        return {**(full.gather_all() if all_blocks else full.gather()), **self._progress()}

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's slices of what `full_state_dict` gave on any mesh (collective with ZeRO).

        `state` has at least this rank's blocks. Where it has weights alone, the optimizer's state stays. Raises
        `MisfitError` for weights that are missing, or of other shapes.
        """
        self._averages.require_none_applied("load_full_state_dict")
        self._full_state().load(state, strict=True)
        self._load_progress(state)

    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Let weights, by their names in the whole model, be these full tensors (collective with ZeRO).

        Names of other ranks' blocks are passed over; unknown ones raise `UsageError`, other shapes `MisfitError`.
        """
        blocks = enumerate(self._model.outlines)
        known = {f"{number}.{name}" for number, block in blocks for name in saved_tensors(block)}
        unknown = sorted(weights.keys() - known)
        if unknown:
            raise UsageError(f"the model has no weight {unknown[0]!r}; names begin with the number of a block")
        self._averages.require_none_applied("set_weights")
        self._full_state().load({f"model.{name}": tensor for name, tensor in weights.items()}, strict=False)

    def state_bytes(self) -> StateBytes:
        """Return the most bytes of weights, gradients and optimizer state on this rank since the last call."""
        return self._state.read_bytes()

    def _full_state(self) -> FullState:
        return FullState(self._model, self._state, self._groups, self._averages.all)

    def _progress(self) -> dict[str, Tensor]:
        """Return what belongs to a state beside tensors of weights; raises `UsageError` where that is not all."""
        self._averages.require_none_applied("saving")
        if self._runner.accumulates:
            raise UsageError("gradients wait for engine.step(…, last=True), and no state has them; save after that")
        return {STEP: torch.tensor(self._runner.steps.total), **self._scale.state_dict()}

    def _load_progress(self, state: Mapping[str, Tensor]) -> None:
        steps = self._runner.steps
        steps.before = int(state.get(STEP, 0)) - steps.in_run
        self._scale.load_state_dict(state)

    def _require_steppable(self) -> None:
        """Raise `UsageError` where a step would train nothing, or lose what was done to the weights since the last."""
        if not torch.is_grad_enabled():
            raise UsageError(
                "a step is called where gradients are switched off, so that it would train nothing; call it outside of "
                "`torch.no_grad()` and `torch.inference_mode()`, or behind `torch.set_grad_enabled(True)`"
            )
        self._averages.require_none_applied("a step")
        masters, weights = self._state.masters, self._state.weights
        if masters.were_changed and (masters.has_copies or weights.are_under_way or not weights.are_resident):
            raise UsageError(
                "weights were changed in place since the last step, but what is stepped are float32 masters or shards "
                "of them, so that the change would be lost; change them in `with engine.gathered(write=True):`, or by "
                "engine.set_weights({name: tensor})"
            )
