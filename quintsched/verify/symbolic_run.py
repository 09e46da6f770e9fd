"""Symbolic run: executes a plan on numbers instead of tensors, instruction by instruction, as a transport would.

Each rank runs in program order, sends never block, and channels deliver in order, whatever value the receiver expects.
A value must be on the rank that consumes it, or the run stops with a fault. Each instruction has one small function;
`quintsched.verify.algebraic_training_model` has the model that they compute with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from quintsched.ir import instruction_set as ins
from quintsched.ir.instruction_set import Instruction
from quintsched.ir.instruction_values import MAX_SKIPS, METRICS, NORM, Value, ValueKind
from quintsched.ir.plan_data import PlanData
from quintsched.verify.algebraic_training_model import (
    PRIME,
    AlgebraicModel,
    Gradient,
    ModularNumber,
    Saved,
    Weights,
    added,
    backward,
    forward,
)
from quintsched.verify.symbolic_rank import Fault, Stopped, SymbolicRank


class SymbolicRun:
    """Symbolic run of all ranks, one instruction at a time."""

    def __init__(self, plan: PlanData, model: AlgebraicModel) -> None:
        self.plan, self.model = plan, model
        self.ranks = [SymbolicRank(number) for number in range(len(plan.programs))]
        self.channels: dict[tuple[int, int], deque[ModularNumber]] = {}

    def to_the_end(self) -> Stopped | None:
        """Run until no rank can advance; return the faults if that is before the end, else None."""
        moving = True
        while moving:
            moving = False
            for rank in self.ranks:
                while (instruction := self.next(rank)) is not None and self.is_ready(rank, instruction):
                    try:
                        _HANDLERS[type(instruction)](self, rank, instruction)
                    except Fault as fault:
                        where = f"rank {rank.number} instruction {rank.index}, {instruction}"
                        return Stopped((f"{where}: {fault}",), ((rank.number, rank.index),))
                    rank.index += 1
                    moving = True
        waiting = [(rank, i) for rank in self.ranks if (i := self.next(rank)) is not None]
        if not waiting:
            return None
        faults = (f"rank {rank.number} waits for ever at instruction {rank.index}, {i}" for rank, i in waiting)
        return Stopped(tuple(faults), tuple((rank.number, rank.index) for rank, _ in waiting))

    def next(self, rank: SymbolicRank) -> Instruction | None:
        """Next instruction of `rank`, or None at its end."""
        program = self.plan.programs[rank.number]
        return program[rank.index] if rank.index < len(program) else None

    def is_ready(self, rank: SymbolicRank, instruction: Instruction) -> bool:
        """Whether the message has arrived, and whether all members have reached the same collective."""
        if isinstance(instruction, ins.Recv):
            return bool(self.channels.get((instruction.peer, rank.number)))
        members = self.members(instruction)
        together = all(self.next(member) == instruction for member in members)
        return rank in members and together if members else True

    def members(self, instruction: Instruction) -> list[SymbolicRank]:
        """Pipeline ranks that meet at a collective; [] for other instructions."""
        if isinstance(instruction, ins.WHOLE_MESH):
            return self.ranks
        if isinstance(instruction, ins.SyncTied):
            return [self.ranks[k] for k in self.plan.layout.ranks_of(instruction.stages)]
        return []

    def others(self, rank: SymbolicRank, instruction: Instruction) -> list[SymbolicRank]:
        """Other members of a collective, which complete it together with this one."""
        return [member for member in self.members(instruction) if member is not rank]


def _send(run: SymbolicRun, rank: SymbolicRank, i: ins.Send) -> None:
    run.channels.setdefault((rank.number, i.peer), deque()).append(rank.take_value(*_carried(run, i)))


def _recv(run: SymbolicRun, rank: SymbolicRank, i: ins.Recv) -> None:
    rank.put(*_carried(run, i), run.channels[i.peer, rank.number].popleft())


def _carried(run: SymbolicRun, i: ins.Message) -> tuple[ValueKind, int, int]:
    """Return the value that a message carries: kind, stage and number."""
    layout = run.plan.layout
    match i:
        case ins.HoldAct() | ins.ReturnAct():
            return ValueKind.LENT, i.stage, i.microbatch
        case ins.SendAct() | ins.RecvGrad():
            return ValueKind.OUTPUT if isinstance(i, ins.SendAct) else ValueKind.OUTPUT_GRAD, i.stage, i.microbatch
        case ins.RecvSkip() | ins.SendSkipGrad():
            kind = ValueKind.SKIP if isinstance(i, ins.RecvSkip) else ValueKind.SKIP_GRAD
            return kind, i.stage, i.microbatch * MAX_SKIPS + layout.skip_numbers[i.skip]
        case ins.SendSkip() | ins.RecvSkipGrad():
            skip = layout.skip_numbers[i.skip]
            kind, hops = ValueKind.SKIP, layout.skip_hops
            if isinstance(i, ins.RecvSkipGrad):
                kind, hops = ValueKind.SKIP_GRAD, layout.skip_chains
            later = next(
                hop.later
                for hop in hops
                if (hop.skip, hop.earlier) == (skip, i.stage) and layout.rank_of(hop.later) == i.peer
            )
            return kind, later, i.microbatch * MAX_SKIPS + skip
    before = layout.before(i.stage, i.microbatch)
    return ValueKind.OUTPUT if isinstance(i, ins.RecvAct) else ValueKind.OUTPUT_GRAD, before, i.microbatch


def _fwd(run: SymbolicRun, rank: SymbolicRank, i: ins.Fwd) -> None:
    layout, model, s, u = run.plan.layout, run.model, i.stage, i.microbatch
    before = layout.before(s, u)
    x = model.inputs[u] if before < 0 else rank.take_value(ValueKind.OUTPUT, before, u)
    saved = Saved(x, _keys_before(run, rank, i))
    y, keys = forward(_weights(run, rank, s), saved)
    skips = {
        h.skip: rank.take_value(ValueKind.SKIP, s, u * MAX_SKIPS + h.skip) for h in layout.skip_hops if h.later == s
    }
    skipped = sum((model.takes[skip, layout.part_of(s)] * number for skip, number in skips.items()), model.zero)
    y = model.modulo(y + skipped)
    for hop in layout.skip_hops:
        if hop.earlier == s:
            made = skips[hop.skip] if hop.skip in skips else model.makes[hop.skip, layout.part_of(s)] * y
            rank.put(ValueKind.SKIP, hop.later, u * MAX_SKIPS + hop.skip, model.modulo(made))
    if layout.after(s, u) >= 0:
        rank.put(ValueKind.OUTPUT, s, u, y)
    if _has_loss(run, i):
        rank.put(ValueKind.LOSS, s, u, model.loss(layout.part_of(s), u, y))
    if (u + 1) % layout.slices:
        rank.put(ValueKind.KEYS, s, u, keys)
    if layout.trains and layout.recomputes(s, u):
        rank.put(ValueKind.CHECKPOINT, s, u, (x, skipped))
    elif layout.trains:
        _save(run, rank, i, saved, y)


def _recompute(run: SymbolicRun, rank: SymbolicRank, i: ins.Recompute) -> None:
    x, skipped = rank.take_value(ValueKind.CHECKPOINT, i.stage, i.microbatch)
    saved = Saved(x, _keys_before(run, rank, i))
    _save(run, rank, i, saved, run.model.modulo(forward(_weights(run, rank, i.stage), saved)[0] + skipped))


def _weights(run: SymbolicRun, rank: SymbolicRank, stage: int) -> Weights:
    """Return the full weights of a stage, which must have been gathered if its replicas hold shards."""
    if not run.plan.layout.zero.shards_weights:
        return run.model.weights[stage]
    found: Weights = rank.look_at(Value(ValueKind.PARAMS, stage, 0))
    return found


def _gather_params(run: SymbolicRun, rank: SymbolicRank, i: ins.GatherParams) -> None:
    rank.put(ValueKind.PARAMS, i.stage, 0, run.model.weights[i.stage])


def _free_params(run: SymbolicRun, rank: SymbolicRank, i: ins.FreeParams) -> None:
    rank.take_value(ValueKind.PARAMS, i.stage, 0)


def _keys_before(run: SymbolicRun, rank: SymbolicRank, i: ins.Compute) -> ModularNumber:
    """Return the state from the previous slice."""
    if i.microbatch % run.plan.layout.slices == 0:
        return run.model.zero
    found: ModularNumber = rank.look_at(Value(ValueKind.KEYS, i.stage, i.microbatch - 1))
    return found


def _save(run: SymbolicRun, rank: SymbolicRank, i: ins.Compute, saved: Saved, y: ModularNumber) -> None:
    """Save the forward's inputs for the backward, and the gradient of the loss if there is one."""
    piece = run.plan.layout.part_of(i.stage)
    grad = run.model.loss_grad(piece, i.microbatch, y) if _has_loss(run, i) else run.model.zero
    rank.put(ValueKind.SAVED, i.stage, i.microbatch, (saved, grad))


