"""A plan as algebra: does it compute exactly the gradient of the sequential program, no more and no less?

Each piece of the model is five random numbers modulo a prime, and computes on each slice of a microbatch

    y = w·x + b + v·k        k' = q·k + u·x        k: what the slices before leave behind, 0 for the first

with the gradients worked out by hand. The sequential program goes through the pieces in the model's order, the plan
through stages along its routes. Such maps do not commute, so an output knows every stage it came through, in
which order, and a sum of gradients knows every microbatch in it. A number is one entry per replica, each with data of
its own, so that a sum over replicas that is missing, early, done twice or over other axes shows as well. Where replicas
share out gradients (ZeRO), each keeps some entries of a sum and 0 for all others, until they are gathered.

The plan runs as a transport runs it: program order on each rank, sends that never wait, channels that deliver what was
sent first under whatever name the receiver expects. Two polynomials that differ agree at a random point with a chance
of about (number of stages)/2^61.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from quintsched.ir import instructions as ins
from quintsched.ir.instructions import Instruction
from quintsched.ir.values import METRICS, NORM, Kind, Value
from quintsched.plan import Plan
from quintsched.text.listing import excerpt
from quintsched.verify.algebra import (
    PRIME,
    Gradient,
    Model,
    Number,
    Saved,
    Sequential,
    Weights,
    added,
    backward,
    forward,
)
from quintsched.verify.collectives import broken_collectives
from quintsched.verify.wellformed import malformations


@dataclass
class _Rank:
    """One pipeline rank while it runs; `shares` are what was added to each stage's gradient, in order."""

    number: int
    index: int = 0
    values: dict[Value, Any] = field(default_factory=dict)
    grads: dict[tuple[int, int], Gradient] = field(default_factory=dict)
    shares: dict[int, list[tuple[int, Gradient]]] = field(default_factory=dict)
    reduced: dict[tuple[int, int], Gradient] = field(default_factory=dict)
    applied: dict[tuple[int, int], list[Gradient]] = field(default_factory=dict)

    def take(self, kind: Kind, stage: int, unit: int) -> Any:
        """Take a value away; raises `_Fault` where it does not stand here."""
        value = Value(kind, stage, unit)
        self.look_at(value)
        return self.values.pop(value)

    def look_at(self, value: Value) -> Any:
        """Return a value; raises `_Fault` where it does not stand here."""
        if value not in self.values:
            raise _Fault(f"needs {value}, which does not stand on rank {self.number}")
        return self.values[value]

    def put(self, kind: Kind, stage: int, unit: int, number: Any) -> None:
        """Make a value; raises `_Fault` where it stands already."""
        value = Value(kind, stage, unit)
        if value in self.values:
            raise _Fault(f"makes {value}, which stands on rank {self.number} already")
        self.values[value] = number


class _Fault(Exception):
    """What an instruction cannot do."""


@dataclass(frozen=True)
class Equivalence:
    """Whether a plan computes what the sequential program does: `faults` say where not, `places` where to look."""

    plan: Plan
    faults: tuple[str, ...]
    places: tuple[tuple[int, int], ...] = ()

    @property
    def holds(self) -> bool:
        """Whether every stage gets exactly the sequential program's gradient."""
        return not self.faults

    def explain(self) -> str:
        """Return the verdict in words, with the cells of the grid marked."""
        if self.holds:
            return f"equivalent: {self.plan.title} computes the gradient of the sequential program"
        head = f"not equivalent to the sequential program: {self.plan.title}"
        return "\n".join([head, *self.faults, *excerpt(self.plan, self.places)])


def equivalence(plan: Plan, seed: int = 0) -> Equivalence:
    """Run a plan and the sequential program on the same random model, and compare all that the plan leaves behind.

    A spelled-out collective is run as a symbol of what its kind promises, so it has to be proved to keep it.
    """
    malformed = next(malformations(plan), None)
    if malformed:
        where = () if malformed.rank is None or malformed.index is None else ((malformed.rank, malformed.index),)
        return Equivalence(plan, (malformed.message,), where)
    broken = tuple(finding.message for finding in broken_collectives(plan))
    return Equivalence(plan, broken) if broken else run_and_compare(plan, seed)


def run_and_compare(plan: Plan, seed: int = 0) -> Equivalence:
    """Judge a plan whose numbers all name something; whether its routes see the model in order shows in the run."""
    model = Model(plan, seed)
    run = _Run(plan, model)
    stopped = run.to_the_end()
    if stopped:
        return stopped
    return Equivalence(plan, tuple(_differences(run, Sequential(plan, model))))


