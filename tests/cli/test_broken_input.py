"""Broken input: one clear message, the right exit code, no traceback."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import quintsched as qs
from quintsched.ir.instruction_set import Fwd
from tests.planner.verify.edits import drop, edited

EXECUTABLE = Path(sys.executable).with_name("quintsched")


@pytest.fixture
def broken(tmp_path):
    """Save a plan after a change to one rank's program."""

    def save(rank, edit):
        path = tmp_path / "broken.json"
        path.write_text(edited(qs.compile("1f1b", mesh="pp=2", microbatches=3), rank, edit).to_json())
        return path

    return save


COMPILE = ("compile", "--schedule")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*COMPILE, "1f1", "--mesh", "pp=2", "-m", 2), "unknown schedule '1f1'; did you mean '1f1b'?"),
        ((*COMPILE, "1f1b", "--mesh", "pp=2", "-m", 2, "-o", "no/such/plan.json"), "cannot write the plan"),
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
    done = cli(*arguments)
    assert (done.code, done.out) == (2, "")
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
    done = cli("check", plan_file)
    assert (done.code, done.out, done.err) == (130, "", "")


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
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == f"got {int(number)}\n"
        assert process.wait(30) == 7
