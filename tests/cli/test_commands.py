"""Commands as people and programs use them; broken input and outputs: one clear message, the exit code, no more."""

import os
import re
import signal
import subprocess
import sys

import pytest

import quintsched as qs
from quintsched.ir.instruction_set import Fwd
from tests.planner.verify.edits import drop, edited


def test_check_a_plan(cli, plan_file):
    shown = cli("check", plan_file)
    assert shown.err == ""
    assert shown.out.startswith("sound: ")
    data = cli("check", plan_file, "--profile", "blocking", "--json").data
    assert data["sound"] is True
    assert data["profile"] == "blocking"
    assert set(data["profiles"].values()) == {True}
    assert data["peak_activations"] == [2, 1]


def test_simulate(cli, plan_file, tmp_path):
    shown = cli("simulate", plan_file).out
    assert "makespan     15 " in shown
    assert "bubble       20.0 %" in shown
    assert "span bubble  20.0 %" in shown
    assert "time in forward\n" in shown
    assert "critical path: rank 0: F0 → rank 1: F0 B0" in shown
    data = cli("simulate", plan_file, "--json").data
    assert (data["makespan"], data["bubble"], data["peak_activations"]) == (15, 1 - 12 / 15, [2, 1])
    costs = tmp_path / "costs.json"
    costs.write_text('{"unit": "ms", "forward": 2, "backward_input": 2, "backward_weight": 2}')
    data = cli("simulate", plan_file, "--costs", costs, "--json").data
    assert (data["makespan"], data["unit"]) == (30, "ms")


def test_compare_gives_each_schedule_what_it_takes(cli):
    shown = cli("compare", "1f1b", "seq-1f1b", "bfs", "--pp", 4, "-m", 8, "--slices", 2, "--chunks", 4)
    assert re.findall(r"^(\S+) +(\d+) +(\d+) +([\d.]+)  ", shown.out, re.MULTILINE) == [
        ("1f1b", "1", "1", "33"),
        ("seq-1f1b", "1", "2", "28.5"),
        ("bfs", "4", "1", "26.25"),
    ]
    assert "zb-auto   1       1       41 " in cli("compare", "zb-auto", "--pp", 4, "-m", 8, "--memory-cap", 2).out


def test_a_real_picture(cli, refused, plan_file, tmp_path):
    pytest.importorskip("matplotlib")
    assert cli("render", plan_file, "-o", "out.svg").out == "out.svg: 1f1b on dp=2,pp=2,tp=2, 4 microbatches\n"
    assert cli("render", plan_file, "-o", "out.PNG", "--json").data["makespan"] == 15
    cli("compare", "1f1b", "gpipe", "--pp", 2, "-m", 2, "-o", "both.svg")
    assert (tmp_path / "out.PNG").read_bytes().startswith(b"\x89PNG")
    one, both = ((tmp_path / name).read_text() for name in ("out.svg", "both.svg"))
    assert ("gpipe on" in one, "gpipe on" in both, "1f1b on" in both) == (False, True, True)
    assert "cannot write the picture" in refused(2, "render", plan_file, "-o", "no/such/folder.png")


@pytest.fixture
def broken(tmp_path):
    """Save a plan after a change to one rank's program."""

    def save(rank, edit):
        path = tmp_path / "broken.json"
        path.write_text(edited(qs.compile("1f1b", mesh="pp=2", microbatches=3), rank, edit).to_json())
        return path

    return save


