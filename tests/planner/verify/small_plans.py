"""Recipes of small plans: every schedule, with all features that a plan can have.

SMALL = (Recipe(1f1b, mesh="pp=1", microbatches=1, …), …)      known when tests are collected
SMALL[0].plan                                                  compiled when it is asked for, and kept
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import Any

import quintsched as qs
from quintsched.ir import instruction_set as ops
from quintsched.passes import place_loans, place_offloads
from quintsched.schedules import find_schedule

SHAPES = (
    *(("pp=1", 1), ("pp=2", 2), ("pp=2", 3), ("pp=2", 4), ("pp=3", 4), ("pp=4", 4)),
    *(("dp=2,pp=2", 4), ("dp=2,pp=3", 3), ("dp=2,ep=2,pp=2", 2)),
)
PAIRED = (
    *(("dualpipe-v", *shape) for shape in (("pp=1", 3), ("pp=2", 4), ("dp=2,pp=2", 3), ("pp=3", 6))),
    *(("dualpipe", *shape) for shape in (("pp=2", 4), ("dp=2,ep=2,pp=2", 4), ("pp=4", 8))),
    *(("interleaved-1f1b", *shape) for shape in (("pp=1", 3), ("pp=2", 4), ("dp=2,pp=2", 4), ("pp=3", 3))),
)
LIGHT = qs.Costs(activation_after_input=0.25)
LEAST_CAPS = {"offload": place_offloads.least_cap, "lend": place_loans.least_cap}
BUILT_IN = [schedule for schedule in qs.all_schedules() if schedule.built_in]
"""Not those that other tests have registered."""


@dataclass(frozen=True, eq=False)
class Recipe:
    """Recipe of a plan; one that `moves` activations does so as far as it can: to the host ("offload"), or "lend"."""

    schedule: qs.Schedule
    options: Mapping[str, Any]
    moves: str = ""

    def __str__(self) -> str:
        words = [f"{name}={value}".replace(" ", "") for name, value in self.options.items()]
        return " ".join([self.schedule.name, *words, *[self.moves] * bool(self.moves)])

    @cached_property
    def plan(self) -> qs.Plan:
        plan = qs.compile(self.schedule, **self.options)
        if not self.moves:
            return plan
        return qs.compile(
            self.schedule, **self.options, costs=LIGHT, **{self.moves: LEAST_CAPS[self.moves](plan, LIGHT)}
        )

    @property
    def mesh(self) -> qs.Mesh:
        return qs.Mesh.parse(self.options["mesh"])


def plans_up_to(instructions: int, recipes: Sequence[Recipe]) -> list[qs.Plan]:
    """Compile all of these, and return the plans that have so many instructions at most."""
    return [recipe.plan for recipe in recipes if recipe.plan.num_instructions <= instructions]


def any_plan(recipes: Sequence[Recipe], random: Random) -> qs.Plan:
    return random.choice(recipes).plan


def cells(plan: qs.Plan, rank: int) -> str:
    """Return a rank's program in letters, without messages."""
    return " ".join(ops.short(i) for i in plan.programs[rank] if not isinstance(i, ops.Message))


def held_back() -> qs.Plan:
    """Each rank keeps a message back behind a computation that waits, by way of the other rank, for that message."""
    plan = qs.compile("gpipe", mesh="pp=2", microbatches=2)
    # fmt: off
    computed: tuple[list[ops.Instruction], list[ops.Instruction]] = (
        [ops.Fwd(0, 0), ops.SendAct(0, 0, 1), ops.Fwd(0, 1), ops.RecvGrad(0, 0, 1), ops.Bwd(0, 0),
         ops.SendAct(0, 1, 1), ops.RecvGrad(0, 1, 1), ops.Bwd(0, 1)],
        [ops.RecvAct(1, 0, 0), ops.Fwd(1, 0), ops.Bwd(1, 0), ops.RecvAct(1, 1, 0), ops.Fwd(1, 1),
         ops.SendGrad(1, 0, 0), ops.Bwd(1, 1), ops.SendGrad(1, 1, 0)],
    )
    # fmt: on
    return replace(plan, programs=tuple((*own, *p[-3:]) for own, p in zip(computed, plan.programs, strict=True)))


def with_pieces(plan: qs.Plan, pieces: tuple[int, ...]) -> qs.Plan:
    """Return the plan with other pieces of the model on its stages, and sums over those that are twins then."""
    programs = []
    for rank, program in enumerate(plan.programs):
        rest = [i for i in program if not (isinstance(i, ops.SyncTied) and i.params == "stage")]
        at = next((k for k, i in enumerate(program) if isinstance(i, ops.SyncTied)), len(rest))
        mine = {pieces[stage] for stage, home in enumerate(plan.stage_to_pp) if home == rank}
        twins = [tuple(stage for stage, piece in enumerate(pieces) if piece == held) for held in mine]
        syncs = [ops.SyncTied("stage", stages) for stages in sorted(twins) if len(stages) > 1]
        programs.append((*rest[:at], *syncs, *rest[at:]))
    return replace(plan, stage_to_part=pieces, programs=tuple(programs))


