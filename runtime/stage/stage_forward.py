"""Forward of a stage: its blocks in sequence, as one chain or several, some of which are recomputed for backwards.

stage of 6 blocks        recompute 0    [ 0 1 2 3 4 5 ]                    one chain, everything is kept
                         recompute 1    ( 0 1 2 3 4 5 )                    one chain, only its input is kept
                         recompute 3    [ 0 1 ] ( 2 ) [ 3 4 ] ( 5 )        every third block is recomputed
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
from ..blocks.block_builders import Parcel, accepted_extras, split_result, takes_targets
from ..blocks.trees import ONE_TENSOR, Tensors, Tree, TreeSpec, flatten
from ..blocks.without_side_effects import as_leaves, detached
from ..comm import Group
from ..parallel.mesh_independent_dropout import Masks
from ..user_objects.object_contents import forward_hooks, is_of_torch
from .in_place_copies import NOTHING_COPIED, Copied, copied_in
from .merge_replica_buffers import buffers_kept
from .stage_random_draws import UNIT, Extras, Outputs, RunBlocks, StageDraws

__all__ = ["UNIT", "Chain", "Extras", "Outputs", "RunBlocks", "StageForward", "apart"]


class Chain:
    """Some consecutive blocks, run one after the other.

    Args:
        blocks: (number, module), including the modules that run around blocks.
        tree: the structure of the first block's input; None: a single tensor. `width` is its number of tensors.
        arriving: names of the tensors carried along into the first block.
        leaving: the agreed output of the last; None: the output of the model, of any structure.
        begins: called for each block that returns a loss.
        copied: inputs that the blocks mutate in place, which are cloned first.
        called: (number, block) → a callable that runs the block.
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
        """Return the last block's output row, and the sum of auxiliary losses (None where no block has one)."""
        width = self._width
        if self._copied is not None:
            given, extras = self._copied.copies_of(given, extras)
        first = given[0] if self._tree is None else self._tree().build(given[:width])
        beside = {**extras, **dict(zip(self._arriving, given[width:], strict=True))} if self._arriving else extras
        outputs, total = self._through((first,), beside)
        if self._leaves_tree:
            output, *riders = outputs
            return (*self._tensors_of(output), *riders), total
        return outputs, total

    @property
    def direct(self) -> RunBlocks:
        """A callable equal to the chain; without its preparations where there is nothing to prepare."""
        prepares = self._copied is not None or self._tree is not None or self._arriving or self._leaves_tree
        return self if prepares else self._through

    @property
    def only(self) -> Callable[[Any], Any] | None:
        """The block of a chain that is no more than this block on one tensor; None for other chains."""
        return self._blocks[0][2] if len(self._blocks) == 1 and not self._names and self.direct == self._run else None

    def take_apart(self, result: Any) -> tuple[Outputs, Tensor | None]:
        """Return what the chain returns, for a result of its `only` block that is no tensor."""
        activation, _, auxiliary = split_result(result)
        if auxiliary is not None:
            self._begins(*self._blocks[0][:2])
        return (activation,), auxiliary

    def _run(self, given: Outputs, beside: Extras) -> tuple[Outputs, Tensor | None]:
        """Return the last block's output with the tensors carried along, and the sum of auxiliary losses."""
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
        """Return the tensors of an output; raises `MisfitError` unless it has the agreed structure."""
        assert self._leaving is not None
        tensors = self._leaving.output.tree.tensors_of(output)
        if tensors is None:
            raise MisfitError(
                f"a {type(self._blocks[-1][1]).__name__} gave {flatten(output)[0]}; the ranks agreed on "
                f"{self._leaving.output.tree}, which it gave when shapes were found, in training: {STEERED}"
            )
        return tensors


STEERED = (
    "the structure and shapes of what a stage leaves must not depend on data, on attributes or on .training; pass a "
    "number that steers them as an extra, engine.step(…, keep=3), and return the same structure in evaluation"
)


class WholeChain:
    """A recomputed chain at the end of the model: returns output tensors, and rebuilds the output from them."""

    def __init__(self, chain: RunBlocks) -> None:
        self._chain, self._tree = chain, ONE_TENSOR

    def __call__(self, given: Outputs, extras: Extras) -> tuple[Outputs, Tensor | None]:
        """Return the tensors of the output."""
        (output,), total = self._chain(given, extras)
        self._tree, tensors = flatten(output)
        return tensors, total

    def output(self, tensors: Outputs) -> Outputs:
        """Return the output, in the structure of the latest run, with these tensors."""
        return (self._tree.build(tensors),)


