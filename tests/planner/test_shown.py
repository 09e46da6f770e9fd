"""Plans, verdicts and simulations at a prompt and in a notebook: one line, and small HTML that is escaped."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest

import quintsched as qs
from quintsched.instructions import Bwd, Fwd
from quintsched.solve import solve
from quintsched.stalls.stall_report import StallReport
from tests.traces import write_trace


def tags_of(text: str) -> list[str]:
    """Return the tags of small HTML, each of which has to be closed."""
    return [one.tag.rpartition("}")[2] for one in ElementTree.fromstring(f"<body>{text}</body>").iter()]


@pytest.fixture(scope="module")
def plan() -> qs.Plan:
    return qs.compile("1f1b", mesh="dp=2,pp=2,tp=2", microbatches=8)


def test_one_line_each(plan):
    name = "1f1b on dp=2,pp=2,tp=2, 8 microbatches"
    assert repr(plan) == "Plan(1f1b, dp=2,pp=2,tp=2, 8 microbatches, 72 instructions)"
    assert repr(plan.mesh) == "Mesh(dp=2, pp=2, tp=2)"
    assert repr(qs.Mesh()) == "Mesh()"
    assert repr(plan.simulate()) == f"Simulation({name}: makespan 27 forward, bubble 11.1%, peak activations 2)"
    profiles = "blocking, single-stream, pair-stream, channel, tagged"
    assert repr(plan.check()) == f"Verdict(sound: {name}, free of deadlock under {profiles})"
    found = {schedule.name: schedule for schedule in qs.all_schedules()}
    assert repr(found["1f1b"]) == f"Schedule(1f1b: {found['1f1b'].summary})"
    offloading = qs.compile("zbv", mesh="pp=2", microbatches=4, offload=1.5)
    assert repr(offloading).startswith("Plan(zbv, pp=2, 4 microbatches, 2 chunks, offloading, ")


def test_html_has_every_computation_of_a_small_plan(plan):
    text = plan._repr_html_()
    found = tags_of(text)
    assert found.count("rect") == 2 * 16
    assert "script" not in found
    assert "bubble</th><td>11.1%" in text
    assert "Fwd(stage=1, microbatch=7) " in text
    assert text == plan.simulate()._repr_html_()
    assert "channel</th><td>free of deadlock" in plan.check()._repr_html_()
    assert "table" in tags_of(plan.check()._repr_html_())


def test_names_are_escaped():
    name = "<script>alert('&')</script>"

    def order(rank: int, shape: qs.Shape):
        yield Fwd(rank, 0)
        yield Bwd(rank, 0)

    plan = qs.compile(qs.Schedule(name, order), mesh="pp=2", microbatches=1)
    broken = replace(plan, programs=(plan.programs[0][:-3], plan.programs[1]))
    for text in (plan._repr_html_(), plan.check()._repr_html_(), broken._repr_html_()):
        assert "script" not in tags_of(text)
        assert "&lt;script&gt;" in text


def test_traces_steps_solutions_searches_and_stalls_draw_themselves(plan, tmp_path):
    trace = write_trace(tmp_path, plan.simulate(qs.Costs(unit="ms", forward=10.0)), scales=(1.0, 1.5))
    assert repr(trace) == f"Trace({plan.title}: 8 ranks, steps 2, 3)"
    assert repr(trace.step(3)).startswith(f"MeasuredStep({plan.title}, step 3: makespan ")
    text = trace._repr_html_()
    assert tags_of(text).count("rect") == 2 * 16
    assert "<th>makespan</th><th>bubble</th></tr><tr><td>2</td>" in text
    found = solve(pp=2, microbatches=2, effort=1)
    assert "certified bound" in found._repr_html_()
    assert "svg" in tags_of(found._repr_html_())
    tuning = qs.tune(qs.find_model("gpt2"), qs.find_hardware("l4"), gpus=2, batch=8, top=2, front=False)
    assert tags_of(tuning._repr_html_()).count("tr") == 1 + len(tuning.best)
    assert repr(tuning).startswith("Tuning(gpt2 on 2 l4: ")
    stall = StallReport(culprits=(), chain=(), states=(), plan=plan)
    assert "the run stalled" in stall._repr_html_()
    assert tags_of(stall._repr_html_())[1] == "div"
