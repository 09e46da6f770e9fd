"""Commands say how far they are: each on standard error, and only to a person who is watching."""

import pytest

import quintsched as qs
from quintsched.files import terminal_progress as module

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
    assert (done.code, done.err) == (0, "")
    assert any(line.startswith(words) for line in lines), lines
    assert qs.Plan.load(plan_file).num_instructions == 40
