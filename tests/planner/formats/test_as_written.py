"""The quick way to read a plan file, for files that are written as we write them, is as strict as the other one."""

from functools import cache

import pytest

import quintsched as qs
from quintsched.formats.plan_json import _loads_as_written, _loads_strictly, loads
from quintsched.ir.plan_data import PlanData
from tests.fuzz.mutator import Mutator
from tests.planner.formats.requests import REQUESTS


@cache
def written(number: int) -> str:
    return qs.compile(**REQUESTS[number]).to_json()


def outcome(read, text: str | bytes) -> PlanData | tuple[type, str]:
    try:
        return read(text)
    except qs.InputError as error:
        return type(error), str(error)


def assert_alike(text: str | bytes) -> None:
    strict, quick = outcome(_loads_strictly, text), outcome(_loads_as_written, text)
    assert quick is None or quick == strict
    assert outcome(loads, text) == strict


@pytest.mark.parametrize("number", range(len(REQUESTS)))
def test_what_we_write_is_read_the_quick_way(number):
    plan = qs.compile(**REQUESTS[number])
    text = plan.to_json()
    for given_text in (text, text.encode()):
        assert _loads_as_written(given_text) == _loads_strictly(given_text) == plan


def test_mutants_and_other_encodings_are_read_alike():
    mutator = Mutator([written(number).encode() for number in range(len(REQUESTS))], 0)
    for _ in range(300):
        assert_alike(mutator.make())
    for encoding in ("utf-8-sig", "utf-16", "utf-32"):
        assert_alike(written(1).encode(encoding))
        assert isinstance(outcome(loads, written(1).encode(encoding)), tuple)
    assert_alike(written(1).replace("\\u00e9", "é"))
    assert_alike(written(3).replace('"axes": ["dp", "ep"]', '"axes": ["ep", "dp"]', 1))
    assert_alike(written(0).replace('"programs"', '"programs": [],\n "programs"', 1))