def _has_loss(run: SymbolicRun, i: ins.Compute) -> bool:
    return run.plan.layout.after(i.stage, i.microbatch) < 0 or i.stage in run.plan.layout.losses


def _offload_act(run: SymbolicRun, rank: SymbolicRank, i: ins.OffloadAct) -> None:
    rank.put(ValueKind.OFFLOADED, i.stage, i.microbatch, rank.take_value(ValueKind.SAVED, i.stage, i.microbatch))


def _fetch_act(run: SymbolicRun, rank: SymbolicRank, i: ins.FetchAct) -> None:
    rank.put(ValueKind.FETCHED, i.stage, i.microbatch, rank.take_value(ValueKind.OFFLOADED, i.stage, i.microbatch))


def _lend_act(run: SymbolicRun, rank: SymbolicRank, i: ins.LendAct) -> None:
    saved = rank.take_value(ValueKind.SAVED, i.stage, i.microbatch)
    rank.put(ValueKind.LOAN, i.stage, i.microbatch, run.model.zero)
    run.channels.setdefault((rank.number, i.peer), deque()).append(saved)


def _reclaim_act(run: SymbolicRun, rank: SymbolicRank, i: ins.ReclaimAct) -> None:
    rank.take_value(ValueKind.LOAN, i.stage, i.microbatch)
    rank.put(ValueKind.FETCHED, i.stage, i.microbatch, run.channels[i.peer, rank.number].popleft())


