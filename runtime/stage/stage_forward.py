"""Running a stage forward: its blocks one after the other, whole or in chains, some of which are run again later.

stage of 6 blocks        recompute 0    [ 0 1 2 3 4 5 ]                    one chain, everything is kept
                         recompute 1    ( 0 1 2 3 4 5 )                    one chain, only its input is kept
                         recompute 3    [ 0 1 ] ( 2 ) [ 3 4 ] ( 5 )        every third block is run again
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quintsched.errors import MisfitError

from ..autograd.recompute import Rerun, run_dropped
from ..blocks.blocks import Parcel, accepted_extras, split_result, takes_targets
from ..blocks.trees import PLAIN, Tensors, Tree, TreeSpec, flatten
from ..blocks.untouched import as_leaves, detached
from ..comm import Group
from ..objects.spaces import forward_hooks, is_of_torch
from ..parallel.dropout import Masks
from .in_place_copies import NOTHING_COPIED, Copied, copied_in
from .stage_draws import UNIT, Extras, Outputs, Run, StageDraws

__all__ = ["UNIT", "Chain", "Extras", "Outputs", "Run", "StageForward", "apart"]


class Chain:
    """Some consecutive blocks.

    Args:
        blocks: with what is around them, and the numbers of those.
        tree: how what the first block is given is built; None: it is a tensor. `width` is how many tensors it has.
        arriving: names of what rides along into the first block.
        leaving: what leaves the last; None: the output of the model, which is left as it is.
        begins: told of each block that gives a loss.
        copied: what the blocks change in place of what they are given, which get copies of it.
        called: number, block → what calls it.
        compiled: whether torch.compile compiles the blocks.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[int, nn.Module]],
        tree: Callable[[], Tree] | None,
        width: int,
        arriving: Sequence[str],
        leaving: Parcel | None,
        *,
        begins: Callable[[int, nn.Module], None],
        copied: Copied = NOTHING_COPIED,
        called: Callable[[int, nn.Module], Callable[..., Any]] = lambda _, block: block,
        compiled: bool = False,
    ) -> None:
        self._blocks = [(n, block, called(n, block), accepted_extras(block)) for n, block in blocks]
        self._begins = begins
        self._tree, self._width = tree, width
        self._arriving, self._leaving = tuple(arriving), leaving
        self._names = () if leaving is None else leaving.names
        self._leaves_tree = leaving is not None and not leaving.output.tree.is_tensor
        self._copied = copied if copied.places or copied.names else None
        self._through = torch.compile(self._run, dynamic=False) if compiled and blocks else self._run

    def __call__(self, given: Outputs, extras: Extras) -> tuple[Outputs, Tensor | None]:
        """Return what leaves the last block, and the sum of the auxiliary losses (None where no block has one)."""
        width = self._width
        if self._copied is not None:
            given, extras = self._copied.of(given, extras)
        first = given[0] if self._tree is None else self._tree().build(given[:width])
        beside = {**extras, **dict(zip(self._arriving, given[width:], strict=True))} if self._arriving else extras
        outputs, total = self._through((first,), beside)
        if self._leaves_tree:
            output, *riders = outputs
            return (*self._tensors_of(output), *riders), total
        return outputs, total

    @property
    def direct(self) -> Run:
        """What does the same as the chain, without its preparations where there is nothing to prepare."""
        prepares = self._copied is not None or self._tree is not None or self._arriving or self._leaves_tree
        return self if prepares else self._through

    def _run(self, given: Outputs, beside: Extras) -> tuple[Outputs, Tensor | None]:
        """Return the last block's output and what rides along behind it, and the sum of the auxiliary losses."""
        activation: Any = given[0]
        total: Tensor | None = None
        for number, block, call, accepts in self._blocks:
            if beside:
                result = call(activation, **{name: extra for name, extra in beside.items() if accepts(name)})
            else:
                result = call(activation)
            if isinstance(result, Tensor):
                activation = result
                continue
            activation, fresh, auxiliary = split_result(result)
            beside = {**beside, **fresh} if fresh else beside
            if auxiliary is not None:
                self._begins(number, block)
                total = auxiliary if total is None else total + auxiliary
        return (activation, *[beside[name] for name in self._names]) if self._names else (activation,), total

    def _tensors_of(self, output: object) -> Tensors:
        """Return the tensors of what leaves; raises `MisfitError` unless it is built as the ranks agreed."""
        assert self._leaving is not None
        tensors = self._leaving.output.tree.tensors_of(output)
        if tensors is None:
            raise MisfitError(
                f"a {type(self._blocks[-1][1]).__name__} gave {flatten(output)[0]}; the ranks agreed on "
                f"{self._leaving.output.tree}, which it gave when shapes were found"
            )
        return tensors


