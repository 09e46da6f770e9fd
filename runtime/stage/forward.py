"""Running a stage forward: its blocks one after the other, whole or in chains, some of which are run again later.

stage of 6 blocks        recompute 0    [ 0 1 2 3 4 5 ]                    one chain, everything is kept
                         recompute 1    ( 0 1 2 3 4 5 )                    one chain, only its input is kept
                         recompute 3    [ 0 1 ] ( 2 ) [ 3 4 ] ( 5 )        every third block is run again
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from ..autograd.recompute import Rerun, run_dropped
from ..blocks.blocks import Parcel, accepted_extras, split_result, takes_targets
from ..comm import Group
from ..parallel.dropout import Masks
from .stage_draws import UNIT, Extras, Outputs, Run, StageDraws

__all__ = ["UNIT", "Chain", "Extras", "Outputs", "Run", "StageForward", "apart"]


class Chain:
    """Some consecutive blocks; `arriving` and `leaving` name what rides along into and out of them."""

    def __init__(self, blocks: Sequence[nn.Module], arriving: Sequence[str], leaving: Sequence[str]) -> None:
        self._blocks = [(block, accepted_extras(block)) for block in blocks]
        self._arriving = tuple(arriving)
        self._leaving = tuple(leaving)

    def __call__(self, given: Outputs, extras: Extras) -> tuple[Outputs, Tensor | None]:
        """Return what leaves the last block, and the sum of the auxiliary losses (None where no block has one)."""
        activation = given[0]
        beside = {**extras, **dict(zip(self._arriving, given[1:], strict=True))} if self._arriving else extras
        total: Tensor | None = None
        for block, accepts in self._blocks:
            if beside:
                result = block(activation, **{name: extra for name, extra in beside.items() if accepts(name)})
            else:
                result = block(activation)
            if isinstance(result, Tensor):
                activation = result
                continue
            activation, fresh, auxiliary = split_result(result)
            beside = {**beside, **fresh} if fresh else beside
            if auxiliary is not None:
                total = auxiliary if total is None else total + auxiliary
        return ((activation, *[beside[name] for name in self._leaving]) if self._leaving else (activation,)), total


class StageForward:
    """One stage, ready to be run on a microbatch.

    Args:
        blocks: the stage's blocks by number; a stage without any gives what it gets.
        start: how many blocks of the model come before.
        parcels: what every block of the model leaves for the next.
        recompute: every k-th block is recomputed; 1: the stage as a whole, 0: none.
        compiled: whether torch.compile compiles each chain.
        around: number, block → the block with what runs before and behind it.
        masks: what the blocks draw by.
        sliced: number → the ranks over which the tokens are sliced that a block is given, if they are.
    """

    def __init__(
        self,
        blocks: Mapping[int, nn.Module],
        start: int,
        parcels: Sequence[Parcel],
        *,
        masks: Masks,
        recompute: int = 0,
        compiled: bool = False,
        around: Callable[[int, nn.Module], list[nn.Module]] = lambda _, block: [block],
        sliced: Callable[[int], Group | None] = lambda _: None,
    ) -> None:
        numbers = list(blocks)
        self.arriving = parcels[start - 1].names if start else ()
        """The names of what the stage is given beside the activation, in order."""
        self.parcel = parcels[start + len(numbers) - 1]
        """What it leaves: its output, and what rides along from there or is taken past stages."""
        self._modules = tuple(blocks.values())
        self.takes_targets = any(map(takes_targets, blocks.values()))
        self.draws = StageDraws(masks, blocks, sliced)
        """What the blocks draw; where they do, they are given their unit (see `UNIT`)."""

        def chain(some: Sequence[int], dropped: bool) -> tuple[Run, Callable[[], Iterable[Tensor]] | None]:
            first, end = (some[0], some[-1] + 1) if some else (start, start)
            arriving, leaving = (parcels[number - 1].names if number else () for number in (first, end))
            modules = [module for number in some for module in around(number, blocks[number])]
            made = Chain(modules, arriving, leaving)
            run = self.draws.keyed(made, torch.compile(made, dynamic=False) if compiled and modules else None)
            return run, partial(_buffers, modules) if dropped else None

        self._chains = [chain(some, dropped) for some, dropped in _cut(numbers, recompute if numbers else 0)]
        self.whole = self._chains[0][0] if len(self._chains) == 1 and not (recompute and numbers) else None
        """What runs the stage, where nothing of it is recomputed."""

    def __call__(self, given: Outputs, extras: Extras, reruns: list[Rerun]) -> tuple[Outputs, Tensor | None]:
        """Run the stage; where gradients are recorded, what has to be run again before the backward joins `reruns`."""
        total: Tensor | None = None
        for chain, buffers in self._chains:
            if buffers and torch.is_grad_enabled():
                given, auxiliary = run_dropped(chain, buffers, given, extras, reruns)
            else:
                given, auxiliary = chain(given, extras)
            if auxiliary is not None:
                total = auxiliary if total is None else total + auxiliary
        return given, total

    def without_weights(self, outputs: Sequence[Tensor]) -> Outputs:
        """Return what leaves a stage, copied where it is a weight or a buffer, which may change or be freed by then."""
        tensors = (t for module in self._modules for t in (*module.parameters(), *module.buffers()))
        held = {tensor.untyped_storage()._cdata for tensor in tensors}
        return tuple([o.clone() if o.untyped_storage()._cdata in held else o for o in outputs])


def _buffers(modules: Iterable[nn.Module]) -> Iterable[Tensor]:
    return (buffer for module in modules for buffer in module.buffers())


def _cut(numbers: Sequence[int], every: int) -> list[tuple[list[int], bool]]:
    """Cut a stage's blocks into chains; return which of them drop their activations."""
    if every <= 1:
        return [(list(numbers), every == 1)]
    places = range(len(numbers))
    starts = sorted({0} | {p for p in places if p % every == every - 1} | {p for p in places if p % every == 0})
    return [
        (list(numbers[start:stop]), start % every == every - 1) for start, stop in pairwise([*starts, len(numbers)])
    ]


def apart(made: Tensor, taken: Outputs) -> Tensor:
    """Return what was made, copied where it lies in the memory of what was taken (a stage that only reshapes).

    That memory may be a receive buffer, which serves again while what was made is still being sent.
    """
    place = made.data_ptr()
    for tensor in taken:
        begin = tensor.data_ptr()
        if begin <= place < begin + tensor.nbytes:
            return made.clone()
    return made
