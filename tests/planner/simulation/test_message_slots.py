"""Slots of messages: as many as a walk through the program finds alive at once, no two alive ones in the same slot."""

from collections import defaultdict
from collections.abc import Iterator
from random import Random

import pytest

import quintsched as qs
from quintsched.ir.dataflow_analysis import Operands
from quintsched.ir.instruction_set import LOANS, Instruction, LendAct, Message, OffloadAct, Recv, Send
from quintsched.ir.instruction_values import MAX_SKIPS, SKIPS, Value, ValueKind
from quintsched.simulation import message_slots as slots

from ..verify.mutants import mutant
from ..verify.small_plans import BUILT_IN, EACH, SMALL, any_plan

RULES = [slots.MessageRule(None, 4), slots.MessageRule(2, 4), slots.MessageRule(1, None), slots.MessageRule(3, 1)]


def unit_of(value: Value) -> int:
    return value.number // MAX_SKIPS if value.kind in SKIPS else value.number


def lane_of(value: Value) -> int:
    """Return the skip that a value belongs to."""
    return value.number % MAX_SKIPS if value.kind in SKIPS else 0


def is_slotted(instruction: Instruction, end: type[Message]) -> bool:
    return isinstance(instruction, end) and not isinstance(instruction, LOANS)


class Walk:
    """One rank's program, walked instruction by instruction; what is alive at each is kept as a set.

    `received[t]` and `sent[t]` are the values whose buffers are needed while instruction t runs.
    """

    def __init__(self, plan: qs.Plan, rank: int, rule: slots.MessageRule) -> None:
        self._plan, self._rule = plan, rule
        self._program = plan.programs[rank]
        self._flows = plan.flows.of_rows(plan.columns.rows_of(rank))
        self.received = list(self._walk_receives())
        self.sent = list(self._walk_sends())

    def _walk_receives(self) -> Iterator[set[Value]]:
        waiting: dict[object, list[tuple[int, Value]]] = defaultdict(list)
        for index, (instruction, flow) in enumerate(zip(self._program, self._flows, strict=True)):
            if is_slotted(instruction, Recv):
                value = flow.produces[0]
                waiting[instruction.peer, value.kind, value.stage, lane_of(value)].append((index, value))
        posted, taken = set[Value](), set[Value]()
        keepers: dict[Value, set[Value]] = {}  # a received value → what keeps it now: itself until it is taken
        for index, flow in enumerate(self._flows):
            for alike in waiting.values():
                for number, (place, value) in enumerate(alike):
                    room = self._rule.ahead is not None and (
                        number < self._rule.ahead or alike[number - self._rule.ahead][1] in taken
                    )
                    if value not in posted and (place == index or room):
                        posted.add(value)
                        keepers[value] = {value}
            yield set(keepers)
            taken |= {*flow.consumes}
            for value, keeping in list(keepers.items()):
                for keeper in keeping & {*flow.consumes}:
                    keeping.discard(keeper)
                    keeping |= self._keepers(keeper, flow)
                if not keeping:
                    keepers.pop(value)

    def _keepers(self, value: Value, flow: Operands) -> set[Value]:
        """Return the values that keep this one alive, made by its taker; microbatches tell an overlap's sides apart."""
        return {
            made
            for made in flow.produces
            if self._plan.mode == "train"
            and unit_of(made) == unit_of(value)
            and (
                made.kind in slots.KEEPS
                or (made.kind is value.kind is ValueKind.SKIP and lane_of(made) == lane_of(value))
            )
            and not (made.kind is ValueKind.SAVED and self._leaves(made))
        }

    def _leaves(self, saved: Value) -> bool:
        """Return whether saved activations are offloaded or lent."""
        moves = (i for i in self._program if isinstance(i, OffloadAct | LendAct))
        return any((i.stage, i.microbatch) == (saved.stage, saved.number) for i in moves)

    def _walk_sends(self) -> Iterator[set[Value]]:
        channels: dict[int, list[Value]] = defaultdict(list)
        placed: dict[int, list[Value]] = defaultdict(list)
        from_others = {f.produces[0] for i, f in zip(self._program, self._flows, strict=True) if is_slotted(i, Recv)}
        made = {value: index for index, flow in enumerate(self._flows) for value in flow.produces}
        for index, (instruction, flow) in enumerate(zip(self._program, self._flows, strict=True)):
            if is_slotted(instruction, Send):
                value = flow.consumes[0]
                placed[index if self._rule.ahead is None else made[value] + 1].append(value)
        flying = set[Value]()
        for index, (instruction, flow) in enumerate(zip(self._program, self._flows, strict=True)):
            if is_slotted(instruction, Send):
                older = channels[instruction.peer]
                if self._rule.max_sends is not None and len(older) >= self._rule.max_sends:
                    flying.discard(older[-self._rule.max_sends])
                older.append(flow.consumes[0])
            flying |= {*placed[index]}
            yield set(flying)
            answered = {v for v in flow.consumes if v.kind is ValueKind.OUTPUT_GRAD and v in from_others}
            flying -= {Value(ValueKind.OUTPUT, v.stage, v.number) for v in answered}


def require_minimal(plan: qs.Plan, rule: slots.MessageRule) -> None:
    """Assert that lifetimes are those of a walk, that slots are as many as are alive at once, and that none clash."""
    both = slots.receive_lifetimes(plan, rule), slots.send_lifetimes(plan, rule)
    counts = slots.message_slots(plan, rule)
    for rank in range(plan.mesh.pp):
        walk = Walk(plan, rank, rule)
        for lifetimes, alive, number in zip(both, (walk.received, walk.sent), counts, strict=True):
            mine = lifetimes.of_rank(plan.columns, rank)
            require_same(plan, mine, alive)
            taken = slots.assign_slots(mine.first.tolist(), mine.last.tolist())
            assert number[rank] == max(map(len, alive), default=0)
            assert sorted({*taken}) == [*range(number[rank])]
            slot_of = {plan.flows.value_at(int(p)): s for p, s in zip(mine.places, taken, strict=True)}
            assert all(len({slot_of[value] for value in values}) == len(values) for values in alive)


def require_same(plan: qs.Plan, lifetimes: slots.Lifetimes, alive: list[set[Value]]) -> None:
    found: list[set[Value]] = [set() for _ in alive]
    for place, first, last in zip(lifetimes.places, lifetimes.first, lifetimes.last, strict=True):
        for index in range(first, last + 1):
            found[index].add(plan.flows.value_at(int(place)))
    assert found == alive


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", BUILT_IN, ids=lambda found: found.name)
def test_slots_are_the_largest_clique_and_nothing_shares_one_with_what_is_alive(schedule: qs.Schedule) -> None:
    plans = [recipe.plan for recipe in EACH if recipe.schedule is schedule]
    assert len(plans) >= 2
    for number, plan in enumerate(plans):
        require_minimal(plan, RULES[number % len(RULES)])


def test_plans_in_odd_orders_too() -> None:
    random, found = Random(0), 0
    for _ in range(40):
        plan = mutant(any_plan(SMALL, random), random)
        if plan.check(profile="tagged").sound:
            found += 1
            require_minimal(plan, RULES[found % len(RULES)])
    assert found > 2


def test_zbv_needs_fewer_receive_slots_than_pools_per_stage_and_direction() -> None:
    """For PyTorch's order a pool per stage and direction takes 43, one pool of a rank 33: its pull request 196465."""
    slots = qs.compile("zbv", mesh="pp=4", microbatches=8).check().slots
    assert slots.receive == (2, 11, 11, 7)
    assert sum(slots.receive) == 31
