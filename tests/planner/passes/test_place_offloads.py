"""Activations under a cap: what goes to the host, when it comes back, what that holds and how long it takes."""

from functools import partial

import quintsched as qs
from quintsched.instructions import Compute, HostCopy, short
from tests.helpers.refusals import require_refusals


def letters(plan: qs.Plan, rank: int) -> str:
    """A rank's computations and copies in a few letters."""
    return " ".join(short(i, with_stage=False) for i in plan.programs[rank] if isinstance(i, Compute | HostCopy))


def spans(simulation: qs.Simulation, rank: int) -> dict[str, tuple[float, float]]:
    return {short(s.instruction, with_stage=False): (s.start, s.end) for s in simulation.timeline[rank]}


def test_a_copy_begins_with_its_forwards_end_and_what_is_behind_its_place_waits() -> None:
    """By hand: a copy takes 3, a forward 1, a backward 2. The first backward comes at once: so the newest has to go."""
    plan = qs.compile("gpipe", mesh="pp=1", microbatches=3, offload=2)
    assert letters(plan, 0) == "F0 F1 OA1 F2 B0 FA1 B1 B2"
    found = spans(plan.simulate(qs.Costs(host_bandwidth=1 / 3)), 0)
    assert [found[name] for name in ("F0", "F1", "OA1", "F2")] == [(0, 1), (1, 2), (2, 5), (5, 6)]
    assert [found[name] for name in ("B0", "FA1", "B1", "B2")] == [(6, 8), (8, 11), (11, 13), (13, 15)]


def test_a_cap_that_is_too_small_names_the_least_that_works() -> None:
    after, uneven = qs.Costs(activation_after_input=0.0), qs.Costs(activation=(1.0, 2.5))
    sizes = {"mesh": "pp=2", "microbatches": 4}
    small = partial(qs.compile, "1f1b", **sizes)
    require_refusals(
        (r"1f1b: offload is 0.5, but .*; the least that works: 1$", lambda: small(mesh="pp=4", offload=0.5)),
        (r"the least that works: 0\.5", lambda: qs.compile("zbv", **sizes, offload=0, costs=after)),
        (r"the least that works: 2\.5", lambda: small(offload=2.0, costs=uneven)),
        ("offload: the plan only computes forward", lambda: qs.compile("inference", **sizes, offload=1)),
    )
    assert small(offload=2.5, costs=uneven)