def _differences(run: _Run, expected: Sequential) -> Iterator[str]:
    for rank in run.ranks:
        if METRICS in rank.values and not _same([rank.values[METRICS]], [expected.total_loss]):
            yield f"rank {rank.number} ends with another loss than the sequential program's"
        for stage in run.plan.layout.stages_of(rank.number) if run.plan.mode == "train" else ():
            yield from _wrong_shares(rank.shares.get(stage, []), stage, expected)
            yield from _wrong_steps(rank, stage, expected)
        yield from (f"a gradient of stage {stage} is never reduced on rank {rank.number}" for stage, _ in rank.grads)
        yield from (f"{value} is left over on rank {rank.number}" for value in rank.values if value not in _LASTING)
    for (source, target), queue in run.channels.items():
        if queue:
            yield f"channel {source}→{target}: {len(queue)} messages are never received"


_LASTING = (METRICS, NORM)


def _wrong_shares(shares: list[tuple[int, Gradient]], stage: int, expected: Sequential) -> Iterator[str]:
    times = Counter(unit for unit, _ in shares)
    for unit in expected.plan.layout.microbatches_of(stage):
        if times[unit] != 1:
            yield f"stage {stage} adds up the gradient of microbatch {unit} {times[unit]} times instead of once"
    for unit, share in shares:
        if not _same(share, expected.share(stage, unit)):
            yield f"stage {stage} computes another gradient for microbatch {unit} than the sequential program"


def _wrong_steps(rank: _Rank, stage: int, expected: Sequential) -> Iterator[str]:
    steps = {bucket: rank.applied.get((stage, bucket), []) for bucket in expected.plan.layout.buckets}
    if not all(steps.values()):
        yield f"stage {stage} never gets its optimizer step"
    if not all(_same(found, expected.step(stage, bucket)) for bucket in steps for found in steps[bucket]):
        yield f"the optimizer steps stage {stage} with another gradient than the sequential program's"


def _same(found: Any, wanted: Any) -> bool:
    return all(a.tolist() == b.tolist() for a, b in zip(found, wanted, strict=True))


class _Run:
    """A run of all ranks, one instruction at a time."""

    def __init__(self, plan: Plan, model: Model) -> None:
        self.plan, self.model = plan, model
        self.ranks = [_Rank(number) for number in range(len(plan.programs))]
        self.channels: dict[tuple[int, int], deque[Number]] = {}

    def to_the_end(self) -> Equivalence | None:
        """Run until nothing moves; return what is wrong where that is before the end."""
        moving = True
        while moving:
            moving = False
            for rank in self.ranks:
                while (instruction := self.next(rank)) is not None and self.is_ready(rank, instruction):
                    try:
                        _HANDLERS[type(instruction)](self, rank, instruction)
                    except _Fault as fault:
                        where = f"rank {rank.number} instruction {rank.index}, {instruction}"
                        return Equivalence(self.plan, (f"{where}: {fault}",), ((rank.number, rank.index),))
                    rank.index += 1
                    moving = True
        waiting = [(rank, i) for rank in self.ranks if (i := self.next(rank)) is not None]
        if not waiting:
            return None
        faults = (f"rank {rank.number} waits for ever at instruction {rank.index}, {i}" for rank, i in waiting)
        return Equivalence(self.plan, tuple(faults), tuple((rank.number, rank.index) for rank, _ in waiting))

    def next(self, rank: _Rank) -> Instruction | None:
        """The instruction that `rank` has come to, or None at its end."""
        program = self.plan.programs[rank.number]
        return program[rank.index] if rank.index < len(program) else None

    def is_ready(self, rank: _Rank, instruction: Instruction) -> bool:
        """Whether the message has come, and whether all members stand at the same collective."""
        if isinstance(instruction, ins.Recv):
            return bool(self.channels.get((instruction.peer, rank.number)))
        members = self.members(instruction)
        together = all(self.next(member) == instruction for member in members)
        return rank in members and together if members else True

    def members(self, instruction: Instruction) -> list[_Rank]:
        """The pipeline ranks that meet at a collective; none for everything else."""
        if isinstance(instruction, ins.WHOLE_MESH):
            return self.ranks
        if isinstance(instruction, ins.SyncTied):
            return [self.ranks[k] for k in self.plan.layout.ranks_of(instruction.stages)]
        return []

    def others(self, rank: _Rank, instruction: Instruction) -> list[_Rank]:
        """The other members of a collective, who are done with it when this one is."""
        return [member for member in self.members(instruction) if member is not rank]


def _send(run: _Run, rank: _Rank, i: ins.Send) -> None:
    stage = i.stage if isinstance(i, ins.SendAct) else run.plan.layout.before(i.stage, i.microbatch)
    number = rank.take(Kind.OUTPUT if isinstance(i, ins.SendAct) else Kind.OUTPUT_GRAD, stage, i.microbatch)
    run.channels.setdefault((rank.number, i.peer), deque()).append(number)