class Whole:
    """A chain at the end of the model that is run again: its output's tensors, and how they are put together."""

    def __init__(self, chain: Run) -> None:
        self._chain, self._tree = chain, PLAIN

    def __call__(self, given: Outputs, extras: Extras) -> tuple[Outputs, Tensor | None]:
        """Return the tensors of the output."""
        (output,), total = self._chain(given, extras)
        self._tree, tensors = flatten(output)
        return tensors, total

    def output(self, tensors: Outputs) -> Outputs:
        """Return the output that the latest run gave, with these tensors."""
        return (self._tree.build(tensors),)


class StageForward:
    """One stage, ready to be run on a microbatch.

    Args:
        blocks: the stage's blocks by number; a stage without any gives what it gets.
        start: how many blocks of the model come before.
        parcels: what every block of the model leaves for the next.
        inputs: a unit of inputs, as ranks agreed on it.
        input_tree: how the inputs of the current step are built, whose values may change from step to step.
        skips: names of what the plan sends past stages, of which no block changes anything.
        recompute: every k-th block is recomputed; 1: the stage as a whole, 0: none.
        compiled: whether torch.compile compiles each chain.
        around: number, block → the block with what runs before and behind it.
        masks: what the blocks draw by.
        sliced: number → the ranks over which the tokens are sliced that a block is given, if they are.
        beside: a mode that the blocks run in.
        begins: told of each block that gives a loss, by its number.
    """

    _num_runs = 0
    """How often it ran in training."""

    def __init__(
        self,
        blocks: Mapping[int, nn.Module],
        start: int,
        parcels: Sequence[Parcel],
        *,
        masks: Masks,
        inputs: TreeSpec,
        input_tree: Callable[[], Tree],
        skips: Collection[str] = (),
        recompute: int = 0,
        compiled: bool = False,
        around: Callable[[int, nn.Module], list[nn.Module]] = lambda _, block: [block],
        sliced: Callable[[int], Group | None] = lambda _: None,
        beside: TorchFunctionMode | None = None,
        begins: Callable[[int, nn.Module], None] = lambda number, block: None,
    ) -> None:
        numbers = list(blocks)
        self.arriving = parcels[start - 1] if start else Parcel(inputs)
        """What the stage is given."""
        self.parcel = parcels[start + len(numbers) - 1]
        """What it leaves: its output, and what rides along from there or is taken past stages."""
        self.blocks = dict(blocks)
        """Its blocks, by their numbers."""
        named = (f"{number} {type(block).__name__}" for number, block in blocks.items())
        self.title = f"blocks {', '.join(named)}" if blocks else "no blocks"
        """Its blocks, in words."""
        self.takes_targets = any(map(takes_targets, blocks.values()))
        self.draws = StageDraws(masks, blocks, sliced, beside)
        """What the blocks draw; where they do, they are given their unit (see `UNIT`)."""
        self._final: Whole | None = None

        def chain(some: Sequence[int], dropped: bool) -> tuple[Run, Callable[[], Iterable[Tensor]] | None]:
            first, end = (some[0], some[-1] + 1) if some else (start, start)
            arriving = parcels[first - 1] if first else Parcel(inputs)
            tree = partial(_tree_of, arriving) if first else input_tree
            modules = [(number, module) for number in some for module in around(number, blocks[number])]
            chain_of = partial(
                Chain,
                modules,
                None if arriving.output.tree.is_tensor else tree,
                arriving.width,
                arriving.names,
                None if end == len(parcels) else parcels[end - 1],
                begins=begins,
                copied=copied_in(range(first, end), parcels, arriving, skips),
            )
            watched = chain_of(called=self.draws.around).direct
            made = self.draws.by_unit(chain_of().direct, watched, chain_of(compiled=True).direct if compiled else None)
            if any(parcels[number].records for number in some):
                made = partial(_run_recorded, made)
            if dropped and end == len(parcels):
                made = self._final = Whole(made)
            return made, partial(_buffers, [module for _, module in modules]) if dropped else None

        self._chains = [chain(some, dropped) for some, dropped in chains_of(numbers, recompute if numbers else 0)]
        self.whole = self._chains[0][0] if len(self._chains) == 1 and not (recompute and numbers) else None
        """What runs the stage, where nothing of it is recomputed."""
        self.plain: Run | None = getattr(self.whole, "plain", None)
        """The same, where blocks draw nothing."""

    def __call__(self, given: Outputs, extras: Extras, reruns: list[Rerun]) -> tuple[Outputs, Tensor | None]:
        """Run the stage; where gradients are recorded, what has to be run again before the backward joins `reruns`."""
        total: Tensor | None = None
        self._num_runs += torch.is_grad_enabled()
        is_compared = not self._num_runs & (self._num_runs - 1)  # the first, second, 4th, 8th, …
        for chain, buffers in self._chains:
            if buffers and torch.is_grad_enabled():
                given, auxiliary = run_dropped(chain, buffers, given, extras, reruns, is_compared=is_compared)
            else:
                given, auxiliary = chain(given, extras)
            if auxiliary is not None:
                total = auxiliary if total is None else total + auxiliary
        return given if self._final is None else self._final.output(given), total

    @cached_property
    def is_of_torch(self) -> bool:
        """Whether no code of users runs in it, which may ask whether what it is given is a leaf."""
        return all(map(is_of_torch, self.blocks.values()))

    @cached_property
    def hooks(self) -> list[dict[int, Any]]:
        """Where hooks are, now or later, that are given what its modules are."""
        return [hooks for block in self.blocks.values() for hooks in forward_hooks(block)]

    def without_weights(self, outputs: Sequence[Tensor]) -> Outputs:
        """Return what leaves a stage, copied where it is a weight or a buffer, which may change or be freed by then."""
        tensors = (t for module in self.blocks.values() for t in (*module.parameters(), *module.buffers()))
        held = {tensor.untyped_storage()._cdata for tensor in tensors}
        return tuple([o.clone() if o.untyped_storage()._cdata in held else o for o in outputs])


def _run_recorded(chain: Run, given: Outputs, extras: Extras) -> tuple[Outputs, Tensor | None]:
    """Run blocks that differentiate in their forwards, with a graph that is gone behind them if nobody records one."""
    if torch.is_grad_enabled():
        return chain(given, extras)
    with torch.enable_grad():
        outputs, auxiliary = chain(as_leaves(given), extras)
    return detached(outputs), detached(auxiliary)


def _tree_of(parcel: Parcel) -> Tree:
    return parcel.output.tree


def _buffers(modules: Iterable[nn.Module]) -> Iterable[Tensor]:
    return (buffer for module in modules for buffer in module.buffers())


def chains_of(numbers: Sequence[int], every: int) -> list[tuple[list[int], bool]]:
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
    return outside(made, spans_of(taken))


def spans_of(taken: Outputs) -> Sequence[tuple[int, int]]:
    """Return where the memory of tensors begins and ends."""
    return [(begin := tensor.data_ptr(), begin + tensor.nbytes) for tensor in taken if tensor is not None]


def outside(made: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return what was made, copied where it lies in such memory."""
    place = made.data_ptr()
    for begin, end in spans:
        if begin <= place < end:
            return made.clone()
    return made