def _backward_of(run: SymbolicRun, rank: SymbolicRank, i: ins.Compute) -> Gradient:
    """Run the backward of a unit and pass its gradients on; return the gradient of the weights."""
    layout, model, s, u = run.plan.layout, run.model, i.stage, i.microbatch
    fetched = Value(ValueKind.FETCHED, s, u) in rank.values
    saved, grad_y = rank.take_value(ValueKind.FETCHED if fetched else ValueKind.SAVED, s, u)
    if layout.after(s, u) >= 0:
        grad_y = grad_y + rank.take_value(ValueKind.OUTPUT_GRAD, s, u)
    grad_y = _pass_skip_grads(run, rank, i, grad_y)
    grad_k = model.zero
    if (u + 1) % layout.slices:
        rank.take_value(ValueKind.KEYS, s, u)
        grad_k = rank.take_value(ValueKind.KEYS_GRAD, s, u)
    of_input, of_keys, share = backward(_weights(run, rank, s), saved, grad_y, grad_k)
    if layout.before(s, u) >= 0:
        rank.put(ValueKind.OUTPUT_GRAD, layout.before(s, u), u, of_input)
    if u % layout.slices:
        rank.put(ValueKind.KEYS_GRAD, s, u - 1, of_keys)
    return model.share(s, share)


