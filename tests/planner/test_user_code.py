"""Objects from users' own files."""

import sys
import textwrap
from pathlib import Path

import pytest

from quintsched.import_user_code import call_object, load_object
from tests.helpers.refusals import require_refusals

SIBLING = """
from __future__ import annotations
from dataclasses import dataclass
from quintsched_test_sibling import VALUE

@dataclass
class Thing:
    value: int = VALUE

def late():
    import quintsched_test_sibling
    return quintsched_test_sibling.VALUE
"""


def write(folder: Path, text: str, name: str = "mine.py") -> str:
    (folder / name).write_text(textwrap.dedent(text))
    return str(folder / name)


def test_siblings_and_dataclasses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    write(tmp_path, "VALUE = 3", "quintsched_test_sibling.py")
    file = write(tmp_path, SIBLING)
    assert load_object(f"{file}:Thing")().value == 3
    assert call_object(f"{file}:late") == 3


def test_what_is_missing_and_imports_that_fail(tmp_path: Path) -> None:
    file, broken = write(tmp_path, "def build(a): pass\nvalue = 3"), write(tmp_path, "def", "broken.py")
    zero = write(tmp_path, "a = 1\n1 / 0", "zero.py")
    require_refusals(
        (r"no file .*mien\.py'.*; did you mean '.*mine\.py'", lambda: load_object(f"{tmp_path}/mien.py:build")),
        (r"there is no file .*empty/mine\.py", lambda: load_object(f"{tmp_path}/empty/mine.py:build")),
        ("has no 'biuld'; did you mean 'build'", lambda: load_object(f"{file}:biuld")),
        ("is a int, not a function", lambda: call_object(f"{file}:value")),
        (r"mine\.py:build\(a\): missing a required argument", lambda: call_object(f"{file}:build")),
        (r"^'my\\x1b\[31m\\n\.py:build' does not name", lambda: load_object("my\x1b[31m\n.py:build")),
        (r"broken\.py:1: the import failed: SyntaxError", lambda: load_object(f"{broken}:x")),
        (r"zero\.py:2: the import failed: ZeroDivisionError", lambda: load_object(f"{zero}:x")),
        (r"zero\.py:2: the import failed: Zero", lambda: load_object(f"{zero}:x")),  # once more
    )
    for incomplete in (f"{file}:", file, "build"):
        require_refusals((r"write it as my_file\.py:name", lambda name=incomplete: load_object(name)))