COMPILE = ("compile", "--schedule")
FLAT = (*COMPILE, "1f1b", "--mesh", "dp=2,pp=3", "-m", 4)
BOTH_WAYS = (*COMPILE, "dualpipe", "--mesh", "pp=2", "-m", 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*COMPILE, "1f1", "--mesh", "pp=2", "-m", 2), "unknown schedule '1f1'; did you mean '1f1b'?"),
        ((*COMPILE, "1f1b", "--mesh", "pp=2", "-m", 2, "-o", "no/such/plan.json"), "cannot write the plan"),
        ((*FLAT, "--costs", "costs.json"), "does not depend on costs or a memory cap"),
        ((*FLAT, "--recompute", "all"), "--recompute: cannot read 'all'; write whole numbers"),
        ((*FLAT, "--tied", "embedding"), "--tied: cannot read 'embedding'; write a name and the stages"),
        ((*FLAT, "--tied", "w=0,1", "--tied", "w=0,2"), "'w' is given twice"),
        ((*FLAT, "--skip", "h"), "--skip: cannot read 'h'; write a name and the stages that make and take it"),
        ((*BOTH_WAYS, "--skip", "h=0,1"), "take 2 routes; skips need a single one"),
        ((*BOTH_WAYS, "--losses", "0,1"), "take 2 routes, of which only the last stage can have one"),
        (("compile", "-s", "1f1b", "--mesh", "", "-m", 2), "mesh: '' names no axis (a variable that is not set?)"),
        (("predict", "--model", "gpt3-175b", "--hardware", "h100", "--mesh", " "), "mesh: ' ' names no axis"),
        (("train", "job.yaml"), "there is no command 'train'; did you mean 'quintsched run'?"),
        (("calibrate", "-o", "."), ".: cannot write the description: Is a directory; write it elsewhere"),
        (("check", "missing.json"), "missing.json: cannot read the plan: No such file or directory"),
        (("show", "plan.json", "--rank", 8), "rank 8 is not in the mesh dp=2,pp=2,tp=2: its ranks are 0 to 7"),
        (("check", "plan.json", "--profile", "chanel"), "did you mean 'channel'?"),
        (("check", "plan.json", "--memory-cap", -1), "memory cap -1"),
        (("check", "plan.json", "--pp", "2..4"), "a plan has its shape"),
        (("simulate", "plan.json", "--costs", "missing.json"), "missing.json: cannot read the costs file"),
        (("run", "missing.yaml"), "there is no file 'missing.yaml'"),
        (("run",), "give a job file"),
        (("run", "plan.json", "job.yaml", "--fresh", "--resume"), "give one of them"),
        (("run", "job.yaml", "--nnodes", 2, "--node-rank", 1), "several machines need --nnodes"),
        (("run", "a.yaml", "train.max_steps=3"), "settings of the job go by --set, each with its full key: --set tr"),
    ],
)
def test_wrong_usage(refused, plan_file, tmp_path, arguments, message):
    (tmp_path / "job.yaml").write_text("")
    (tmp_path / "costs.json").write_text("{}")
    assert message in refused(2, *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("chek", "plan.json"),
        ("check", "plan.json", "--profil", "channel"),
        ("compile", "--schedule", "1f1b", "--mesh", "pp=2", "-m", "two"),
        ("run", "job.yaml", "--nproc", 0),
    ],
)
def test_a_command_line_that_cannot_be_read(cli, arguments):
    done = cli(*arguments, code=2)
    assert done.out == ""
    assert done.err.count("Error: ") == 1


@pytest.mark.parametrize("command", [("check",), ("show",), ("simulate",), ("render", "-o", "out.png")])
def test_files_that_are_no_plans(refused, tmp_path, command):
    path = tmp_path / "bad.json"
    for content, words in (
        ('{"format": "quintsched.plan", "version": 1', "is it truncated?"),
        ("[" * 10**5, "nested too"),
    ):
        path.write_text(content)
        error = refused(1, command[0], path, *command[1:])
        assert error.startswith(f"error: {path}: ")
        assert words in error


def test_names_of_files_make_no_lines_of_their_own(refused, tmp_path, monkeypatch):
    name = "./a\x1b[2J\nrank 3: b.json"
    (tmp_path / name).write_text("{")
    monkeypatch.setattr(sys, "argv", ["quintsched", "show", name])
    said = refused(1, "show", name).splitlines()
    assert [line[:36] for line in said] == ["error: a\\x1b[2J\\nrank 3: b.json: not"]


@pytest.mark.parametrize("command", [("simulate",), ("simulate", "--json"), ("show",), ("render", "-o", "out.json")])
def test_an_unsound_plan_has_no_figures_but_a_counter_example(refused, broken, command):
    path = broken(1, drop(Fwd(1, 1)))
    message = refused(1, command[0], path, *command[1:])
    assert message.startswith("error: not sound: 1f1b on pp=2")
    assert ">1B1<" in message


