"""Proof that a plan is sound, or a counter-example.

    well-formed → 1 complete → 2 data flow → 3 channels → 5 collectives → 4 deadlock → 6 memory

A transport profile describes a run: its queues, and a host that issues each rank's program in order and blocks where a
computation consumes a value. Messages that match by tag are issued ahead of their place, without waiting.

One pipeline proves all replicas: they run the same programs, and mapping each rank to its pp coordinate maps a cycle to
a cycle. Each finding names a pipeline rank, an index in its program, and the instruction there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from quintsched.check_call_arguments import NUMBER, PLAN, TEXT, takes
from quintsched.errors import UnsoundError, UsageError, counted, printable
from quintsched.graph.events_and_channels import Channels, Events, carried, pipeline_collectives
from quintsched.graph.transport_ordering_rules import find_profile
from quintsched.ir.diagnostics import Finding, Point
from quintsched.ir.instruction_columns import Flags, Ints
from quintsched.ir.instruction_set import COMPUTATIONS, Bwd, BwdInput, BwdWeight, Compute, Fwd, Recompute
from quintsched.ir.plan_data import PlanData, listed
from quintsched.simulation.costs import Costs
from quintsched.simulation.message_slots import MessageRule, MessageSlots, message_slots
from quintsched.simulation.notebook_html import figures, heading, words
from quintsched.simulation.simulated_activation_memory import peak_activations, peak_receives
from quintsched.text.plan_listing import excerpt
from quintsched.verify.deadlock import deadlocks
from quintsched.verify.planned_collectives import broken_collectives
from quintsched.verify.values_made_once_and_used import broken_flow
from quintsched.verify.wellformed import malformations

MOST_FINDINGS = 10
MOST_LISTED_RANKS = 16
"""Maximum number of members of a group that a message lists."""


@dataclass(frozen=True)
class Verdict:
    """Result of `check`.

    `profiles` gives for each transport profile whether the plan is free of deadlock, and `cycles` explains those that
    are not: the waits that form a cycle, one finding per rank's part of it. `profile` is the requested profile.
    """

    plan: PlanData
    findings: tuple[Finding, ...]
    profiles: dict[str, bool]
    peak_activations: tuple[float, ...]
    peak_receives: tuple[int, ...]
    cycles: dict[str, tuple[Finding, ...]] = field(default_factory=dict)
    profile: str = "channel"

    @property
    def slots(self) -> MessageSlots:
        """Number of receive and send slots of each pp rank under the profile; empty unless the plan is sound."""
        if not self.sound:
            return MessageSlots((), ())
        rule = MessageRule.from_profile(find_profile(self.profile), may_wait=self.profiles.get("blocking", False))
        return self.plan.remember(f"slots {rule}", lambda: message_slots(self.plan, rule))

    @property
    def sound(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    def __repr__(self) -> str:
        free = ", ".join(name for name, is_free in self.profiles.items() if is_free)
        if self.sound:
            return f"Verdict(sound: {self.plan.title}, free of deadlock under {free})"
        first = self.findings[0]
        more = f", and {len(self.findings) - 1} more" if len(self.findings) > 1 else ""
        return f"Verdict(not sound: {self.plan.title}, {first.point.value}: {printable(first.message, 200)}{more})"

    def _repr_html_(self) -> str:
        """Return the proof's figures, or what is wrong, as HTML for notebooks."""
        profiles = [(name, "free of deadlock" if free else "not free") for name, free in self.profiles.items()]
        title = heading(f"{'sound' if self.sound else 'not sound'}: {self.plan.title}")
        return f"<div>{title}{figures(profiles)}{words(self.explain())}</div>"

    def explain(self) -> str:
        """Return the verdict as text: the proof's figures, or the findings with excerpts around their places."""
        if self.sound:
            free = ", ".join(name for name, is_free in self.profiles.items() if is_free)
            held = counted(max(self.peak_activations, default=0), "microbatch's", "g")
            received = counted(max(self.peak_receives, default=0), "received message")
            head = (
                f"sound: {counted(self.plan.num_instructions, 'instruction')} on "
                f"{counted(self.plan.mesh.pp, 'pipeline rank')}; free of deadlock under {free}; a rank stores at most "
                f"{held} activations and {received}{self._blocks}"
            )
            return "\n".join([head, *self._why_not_elsewhere()])
        cycle = [finding for finding in self.findings if finding.point is Point.DEADLOCK]
        shown = [finding for finding in self.findings if finding not in cycle][:MOST_FINDINGS] + cycle
        lines = [f"{finding.point.value}: {finding.message}" for finding in shown]
        if len(self.findings) > len(shown):
            lines.append(f"… and {len(self.findings) - len(shown)} more")
        places = [(f.rank, f.index) for f in shown if f.rank is not None and f.index is not None]
        return "\n".join([f"not sound: {self.plan.title}", *lines, *excerpt(self.plan, places)])

    @property
    def _blocks(self) -> str:
        blocks = self.plan.blocks_per_stage
        return f"; the stages have {listed(blocks)} blocks of the model" if blocks else ""

    def _why_not_elsewhere(self) -> list[str]:
        """Return one line per cycle, for the profiles under which the plan is not free of deadlock."""
        circles: dict[frozenset[str], list[str]] = {}
        for name, (_, *waits) in self.cycles.items():
            circles.setdefault(frozenset(wait.message for wait in waits), []).append(name)
        return [
            f"not free under {', '.join(names)}: {'; '.join(wait.message for wait in self.cycles[names[0]][1:])}"
            for names in circles.values()
        ]

    def raise_if_unsound(self) -> None:
        """Raise `UnsoundError` with the explanation unless the plan is sound."""
        if not self.sound:
            raise UnsoundError(self.explain())


