"""Count of the bytes that autograd saves for backwards: measured values for the simulator's peak activations.

Every tensor that an autograd graph saves passes the saved-tensor hooks; it counts until the graph drops it. Bytes are
counted by storage, once however many tensors view it. Weights, buffers and the batch do not count: they are resident in
any case. Nor do activations while they are in host memory; lent ones count on the rank that holds them. Products that a
`BwdInput` keeps for its `BwdWeight` count as well.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import partial
from statistics import median
from types import TracebackType

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from quintsched.errors import MisfitError
from quintsched.ir.instruction_set import BwdInput, BwdWeight, Compute, Fwd, Instruction, Recompute
from quintsched.ir.instruction_values import Value, ValueKind
from quintsched.simulation.costs import Costs

from ..autograd.saved_tensor_offload import identities, identity
from ..blocks.dtensor import is_sharded
from ..blocks.trees import tensors_of
from ..comm import Group
from ..comm.host_collectives import reduce_numbers
from ..comm.overlap_threads import BoundCall
from ..stage.batches.microbatches import Batch
from ..stage.build_stages import Stage
from ..weights_and_gradients.zero_shards import ShardedWeights
from .instruction_state import RunState
from .values_between_instructions import do_nothing


class _SavedTensor:
    """A saved tensor, counted as long as this object lives. It is detached: a graph reference would be a cycle."""

    __slots__ = ("count", "tensor")

    def __init__(self, tensor: Tensor, count: SavedBytes) -> None:
        self.tensor = tensor.detach()
        self.count = count
        count.add_tensor(self.tensor)

    def __del__(self) -> None:
        self.count.remove(self.tensor)


class SavedBytes:
    """Bytes saved for backwards on one rank, counted while a step runs in this context.

    Attributes:
        peak: the largest number of bytes saved at once.
    """

    def __init__(self, state: RunState, stages: Mapping[int, Stage], batch: Batch) -> None:
        if any(is_sharded(stage) for stage in stages.values()):
            raise MisfitError("what autograd saves cannot be counted for modules that PyTorch has sharded")
        self._flows, self._current = state.flows, state.current
        self._pending, self._moved = state.compute.pending, state.compute.moved
        self._resident = identities(resident_tensors(stages, state.zero.weights, batch))
        self._references: Counter[int] = Counter()
        self._products: dict[tuple[int, int], list[_SavedTensor]] = {}
        self._bytes = 0
        self.peak = 0
        self._changes: dict[tuple[type[Instruction], int], list[tuple[int, int]]] = defaultdict(list)
        self._hooks = saved_tensors_hooks(lambda tensor: _SavedTensor(tensor, self), lambda held: held.tensor)

    def __enter__(self) -> SavedBytes:
        self._moved.track = partial(_SavedTensor, count=self)
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        self._moved.track = None

    def add_tensor(self, tensor: Tensor) -> None:
        """Count a saved tensor."""
        storage = tensor.untyped_storage()
        if identity(storage) in self._resident:
            return
        self._references[identity(storage)] += 1
        if self._references[identity(storage)] == 1:
            self._bytes += storage.nbytes()
            self.peak = max(self.peak, self._bytes)

    def remove(self, tensor: Tensor) -> None:
        """Stop counting a saved tensor."""
        storage = tensor.untyped_storage()
        if identity(storage) in self._resident:
            return
        self._references[identity(storage)] -= 1
        if not self._references[identity(storage)]:
            self._bytes -= storage.nbytes()

    def wrap(self, index: int, call: BoundCall) -> BoundCall:
        """Return `call` so that its change of saved bytes is attributed to its instruction, unless that is skipped.

        An `Overlap` counts for `peak` alone, as its two sides change the bytes at the same time: for `costs`, a stage
        is measured by its other instructions, and as 0 where all of its forwards are sides of `Overlap`s.
        """
        instruction = self._flows.program[index]
        if not isinstance(instruction, Compute):
            return call
        changes = self._changes[type(instruction), instruction.stage]
        count_products = self._products_of(instruction)

        def counted() -> None:
            before = self._bytes
            call()
            count_products()
            changes.append((instruction.microbatch, self._bytes - before))

        return self._current.unless_empty(instruction.microbatch, counted, call)

    def _products_of(self, instruction: Compute) -> BoundCall:
        """Return a function that counts the deferred products of a `BwdInput`, or drops those of a `BwdWeight`."""
        products, key = self._products, (instruction.stage, instruction.microbatch)
        pending = self._flows.made(instruction, ValueKind.PENDING)

        def count(value: Value) -> None:
            products[key] = [_SavedTensor(tensor, self) for tensor in self._pending[value].tensors()]

        def drop() -> None:
            del products[key]

        if pending:
            return partial(count, pending[0])
        return drop if isinstance(instruction, BwdWeight) else do_nothing

    def costs(self, group: Group) -> Costs:
        """Return the bytes that a unit of each stage holds, for `Plan.simulate` (collective over the group).

        Keys and values count for the first slice of a microbatch, which allocates them for all slices.
        """
        here, num_stages = {stage for _, stage in self._changes}, len(self._flows.plan.stage_to_pp)
        mine = [self._of_stage(stage) if stage in here else (0.0,) * 4 for stage in range(num_stages)]
        rows = reduce_numbers(group, [number for of_stage in mine for number in of_stage])
        activation, after_input, checkpointed, keys = (tuple(rows[first::4]) for first in range(4))
        return Costs(
            unit="byte",
            activation=activation,
            activation_after_input=after_input,
            activation_checkpointed=checkpointed,
            keys=keys,
        )

    def _of_stage(self, stage: int) -> tuple[float, float, float, float]:
        """Return what a unit holds, in bytes: saved, saved after `BwdInput`, checkpointed, keys and values."""
        slices = self._flows.plan.schedule.slices
        first, later = self._typical(Fwd, stage, 0), self._typical(Fwd, stage, slices - 1)
        again = self._typical(Recompute, stage, slices - 1)
        whole, keys = later + again, first - later
        return whole, whole + self._typical(BwdInput, stage, slices - 1), later if again else 0.0, keys

    def _typical(self, kind: type[Instruction], stage: int, number: int) -> float:
        """Return the median change of saved bytes by instructions of a kind on slice `number` of each microbatch.

        If a stage recomputes some microbatches, only their forwards count.
        """
        slices, recomputed = self._flows.plan.schedule.slices, self._flows.plan.layout.recomputing[stage]
        found = [
            change
            for unit, change in self._changes.get((kind, stage), ())
            if unit % slices == number and (kind is not Fwd or recomputed[unit] or not recomputed.any())
        ]
        return float(median(found)) if found else 0.0


def resident_tensors(stages: Mapping[int, Stage], sharded: ShardedWeights, batch: Batch) -> list[Tensor]:
    """Return the tensors of a step that are resident in any case: weights, buffers and the batch."""
    weights = [t for stage in stages.values() for t in (*stage.parameters(), *stage.buffers())]
    if sharded:  # parameters view full weights, or other memory while these are not resident
        weights = [t for t in weights if not t.requires_grad] + sharded.full_tensors()
    return [*weights, *(t for row in batch.inputs for t in row), *tensors_of([*batch.targets, *batch.extras])]
