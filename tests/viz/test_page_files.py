"""Files dropped on a page, links to it, and what is marked in them: broken ones are refused, in a browser."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import quintsched as qs
from quintsched.ir.instruction_set import Bwd, RecvGrad, SendAct
from quintsched.stalls.culprit import find_culprit
from quintsched.stalls.last_reported_rank_states import Fate, RankState
from quintsched.viz import render, render_stall, save_untimed
from tests.traces import write_trace

from .browser import IN_CHROMIUM, Page, drop, opened

pytestmark = IN_CHROMIUM


def test_a_link_opens_the_same_order(page: Page, tmp_path: Path) -> None:
    opened(page, qs.compile("zb-h1", mesh="pp=3", microbatches=4).simulate(), tmp_path / "plan.html")
    page.evaluate("quintsched.playground.toggle(); quintsched.playground.move(1, 0)")
    edited = page.evaluate("quintsched.plan.toJson()")
    link = page.evaluate(
        "[...document.querySelectorAll('button')].find((b) => b.textContent === 'share link').click() ?? location.hash"
    )
    page.open(tmp_path / "plan.html", link)
    assert page.evaluate("quintsched.plan.toJson()") == edited


BROKEN = {
    "plan.json": ["", "null", "[]", '{"format": "quintsched.plan"}', '{"format": "quintsched.trace"}'],
    "plan.csv": ["", "999999999F0", "0B0,0F0"],
    "costs.json": [
        f'{{"forward": {cost}}}' for cost in ("-1", '"x"', "[1]", "[1, 2, 3, 4]", "1e200", '1, "forwrd": 1')
    ],
}
FRAGMENTS = (
    *("%", "{", "null", '{"pp":1000000000}', '{"pp":1.5}', '{"schedule":"constructor"}', '{"costs":{"forward":"x"}}'),
    *("1", "[]", '{"levle":3}', '{"cap":-1}', '{"cap":"x"}', '{"schedule":"interleaved","microbatches":3}'),
    *(f'{{"dp":{dp}}}' for dp in ("1000000000", "-1", "0", '"x"', "1.5")),
    *('{"zero":9}', '{"zero":3}', '{"stage_to_pp":[0,1,2,9]}', '{"stage_to_pp":[0]}', '{"mesh":[["xp",2]]}'),
    *('{"mesh":7}', '{"orders":[]}', '{"pp":2,"orders":["0F0","7F9"]}', '{"pp":1,"orders":"x"}'),
)


def test_broken_files_and_links_are_refused(page: Page, tmp_path: Path) -> None:
    plan = qs.compile("1f1b", mesh="pp=3", microbatches=4)
    opened(page, plan.simulate(), tmp_path / "plan.html")
    huge = plan.to_json().replace('"microbatches": 4', '"microbatches": 4000000000')
    wide = json.loads(plan.to_json())
    wide |= {"mesh": [["pp", 100_000]], "programs": [[]] * 100_000, "stage_to_pp": [*range(100_000)]}
    for name, texts in {**BROKEN, "huge.json": [huge], "wide.json": [json.dumps(wide)]}.items():
        for text in texts:
            page.evaluate("quintsched.clear()")
            drop(page, {name: text})
            assert "cannot read this" in page.evaluate("quintsched.panel.textContent"), (name, text)
    for fragment in FRAGMENTS:
        page.open(tmp_path / "plan.html", f"#play={fragment}")
        said = page.evaluate("quintsched.panel.textContent")
        assert "opens no plan" in said or "well-formed" in said, fragment
        assert page.evaluate("quintsched.run.makespan") >= 0
    assert not page.errors


def test_broken_traces_and_stalls_are_refused(page: Page, tmp_path: Path) -> None:
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)
    write_trace(tmp_path, plan.simulate(qs.Costs(unit="ms")), scales=(1.2,))
    whole = {path.name: json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank*.json"))}
    step = whole["rank0.json"]["steps"][0]
    render(plan.simulate(), tmp_path / "plan.html")
    render(qs.compile("gpipe", mesh="pp=2", microbatches=2).simulate(), tmp_path / "other.html")
    for fault, where in (
        ({}, "other"),
        *(
            ({key: value}, "plan")
            for key, value in (("version", 2), ("unit", "h"), ("plan", "0" * 64), ("steps", None))
        ),
        *(({"steps": [step | {"start": starts}]}, "plan") for starts in ([], step["start"][:-1], [None] * 20)),
        ({"steps": [step | {"end": [0.0] * len(step["end"])}]}, "plan"),
    ):
        page.open(tmp_path / f"{where}.html")
        drop(page, {n: json.dumps(of | (fault if n == "rank0.json" else {})) for n, of in whole.items()})
        assert "cannot read this" in page.evaluate("quintsched.panel.textContent"), fault
    page.open(tmp_path / "plan.html")
    drop(page, {name: json.dumps(of) for name, of in whole.items()})
    assert page.evaluate("quintsched.runs.length") == 2
    state = RankState(0, "a", 0, "step", 3, "train", 2, 5.0, 0.1, None, None, 3)
    stall = json.loads(find_culprit(plan, [state, replace(state, rank=1)]).to_json())
    nowhere = stall["states"][0] | {"index": -4}
    for broken in ({"version": 2}, {"chain": [{}]}, {"culprits": "x"}, {"states": [nowhere]}):
        page.evaluate("quintsched.clear()")
        drop(page, {"stall.json": json.dumps(stall | broken)})
        assert "cannot read this" in page.evaluate("quintsched.panel.textContent"), broken
    assert not page.errors


def deadlocked() -> qs.Plan:
    """Return a plan whose rank 0 waits for a gradient before it sends what that gradient comes from."""
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)
    program = list(plan.programs[0])
    send, receive, backward = (next(i for i in program if isinstance(i, kind)) for kind in (SendAct, RecvGrad, Bwd))
    rest = [i for i in program if i not in (receive, backward)]
    at = rest.index(send)
    program = [*rest[:at], receive, backward, *rest[at:]]
    return replace(plan, programs=(tuple(program), plan.programs[1]))


@pytest.mark.parametrize("dropped", [False, True])
def test_the_counter_example_of_a_deadlock_is_marked(dropped: bool, page: Page, tmp_path: Path) -> None:
    plan = deadlocked()
    if dropped:
        opened(page, qs.compile("gpipe", mesh="pp=2", microbatches=1).simulate(), tmp_path / "plan.html")
        drop(page, {"plan.json": plan.to_json()})
    else:
        save_untimed(plan, tmp_path / "broken.html")
        page.open(tmp_path / "broken.html")
    assert not page.evaluate("quintsched.verdict.sound()")
    assert page.evaluate("quintsched.cycle.length") >= 2
    assert "close a circle" in page.evaluate("quintsched.panel.textContent")
    assert page.evaluate("quintsched.run.stuck.size") > 4
    assert not page.errors


def test_a_stall_is_marked(page: Page, tmp_path: Path) -> None:
    plan = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=4)
    killed = {1: Fate("signal", 9)}
    report = find_culprit(
        plan, [RankState(r, "a", r, "step", 3, "train", 4 - r, 5.0, 0.1, killed.get(r), None, 3) for r in range(4)]
    )
    render_stall(report, tmp_path / "stall.html")
    page.open(tmp_path / "stall.html")
    assert page.evaluate("quintsched.view.marked.length") == 4
    assert page.evaluate("quintsched.view.marked.filter(([, , culprit]) => culprit).length") == len(report.ranks)
    assert "where the ranks were" in page.evaluate("quintsched.panel.textContent")
    assert not page.errors
