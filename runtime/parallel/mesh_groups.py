"""Process groups of a mesh, made up front in one fixed order on all ranks.

mesh dp=2,pp=2,tp=2         tensor     (0 1) (2 3) (4 5) (6 7)   inside a forward: tensor parallelism
                            replicas   (0 4) (1 5) (2 6) (3 7)   gradient buckets
                            context    (0) … (7)                 inside a forward: slices of a sequence
                            pipeline   (0 2) (1 3) (4 6) (5 7)   shapes of activations that are sent
                            metrics    (0 2 4 6) (1 3 5 7)       loss and metrics: all axes but tp
                            experts    (0) … (7)                 inside a forward: expert parallelism (ep)
                            model      (0 1 2 3) (4 5 6 7)       the gradient norm: one whole model, all experts
                            holders    (0 1 4 5) (2 3 6 7)       all ranks that hold the same stages
                            world      (0 … 7)                   agreement, checkpoints
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quintsched.ir.instruction_set import Message, Overlap, Send
from quintsched.ir.mesh import EXPERT_REPLICA_AXES, REPLICA_AXES, Mesh
from quintsched.plan import Plan

from ..blocks.dtensor import comes_summed, counts_here
from ..comm import Group, Transport
from ..comm.message_collectives import spell_out, spelled_channels
from ..comm.overlap_threads import SidedGroup, Sides
from .context.ring_attention import ring_channels
from .tensor.parameter_shards import shard_of


@dataclass(frozen=True)
class Sharing:
    """Group of ranks that hold the same weights; `first` is the index of the rank whose stage comes first."""

    group: Group
    first: int


@dataclass(frozen=True)
class MeshGroups:
    """Process groups of one rank; the picture of the module shows their members."""

    tensor: Group
    context: Group
    experts: Group
    replicas: Group
    expert_replicas: Group
    """Replicas of this rank's experts: `replicas` without the axis ep."""
    pipeline: Group
    metrics: Group
    model: Group
    holders: Group
    world: Group
    sharing: Mapping[tuple[int, ...], Sharing]
    """For each set of stages on several ranks that share weights (ties, twins): the ranks of it in this replica."""
    sides: Sides
    """Forward and backward side of this rank, for plans that overlap the two."""

    def counts(self, parameter: nn.Parameter, *, is_expert: bool = False) -> bool:
        """Whether this rank adds a parameter to the global norm: of copies along tp or ep, only the first counts.

        `is_expert`: the ranks along ep hold different parameters.
        """
        if isinstance(parameter, DTensor) and comes_summed(parameter):
            return counts_here(parameter) and self.tensor.index == 0
        is_first = is_expert or self.experts.index == 0
        if isinstance(parameter, DTensor):
            return is_first and counts_here(parameter)
        return is_first and (shard_of(parameter) is not None or self.tensor.index == 0)

    def copies_of(self, tensor: Tensor) -> Group:
        """Return the group of ranks with the same local tensor: the stage's holders, unless it is a DTensor."""
        if not isinstance(tensor, DTensor):
            return self.holders
        return self.tensor if comes_summed(tensor) else self.replicas


def make_groups(plan: Plan, transport: Transport) -> MeshGroups:
    """Make all groups of a plan in one order (a collective call of all ranks).

    Groups of the same ranks share one communicator: their collectives follow program order. Only `replicas` and
    `expert_replicas` have their own, as gradient reductions are launched ahead of program order; if the plan spells
    these out, they are sent as messages. Where the plan overlaps forwards and backwards, the groups inside stages
    have one communicator for each side.
    """
    mesh = plan.mesh
    made: dict[tuple[tuple[int, ...], ...], Group] = {(tuple(range(mesh.size)),): transport.world_group()}

    def group(*axes: str) -> Group:
        partition = tuple(mesh.groups(*axes))
        if partition not in made:
            made[partition] = transport.make_group(partition)
        return made[partition]

    def replicas_over(axes: tuple[str, ...]) -> Group:
        return spell_out(transport.make_group(mesh.groups(*axes)), plan.communication, transport)

    sides, overlaps = Sides(), bool(len(plan.columns.rows_where(Overlap)))

    def inside_stages(axis: str) -> Group:
        one = group(axis)
        if one.size == 1 or not overlaps:
            return one
        return SidedGroup((one, transport.make_group(mesh.groups(axis))), axis, sides)

    tensor, context, replicas = inside_stages("tp"), inside_stages("cp"), replicas_over(REPLICA_AXES)
    experts, expert_replicas = inside_stages("ep"), replicas
    if mesh.axis_size("ep") > 1:
        expert_replicas = replicas_over(EXPERT_REPLICA_AXES)
    pipeline, metrics, model = group("pp"), group("pp", *REPLICA_AXES), group("pp", "tp", "ep")
    holding, world = group("tp", *REPLICA_AXES), group("pp", "tp", *REPLICA_AXES)
    layout, sharing = plan.layout, {}
    twins = {layout.twins(stage) for stage in range(len(plan.stage_to_pp))} - {()}
    for stages in sorted(twins | set(plan.tied.values())):
        holders = sorted({plan.stage_to_pp[stage] for stage in stages})
        if len(holders) > 1:
            together = transport.make_group(_sharing_partition(mesh, holders))
            sharing[stages] = Sharing(together, holders.index(plan.stage_to_pp[stages[0]]))
    return MeshGroups(
        tensor, context, experts, replicas, expert_replicas, pipeline, metrics, model, holding, world, sharing, sides
    )


def _sharing_partition(mesh: Mesh, holders: Sequence[int]) -> list[tuple[int, ...]]:
    """Return a partition of all ranks: those at these pp coordinates in one group per pipeline, others alone."""
    partition: list[tuple[int, ...]] = []
    for line in mesh.groups("pp"):
        partition.append(tuple(sorted(line[k] for k in holders)))
        partition += [(rank,) for k, rank in enumerate(line) if k not in holders]
    return partition


def open_channels(plans: Iterable[Plan], transport: Transport, *, ring: bool) -> None:
    """Open every directed channel that the plans use, for all replicas, in ascending order.

    Included are those of spelled-out collectives, and with `ring` those of rings over cp.
    """
    plans = [*plans]
    used = {
        (rank, message.peer) if isinstance(message, Send) else (message.peer, rank)
        for plan in plans
        for rank, program in enumerate(plan.programs)
        for message in program
        if isinstance(message, Message)
    }
    mesh = plans[0].mesh
    pipelines = [(line[source], line[target]) for line in mesh.groups("pp") for source, target in used]
    rings = [channel for line in mesh.groups("cp") for channel in ring_channels(line)] if ring else []
    spelled = [channel for plan in plans for channel in spelled_channels(plan)]
    transport.open_channels(sorted(pipelines + rings + spelled))
