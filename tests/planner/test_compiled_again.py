"""Objects from users' own files, and plans that are compiled again from what they say of their settings."""

import sys
import textwrap
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import quintsched as qs
from quintsched.compiler import compiled_again
from quintsched.import_user_code import call_object, load_object
from quintsched.ir.instruction_set import Compute
from quintsched.solve import solve
from tests.helpers.refusals import require_refusals


def test_a_plan_is_compiled_again_for_other_microbatches():
    """`test_every_schedule.py` compiles each plan again as it is."""
    for name, more in (("1f1b", {"zero": 3, "zero_every": 2}), ("zbv", {"recompute": 1, "skip": {"h": (0, 1)}})):
        plan, wanted = (qs.compile(name, mesh="dp=2,pp=2", microbatches=number, **more) for number in (8, 4))
        assert compiled_again(plan, microbatches=4).to_json() == wanted.to_json()
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=4, recompute=1, recompute_microbatches="0,2;3")
    for microbatches, chosen in ((3, ((0, 2), ())), (9, ((0, 2, 4, 6, 8), (3, 7)))):
        assert compiled_again(plan, microbatches=microbatches).recompute_microbatches == chosen


def test_a_plan_that_was_changed_by_hand_is_not_compiled_again():
    plan = qs.compile("gpipe", mesh="pp=2", microbatches=4)
    named_otherwise = replace(plan, schedule=replace(plan.schedule, name="1f1b"))
    assert compiled_again(named_otherwise, microbatches=2) is None


def test_a_name_that_is_not_registered_is_never_resolved_and_the_order_stays(tmp_path):
    plan = qs.compile("gpipe", mesh="pp=2", microbatches=4)
    other = replace(plan, schedule=replace(plan.schedule, name="evil.py:run"))
    assert compiled_again(other).to_json() == other.to_json()
    assert compiled_again(other, microbatches=2) is None
    costs = qs.Costs(forward=(1.0, 2.0, 0.5, 1.0), activation=0.5)
    solved = solve(pp=2, microbatches=4, placement="v", memory_cap=1, costs=costs, effort=1).plan
    solved.save(tmp_path / "solved.qplan")
    tied = qs.compile(str(tmp_path / "solved.qplan"), mesh="dp=2,pp=2", microbatches=4, zero=1, tied={"w": (0, 3)})
    assert order_of(tied) == order_of(solved)
    assert compiled_again(tied).to_json() == tied.to_json()
    solved_again = partial(qs.compile, str(tmp_path / "solved.qplan"))
    both_ways = qs.compile("dualpipe", mesh="pp=2", microbatches=4)
    require_refusals(
        ("of 2 pipeline ranks, not of 4", lambda: solved_again(mesh="pp=4", microbatches=4)),
        ("order of 4 microbatches, not of 2", lambda: solved_again(mesh="pp=2", microbatches=2)),
        ("microbatches is 3", lambda: compiled_again(both_ways, microbatches=3)),
    )


def order_of(plan):
    """Return the computations of each rank."""
    return [[i for i in program if isinstance(i, Compute)] for program in plan.programs]


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
    )
    for incomplete in (f"{file}:", file, "build"):
        require_refusals((r"write it as my_file\.py:name", lambda name=incomplete: load_object(name)))