@takes("check(plan, profile)", plan=PLAN, profile=TEXT, memory_cap=NUMBER)
def check(plan: PlanData, profile: str = "channel", memory_cap: float | None = None) -> Verdict:
    """Prove a plan sound; see the module. Raises `UsageError` only for an unknown profile or a negative cap.

    The plan caches its proof: calls with another profile or cap are cheap.
    """
    find_profile(profile)
    if memory_cap is not None and not memory_cap >= 0:
        raise UsageError(f"memory cap {memory_cap:g}: give the most activations a rank may hold, at least 0")
    proof = plan.remember("proof", lambda: _prove(plan))
    findings = (*proof.findings, *proof.cycles.get(profile, ()), *_over_cap(proof.peak_activations, memory_cap))
    return replace(proof, plan=plan, findings=findings, profile=profile)


def _prove(plan: PlanData) -> Verdict:
    """Prove all points that do not depend on a profile or a cap, and freedom of deadlock under every profile."""
    malformed = _malformed(plan)
    if malformed:
        return Verdict(plan, tuple(malformed), {}, (), ())
    events = Events.merge(plan)
    findings = [
        *_incomplete(plan),
        *broken_flow(plan),
        *_broken_channels(plan, events.channels),
        *_broken_collectives(plan),
        *broken_collectives(plan),
    ]
    profiles: dict[str, bool] = {}
    cycles: dict[str, tuple[Finding, ...]] = {}
    if not any(finding.point in (Point.CHANNELS, Point.COLLECTIVES) for finding in findings):
        profiles, cycles = deadlocks(plan, events, any(f.point is Point.DATA_FLOW for f in findings))
    costs = Costs().spread(plan.stage_shares, plan.schedule.slices)
    activations, receives = peak_activations(plan, costs), peak_receives(plan)
    return Verdict(plan, tuple(findings), profiles, activations, receives, cycles)


def require_wellformed(plan: PlanData) -> None:
    """Raise `UnsoundError` for the first malformation of a plan, such as an index out of range."""
    for malformation in malformations(plan):
        raise UnsoundError(malformation.message)


def check_order(plan: PlanData) -> Verdict:
    """Prove a bare order of computation: only that it is well-formed and complete."""
    findings = _malformed(plan) or list(_incomplete(plan, lowered=False))
    return Verdict(plan, tuple(findings), {}, (), ())


def _malformed(plan: PlanData) -> list[Finding]:
    return [Finding(Point.WELL_FORMED, m.message, m.rank, m.index) for m in malformations(plan)]


def _incomplete(plan: PlanData, *, lowered: bool = True) -> Iterator[Finding]:
    """Point 1, complete: each microbatch once forward, and once backward (whole or in halves), on each of its stages.

    It is recomputed once if its stage recomputes it; a bare order of computation may leave that to a pass.
    """
    layout = plan.layout
    times = {kind: _times(plan, kind) for kind in COMPUTATIONS}
    owed = layout.visits_all.ravel()
    yield from _miscounted(plan, Fwd, times[Fwd], owed)
    trains = owed & layout.trains
    whole = times[Bwd] + np.minimum(times[BwdInput], times[BwdWeight])
    halves = (times[BwdInput] > 0) | (times[BwdWeight] > 0)
    yield from _miscounted(plan, Bwd, np.where(halves, whole, times[Bwd]), trains)
    for half in (BwdInput, BwdWeight):
        yield from _miscounted(plan, half, times[half], trains & halves)
    again = trains & layout.recomputing.ravel()
    yield from _miscounted(plan, Recompute, times[Recompute], again if lowered else again & (times[Recompute] > 0))