class StageForward:
    """The forward of one stage for a microbatch.

    Args:
        blocks: the stage's blocks by number; a stage without blocks returns its input.
        start: number of blocks of the model before this stage.
        parcels: each block's output for the next.
        inputs: spec of a unit of inputs, as ranks agreed on it.
        input_tree: returns the structure of the current step's inputs, whose plain values may change between steps.
        skips: names of the plan's skips, which no block mutates.
        recompute: every k-th block is recomputed, for some units; 1: the whole stage, 0: none.
        compiled: whether torch.compile compiles each chain.
        around: (number, block) → the block with the modules that run before and after it.
        masks: keys of the random draws of blocks.
        sliced: number → the group over which a block's input tokens are sharded; None: they are not.
        beside: a torch function mode that the blocks run in.
        begins: called with the number of each block that returns a loss.
    """

    _num_runs = 0
    """Number of runs that drop activations."""
    _final: WholeChain | None = None

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
        """Spec of the stage's input."""
        self.parcel = parcels[start + len(numbers) - 1]
        """Spec of its output, with tensors carried along to later stages and skips."""
        self.blocks = dict(blocks)
        """The blocks of the stage, by number."""
        named = (f"{number} {type(block).__name__}" for number, block in blocks.items())
        self.title = f"blocks {', '.join(named)}" if blocks else "no blocks"
        """The blocks of the stage, in words."""
        self.takes_targets = any(map(takes_targets, blocks.values()))
        self.draws = StageDraws(masks, blocks, sliced, beside)
        """Random draws of the blocks; blocks that draw get their unit (see `UNIT`)."""
        self.buffers_kept = partial(buffers_kept, blocks.values(), synced=beside is not None)

        def chain(some: Sequence[int], dropped: bool) -> tuple[RunBlocks, Callable[[], Iterable[Tensor]] | None]:
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
            watched, self._latest = chain_of(called=self.draws.around).direct, (plain := chain_of())
            made = self.draws.by_unit(plain.direct, watched, chain_of(compiled=True).direct if compiled else None)
            if any(parcels[number].records for number in some):
                made = partial(_run_recorded, made)
            if dropped and end == len(parcels):
                made = self._final = WholeChain(made)
            return made, partial(_buffers, [module for _, module in modules]) if dropped else None

        self._chains = [chain(some, dropped) for some, dropped in chains_of(numbers, recompute if numbers else 0)]
        self.whole = self._chains[0][0] if len(self._chains) == 1 and not (recompute and numbers) else None
        """The callable that runs the stage, where nothing is recomputed and there is a single chain."""
        self.plain: RunBlocks | None = getattr(self.whole, "plain", None)
        """The same without random draws."""

    def __call__(self, given: Outputs, extras: Extras, reruns: list[Rerun] | None) -> tuple[Outputs, Tensor | None]:
        """Run the stage; recomputation that a backward needs first is added to `reruns`; None: activations are kept."""
        total: Tensor | None = None
        self._num_runs += reruns is not None
        is_compared = not self._num_runs & (self._num_runs - 1)  # the first, second, 4th, 8th, …
        for chain, buffers in self._chains:
            if buffers and reruns is not None:
                given, auxiliary = run_dropped(chain, buffers, given, extras, reruns, is_compared=is_compared)
            else:
                given, auxiliary = chain(given, extras)
            if auxiliary is not None:
                total = auxiliary if total is None else total + auxiliary
        return given if self._final is None else self._final.output(given), total

    @property
    def only(self) -> Callable[[Any], Any] | None:
        """The block of a stage that is no more than this block on one tensor; None for other stages."""
        return self._latest.only if self.plain is not None and self.plain == self._latest.direct else None

    def take_apart(self, result: Any) -> tuple[Outputs, Tensor | None]:
        """Return what the stage returns, for a result of its `only` block that is no tensor."""
        return self._latest.take_apart(result)

    @cached_property
    def is_of_torch(self) -> bool:
        """Whether it runs torch's modules alone, and no user code that could test whether its input is a leaf."""
        return all(map(is_of_torch, self.blocks.values()))

    @cached_property
    def hooks(self) -> list[dict[int, Any]]:
        """The forward hook dicts of its modules, now or later non-empty, which see the modules' inputs."""
        return [hooks for block in self.blocks.values() for hooks in forward_hooks(block)]

    def without_weights(self, outputs: Sequence[Tensor]) -> Outputs:
        """Return outputs, with clones of weights and buffers: these may be modified or freed before they are sent."""
        tensors = (t for module in self.blocks.values() for t in (*module.parameters(), *module.buffers()))
        held = {tensor.untyped_storage()._cdata for tensor in tensors}
        return tuple([o.clone() if o.untyped_storage()._cdata in held else o for o in outputs])


def _run_recorded(chain: RunBlocks, given: Outputs, extras: Extras) -> tuple[Outputs, Tensor | None]:
    """Run blocks that differentiate in their forwards; without grad mode, the graph is dropped afterwards."""
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
    """Cut a stage's blocks into chains; return (blocks, whether the chain drops its activations) for each."""
    if every <= 1:
        return [(list(numbers), every == 1)]
    places = range(len(numbers))
    starts = sorted({0} | {p for p in places if p % every == every - 1} | {p for p in places if p % every == 0})
    return [
        (list(numbers[start:stop]), start % every == every - 1) for start, stop in pairwise([*starts, len(numbers)])
    ]


def apart(made: Tensor, taken: Outputs) -> Tensor:
    """Return a tensor, cloned where it shares memory with inputs (a stage that only reshapes).

    That memory may be a receive buffer, which is reused while the output is still being sent.
    """
    return outside(made, spans_of(taken))


def spans_of(taken: Outputs) -> Sequence[tuple[int, int]]:
    """Return the (begin, end) addresses of tensors' memory."""
    return [(begin := tensor.data_ptr(), begin + tensor.nbytes) for tensor in taken if tensor is not None]


def outside(made: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return a tensor, cloned where its memory begins inside one of the spans."""
    address = made.data_ptr()
    for begin, end in spans:
        if begin <= address < end:
            return made.clone()
    return made
