"""Inventory of a rank's persistent tensors: their places in the whole model, and which rank of several saves them.

    parameter   master (bf16: in float32), or the segment of it that this rank steps (ZeRO), or itself
    buffer      itself
    average     as the weight                                            "ema.<number>.<name>"
    state of    as the weight where it has its shape, else whole, or     "optimizer.<name>.<key>"
    optimizers  beside: of this shard of the weight alone

Replicated tensors are equal, so the first of the ranks that hold the same numbers saves them (`speaks`).

Full tensors are gathered over the ranks that hold parts: each writes its numbers into a tensor of zeros.

    rank 0  [ segment, shard 0 of tp ]     ▓ ▓ 0 0          an all-reduce takes the largest of each byte, so that
    rank 1  [ segment, shard 1 of tp ]     0 0 ▓ ▓   ──▶    all ranks get every bit unchanged

State without a place in a full tensor, such as step counts and Adafactor's factors, is taken from the first rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..blocks.dtensor import comes_summed, counts_here, local_of
from ..blocks.plain_values_as_tensors import is_text
from ..blocks.state_dict_entries import saved_tensors
from ..comm import Group, ReduceOp
from ..comm.host_collectives import ControlGroup, share_bytes
from ..optim.loss_scale import SCALE, LossScale
from ..optim.optimizer_state import flat_of
from ..parallel.expert.moe import mixtures
from ..parallel.mesh_groups import MeshGroups
from ..parallel.tensor.parameter_shards import shard_of
from ..stage.rank_stages import RankModel
from ..weights_and_gradients.rank_state_dict import require_alike
from ..weights_and_gradients.training_state import KeptState, TrainingState
from .index_ranges_in_full_tensors import StateLayout, TensorPiece, TensorPlacement
from .pretrained.model_tensor_names import ModelNames
from .saved_state import AVERAGE, MODEL, STATE, STEP, SavedState, ShapesByName, parts_of
from .weight_averages import Averages


class StepCounts(Protocol):
    """Number of steps made: in this run, and in all."""

    in_run: int
    total: int


@dataclass(frozen=True)
class HeldTensor:
    """A weight or a buffer as a rank holds it.

    Attributes:
        name: its name in the whole model, "<block>.<name in the block>".
        stage: the stage that it is in.
        tensor: the tensor that the block computes with.
        numbers: the numbers to save: a master, of which `tensor` is rounded or gathered; None where this rank has none.
        placement: their place in the full tensor.
        speaks: whether this rank is the one that saves them.
    """

    name: str
    stage: int
    tensor: Tensor
    numbers: Tensor | None
    placement: TensorPlacement
    speaks: bool

    def boxes(self) -> Iterator[TensorPiece]:
        """Yield the boxes of the full tensor that this rank holds."""
        if self.numbers is not None:
            yield from self.placement.boxes(self.numbers.detach())


@dataclass(frozen=True)
class RankTensors:
    """All persistent tensors of one rank; its methods first wait for weights that are being gathered."""

    model: RankModel
    training: TrainingState
    groups: MeshGroups
    names: ModelNames
    steps: StepCounts
    scale: LossScale
    averages: Averages

    @cached_property
    def everyone(self) -> ControlGroup:
        """All ranks, for control messages."""
        return ControlGroup(self.groups.world)

    @property
    def number(self) -> int:
        """Number of this rank among all."""
        return self.groups.world.index

    @property
    def trains(self) -> bool:
        """Whether its plan trains, so that there are optimizers and averages."""
        return self.model.plan.mode == "train"

    @property
    def replicas(self) -> tuple[int, int]:
        """Number of this rank's replica of the batch, and how many replicas there are."""
        return self.model.replica, self.model.num_replicas

    def held(self) -> list[HeldTensor]:
        """Return the weights and buffers of this rank's stages; a tied one under each of its names."""
        self.training.weights.wait_gathers()
        return [
            self._held(name.removeprefix("blocks."), number, tensor, id(tensor) in experts)
            for number, stage in self.model.stages.items()
            for experts in [_of_experts(stage)]
            for name, tensor in saved_tensors(stage).items()
        ]

    def _held(self, name: str, stage: int, tensor: Tensor, is_of_experts: bool) -> HeldTensor:
        masters, groups, span = self.training.masters, self.groups, None
        numbers: Tensor | None = local_of(tensor)
        if isinstance(tensor, nn.Parameter):
            numbers, span = masters.master_of(tensor), masters.span_of(tensor)
        placement = TensorPlacement.from_tensor(tensor, span)
        if numbers is not None and tuple(numbers.shape) == placement.local:
            placement = replace(placement, span=None)
        replicas = groups.expert_replicas if is_of_experts else groups.replicas
        speaks = span is not None or replicas.index == 0
        if isinstance(tensor, DTensor):
            comes_here = groups.tensor.index == 0 if comes_summed(tensor) else speaks
            speaks = counts_here(tensor) and comes_here
        else:
            speaks = speaks and (shard_of(tensor) is not None or groups.tensor.index == 0)
        return HeldTensor(name, stage, tensor, numbers, placement, speaks and numbers is not None)

    def kept(self, one: HeldTensor) -> KeptState | None:
        """Return the optimizer's state of a weight; None for a frozen weight, or one that another rank steps."""
        if one.name not in self._trained or not isinstance(one.tensor, nn.Parameter):
            return None
        kept = self.training.kept_for(one.stage, one.tensor)
        return None if kept.handle is None else kept

    @cached_property
    def _trained(self) -> set[str]:
        return {name for stage in self.model.stages.values() for name in stage.named_weights()}

    def tensors(self) -> dict[str, Tensor]:
        """Return weights, buffers, averages, and the optimizers' states of weights, by name, as this rank holds them.

        Raises `UsageError` for state of an optimizer that no file of tensors can hold, and for changes of weights that
        the next step would refuse.
        """
        found: dict[str, Tensor] = {}
        held = self.held()
        self.training.take_in_changes()
        for one in held:
            if one.numbers is not None:
                found[MODEL + one.name] = one.numbers.detach()
            kept = self.kept(one)
            if kept is not None:
                found |= {f"{STATE}{one.name}.{key}": value for key, value in flat_of(kept.state, one.name).items()}
        for number, average in enumerate(self.averages.all):
            found |= {f"{AVERAGE}{number}.{name}": tensor for name, tensor in average.state_dict().items()}
        return found

    def placements(self, sizes: ShapesByName) -> tuple[dict[str, TensorPlacement], dict[str, TensorPlacement]]:
        """Return placements of tensors by name; second, for states that have none, the placements of their weights.

        Names that are in neither are whole.
        """
        held = {one.name: one for one in self.held() if one.numbers is not None}
        found: dict[str, TensorPlacement] = {}
        beside: dict[str, TensorPlacement] = {}
        of_states: dict[str, TensorPlacement] = {}
        for name, size in sizes.items():
            kind, weight, key = parts_of(name)
            one = held.get(weight)
            if one is None:
                continue
            placement = one.placement
            if kind == STATE:
                if weight not in of_states:
                    kept = self.kept(one)
                    of_states[weight] = placement if kept is None else state_placement(one, kept)
                placement = of_states[weight]
                if not size or is_text(key) or size != placement.held:
                    if size and not placement.is_whole:
                        beside[name] = placement
                    continue
            found[name] = placement
        return found, beside

    def layout(self, sizes: ShapesByName) -> StateLayout:
        """Return the layout of this rank's saved tensors, of these names and shapes, in the whole model."""
        found, beside = self.placements(sizes)
        own, held = self.names.own or {}, self.held()
        return StateLayout(
            self.replicas,
            {name: placement for name, placement in found.items() if not placement.is_plain},
            beside,
            {
                MODEL + one.name: str(one.tensor.dtype).removeprefix("torch.")
                for one in held
                if one.numbers is not None and one.numbers.dtype != one.tensor.dtype
            },
            {one.name: own[one.name] for one in held if own.get(one.name, one.name) != one.name},
            [list(group) for group in self.names.same()],
        )

    def take_progress(self, saved: SavedState) -> None:
        """Set the number of steps and the loss scale from a state; without a number of steps it is 0."""
        self.steps.total = int(saved.whole(STEP)) if STEP in saved.pieces else 0
        if SCALE in saved.pieces:
            self.scale.load_state_dict({SCALE: saved.whole(SCALE)})

    def is_first_twin(self, one: HeldTensor) -> bool:
        """Whether a tensor is in the first of the stages that hold the same part of the model."""
        return self.model.plan.layout.twins(one.stage)[:1] in ((), (one.stage,))


