import json
import os
import subprocess
import sys

import pytest

from quintsched.files.terminal import shown, shown_json

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
