"""Progress is for terminals, begins late, and leaves nothing behind."""

import io
import time

import pytest

from quintsched.files import terminal_progress as module
from quintsched.files.terminal_progress import CLEAR, progress


class Screen(io.StringIO):
    """A terminal, or a pipe."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: terminal


@pytest.fixture
def screen(monkeypatch):
    monkeypatch.setattr(module, "QUIET_S", 0.02)
    monkeypatch.setattr(module, "PERIOD_S", 0.02)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")

    def make(terminal: bool = True) -> Screen:
        made = Screen(terminal)
        monkeypatch.setattr("sys.stderr", made)
        return made

    return make


def shown(made: Screen, so_far: str = "") -> str:
    """Wait until something new is on the screen, and return it."""
    end = time.monotonic() + 5
    while made.getvalue() == so_far and time.monotonic() < end:
        time.sleep(0.005)
    return made.getvalue().removeprefix(so_far)


def test_what_takes_long_is_shown_and_cleared(screen):
    made = screen()
    with progress("proving 4 shapes") as found:
        found.show_done(1, 4, "pp=2")
        assert shown(made).startswith(f"{CLEAR}proving 4 shapes: pp=2, 25 %, 0 s, about ")
        found.now("timing")
        assert "timing, 0 s" in shown(made, made.getvalue())
    assert made.getvalue().endswith(CLEAR)


def test_nothing_is_shown_of_what_is_quick(screen, monkeypatch):
    monkeypatch.setattr(module, "QUIET_S", 30.0)
    made = screen()
    begun = time.monotonic()
    with pytest.raises(KeyError), progress("reading"):
        raise KeyError
    assert made.getvalue() == ""
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("why", ["pipe", "dumb", "none"])
def test_nothing_is_shown_where_nobody_watches(screen, monkeypatch, why):
    made = screen(terminal=why != "pipe")
    if why == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    if why == "none":
        monkeypatch.setattr("sys.stderr", None)
    with progress("reading"):
        time.sleep(0.06)
    assert made.getvalue() == ""


def test_a_line_is_no_longer_than_the_terminal_and_harms_it_not(screen):
    made = screen()
    with progress("reading \x1b[31m" + "x" * 100):
        line = shown(made).removeprefix(CLEAR)
    assert len(line) == 59
    assert "\x1b" not in line