def state_placement(one: HeldTensor, kept: KeptState) -> TensorPlacement:
    """Return the placement of a state that has its weight's shape: whole where tp gathers the weight for its steps."""
    return one.placement if kept.is_shard else TensorPlacement.whole(one.placement.shape)


def sizes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _of_experts(stage: nn.Module) -> set[int]:
    """Return the ids of experts' tensors that differ between the ranks along ep."""
    shared_out = [layer for layer in mixtures(stage).values() if layer.group.size > 1]
    return {id(tensor) for layer in shared_out for tensor in saved_tensors(layer.experts).values()}


@torch.no_grad()
def apart(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Make tensors contiguous, and copy those that share memory, as files need them."""
    seen: dict[tuple[torch.device, int], list[tuple[int, int]]] = {}
    for name, tensor in state.items():
        state[name] = tensor = tensor.detach()
        if not tensor.is_contiguous():
            state[name] = tensor.contiguous()
        elif tensor.numel():
            start = tensor.data_ptr()
            spans = seen.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), [])
            if any(start < end and first < start + tensor.nbytes for first, end in spans):
                state[name] = tensor.clone()
            spans.append((start, start + tensor.nbytes))
    return state


def gather_boxes(
    boxes: Iterable[TensorPiece], sizes: Sequence[int], dtype: torch.dtype, group: Group, offsets: Sequence[int] = ()
) -> Tensor:
    """Return on all members a window of these sizes, assembled from their disjoint boxes (collective)."""
    piece = torch.zeros(tuple(sizes), dtype=dtype, device=group.device)
    offsets = offsets or (0,) * len(sizes)
    for box in boxes:
        here = box.within(offsets, sizes)
        if here is not None:
            piece[here.places_from(offsets)] = here.numbers.to(piece)
    if piece.numel():
        group.all_reduce(piece.reshape(-1).view(torch.uint8), ReduceOp.MAX).wait()
    return piece


def full_state(rank: RankTensors, *, all_blocks: bool) -> dict[str, Tensor]:
    """Return full tensors of weights, averages and optimizers' states, on the CPU (collective).

    They are those of the ranks that hold the same stages; with `all_blocks`, of all. Further state of modules and
    optimizers is included; raises `MisfitError` where it differs between ranks.
    """
    beside = {
        name: tensor.detach().to("cpu", copy=True) for name, tensor in rank.training.beside.read_tensors().items()
    }
    require_alike(beside, rank.groups.world)
    group = rank.groups.world if all_blocks else rank.groups.holders
    return dict(_gathered(rank, {**rank.tensors(), **beside}, group))


def _gathered(rank: RankTensors, tensors: dict[str, Tensor], group: Group) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) for every tensor that some member of a group has."""
    placements, _ = rank.placements(sizes_of(tensors))
    speaks = {one.name for one in rank.held() if one.speaks}
    mine = {
        name: (placements.get(name) or TensorPlacement.whole(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    }
    text = json.dumps({name: [*placement.shape, dtype] for name, (placement, dtype) in mine.items()})
    first: dict[str, int] = {}
    specs: dict[str, list[object]] = {}
    for member, theirs in enumerate(share_bytes(group, text.encode())):
        for name, spec in json.loads(theirs).items():
            first.setdefault(name, member)
            specs.setdefault(name, spec)
    for name, (*shape, dtype) in sorted(specs.items()):
        boxes: Iterable[TensorPiece] = ()
        if name in mine:
            placement, _ = mine[name]
            here = first[name] == group.index if placement.is_whole else parts_of(name)[1] in speaks
            boxes = placement.boxes(tensors[name].detach()) if here else ()
        sizes = [int(str(size)) for size in shape]
        yield name, gather_boxes(boxes, sizes, getattr(torch, str(dtype)), group).cpu()
