"""Objects from users' own files."""

import sys
import textwrap
from pathlib import Path

import pytest

from quintsched.errors import UsageError
from quintsched.import_user_code import call_object, load_object


class TestUserFiles:
    def write(self, folder: Path, text: str, name: str = "mine.py") -> str:
        (folder / name).write_text(textwrap.dedent(text))
        return str(folder / name)

    def test_siblings_and_dataclasses(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "path", [*sys.path])
        self.write(tmp_path, "VALUE = 3", "quintsched_test_sibling.py")
        file = self.write(
            tmp_path,
            """
            from __future__ import annotations
            from dataclasses import dataclass
            from quintsched_test_sibling import VALUE

            @dataclass
            class Thing:
                value: int = VALUE

            def late():
                import quintsched_test_sibling
                return quintsched_test_sibling.VALUE
            """,
        )
        assert load_object(f"{file}:Thing")().value == 3
        assert call_object(f"{file}:late") == 3

    def test_what_is_missing(self, tmp_path: Path) -> None:
        file = self.write(tmp_path, "def build(a): pass\nvalue = 3")
        with pytest.raises(UsageError, match=r"there is no file .*mien\.py'.*; did you mean '.*mine\.py'"):
            load_object(f"{tmp_path}/mien.py:build")
        with pytest.raises(UsageError, match="there is no file"):
            load_object(f"{tmp_path}/empty/mine.py:build")
        with pytest.raises(UsageError, match="has no 'biuld'; did you mean 'build'"):
            load_object(f"{file}:biuld")
        for incomplete in (f"{file}:", file, "build"):
            with pytest.raises(UsageError, match=r"write it as my_file\.py:name"):
                load_object(incomplete)
        with pytest.raises(UsageError, match="is a int, not a function"):
            call_object(f"{file}:value")
        with pytest.raises(UsageError, match=r"mine\.py:build\(a\): missing a required argument"):
            call_object(f"{file}:build")
        with pytest.raises(UsageError, match=r"^'my\\x1b\[31m\\n\.py:build' does not name an object of a file"):
            load_object("my\x1b[31m\n.py:build")

    def test_imports_that_fail(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"broken\.py:1: the import failed: SyntaxError"):
            load_object(self.write(tmp_path, "def", "broken.py") + ":x")
        file = self.write(tmp_path, "a = 1\n1 / 0", "zero.py")
        for _ in range(2):
            with pytest.raises(UsageError, match=r"zero\.py:2: the import failed: ZeroDivisionError"):
                load_object(f"{file}:x")
