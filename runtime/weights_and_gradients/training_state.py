"""State of a rank from step to step: weights, gradients and optimizer state; full, or its shards.

plan without ZeRO    Masters           GradBucket of one shard       every replica holds all of it
ZeRO                 ShardedMasters    GradBucket of equal shards    every replica holds, and steps, its shard
plan that only runs forward            no GradBucket, no masters     weights alone
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from quintsched.errors import UsageError
from quintsched.ir.instruction_set import AllReduceBucket, Instruction
from quintsched.plan import Plan

from ..blocks.dtensor import full_of, local_of
from ..blocks.state_dict_entries import saved_tensors
from ..optim.build_optimizers import OptimizerBuilds
from ..optim.step_on_gathered_matrices import Stepper
from ..parallel.mesh_groups import MeshGroups
from ..parallel.tensor.parameter_shards import gather_full, shard_of, take_shard
from ..stage.build_stages import Stage
from ..stage.tied_weights import TiedWeights
from .flat_buffer_offsets import FlatLayout
from .grad_buckets import VERSION, GradBucket, GradBuckets, PlanBucket, cut_buckets
from .grad_norm import AbsentGradients, GradNorm
from .hooks_that_fill_buckets import GradHooks
from .launch_bucket_reductions import GradReducer
from .master_weights import Masters
from .rank_state_dict import BesideTensors, named_masters, of_model
from .resident_weight_bytes import MemoryKind, MemoryStats, StateBytes
from .zero_shards import ShardedMasters, ShardedWeights, WeightBucket

BucketCut = list[tuple[PlanBucket, list[nn.Parameter]]]


class GradientHandling(NamedTuple):
    """Handling of one rank's gradients: filled by `hooks`, then reduced, measured and clipped."""

    hooks: GradHooks
    reducer: GradReducer
    norm: GradNorm
    absent: AbsentGradients


class KeptState(NamedTuple):
    """Optimizer state of a parameter.

    `handle` is the tensor that this rank steps for it, None: none; `is_shard`: state of its shape is sharded as it is.
    `stepper` steps it.
    """

    handle: nn.Parameter | None
    state: dict[str, Any]
    is_shard: bool
    stepper: Stepper | None = None

    def home_of(self, key: str) -> torch.device:
        """Return the device of a state: the parameter's; the host for step counts, unless kernels read them."""
        assert self.handle is not None
        on_host = key == "step" and self.stepper is not None
        on_host = on_host and not (self.group.get("capturable") or self.group.get("fused"))
        return torch.device("cpu") if on_host else self.handle.device

    @property
    def group(self) -> Mapping[str, Any]:
        """The settings of its parameter group."""
        return {} if self.stepper is None or self.handle is None else self.stepper.group_of(self.handle)


