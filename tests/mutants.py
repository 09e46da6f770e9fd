"""Changes of one line each that a test has to find: data/mutants.json has one for each promise that has been tried.

a change: file, line, line in its place, test ─▶ the package with it, imported and not written ─▶ the test fails

python -m tests.mutants NUMBER          runs the test of a change, and ends as pytest does
"""

import importlib.machinery
import json
import sys
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]


class Mutant(NamedTuple):
    """A line of a file, the line in its place, and a test that fails with that."""

    file: str
    old: str
    new: str
    test: str

    def source(self) -> str:
        """Return the file with the change; the line must be there once."""
        text = (ROOT / self.file).read_text(encoding="utf-8")
        assert text.count(self.old) == 1, f"{self.file}: no one line {self.old!r} any more: name another change"
        return text.replace(self.old, self.new)


MUTANTS = [Mutant(**one) for one in json.loads((ROOT / "tests" / "data" / "mutants.json").read_text(encoding="utf-8"))]


def run(mutant: Mutant) -> int:
    """Run the test of a change in this process, into which nothing of the package was imported before."""
    target, text, read = (ROOT / mutant.file).resolve(), mutant.source(), importlib.machinery.SourceFileLoader.get_code

    def changed(loader: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
        is_it = Path(loader.path).resolve() == target
        return compile(text, loader.path, "exec", dont_inherit=True) if is_it else read(loader, name)

    importlib.machinery.SourceFileLoader.get_code = changed  # type: ignore[method-assign, assignment]
    return int(pytest.main(["-q", "-x", "--tb=no", "-p", "no:cacheprovider", "-m", "", str(ROOT / mutant.test)]))


if __name__ == "__main__":
    sys.exit(run(MUTANTS[int(sys.argv[1])]))
