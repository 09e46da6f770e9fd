"""Reading and changing weights between steps, wherever they lie.

engine.stages[0].blocks["1"].norm.weight     ZeRO-1, 2: what is being gathered is waited for first
engine.stages[0].state_dict()                ZeRO-3: refused, since weights are not-a-number between steps
with engine.gathered(): …                    full weights, on every ZeRO stage
with engine.gathered(write=True): clamp_()   and what is changed in them goes into shards and masters
weight.clamp_() alone                        lost where masters or shards are what is stepped: found, and refused
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from quintsched.errors import UsageError

from ..stage.build import Stage
from ..state.training_state import TrainingState


class WeightAccess:
    """Guards the weights of one rank's stages between steps."""

    def __init__(self, state: TrainingState, stages: Mapping[int, Stage]) -> None:
        self._state, self._stages = state, stages
        if state.weights:
            for stage in stages.values():
                for block in stage.blocks.values():
                    block.register_state_dict_pre_hook(_guard(state))

    def fresh(self) -> Mapping[int, Stage]:
        """Return the stages, whose weights have been gathered, as far as they are between steps."""
        self._state.weights.settle()
        return self._stages

    @contextmanager
    def gathered(self, *, write: bool) -> Iterator[Mapping[int, Stage]]:
        """A context in which weights are full; with `write` what is changed in them is kept."""
        with ExitStack() as stack:
            for number in self._stages:
                stack.enter_context(self._state.weights.gathered(number))
            yield self._stages
            if write:
                self._state.take_over()


def _guard(state: TrainingState) -> Callable[..., None]:
    """Return what runs before a block says its state: a function, which copies of the block have in common."""

    def before(module: nn.Module, prefix: str, keep_vars: bool, *_: Any) -> None:
        if keep_vars:
            return
        state.weights.settle()
        if not state.weights.are_resident:
            raise UsageError(
                "with ZeRO-3 the blocks show their weights only while a step uses them; read them in `with "
                "engine.gathered():`, or by engine.full_weights()"
            )

    return before
