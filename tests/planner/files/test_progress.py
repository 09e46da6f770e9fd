"""Plain files of a folder, opened without waiting; terminals: progress that leaves nothing behind, closed streams."""

import io
import json
import os
import socket
import subprocess
import sys
import time

import pytest

from quintsched.errors import InputError
from quintsched.files import terminal_progress as module
from quintsched.files.read_plain_files_only import open_plain, read_plain, require_folder, require_plain_name
from quintsched.files.terminal import shown, shown_json
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


def wait_for_screen(made: Screen, so_far: str = "") -> str:
    """Wait until something new is on the screen, and return it."""
    end = time.monotonic() + 5
    while made.getvalue() == so_far and time.monotonic() < end:
        time.sleep(0.005)
    return made.getvalue().removeprefix(so_far)


def test_what_takes_long_is_shown_and_cleared(screen):
    made = screen()
    with progress("proving 4 shapes") as found:
        found.show_done(1, 4, "pp=2")
        assert wait_for_screen(made).startswith(f"{CLEAR}proving 4 shapes: pp=2, 25 %, 0 s, about ")
        found.now("timing")
        assert "timing, 0 s" in wait_for_screen(made, made.getvalue())
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
        line = wait_for_screen(made).removeprefix(CLEAR)
    assert len(line) == 59
    assert "\x1b" not in line


def test_what_takes_the_place_of_a_file_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "f"
    path.write_bytes(b"1")
    look = os.lstat

    def swapped(name):
        status = look(name)
        if name == path:
            path.unlink()
            os.mkfifo(path)
        return status

    monkeypatch.setattr(os, "lstat", swapped)
    with pytest.raises(InputError, match="it is a FIFO, not a file"):
        read_plain(path, "the file", 99)


def test_folders_and_names(tmp_path):
    require_folder(tmp_path, "the folder")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(InputError, match="it is a symbolic link, not a directory"):
        require_folder(tmp_path / "link", "the folder")
    require_plain_name("rank-00000.safetensors")
    for name in ("", ".", "..", "a/b", "/etc/passwd", "a\0", "..\\x", "x" * 201):
        with pytest.raises(InputError, match="is not the name of a file"):
            require_plain_name(name)


def test_a_file_is_read_up_to_its_limit(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"12345")
    assert read_plain(path, "the file", 5) == b"12345"
    with pytest.raises(InputError, match=r"/f: it has 5 bytes, more than the 4 that are read"):
        read_plain(path, "the file", 4)


@pytest.mark.parametrize("kind", ["a symbolic link", "a directory", "a FIFO", "a socket", "a device"])
def test_what_is_no_file_is_refused_at_once(kind, tmp_path):
    path = tmp_path / "f"
    with socket.socket(socket.AF_UNIX) as server:
        match kind:
            case "a symbolic link":
                path.symlink_to("/dev/zero")
            case "a directory":
                path.mkdir()
            case "a FIFO":
                os.mkfifo(path)
            case "a socket":
                server.bind(str(path))
            case _:
                path = tmp_path.__class__("/dev/zero")
        with pytest.raises(InputError, match=f"cannot read the file: it is {kind}, not a file"):
            read_plain(path, "the file", 99)


def test_what_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(InputError, match=r"/f: cannot read the file: No such file"):
        read_plain(tmp_path / "f", "the file", 9)
    (tmp_path / "f").write_bytes(b"")
    failed = pytest.raises(InputError, match=r"/f: cannot read the file: Input/output error")
    with failed, open_plain(tmp_path / "f", "the file"):
        raise OSError(5, "Input/output error")


needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
ODD = ["\x1b[31m", "\x00", "\x7f", "\x9b2J", "\r", "\u202e", "\u200b", "\u2028", "\ufeff", "\ud800", "\U000e0041"]


@pytest.mark.parametrize("odd", ODD)
def test_nothing_unseen_reaches_a_terminal(odd):
    assert shown(f"a{odd}b\nc") == f"a{odd.encode('unicode_escape').decode()}b\nc"
    text = shown_json(json.dumps(f"a{odd}b", ensure_ascii=False))
    assert text.isprintable()
    assert json.loads(text) == f"a{odd}b"


SAYS = """
import sys, time
from quintsched.files.terminal import standard_streams
with standard_streams():
    time.sleep(0.3)
    sys.stdout.write(sys.argv[1])
    sys.stderr.write("heard\\n")
    sys.exit(3)
"""

FULL = "heard\nerror: cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize(
    ("shell", "code", "heard"),
    [
        ("{} 'ü\u2028'", 3, "heard\n"),
        ("{} x >&-", 2, "heard\nerror: cannot write to standard output: it is closed\n"),
        pytest.param("{} x >/dev/full", 2, FULL, marks=needs_full),
        ("{} x <&- >&- 2>&-", 2, ""),
        ("{} x | exec sleep 0; exit ${{PIPESTATUS[0]}}", 141, "heard\n"),
    ],
)
def test_streams_that_fail(tmp_path, shell, code, heard):
    file = tmp_path / "says.py"
    file.write_text(SAYS)
    line = shell.format(f"'{sys.executable}' '{file}'")
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, heard)
