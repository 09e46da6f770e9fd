"""Tests can fail: with each of these changes of the package, the test that is named for it does."""

import subprocess
import sys

import pytest

from .mutants import MUTANTS, ROOT


def test_what_they_change_and_the_tests_that_they_name_are_there() -> None:
    for mutant in MUTANTS:
        assert mutant.source()
        file, _, name = mutant.test.partition("::")
        assert f"def {name.split('::')[-1].partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), mutant


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("number", range(len(MUTANTS)))
def test_each_is_found(number: int) -> None:
    command = [sys.executable, "-m", "tests.mutants", str(number)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, f"{MUTANTS[number]}\n{done.stdout[-2000:]}"
