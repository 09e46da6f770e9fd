"""Report files: what was written is read, and what is not a report is refused with the place."""

import json
from functools import partial
from pathlib import Path

import pytest

import quintsched as qs
from quintsched.stalls.culprit import find_culprit
from quintsched.stalls.last_reported_rank_states import BlockingCall, Fate, RankState
from quintsched.stalls.stall_report import StallReport

PLAN = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=2)


@pytest.fixture
def report():
    awaits = [BlockingCall("receive", 2), BlockingCall("nothing"), BlockingCall("collective", ranks=(0, 1, 2, 3)), None]
    fates = [None, Fate("signal", 9), None, None]
    state = partial(
        RankState, host="a", phase="step", step=1, program="train", index=2, since_s=3.0, heard_s=0.1, run=1
    )
    return find_culprit(PLAN, [state(rank=r, pid=r, fate=fates[r], awaits=awaits[r]) for r in range(4)])


def test_a_report_comes_back(report, tmp_path):
    path = tmp_path / "stall.json"
    report.save(path)
    again = StallReport.load(path)
    assert again == report
    assert again.words() == report.words()
    assert again.plan == PLAN
    assert json.loads(path.read_text())["culprits"][0]["rank"] == 1


def test_a_broken_report_is_refused_with_the_place(report, tmp_path):
    path = tmp_path / "stall.json"
    for change, says in (
        (lambda d: d.update(format="quintsched.plan"), "/format: this is not a stall report"),
        (lambda d: d.update(version=2), "/version: this release reads 1, not 2"),
        (lambda d: d.pop("plan"), "/plan: a report holds the plan"),
        (lambda d: d["plan"].update(mesh=[["pp", 0]]), "/plan: /mesh"),
        (lambda d: d.update(more=1), "/more: unknown key"),
        (lambda d: d["states"][0].update(rank="0"), "/states/0/rank"),
        (lambda d: d["states"][0].update(rank=9), "rank 9 is not in the mesh"),
        (lambda d: d["states"][0].update(index=99), "rank 0 has no instruction 99"),
        (lambda d: d["states"][0].update(phase="asleep"), "/states/0/phase"),
        (lambda d: d["culprits"][0].update(fault="none"), "/culprits/0/fault"),
        (lambda d: d["chain"].append({}), "/chain/"),
    ):
        data = json.loads(report.to_json())
        change(data)
        path.write_text(json.dumps(data))
        with pytest.raises(qs.InputError, match=r"stall\.json: ") as refused:
            StallReport.load(path)
        assert says in str(refused.value)


def test_what_is_no_report_is_refused(tmp_path):
    for text in ("", "[]", "nothing", '{"format": "quintsched.stall", "format": 1}', "[" * 10**5):
        with pytest.raises(qs.InputError):
            StallReport.from_json(text)
    with pytest.raises(qs.UsageError):
        StallReport.load(tmp_path / "none.json")


def test_the_example_of_the_docs_says_what_it_says(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[3] / "docs" / "reliability.md").read_text()
    code, _, rest = page.partition("```python\n")[2].partition("```")
    exec(code, {})
    assert capsys.readouterr().out == rest.partition("```text\n")[2].partition("```")[0]
    assert StallReport.load("stall.json").ranks == (1,)


@pytest.mark.parametrize("name", ["culprits", "chain", "states"])
def test_more_of_them_than_the_mesh_has_ranks_are_not_looked_at(report, name, monkeypatch):
    data = json.loads(report.to_json())
    data[name] = data[name][:1] * 17
    monkeypatch.setattr("quintsched.stalls.stall_report.StallFile", None)
    with pytest.raises(qs.InputError, match=f"^/{name}: there are 17, but the mesh dp=2,pp=2 has 4 ranks$"):
        StallReport.from_json(json.dumps(data))
