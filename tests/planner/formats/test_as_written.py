"""The quick way to read a plan file, for files that are written as we write them, is as strict as the other one."""

import json
import re
from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import quintsched as qs
from quintsched.errors import InputError
from quintsched.formats.plan_json import _loads_as_written, _loads_strictly, loads
from quintsched.ir.plan_data import PlanData
from tests.planner.formats.requests import REQUESTS

NUMBERS = ("-0", "-1", "00", "01", "1.0", "0.0", "1.5", "1e0", "1E400", "-1e400", "NaN", "Infinity", "-Infinity", "+1")
NUMBERS += (str(2**24), str(2**24 + 1), str(2**31), str(2**63), str(2**64), "9" * 5000, "0x1", "1_0", "١")
WORDS = ("true", "false", "null", '"0"', '"Fwd"', "[]", "[0]", "{}", "[[0]]", '{"op": "ClipGrad"}', "[" * 3000)
JUNK = (
    " ",
    "\n",
    "\r\n",
    "\t",
    "\ufeff",
    "\x00",
    "\u2028",
    "/* */",
    "#",
    ",",
    ",,",
    "]",
    "[",
    "}",
    "{",
    '"',
    "\\",
    "\ud800",
)
JUNK += (",\n  [", "]}\n", '\n "programs": [\n', ',\n   {"op": "ClipGrad"}', "%s", "%d")


@cache
def written(number: int) -> str:
    return qs.compile(**REQUESTS[number]).to_json()


def spots(text: str, pattern: str) -> list[tuple[int, int]]:
    return [found.span() for found in re.finditer(pattern, text)] or [(len(text), len(text))]


@st.composite
def edited(draw: st.DrawFn) -> str:
    """A written plan with 1 to 3 edits of its text."""
    text = written(draw(st.integers(0, len(REQUESTS) - 1)))
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        text = draw(st.sampled_from(EDITS))(text, draw)
    return text


def replaced(pattern: str, by: tuple[str, ...]):
    def edit(text: str, draw: st.DrawFn) -> str:
        first, end = draw(st.sampled_from(spots(text, pattern)))
        return text[:first] + draw(st.sampled_from(by)) + text[end:]

    return edit


def other_digit(text: str, draw: st.DrawFn) -> str:
    first, end = draw(st.sampled_from(spots(text, r"\d")))
    return text[:first] + draw(st.sampled_from("0123456789")) + text[end:]


def without(text: str, draw: st.DrawFn) -> str:
    first = draw(st.integers(0, len(text)))
    return text[:first] + text[first + draw(st.integers(1, 3)) :]


def truncated(text: str, draw: st.DrawFn) -> str:
    return text[: draw(st.integers(0, len(text)))]


def object_rewritten(text: str, draw: st.DrawFn) -> str:
    """Rewrite an instruction (or what looks like one): keys in another order, or twice, or one more, or one fewer."""
    first, end = draw(st.sampled_from(spots(text, r'\{"op": [^{}]*\}')))
    try:
        pairs = list(json.loads(text[first:end]).items())
    except (ValueError, AttributeError):
        return text
    match draw(st.integers(0, 4)):
        case 0:
            pairs = draw(st.permutations(pairs))
        case 1:
            pairs.append(draw(st.sampled_from(pairs)))
        case 2:
            pairs.append(draw(st.sampled_from([("extra", 0), ("", 0), ("stage", 0), ("part", 0), ("op", "Fwd")])))
        case 3:
            pairs.remove(draw(st.sampled_from(pairs)))
        case 4:
            at = draw(st.integers(0, len(pairs) - 1))
            pairs[at] = (draw(st.sampled_from(pairs))[0], pairs[at][1])
    ensure_ascii = draw(st.booleans())
    colon = draw(st.sampled_from([": ", ":", " : "]))
    body = (json.dumps(k) + colon + json.dumps(v, ensure_ascii=ensure_ascii) for k, v in pairs)
    return text[:first] + "{" + draw(st.sampled_from([", ", ",", " ,"])).join(body) + "}" + text[end:]


def escaped(text: str, draw: st.DrawFn) -> str:
    """Write a letter of a name as an escape, which means the same."""
    first, end = draw(st.sampled_from(spots(text, r'[A-Za-z](?=[A-Za-z]*")')))
    return text[:first] + "".join(f"\\u{ord(letter):04x}" for letter in text[first:end]) + text[end:]


def lines_moved(text: str, draw: st.DrawFn) -> str:
    lines = text.split("\n")
    at, to = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
    if draw(st.booleans()):
        lines.insert(to, lines[at])
    else:
        lines[at], lines[to] = lines[to], lines[at]
    return "\n".join(lines)


def other_line_ends(text: str, draw: st.DrawFn) -> str:
    return text.replace("\n", draw(st.sampled_from(["\r\n", "\r", "", "\n\n", " \n"])))


EDITS = (
    other_digit,
    other_digit,
    replaced(r"(?<=[ \[])\d+(?=[,}\]])", NUMBERS + WORDS),
    replaced(r'"[^"]*"', (*WORDS, '"FWD"', '"Bwd"', '"stage"', '"op"', '"dp"', '"\\u0000"', '"a\\"b"', '"\\ud83d"')),
    replaced(r'(?<=")[^"]+(?=")', ("Fwd", "op", "stage", "microbatch", "x" * 201, "é", "\\n", "")),
    replaced(r"(?=[\[\]{},:\n])", JUNK),
    replaced("$", JUNK),
    replaced("^", JUNK),
    replaced(r"\[[^\[\]]*\]", WORDS),
    without,
    truncated,
    object_rewritten,
    object_rewritten,
    escaped,
    lines_moved,
    other_line_ends,
)


def outcome(read, text: str | bytes) -> PlanData | tuple[type, str]:
    try:
        return read(text)
    except InputError as error:
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
    assert qs.Plan.from_json(text).to_json() == text


@given(text=edited())
@example(text=written(0).replace('"microbatch": 0}', '"microbatch": 0.0}', 1))
@example(text=written(0).replace('"microbatch": 1}', '"microbatch": true}', 1))
@example(text=written(0).replace('"stage": 0', '"stage": 0, "stage": 0', 1))
@example(text=written(0).replace('"stage": 0', '"stage": -0', 1))
@example(text=written(0).replace('"programs"', '"programs": [],\n "programs"', 1))
@example(text=written(3).replace('"axes": ["dp", "ep"]', '"axes": ["ep", "dp"]', 1))
@example(text=written(1).replace("\\u00e9", "é"))
def test_edited_text_is_read_alike(text):
    assert_alike(text)


@given(text=edited(), data=st.data())
def test_edited_bytes_are_read_alike(text, data):
    whole = text.encode("utf-8", "surrogatepass")
    at = data.draw(st.integers(0, len(whole)))
    junk = data.draw(
        st.sampled_from([b"", b"", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\x80", b"\xef\xbb\xbf", b"\x00"])
    )
    assert_alike(whole[:at] + junk + whole[at:])


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_other_encodings_are_refused_alike(encoding):
    assert_alike(written(1).encode(encoding))
    assert isinstance(outcome(loads, written(1).encode(encoding)), tuple)
