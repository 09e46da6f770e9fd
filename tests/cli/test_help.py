"""Help texts, one vocabulary of all commands, ways to start the command line, completion, and how far commands are."""

import os
import re
import shutil
import sys

import pytest

import quintsched as qs
from quintsched.cli import SECTIONS, main
from quintsched.cli.app import CommandGroup
from quintsched.cli.request_options import AXIS_OPTIONS
from quintsched.cli.shared_options import MICROBATCHES
from quintsched.files import terminal_progress as module

from ..helpers.commands import run

NAMES = {
    heading: [one.name if isinstance(one, CommandGroup) else one.__name__.rstrip("_") for one in commands]
    for heading, commands in SECTIONS.items()
}


def words(text: str) -> str:
    return " ".join(text.split())


def test_help_lists_all_commands_under_headings(cli):
    shown = cli("--help").out
    for heading, names in NAMES.items():
        section = shown.split(f"\n{heading}:\n")[1].split("\n\n")[0]
        assert re.findall(r"^  ([a-z]+)  +[A-Z]", section, re.MULTILINE) == names
    assert list(NAMES) == re.findall(r"^([A-Z]\w+):$", shown, re.MULTILINE)[1:]


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_no_help_is_cut_off(cli, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    for command in ([], *([name] for names in NAMES.values() for name in names)):
        shown = cli(*command, "--help").out.splitlines()
        assert max(map(len, shown)) <= min(columns, 120)
        assert not [line for line in shown[1:] if line.endswith(("...", "…"))]
    wide = cli("checkpoint", "--help").out
    assert "from which `quintsched run --resume` starts on any mesh." in words(wide)


def test_colours_are_for_terminals_that_want_them(cli, monkeypatch):
    assert "\x1b" not in cli("--help").out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1mPlans\x1b[0m:\n" in help_of()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in help_of()


def help_of() -> str:
    from typer.main import get_command

    from quintsched.cli.app import make_app

    command = get_command(make_app(SECTIONS))
    return command.get_help(command.make_context("quintsched", [], resilient_parsing=True))


@pytest.fixture
def shell(monkeypatch):
    """Return what has a shell be the one that the command is started from."""

    def start_from(name: str) -> None:
        monkeypatch.setattr("shellingham.detect_shell", lambda: (name, f"/bin/{name}"))

    return start_from


@pytest.mark.parametrize(
    ("line", "found"), [("ca", ["calibrate"]), ("checkpoint re", ["reshard"]), ("show --gr", ["--groups"])]
)
def test_completions(capsys, monkeypatch, line, found):
    typed = ["quintsched", *line.split()]
    monkeypatch.setenv("_QUINTSCHED_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(typed))
    monkeypatch.setenv("COMP_CWORD", str(len(typed) - 1))
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().out.split() == found


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_takes_the_script(cli, shell, tmp_path, monkeypatch):
    shell("bash")
    command = tmp_path / "quintsched"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "from quintsched.cli import main; main()" "$@"\n')
    command.chmod(0o755)
    ask = 'COMP_WORDS=(quintsched checkp); COMP_CWORD=1; _quintsched_completion quintsched; echo "${COMPREPLY[@]}"'
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    code, out, err = run("bash", "-c", f"{cli('--show-completion').out}\n{ask}")
    assert (code, out.split()) == (0, ["checkpoint"]), err


GPT = ("--model", "gpt3-175b", "--hardware", "a100-80gb", "--batch", 64)


@pytest.mark.parametrize(
    ("axes", "mesh"),
    [
        (("--dp", 2, "--pp", 2), "pp=2,dp=2"),
        (("--tp", 2, "--pp", 3), "pp=3,tp=2"),
        (("--ep", 2, "--cp", 2, "--tp", 2, "--dp", 1), "dp=1,ep=2,cp=2,tp=2"),
    ],
)
def test_compile_takes_axes(cli, axes, mesh):
    done = cli("compile", "-s", "1f1b", "-m", 4, *axes)
    assert qs.Plan.from_json(done.out) == qs.compile("1f1b", mesh=mesh, microbatches=4)


def test_compile_needs_one_mesh(refused):
    command = ("compile", "-s", "1f1b", "-m", 4)
    assert "--mesh is missing, or its axes: --dp, --pp" in refused(2, *command)
    message = refused(2, *command, "--mesh", "pp=2", "--dp", 2)
    assert "--mesh pp=2 and --dp 2: both say the mesh; give one of them" in message
    assert "mesh: axis pp has size 0" in refused(2, *command, "--pp", 0)
    assert "--schedule is missing" in refused(2, "compile", "--pp", 2, "-m", 4)
    assert "--microbatches is missing" in refused(2, "compile", "-s", "1f1b", "--pp", 2)


def test_an_unknown_option_of_run_leads_to_set(cli):
    assert "--set train.max_steps=100" in cli("run", "job.yaml", "--train.lr", 3, code=2).err
    for misused in (("run", "job.yaml", "--restarts"), ("check", "x", "--pofile", 3)):
        assert "--set" not in cli(*misused, code=2).err


def test_predict_takes_a_mesh(cli, refused):
    by_axes = cli("predict", *GPT, "--gpus", 128, "--dp", 2, "--pp", 8, "--tp", 8, "--json").data
    by_mesh = ("predict", *GPT, "--mesh", "dp=2,pp=8,tp=8")
    assert cli(*by_mesh, "--json").data == cli(*by_mesh, "--gpus", 128, "--json").data == by_axes
    assert "both say the mesh" in refused(2, *by_mesh, "--dp", 2)
    assert "--gpus 64, but --mesh dp=2,pp=8,tp=8 has 128 ranks" in refused(2, *by_mesh, "--gpus", 64)
    assert "mesh: unknown axis 'xp'" in refused(2, "predict", *GPT, "--mesh", "xp=2")


def test_words_mean_the_same_in_every_command(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    for command in (("compile",), ("compare",), ("check",), ("checkpoint", "reshard")):
        assert MICROBATCHES in words(cli(*command, "--help").out)
    for command in ("compile", "predict", "tune"):
        shown = words(cli(command, "--help").out)
        assert "--mesh AXES" in shown
        for axis, said in AXIS_OPTIONS.items():
            assert f"--{axis} N {said.removesuffix('.')}" in shown
    for command in ("predict", "tune"):
        assert "Samples of a step, over all replicas: a job's train.batch_size." in words(cli(command, "--help").out)


TUNE = ("tune", "--model", "gpt2", "--hardware", "l4", "--mesh", "pp=2", "--batch", 8, "--schedule", "1f1b", "--top", 1)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("compile", "-s", "1f1b", "--pp", 2, "-m", 4, "-o", "a.json"), "compiling "),
        (("check", "{plan}"), "proving 40 instructions"),
        (("simulate", "{plan}"), "timing 40 instructions"),
        (("show", "{plan}"), "timing 40 instructions"),
        (("compare", "1f1b", "gpipe", "--pp", 2, "-m", 2), "comparing: gpipe, 50 %"),
        (("check", "{own}", "--pp", "1..2", "-m", "1..2"), "proving 4 shapes: pp=2, 2 microbatches, 100 %"),
        (TUNE, "searching: best "),
        ((*TUNE, "--simulate"), "simulating 1 strategy"),
    ],
)
def test_how_far_a_command_is(cli, plan_file, root, monkeypatch, command, words):
    own = root / "examples" / "custom_schedule.py:paired_1f1b"
    lines: list[str] = []
    for name in ("__init__", "show_done", "now"):
        plain = getattr(module.ProgressLine, name)

        def noted(self, *given, plain=plain):
            plain(self, *given)
            lines.append(self.line)

        monkeypatch.setattr(module.ProgressLine, name, noted)
    done = cli(*(str(word).format(plan=plan_file, own=own) for word in command))
    assert done.err == ""
    assert any(line.startswith(words) for line in lines), lines
    assert qs.Plan.load(plan_file).num_instructions == 40