def _recv(run: _Run, rank: _Rank, i: ins.Recv) -> None:
    number = run.channels[i.peer, rank.number].popleft()
    if isinstance(i, ins.RecvAct):
        rank.put(Kind.OUTPUT, run.plan.layout.before(i.stage, i.microbatch), i.microbatch, number)
    else:
        rank.put(Kind.OUTPUT_GRAD, i.stage, i.microbatch, number)


def _fwd(run: _Run, rank: _Rank, i: ins.Fwd) -> None:
    layout, model, s, u = run.plan.layout, run.model, i.stage, i.microbatch
    before = layout.before(s, u)
    x = model.inputs[u] if before < 0 else rank.take(Kind.OUTPUT, before, u)
    saved = Saved(x, _keys_before(run, rank, i))
    y, keys = forward(_weights(run, rank, s), saved)
    if layout.after(s, u) >= 0:
        rank.put(Kind.OUTPUT, s, u, y)
    else:
        rank.put(Kind.LOSS, s, u, model.loss(u, y))
    if (u + 1) % layout.slices:
        rank.put(Kind.KEYS, s, u, keys)
    if layout.trains and layout.recomputes(s):
        rank.put(Kind.CHECKPOINT, s, u, x)
    elif layout.trains:
        _save(run, rank, i, saved, y)


def _recompute(run: _Run, rank: _Rank, i: ins.Recompute) -> None:
    saved = Saved(rank.take(Kind.CHECKPOINT, i.stage, i.microbatch), _keys_before(run, rank, i))
    _save(run, rank, i, saved, forward(_weights(run, rank, i.stage), saved)[0])


def _weights(run: _Run, rank: _Rank, stage: int) -> Weights:
    """Return the full weights of a stage, which have to be gathered where its replicas hold shares."""
    if not run.plan.layout.zero.shares_weights:
        return run.model.weights[stage]
    found: Weights = rank.look_at(Value(Kind.PARAMS, stage, 0))
    return found


def _gather_params(run: _Run, rank: _Rank, i: ins.GatherParams) -> None:
    rank.put(Kind.PARAMS, i.stage, 0, run.model.weights[i.stage])


def _free_params(run: _Run, rank: _Rank, i: ins.FreeParams) -> None:
    rank.take(Kind.PARAMS, i.stage, 0)


def _keys_before(run: _Run, rank: _Rank, i: ins.Compute) -> Number:
    """Return the keys of the slice before."""
    if i.microbatch % run.plan.layout.slices == 0:
        return run.model.zero
    found: Number = rank.look_at(Value(Kind.KEYS, i.stage, i.microbatch - 1))
    return found


def _save(run: _Run, rank: _Rank, i: ins.Compute, saved: Saved, y: Number) -> None:
    """Keep what the backward needs; on the last stage the gradient of the loss too."""
    is_last = run.plan.layout.after(i.stage, i.microbatch) < 0
    rank.put(Kind.SAVED, i.stage, i.microbatch, (saved, run.model.loss_grad(i.microbatch, y) if is_last else None))


def _backward_of(run: _Run, rank: _Rank, i: ins.Compute) -> Gradient:
    """Run the backward of a unit and hand its gradients on; return that of the weights."""
    layout, model, s, u = run.plan.layout, run.model, i.stage, i.microbatch
    saved, grad_y = rank.take(Kind.SAVED, s, u)
    if grad_y is None:
        grad_y = rank.take(Kind.OUTPUT_GRAD, s, u)
    grad_k = model.zero
    if (u + 1) % layout.slices:
        rank.take(Kind.KEYS, s, u)
        grad_k = rank.take(Kind.KEYS_GRAD, s, u)
    of_input, of_keys, share = backward(_weights(run, rank, s), saved, grad_y, grad_k)
    if layout.before(s, u) >= 0:
        rank.put(Kind.OUTPUT_GRAD, layout.before(s, u), u, of_input)
    if u % layout.slices:
        rank.put(Kind.KEYS_GRAD, s, u - 1, of_keys)
    return model.share(s, share)


def _bwd(run: _Run, rank: _Rank, i: ins.Bwd) -> None:
    _add(run, rank, i, _backward_of(run, rank, i))


def _bwd_input(run: _Run, rank: _Rank, i: ins.BwdInput) -> None:
    rank.put(Kind.PENDING, i.stage, i.microbatch, _backward_of(run, rank, i))


def _bwd_weight(run: _Run, rank: _Rank, i: ins.BwdWeight) -> None:
    _add(run, rank, i, rank.take(Kind.PENDING, i.stage, i.microbatch))