def _small() -> Iterator[Recipe]:
    """Yield every schedule there is at those small shapes that it takes; with slices where it takes them.

    Each plainly, with every second stage recomputed and a weight tied between the first stage and the last, with its
    first and last microbatch recomputed, with skips past stages, with a loss on a stage before the last, and with
    optimizer state, gradients or weights shared out over its replicas.
    """
    for schedule in BUILT_IN:
        for mesh, microbatches in SHAPES:
            for slices in {1, min(2, schedule.max_slices)}:
                pp = qs.Mesh.parse(mesh).pp
                try:
                    schedule.shape(pp, microbatches, None, slices)
                except qs.UsageError:
                    continue
                last = len(schedule.placed(pp, None)) - 1
                shape = {"mesh": mesh, "microbatches": microbatches, "slices": slices, "buckets_per_stage": 2}
                kinds = [*_kinds(schedule, last, "2" in mesh.split("pp")[0])]
                if schedule.mode == "train" and microbatches > 2:
                    kinds.append({"recompute": 1, "recompute_microbatches": (0, microbatches - 1)})
                yield from (Recipe(schedule, shape | more) for more in kinds)


def _kinds(schedule: qs.Schedule, last: int, replicated: bool) -> Iterator[dict[str, Any]]:
    recompute = [(stage + 1) % 2 for stage in range(last + 1)]
    chain = last > 0 and not schedule.bidirectional
    tied = {"embedding": (0, last)} if chain else {}
    yield {}
    if schedule.mode == "train":
        yield {"recompute": recompute, "tied": tied}
    if chain:
        yield {"skip": _skips_between(last)}
        yield {"losses": [last // 2, last], "skip": {"far": (0, last)}}
    if replicated and schedule.mode == "train":
        yield from ({"zero": 1}, {"zero": 2}, {"zero": 2, "zero_every": 2}, {"zero": 3}, {"zero": 3, "zero_every": 3})
        yield {"zero": 3, "recompute": recompute, "tied": tied}
    elif replicated:
        yield {"zero": 3}


def _skips_between(last: int) -> dict[str, tuple[int, ...]]:
    """A skip from the first stage to all others, and one that goes past some, if there are such."""
    return {"all": tuple(range(last + 1)), "far": (0, last)} if last < 3 else {"all": (0, 1, 2, last), "far": (1, last)}


def _spelled() -> Iterator[Recipe]:
    """Yield plans whose buckets are exchanged in messages: by rings, by trees, by what is fastest; with ZeRO 1 to 3."""
    for name in ("1f1b", "zb-h1", "dualpipe", "interleaved-1f1b"):
        for mesh in ("dp=2,pp=2", "dp=3,pp=2", "dp=2,ep=2,pp=2"):
            kinds: list[dict[str, Any]] = [{"communication": means} for means in ("ring", "tree", "auto")]
            kinds += [{"communication": "ring", "zero": zero} for zero in (1, 2, 3)]
            kinds += [{"communication": "auto", "zero": 1}]
            if name == "1f1b":
                kinds.append({"communication": "ring", "zero": 1, "recompute": 1, "tied": {"embedding": (0, 1)}})
            shape = {"mesh": mesh, "microbatches": 2 if name != "dualpipe" else 4}
            yield from (Recipe(find_schedule(name), shape | kind) for kind in kinds)
    for means in ("ring", "tree"):
        yield Recipe(find_schedule("1f1b"), {"mesh": "dp=4", "microbatches": 1, "communication": means})


def _offloaded() -> Iterator[Recipe]:
    """Yield plans of every schedule that offload: recomputed in part, and ZeRO-3."""
    for schedule in BUILT_IN:
        if schedule.mode == "train":
            shape = {"microbatches": 4, "slices": min(2, schedule.max_slices)}
            recompute = [stage % 2 for stage in range(len(schedule.placed(2, None)))]
            yield Recipe(schedule, {"mesh": "pp=2"} | shape, moves="offload")
            yield Recipe(schedule, {"mesh": "dp=2,pp=2", "zero": 3} | shape, moves="offload")
            again = {"recompute": recompute, "recompute_microbatches": (0, 3)}
            yield Recipe(schedule, {"mesh": "pp=2"} | again | shape, moves="offload")


def _lending() -> Iterator[Recipe]:
    """Yield plans whose first ranks lend activations to the last: some in slices, with ZeRO-3, skips or a full rank."""
    each: list[tuple[str, dict[str, Any]]] = [
        *((name, {}) for name in ("1f1b", "eager-1f1b", "zb-h2", "interleaved-1f1b", "hanayo")),
        ("gpipe", {"stages": (1, 2, 1, 1)}),
        *(("1f1b", {"mesh": "dp=2,pp=3", "zero": zero, "microbatches": 3}) for zero in (0, 3)),
        ("1f1b", {"skip": {"h": (0, 2)}, "recompute": [0, 1, 0, 0]}),
        ("seq-1f1b", {"slices": 2}),
    ]
    for name, options in each:
        yield Recipe(find_schedule(name), {"mesh": "pp=4", "microbatches": 8, **options}, moves="lend")


def _overlapping() -> Iterator[Recipe]:
    """Yield every schedule that has pairs, with them: plainly, recomputed and tied in part, skips, with ZeRO 1 to 3."""
    for name, mesh, microbatches in PAIRED:
        schedule = find_schedule(name)
        shape = {"mesh": mesh, "microbatches": microbatches, "buckets_per_stage": 2, "overlap": True}
        last = len(schedule.placed(qs.Mesh.parse(mesh).pp, None)) - 1
        recompute = [(stage + 1) % 2 for stage in range(last + 1)]
        tied = {} if schedule.bidirectional else {"embedding": (0, last)}
        again = {"recompute": recompute, "recompute_microbatches": (0, microbatches - 1)}
        kinds: list[dict[str, Any]] = [{}, {**again, "tied": tied}]
        if not schedule.bidirectional and last:
            kinds.append({"skip": _skips_between(last), "losses": [last // 2, last]})
        if "dp" in mesh:
            kinds += [{"zero": 1}, {"zero": 2, "zero_every": 2}, {"zero": 3}, {"zero": 3, "recompute": recompute}]
        yield from (Recipe(schedule, shape | kind) for kind in kinds)
    for name, mesh, where in (("interleaved-1f1b", "pp=2", [0, 0, 1, 0]), ("dualpipe-v", "dp=2,pp=2", [0, 1, 1, 1, 0])):
        shape = {"mesh": mesh, "microbatches": 4, "stage_to_pp": where, "overlap": True}
        yield Recipe(find_schedule(name), shape)


def _uneven() -> Iterator[Recipe]:
    """Yield plans whose stages are runs of the schedule's, or missing, with as many blocks as they say."""
    shapes: list[tuple[str, str, int, list[int], dict[str, Any]]] = [
        ("1f1b", "dp=2,pp=2", 3, [0, 0, 1], {"stages": [1, 2, 0], "zero": 1}),
        ("zb-h1", "pp=2", 3, [0, 1, 1, 1], {"stages": [2, 0, 1, 1], "tied": {"embedding": (0, 3)}}),
        ("interleaved-1f1b", "pp=2", 4, [0, 0, 1, 0], {}),
        ("zbv", "pp=2", 3, [0, 1, 1, 1, 0], {"recompute": [0, 1, 0, 1, 0], "recompute_microbatches": [1]}),
        ("dualpipe", "pp=2", 4, [0, 0, 1, 1, 1, 0], {"stages": [1, 3, 0, 1, 3, 0]}),
        ("v-min", "pp=3", 3, [0, 1, 2, 1, 0], {"stages": [1, 1, 1, 1, 0]}),
    ]
    for name, mesh, microbatches, where, more in shapes:
        shape = {"mesh": mesh, "microbatches": microbatches, "stage_to_pp": where}
        yield Recipe(find_schedule(name), shape | more)


def _tied() -> Iterator[Recipe]:
    """Yield plans with sums over several groups of ranks, of which some share a rank and some share more."""
    shapes: list[tuple[str, str, int, Sequence[tuple[int, ...]]]] = [
        ("1f1b", "pp=3", 3, [(0, 1), (1, 2), (0, 2)]),
        ("zb-h1", "pp=3", 3, [(0, 1), (0, 1, 2), (1, 2)]),
        ("gpipe", "pp=4", 2, [(0, 1, 3), (1, 2), (2, 3)]),
        ("interleaved-1f1b", "pp=3", 3, [(0, 4), (2, 4), (2, 3)]),
        ("zbv", "pp=2", 3, [(0, 1), (0, 3), (2, 3)]),
        ("1f1b", "dp=2,pp=3", 3, [(0, 2), (1, 2), (0, 1)]),
    ]
    for name, mesh, microbatches, groups in shapes:
        tied = dict(zip(("embedding", "more", "bias"), groups, strict=True))
        yield Recipe(find_schedule(name), {"mesh": mesh, "microbatches": microbatches, "tied": tied})


SMALL, SPELLED, OFFLOADED, LENDING, OVERLAPPING, UNEVEN, TIED = (
    tuple(recipes) for recipes in (_small(), _spelled(), _offloaded(), _lending(), _overlapping(), _uneven(), _tied())
)
RARE = (*SPELLED, *OVERLAPPING, *UNEVEN, *OFFLOADED, *LENDING, *TIED)
EACH = (*SMALL, *RARE)
DRAWN = (*SMALL, *RARE * 4)
"""All of them; those that are few come up oftener where plans are drawn by chance."""