class TrainingState:
    """Weights, gradients and optimizers of one rank's stages.

    Args:
        plan: has the ZeRO stage, the buckets to reduce, and the stages that step together.
        pp_rank: this rank's pp coordinate.
        stages: its stages, with the initial weights.
        groups: the groups of the mesh.
        tied: weights that several stages hold.
        builds: builds the optimizers.
        bucket_bytes: maximum size of a reduction bucket, in bytes.

    Attributes:
        shown: gradients that user code finds in `.grad` between steps.
        shown_versions: their version counters after the last step.

    Raises:
        MisfitError: weights that cannot be sharded.
    """

    def __init__(
        self,
        plan: Plan,
        pp_rank: int,
        stages: Mapping[int, Stage],
        groups: MeshGroups,
        tied: TiedWeights,
        builds: OptimizerBuilds,
        *,
        bucket_bytes: int,
    ) -> None:
        self._stages, self._groups, self._tied, self._zero = stages, groups, tied, plan.zero
        self._stats = MemoryStats()
        self.weights, self._whole, self._at_one_place = ShardedWeights(), builds.whole, builds.at_one_place
        buckets = self._make_buckets(plan, pp_rank, bucket_bytes)
        self.gradients = self._make_gradients(plan, buckets)
        self.shown = list[Tensor]()
        for bucket in buckets.all:
            self.shown += dict(bucket.given).values()
        self.shown_versions = [*map(VERSION, self.shown)]
        self.steppers = builds.bind(self.masters.master_of)
        self.beside = BesideTensors(stages, self.steppers, self.masters)
        self.zero_split = self._describe_split(builds.why)
        self.read_bytes()  # resets peaks: weights were resident twice while they were sharded

    def _make_buckets(self, plan: Plan, pp_rank: int, bucket_bytes: int) -> GradBuckets:
        apart, whole = self._tied.parameters, self._whole
        whole_bytes = bucket_bytes * self._groups.replicas.size
        waiting_apart, trains = self._zero.shards_gradients, plan.mode == "train"
        cut = [
            bucket
            for stage in (self._stages.values() if trains or self._zero.shards_weights else ())
            for bucket in cut_buckets(
                stage,
                plan.buckets_per_stage,
                bucket_bytes,
                apart,
                waiting_apart=waiting_apart,
                whole=whole,
                whole_bytes=whole_bytes,
            )
        ]
        layouts, last = list[FlatLayout | None]([None] * len(cut)), None
        if self._zero.shards_optimizer:
            weights = [self._shard(*bucket, plan.buckets_per_stage, is_stepped=trains) for bucket in cut]
            layouts = [bucket.layout for bucket in weights]
            self.weights = ShardedWeights(weights, reshards=self._zero.shards_weights)
            self.masters: Masters = ShardedMasters(weights, self._stages)
        else:
            self.masters = Masters(self._stages, stepped=trains)
            held = (local_of(p) for stage in self._stages.values() for p in stage.named_weights().values())
            self._stats.add_bytes(MemoryKind.WEIGHTS, sum(weight.nbytes for weight in held))
            last = self._last_reduced(cut, plan.programs[pp_rank])
        buckets = [
            GradBucket(
                plan_bucket,
                parameters,
                self.masters,
                layout=layouts[number],
                reshards=self._zero.shards_gradients,
                has_room=number == last,
                stats=self._stats,
            )
            for number, (plan_bucket, parameters) in enumerate(cut if trains else ())
        ]
        return GradBuckets(buckets, self._stages, self._groups, first_expert_bucket=plan.buckets_per_stage)

    def _last_reduced(self, cut: BucketCut, program: Sequence[Instruction]) -> int | None:
        """Return the index of the bucket that is reduced last, if there are several replicas."""
        order = [PlanBucket(i.stage, i.bucket) for i in program if isinstance(i, AllReduceBucket)]
        found = [number for reduced in order for number, (plan_bucket, _) in enumerate(cut) if plan_bucket == reduced]
        return found[-1] if found and self._groups.replicas.size > 1 else None

    def _shard(
        self,
        plan_bucket: PlanBucket,
        parameters: Sequence[nn.Parameter],
        first_expert_bucket: int,
        *,
        is_stepped: bool,
    ) -> WeightBucket:
        """Shard the weights of a bucket over their replicas."""
        is_of_experts = plan_bucket.number >= first_expert_bucket
        return WeightBucket(
            plan_bucket,
            parameters,
            self._groups.expert_replicas if is_of_experts else self._groups.replicas,
            reshards=self._zero.shards_weights,
            whole=parameters[0] in self._whole,
            at_one_place=self._at_one_place,
            is_stepped=is_stepped,
            stats=self._stats,
        )

    def _make_gradients(self, plan: Plan, buckets: GradBuckets) -> GradientHandling:
        sharded = self._zero.shards_optimizer
        reducer = GradReducer(buckets, self._groups, self._tied, sharded=sharded)
        norm = GradNorm(
            buckets,
            self._groups,
            self._tied,
            twin_stages=[stage for stage in self._stages if plan.layout.twins(stage)[:1] not in ((), (stage,))],
            sharded=sharded,
        )
        absent = AbsentGradients(buckets, self.masters, sharded=sharded)
        return GradientHandling(GradHooks(buckets, reducer), reducer, norm, absent)

    @property
    def optimizers(self) -> dict[tuple[int, ...], Optimizer]:
        """The optimizers, by the stages that each steps."""
        return {stages: stepper.optimizer for stages, stepper in self.steppers.items()}

    def _describe_split(self, why: Sequence[str]) -> str | None:
        """Describe, in a line, the parameters that are stepped whole by one replica each; None where there are none."""
        filled = self.weights.filled()
        if not filled:
            return None
        total = len({p for stage in self._stages.values() for p in stage.named_weights().values()})
        load = max(filled) * len(filled) / max(1, sum(filled))
        needs = f"{', '.join(dict.fromkeys(why))} need{'s' if len(set(why)) == 1 else ''} them" if why else "as asked"
        return (
            f"ZeRO-{self._zero.stage} gives whole parameters to {len(filled)} replicas ({needs}): {len(self._whole)} "
            f"of {total} weights; the fullest steps {load:.2f} times its even share"
        )

    def kept_for(self, stage: int, parameter: nn.Parameter) -> KeptState:
        """Return the optimizer state of a parameter of a stage."""
        master = self.masters.master_of(parameter)
        stepper = next((stepper for stages, stepper in self.steppers.items() if stage in stages), None)
        if master is None or stepper is None:
            return KeptState(master, {}, is_shard=True)
        return KeptState(master, stepper.state_of(master), not stepper.gathers(master), stepper)

    def stepped(self) -> dict[str, nn.Parameter]:
        """Return the tensors that this rank's optimizers step, by the names of weights in the whole model."""
        return named_masters(self._stages, self.masters)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Return a context for changes to the stepped tensors; after it blocks have the same numbers (collective)."""
        self.weights.wait_gathers()
        yield
        self.masters.publish(list(self._stages))
        self.weights.gather_again()

    def take_in_changes(self) -> None:
        """Take in weights that user code has changed; raise `UsageError` where changes would be lost, or misplaced."""
        changed = self.masters.changed()
        if not changed:
            return
        if self.masters.has_copies or self.weights.are_under_way or not self.weights.are_resident:
            raise UsageError(
                f"weights were changed in place since the last step, such as {changed[0][0]!r} (<block>.<weight>), but "
                "what is stepped are float32 masters or shards of them, so that the change would be lost; change them "
                "in `with engine.gathered(write=True):`, or by engine.set_weights({name: tensor})"
            )
        if cut := next((name for name, is_cut in changed if is_cut), None):
            raise UsageError(
                f"{cut!r} (<block>.<weight>) was changed in place since the last step, but tp gives this rank a shard "
                "of it, and nobody can tell whether the change goes by the whole; change it in `with "
                "engine.gathered(write=True):`, where weights are whole, or by engine.set_weights({name: tensor})"
            )
        self.weights.take_in()

    def require_own_gradients(self) -> None:
        """Raise `UsageError` where user code has changed gradients that the last step has used; zeros are allowed."""
        pairs = zip(self.shown, self.shown_versions, strict=True)
        changed = [view for view, version in pairs if view._version != version]
        if self.gradients.reducer.accumulates or any(bool(view.any()) for view in changed):
            raise UsageError(
                "gradients were changed since the last engine.step, as by clip_grad_norm_ or p.grad.mul_, which has no "
                "effect, as that step has used them: clip by Engine(…, clip=…), scale the loss, or change gradients in "
                "a hook, optimizer.register_step_pre_hook; before a backward of the loop's own, call zero_grad()"
            )

    @torch.no_grad()
    def take_over(self) -> None:
        """Copy user changes of the full weights, which are resident, to shards and masters."""
        self.weights.take_over()
        self.masters.take_over()
        self.masters.publish(list(self._stages))

    @contextmanager
    def joined(self, *, write: bool) -> Iterator[None]:
        """Return a context in which tensor-parallel weights are whole; with `write`, changes are copied to shards."""
        held = dict.fromkeys(p for stage in self._stages.values() for p in stage.parameters())
        cut = [(p, p.data, shard) for p in held if (shard := shard_of(p)) is not None]
        for parameter, _, shard in cut:
            parameter.data = gather_full(parameter, self._groups.tensor, shard)
        try:
            yield
            for parameter, mine, shard in cut if write else ():
                mine.copy_(take_shard(parameter, shard))
        finally:
            for parameter, mine, _ in cut:
                parameter.data = mine

    def full_weights(self) -> dict[str, Tensor]:
        """Return full weights, gathered from their shards (collective over tp, and replicas that hold shards)."""
        found = {}
        for number, stage in self._stages.items():
            with self.weights.gathered(number):
                for name, tensor in saved_tensors(stage).items():
                    full = full_of(tensor) if isinstance(tensor, DTensor) else gather_full(tensor, self._groups.tensor)
                    found[of_model(name)] = full.detach().clone()
        return found

    def read_bytes(self) -> StateBytes:
        """Return the peak bytes since the last call."""
        states = (kept for optimizer in self.optimizers.values() for kept in optimizer.state.values())
        values = (value for kept in states for value in (kept.values() if isinstance(kept, Mapping) else [kept]))
        tensors = (value for value in values if isinstance(value, Tensor))
        return self._stats.read_peaks(self.masters.num_bytes + sum(tensor.nbytes for tensor in tensors))