def _add(run: _Run, rank: _Rank, i: ins.Compute, share: Gradient) -> None:
    rank.shares.setdefault(i.stage, []).append((i.microbatch, share))
    for bucket in run.plan.layout.buckets:
        old = rank.grads.get((i.stage, bucket), (run.model.zero,) * len(share))
        rank.grads[i.stage, bucket] = added(old, share)


def _held(rank: _Rank, stage: int, bucket: int) -> Gradient:
    if (stage, bucket) not in rank.grads:
        raise _Fault(f"finds no gradient of stage {stage}")
    return rank.grads[stage, bucket]


def _all_reduce_bucket(run: _Run, rank: _Rank, i: ins.AllReduceBucket) -> None:
    held = _held(rank, i.stage, i.bucket)
    rank.grads[i.stage, i.bucket] = tuple(run.model.over(i.axes, part) for part in held)


def _reduce_scatter_bucket(run: _Run, rank: _Rank, i: ins.ReduceScatterBucket) -> None:
    """Add the rank's share of the sum of what was accumulated since the last time, which then begins anew."""
    place = (i.stage, i.bucket)
    total = [run.model.over(i.axes, entry) for entry in _held(rank, *place)]
    share = run.model.share_of(i.axes, tuple(total))
    del rank.grads[place]
    rank.reduced[place] = added(rank.reduced[place], share) if place in rank.reduced else share


def _all_gather_bucket(run: _Run, rank: _Rank, i: ins.AllGatherBucket) -> None:
    steps = rank.applied.get((i.stage, i.bucket))
    if not steps:
        raise _Fault(f"finds no stepped shares of stage {i.stage}")
    steps[-1] = tuple(run.model.over(i.axes, entry) for entry in steps[-1])


def _stepped_with(run: _Run, rank: _Rank) -> dict[tuple[int, int], Gradient]:
    """The gradients as the optimizer wants them."""
    return rank.reduced if run.plan.zero.shares_optimizer else rank.grads


def _sync_tied(run: _Run, rank: _Rank, i: ins.SyncTied) -> None:
    tie = next(tie for tie in run.plan.layout.ties if (tie.params, tie.stages) == (i.params, i.stages))
    holders = [(run.ranks[run.plan.stage_to_pp[stage]], stage, run.model.held(tie, stage)) for stage in i.stages]
    for bucket in run.plan.layout.buckets:
        total = added(*(_held(holder, stage, bucket)[part] for holder, stage, part in holders))
        for holder, stage, part in holders:
            gradient = list(_held(holder, stage, bucket))
            gradient[part] = total
            holder.grads[stage, bucket] = tuple(gradient)
    _all_go_on(run, rank, i)


def _share_metrics(run: _Run, rank: _Rank, i: ins.ShareMetrics) -> None:
    total = run.model.zero
    for holder in run.ranks:
        for value in [value for value in holder.values if value.kind is Kind.LOSS]:
            total = (total + holder.values.pop(value)) % PRIME
    for holder in run.ranks:
        holder.values[METRICS] = run.model.over_replicas(total)
    _all_go_on(run, rank, i)


def _clip_grad(run: _Run, rank: _Rank, i: ins.ClipGrad) -> None:
    """Look at the gradients of all ranks, as they stand now."""
    for holder in run.ranks:
        holder.values[NORM] = dict(_stepped_with(run, holder))
    _all_go_on(run, rank, i)


def _opt_step(run: _Run, rank: _Rank, i: ins.OptStep) -> None:
    for value in (METRICS, NORM):
        rank.look_at(value)
    for stage in i.stages:
        for bucket in run.plan.layout.buckets:
            gradient = _stepped_with(run, rank).pop((stage, bucket), None)
            if gradient is None:
                raise _Fault(f"finds no gradient of stage {stage}")
            if rank.values[NORM].get((stage, bucket)) is not gradient:
                raise _Fault(f"uses another gradient of stage {stage} than the one in the norm")
            rank.applied.setdefault((stage, bucket), []).append(gradient)


def _all_go_on(run: _Run, rank: _Rank, instruction: Instruction) -> None:
    for other in run.others(rank, instruction):
        other.index += 1


_HANDLERS: dict[type[Instruction], Callable[[_Run, _Rank, Any], None]] = {
    ins.RecvAct: _recv,
    ins.Fwd: _fwd,
    ins.Recompute: _recompute,
    ins.SendAct: _send,
    ins.RecvGrad: _recv,
    ins.Bwd: _bwd,
    ins.BwdInput: _bwd_input,
    ins.BwdWeight: _bwd_weight,
    ins.SendGrad: _send,
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