def test_an_interrupt_is_quiet(cli, plan_file, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("quintsched.plan.Plan.load", interrupt)
    done = cli("check", plan_file, code=130)
    assert (done.out, done.err) == ("", "")


def test_what_is_not_installed_is_asked_for(refused, plan_file, tmp_path, monkeypatch):
    (tmp_path / "job.yaml").write_text("")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'quintsched[runtime]'" in refused(2, "run", "job.yaml")
    assert "pip install 'quintsched[viz]'" in refused(2, "render", plan_file, "-o", "out.png")


CHILD = """
import signal, sys, time
def stop(number, frame):
    print(f"got {number}", flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
print("ready", flush=True)
time.sleep(60)
"""

CALLER = """
import sys
from quintsched.cli.run_and_verify import call
sys.exit(call([sys.executable, "-c", {child!r}]))
"""


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_run_hands_signals_and_exit_codes_on(number):
    command = [sys.executable, "-c", CALLER.format(child=CHILD)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == f"got {int(number)}\n"
        assert process.wait(30) == 7


TO_COMPILE = ("compile", "-s", "1f1b", "--mesh", "pp=2", "-m", 2)


@pytest.fixture
def inputs(tmp_path):
    """A plan, costs, a CSV, a collective and a schedule, with a hard and a symbolic link to each."""
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)
    plan.save(tmp_path / "p.json")
    (tmp_path / "c.json").write_text('{"forward": 2}')
    (tmp_path / "s.csv").write_text("0F0,0B0\n")
    (tmp_path / "s.py").write_text("")
    for path in list(tmp_path.iterdir()):
        (tmp_path / f"soft_{path.name}").symlink_to(path)
        (tmp_path / f"hard_{path.name}").hardlink_to(path)
    return {path.name: path.read_bytes() for path in tmp_path.iterdir()}


@pytest.mark.parametrize("link", ["", "soft_", "hard_"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("render", "p.json", "-o", "p.json"),
        ("render", "p.json", "--costs", "c.json", "-o", "c.json"),
        ("export", "p.json", "--to", "torch-csv", "-o", "p.json"),
        ("import", "s.csv", "-o", "s.csv"),
        ("simulate", "p.json", "-o", "p.json"),
        ("simulate", "p.json", "--costs", "c.json", "-o", "c.json"),
        (*TO_COMPILE, "--costs", "c.json", "-o", "c.json"),
        ("compile", "-s", "s.py:mine", "--mesh", "pp=2", "-m", 2, "-o", "s.py"),
        ("collective", "c.json", "-o", "c.json"),
    ],
)
def test_no_command_overwrites_what_it_reads(refused, inputs, tmp_path, link, arguments):
    *others, output = arguments
    message = refused(2, *others, f"{link}{output}")
    assert f"{link}{output}: the command reads this file" in message
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == inputs


def test_a_full_disk_leaves_no_half_file(refused, plan_file, tmp_path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(os, "write", full)
    for arguments in (
        ("export", plan_file, "--to", "torch-csv", "-o", "out.csv"),
        ("collective", "ring", "--ranks", 3, "-o", "ring.json"),
        ("simulate", plan_file, "-o", "costs.json"),
        ("new", "mine.py"),
        (*TO_COMPILE, "-o", "new.json"),
    ):
        assert "No space left on device" in refused(1, *arguments)
    assert sorted(tmp_path.iterdir()) == before


SIZES = ("compile", "--mesh", "pp=2", "-m", 4)


def test_a_file_that_is_too_long_is_not_read_at_all(refused, tmp_path):
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
        (*SIZES, "-s", "zb-auto", "--costs", huge),
    ):
        assert message in refused(1, *arguments)
    with pytest.raises(qs.UsageError, match="/dev/zero: cannot read the plan: it is a device, not a file"):
        qs.Plan.load("/dev/zero")


def test_a_plan_that_no_file_holds_is_refused_before_the_work(refused, tmp_path):
    large = ("compile", "-s", "1f1b", "--mesh", "pp=64", "-m")
    said = refused(2, *large, 16000, "-o", tmp_path / "plan.json")
    assert "a plan file in JSON has at most 268435456; name it plan.qplan" in said
    assert "plan.json: the plan has at least 37" in said
    assert "instructions; a plan file has at most 8388608" in refused(2, *large, 32000, "-o", tmp_path / "plan.qplan")