def _times(plan: PlanData, kind: type[Compute]) -> Ints:
    """Return how often `kind` computes each cell: stage x microbatches + microbatch."""
    columns, microbatches = plan.columns.apart.columns, plan.layout.num_microbatches
    rows = columns.rows_where(kind)
    cells = columns.stage[rows] * microbatches + columns.unit[rows]
    return np.bincount(cells, minlength=len(plan.stage_to_pp) * microbatches)


def _miscounted(plan: PlanData, kind: type[Compute], times: Ints, owed: Flags) -> Iterator[Finding]:
    for cell in np.flatnonzero(times != owed).tolist():
        what = kind(*divmod(cell, plan.layout.num_microbatches))
        rank = plan.layout.rank_of(what.stage)
        message = f"rank {rank} runs {what} {times[cell]} times instead of {'once' if owed[cell] else 'never'}"
        yield Finding(Point.COMPLETE, message, rank)


def _broken_channels(plan: PlanData, channels: Channels) -> Iterator[Finding]:
    """Point 3, channels: the k-th send of a channel carries the value that its k-th receive expects."""
    columns, numbering = plan.columns, plan.flows.numbering
    sent, received = channels.pairs
    taken, made = carried(plan, sent), carried(plan, received)
    number = np.zeros(len(columns), np.int64)
    number[channels.sends.rows] = channels.sends.numbers
    seen: set[tuple[int, int]] = set()
    for pair in np.flatnonzero(taken != made).tolist():
        source, target = int(sent[pair]), int(received[pair])
        channel = (int(columns.rank[source]), int(columns.rank[target]))
        if channel not in seen:
            seen.add(channel)
            message = (
                f"channel {channel[0]}→{channel[1]}, message {number[source]}: {plan.at(source)} sends "
                f"{numbering.value(int(taken[pair]))}, but {plan.at(target)} expects "
                f"{numbering.value(int(made[pair]))}; order is identity"
            )
            yield Finding(Point.CHANNELS, message, *columns.place(target))
    for name in channels.uneven():
        num_sent, num_received = int(channels.sends.counts[name]), int(channels.receives.counts[name])
        ends = channels.sends if num_sent > num_received else channels.receives
        lonely = int(ends.rows[ends.starts[name] + min(num_sent, num_received)])
        message = (
            f"channel {channels.sources[name]}→{channels.destinations[name]}: {num_sent} sends but {num_received} "
            f"receives; no partner for {plan.at(lonely)}"
        )
        yield Finding(Point.CHANNELS, message, *columns.place(lonely))


def _broken_collectives(plan: PlanData) -> Iterator[Finding]:
    """Point 5, collectives: all members of a group of pipeline ranks issue the same ones in the same order."""
    for members, issued in pipeline_collectives(plan).items():
        expected, together = _names(plan, issued.get(members[0], ())), _listed(members)
        for rank in members[1:]:
            rows = issued.get(rank, ())
            if _names(plan, rows) != expected:
                message = (
                    f"rank {rank} issues {_names(plan, rows)} over ranks {together}, but rank "
                    f"{members[0]} issues {expected}; all members must issue the same collectives in the same order"
                )
                yield Finding(Point.COLLECTIVES, message, rank, plan.columns.place(rows[0])[1] if rows else None)


def _names(plan: PlanData, rows: Sequence[int]) -> str:
    return ", ".join(map(str, plan.columns.instructions(list(rows)))) or "nothing"


def _listed(members: Sequence[int]) -> str:
    """Return ranks as text, at most `MOST_LISTED_RANKS` of them."""
    shown = [
        *map(str, members[:MOST_LISTED_RANKS]),
        *(["…", str(members[-1])] if len(members) > MOST_LISTED_RANKS else []),
    ]
    return ", ".join(shown)


def _over_cap(activations: Sequence[float], cap: float | None) -> Iterator[Finding]:
    """Point 6, memory: the peak of each rank is within the cap, if one is given."""
    for rank, peak in enumerate(activations):
        if cap is not None and peak > cap:
            held = counted(peak, "microbatch's", "g")
            message = f"rank {rank} holds up to {held} activations; the cap is {cap:g}"
            yield Finding(Point.MEMORY, message, rank)