def _pass_skip_grads(run: SymbolicRun, rank: SymbolicRank, i: ins.Compute, grad_y: ModularNumber) -> ModularNumber:
    """Add the gradients of skips that a stage makes to its output's, and its own to those of skips that it takes."""
    layout, model, s, u = run.plan.layout, run.model, i.stage, i.microbatch
    sums = {
        hop.skip: rank.take_value(ValueKind.SKIP_GRAD, hop.later, u * MAX_SKIPS + hop.skip)
        for hop in layout.skip_chains
        if hop.earlier == s
    }
    made = (
        model.makes[skip, layout.part_of(s)] * number for skip, number in sums.items() if layout.skips[skip][1][0] == s
    )
    grad_y = model.modulo(sum(made, grad_y))
    for hop in layout.skip_chains:
        if hop.later == s:
            total = sums.get(hop.skip, model.zero) + model.takes[hop.skip, layout.part_of(s)] * grad_y
            rank.put(ValueKind.SKIP_GRAD, s, u * MAX_SKIPS + hop.skip, model.modulo(total))
    return grad_y


def _bwd(run: SymbolicRun, rank: SymbolicRank, i: ins.Bwd) -> None:
    _add(run, rank, i, _backward_of(run, rank, i))


def _overlap(run: SymbolicRun, rank: SymbolicRank, i: ins.Overlap) -> None:
    for side in i.sides:
        _HANDLERS[type(side)](run, rank, side)


def _bwd_input(run: SymbolicRun, rank: SymbolicRank, i: ins.BwdInput) -> None:
    rank.put(ValueKind.PENDING, i.stage, i.microbatch, _backward_of(run, rank, i))


def _bwd_weight(run: SymbolicRun, rank: SymbolicRank, i: ins.BwdWeight) -> None:
    _add(run, rank, i, rank.take_value(ValueKind.PENDING, i.stage, i.microbatch))


def _add(run: SymbolicRun, rank: SymbolicRank, i: ins.Compute, share: Gradient) -> None:
    rank.shares.setdefault(i.stage, []).append((i.microbatch, share))
    for bucket in run.plan.layout.buckets:
        old = rank.grads.get((i.stage, bucket), (run.model.zero,) * len(share))
        rank.grads[i.stage, bucket] = added(old, share)


def _held(rank: SymbolicRank, stage: int, bucket: int) -> Gradient:
    if (stage, bucket) not in rank.grads:
        raise Fault(f"finds no gradient of stage {stage}")
    return rank.grads[stage, bucket]


def _all_reduce_bucket(run: SymbolicRun, rank: SymbolicRank, i: ins.AllReduceBucket) -> None:
    held = _held(rank, i.stage, i.bucket)
    rank.grads[i.stage, i.bucket] = tuple(run.model.over(i.axes, part) for part in held)


def _reduce_scatter_bucket(run: SymbolicRun, rank: SymbolicRank, i: ins.ReduceScatterBucket) -> None:
    """Reduce the gradients accumulated since the last reduction, add the rank's shard to its sum, and start anew."""
    place = (i.stage, i.bucket)
    total = [run.model.over(i.axes, entry) for entry in _held(rank, *place)]
    share = run.model.share_of(i.axes, tuple(total))
    del rank.grads[place]
    rank.reduced[place] = added(rank.reduced[place], share) if place in rank.reduced else share


def _all_gather_bucket(run: SymbolicRun, rank: SymbolicRank, i: ins.AllGatherBucket) -> None:
    steps = rank.applied.get((i.stage, i.bucket))
    if not steps:
        raise Fault(f"finds no stepped shares of stage {i.stage}")
    steps[-1] = tuple(run.model.over(i.axes, entry) for entry in steps[-1])


