"""Access to an engine's weights between steps, wherever they are stored: `engine.weights`.

engine.stages[0].blocks["1"].norm.weight     ZeRO-1, 2: waits for a pending all-gather first
engine.stages[0].state_dict()                ZeRO-3: refused, since weights are not-a-number between steps
with engine.gathered(): …                    full weights, on every ZeRO stage, and over tp
with engine.gathered(write=True): clamp_()   and changes are written back to shards and masters
weight.clamp_() alone                        would be lost where masters or ZeRO shards are stepped, and applied to
                                             the shard alone over tp: detected, and refused
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quintsched.check_call_arguments import FUNCTION, MAPPING, NUMBER, ArgumentKind, shown, takes
from quintsched.errors import UsageError

from ...blocks.state_dict_entries import saved_tensors
from ...optim.chained_optimizers import LRSchedulers
from ...stage.build_stages import Stage
from ...weights_and_gradients.master_weights import Masters
from ...weights_and_gradients.resident_weight_bytes import StateBytes
from ...weights_and_gradients.training_state import TrainingState
from ..load_state import StateLoader
from ..rank_tensor_inventory import RankTensors
from ..saved_state import MODEL, SavedState
from ..weight_averages import Decay, WeightAverage


class EngineWeights:
    """Persistent tensors of an engine, for users: weights, optimizers, averages."""

    def __init__(self, rank: RankTensors) -> None:
        self._rank, self._training = rank, rank.training
        if self._training.weights:
            for stage in rank.model.stages.values():
                for block in stage.blocks.values():
                    block.register_state_dict_pre_hook(_guard(self._training))

    @property
    def stages(self) -> Mapping[int, Stage]:
        """Stages of this rank: their blocks, with sharded weights, by their numbers in the whole model.

        With ZeRO-1 and 2 this waits for weights that are being gathered; with ZeRO-3 use `gathered`. Where collectives
        are expanded into messages, all ranks must read it at the same point.
        """
        self._training.weights.wait_gathers()
        return self._rank.model.stages

    @contextmanager
    def gathered(self, *, write: bool = False) -> Iterator[Mapping[int, Stage]]:
        """Show full weights in this rank's stages within a context, with ZeRO-3 and over tp too (collective).

        With `write`, changes to them, the same on all replicas, are written back to the master weights.
        """
        stages = self._rank.model.stages
        with ExitStack() as stack:
            for number in stages:
                stack.enter_context(self._training.weights.gathered(number))
            with self._training.joined(write=write):
                yield stages
            if write:
                self._training.take_over()

    @property
    def optimizers(self) -> dict[tuple[int, ...], Optimizer]:
        """Optimizers of this rank, each by the stages that it steps; several as one (`optim.chained_optimizers`)."""
        return self._training.optimizers

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer of this rank; raises `UsageError` where the plan gives it none or several (see `optimizers`)."""
        if len(self.optimizers) != 1:
            raise UsageError(f"this rank has {len(self.optimizers)} optimizers; use engine.optimizers")
        return next(iter(self.optimizers.values()))

    @takes("engine.lr_schedulers(make)", make=FUNCTION)
    def lr_schedulers(self, make: Callable[[Optimizer], Any]) -> LRSchedulers:
        """Return a learning-rate scheduler for each of this rank's optimizers: `make` builds it.

        schedulers = engine.lr_schedulers(lambda optimizer: CosineAnnealingLR(optimizer, 1000)); then schedulers.step()
        """
        return LRSchedulers(make, self.optimizers.values())

    @property
    def zero_split(self) -> str | None:
        """Line on the whole parameters that ZeRO gives to replicas, and how unevenly; None where it gives none."""
        return self._training.zero_split

    @property
    def masters(self) -> Masters:
        """Master weights that the optimizer steps, where they are not those that blocks compute with."""
        return self._training.masters

    @takes("engine.ema(0.999)", decay=ArgumentKind("a number or a function", lambda d: NUMBER.holds(d) or callable(d)))
    def ema(self, decay: Decay) -> WeightAverage:
        """Return an exponential moving average of the weights, float32 or wider, which every step from now on updates.

        `decay` is a number from 0 to 1, or a function of the number of updates so far. See `WeightAverage`.
        """
        average = WeightAverage(self._training, decay)
        self._rank.averages.all.append(average)
        return average

    def full_weights(self) -> dict[str, Tensor]:
        """Return the full weights of this rank's blocks (collective over tp, and replicas that hold shards).

        With ZeRO-3 the blocks themselves show them only while a step uses them.
        """
        return self._training.full_weights()

    @takes("engine.set_weights({name: tensor})", weights=MAPPING)
    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Set weights, by their names in the whole model, to these full tensors (collective with ZeRO).

        Names of other ranks' blocks are ignored; unknown ones raise `UsageError`, other shapes `MisfitError`.
        """
        blocks = enumerate(self._rank.model.outlines)
        known = {f"{number}.{name}" for number, block in blocks for name in saved_tensors(block)}
        if wrong := [name for name, weight in weights.items() if not isinstance(weight, Tensor)]:
            raise UsageError(f"set_weights: {wrong[0]!r} is given {shown(weights[wrong[0]])}; give a full tensor")
        unknown = sorted(weights.keys() - known)
        if unknown:
            raise UsageError(f"the model has no weight {unknown[0]!r}; names begin with the number of a block")
        self._rank.averages.require_none_applied("set_weights")
        saved = SavedState.of_tensors({MODEL + name: tensor for name, tensor in weights.items()})
        StateLoader(saved, self._rank, is_part=True).load_state()

    def state_bytes(self) -> StateBytes:
        """Return the peak bytes of weights, gradients and optimizer state on this rank since the last call."""
        return self._training.read_bytes()

    def require_steppable(self) -> None:
        """Raise `UsageError` where a step would train nothing, or weights and an average are swapped."""
        if not torch.is_grad_enabled():
            raise UsageError(
                "a step is called where gradients are switched off, so that it would train nothing; call it outside of "
                "`torch.no_grad()` and `torch.inference_mode()`, or behind `torch.set_grad_enabled(True)`"
            )
        if self._rank.averages.all:
            self._rank.averages.require_none_applied("a step")


def _guard(training: TrainingState) -> Callable[..., None]:
    """Return the state-dict pre-hook of a block: a function without `self`, which copies of the block share."""

    def before(module: nn.Module, prefix: str, keep_vars: bool, *_: Any) -> None:
        if keep_vars:
            return
        training.weights.wait_gathers()
        if not training.weights.are_resident:
            raise UsageError(
                "with ZeRO-3 the blocks show their weights only while a step uses them; read them in `with "
                "engine.gathered():`, or by engine.full_weights()"
            )

    return before
