"""Numbers and files that are too large, and code that ends the wrong way: one clear error each."""

import json
from pathlib import Path

import pytest

import quintsched as qs
from quintsched.formats import plan_file as planfile
from tests.traces import write_trace

COMPILE = ("compile", "--mesh", "pp=2", "-m", 4)


@pytest.mark.parametrize("name", ["forward", "weights"])
def test_costs_stay_numbers_when_they_are_added_up(cli, refused, plan_file, tmp_path, name):
    (tmp_path / "costs.json").write_text(json.dumps({name: 1e308}))
    message = refused(1, "simulate", plan_file, "--costs", "costs.json")
    assert f"costs.json: /{name}" in message
    assert "Input should be at most 1e+100" in message
    assert "costs.json" in refused(1, *COMPILE, "-s", "zb-auto", "--costs", "costs.json")
    (tmp_path / "costs.json").write_text(json.dumps({name: 1e100}))
    assert cli("simulate", plan_file, "--costs", "costs.json", "--json").data["makespan"] >= 0


@pytest.mark.parametrize("command", [("simulate", "--costs", "from-trace"), ("render", "-o", "x.json", "--trace")])
@pytest.mark.parametrize("at", ["end", "start"])
def test_a_trace_that_ends_beyond_all_time(refused, plan_file, tmp_path, command, at):
    write_trace(tmp_path / "traces", qs.Plan.load(plan_file).simulate(qs.Costs(unit="ms")))
    path = tmp_path / "traces" / "rank0.json"
    trace = json.loads(path.read_text())
    trace["steps"][0][at][-1] = 1e308 if at == "end" else -1e308
    path.write_text(json.dumps(trace))
    name, *options = command
    message = refused(1, name, plan_file, *options, "traces")
    assert f"rank0.json: /steps/0/{at}/{len(trace['steps'][0][at]) - 1}: Input should be" in message


def test_a_file_that_is_too_long_is_not_read(refused, tmp_path, monkeypatch):
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(3 * 2**30)
    message = f"it has {3 * 2**30} bytes, more than the"
    for arguments in (
        ("check", huge),
        ("show", huge),
        ("import", huge),
        ("collective", huge),
        ("export", huge, "--to", "promela"),
        (*COMPILE, "-s", "zb-auto", "--costs", huge),
    ):
        assert message in refused(1, *arguments)
    monkeypatch.setattr(planfile, "MOST_PLAN_BYTES", 100)
    with pytest.raises(qs.UsageError, match="/dev/zero: cannot read the plan: it is a device, not a file"):
        qs.Plan.load("/dev/zero")
    with Path("/dev/zero").open("rb") as zero, pytest.raises(qs.InputError, match="more bytes than the 100 that"):
        qs.Plan.load(f"/dev/fd/{zero.fileno()}")
    with pytest.raises(qs.UsageError, match=r"a plan file in JSON has at most 100; name it huge\.qplan"):
        qs.compile("1f1b", mesh="pp=2", microbatches=2).save(huge)


def test_a_plan_that_no_file_holds_is_refused_before_the_work(refused, tmp_path):
    large = ("compile", "-s", "1f1b", "--mesh", "pp=64", "-m")
    said = refused(2, *large, 16000, "-o", tmp_path / "plan.json")
    assert "a plan file in JSON has at most 268435456; name it plan.qplan" in said
    assert "plan.json: the plan has at least 37" in said
    assert "instructions; a plan file has at most 8388608" in refused(2, *large, 32000, "-o", tmp_path / "plan.qplan")


@pytest.mark.parametrize(
    "command",
    [("check",), ("show",), ("simulate", "--json"), ("export", "--to", "torch-csv"), ("render", "-o", "x.svg")],
)
def test_a_compressed_plan_is_read_like_any_other(cli, tmp_path, command):
    written = [(tmp_path / name, cli(*COMPILE, "-s", "zb-h1", "-o", name).code) for name in ("p.json", "p.qplan")]
    first, second = (cli(command[0], file, *command[1:]) for file, code in written if code == 0)
    assert (first.code, first.out) == (second.code, second.out)
