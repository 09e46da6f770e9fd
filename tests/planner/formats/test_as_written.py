"""The quick way to read a plan file, for files that are written as we write them, is as strict as the other one."""

import json
import re
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

import quintsched as qs
from quintsched.formats.plan_json import _loads_as_written, _loads_strictly, loads
from quintsched.ir.plan_data import PlanData
from tests.fuzz.mutator import Mutator
from tests.planner.formats.requests import REQUESTS

NUMBERS = ("-0", "-1", "00", "01", "1.0", "0.0", "1e0", "1E400", "NaN", "-Infinity", "+1", "0x1", "1_0", "١")
NUMBERS += (str(2**24), str(2**24 + 1), str(2**63), str(2**64), "9" * 5000)
WORDS = ("true", "null", '"0"', '"Fwd"', '"\\u0046wd"', "[]", "[0]", "[[0]]", '{"op": "ClipGrad"}', "[" * 3000)
JUNK = (" ", "\r\n", "\ufeff", "\x00", "\u2028", "#", ",", "]", "{", '"', "\\", "\ud800", ",\n  [", "]}\n", "%s")


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


@given(number=st.integers(0, len(REQUESTS) - 1), data=st.data())
def test_one_edit_is_read_alike(number, data):
    """Another value for a number, a name or a list; an instruction with its keys moved, twice, or renamed; junk."""
    text = written(number)
    pattern, by = data.draw(st.sampled_from(((r"(?<=[ \[])\d+(?=[,}\]])", NUMBERS + WORDS), (r'"[^"]*"', WORDS))))
    spots = [found.span() for found in re.finditer(pattern, text)]
    first, end = data.draw(st.sampled_from(spots))
    assert_alike(text[:first] + data.draw(st.sampled_from(by)) + text[end:])
    assert_alike(text[:first] + data.draw(st.sampled_from(JUNK)) + text[first:])
    assert_alike(text.encode()[:first] + data.draw(st.sampled_from([b"\xff", b"\xed\xa0\x80", b""])))
    first, end = data.draw(st.sampled_from([found.span() for found in re.finditer(r'\{"op": [^{}]*\}', text)]))
    pairs = data.draw(st.permutations([*json.loads(text[first:end]).items()]))
    more = data.draw(st.sampled_from([[], pairs[:1], [("extra", 0)], [("stage", 0)], [("op", "Fwd")]]))
    body = ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in [*pairs, *more])
    assert_alike(text[:first] + "{" + body + "}" + text[end:])
    lines = text.split("\n")
    at, to = (data.draw(st.integers(0, len(lines) - 1)) for _ in range(2))
    lines[at], lines[to] = lines[to], lines[at]
    assert_alike(data.draw(st.sampled_from(["\n", "\n", "\r\n", "\n\n"])).join(lines))


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