def _stepped_with(run: SymbolicRun, rank: SymbolicRank) -> dict[tuple[int, int], Gradient]:
    """Gradients in the form that the optimizer steps with: reduced shards, or full gradients."""
    return rank.reduced if run.plan.zero.shards_optimizer else rank.grads


def _sync_tied(run: SymbolicRun, rank: SymbolicRank, i: ins.SyncTied) -> None:
    tie = next(tie for tie in run.plan.layout.ties if (tie.params, tie.stages) == (i.params, i.stages))
    holders = [(run.ranks[run.plan.stage_to_pp[stage]], stage, run.model.held(tie, stage)) for stage in i.stages]
    for bucket in run.plan.layout.buckets:
        total = added(*(_held(holder, stage, bucket)[part] for holder, stage, part in holders))
        for holder, stage, part in holders:
            gradient = list(_held(holder, stage, bucket))
            gradient[part] = total
            holder.grads[stage, bucket] = tuple(gradient)
    _all_go_on(run, rank, i)


def _share_metrics(run: SymbolicRun, rank: SymbolicRank, i: ins.ShareMetrics) -> None:
    total = run.model.zero
    for holder in run.ranks:
        for value in [value for value in holder.values if value.kind is ValueKind.LOSS]:
            total = (total + holder.values.pop(value)) % PRIME
    for holder in run.ranks:
        holder.values[METRICS] = run.model.over_replicas(total)
    _all_go_on(run, rank, i)


def _clip_grad(run: SymbolicRun, rank: SymbolicRank, i: ins.ClipGrad) -> None:
    """Record the gradients of all ranks in the norm, so that the optimizer step can check that it uses the same."""
    for holder in run.ranks:
        holder.values[NORM] = dict(_stepped_with(run, holder))
    _all_go_on(run, rank, i)


def _opt_step(run: SymbolicRun, rank: SymbolicRank, i: ins.OptStep) -> None:
    for value in (METRICS, NORM):
        rank.look_at(value)
    for stage in i.stages:
        for bucket in run.plan.layout.buckets:
            gradient = _stepped_with(run, rank).pop((stage, bucket), None)
            if gradient is None:
                raise Fault(f"finds no gradient of stage {stage}")
            if rank.values[NORM].get((stage, bucket)) is not gradient:
                raise Fault(f"uses another gradient of stage {stage} than the one in the norm")
            rank.applied.setdefault((stage, bucket), []).append(gradient)


def _all_go_on(run: SymbolicRun, rank: SymbolicRank, instruction: Instruction) -> None:
    for other in run.others(rank, instruction):
        other.index += 1


_HANDLERS: dict[type[Instruction], Callable[[SymbolicRun, SymbolicRank, Any], None]] = {
    ins.RecvAct: _recv,
    ins.Fwd: _fwd,
    ins.Recompute: _recompute,
    ins.SendAct: _send,
    ins.RecvSkip: _recv,
    ins.SendSkip: _send,
    ins.OffloadAct: _offload_act,
    ins.FetchAct: _fetch_act,
    ins.LendAct: _lend_act,
    ins.HoldAct: _recv,
    ins.ReturnAct: _send,
    ins.ReclaimAct: _reclaim_act,
    ins.RecvGrad: _recv,
    ins.Bwd: _bwd,
    ins.Overlap: _overlap,
    ins.BwdInput: _bwd_input,
    ins.BwdWeight: _bwd_weight,
    ins.SendGrad: _send,
    ins.RecvSkipGrad: _recv,
    ins.SendSkipGrad: _send,
    ins.SyncTied: _sync_tied,
    ins.AllReduceBucket: _all_reduce_bucket,
    ins.ReduceScatterBucket: _reduce_scatter_bucket,
    ins.AllGatherBucket: _all_gather_bucket,
    ins.GatherParams: _gather_params,
    ins.FreeParams: _free_params,
    ins.ShareMetrics: _share_metrics,
    ins.ClipGrad: _clip_grad,
    ins.OptStep: _opt_step,
}
