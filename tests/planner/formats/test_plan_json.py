"""The plan file: the same bytes for the same plan, and one clear error with the place for everything else."""

import hashlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import quintsched as qs
from quintsched.formats.plan_json import _loads_as_written, _loads_strictly, loads
from quintsched.ir.plan_data import PlanData
from tests.fuzz.mutator import Mutator
from tests.planner.formats.requests import REQUESTS

KNOWN = json.loads((Path(__file__).parents[2] / "data" / "plan_hashes.json").read_text())


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 6))])
def test_plans_are_written_with_the_bytes_that_they_always_had(part):
    """However a plan is represented: the files of 224 plans, by their SHA-256; every sixth one every day."""
    assert len(KNOWN) >= 200
    for known in KNOWN[part::6]:
        request = known["request"] | ({"costs": qs.Costs(**costs)} if (costs := known["request"].get("costs")) else {})
        text = qs.compile(**request).to_json()
        assert hashlib.sha256(text.encode()).hexdigest() == known["sha256"], known["request"]


@given(data=st.data())
def test_layout_and_order_of_keys_do_not_matter(plan, data):
    head = json.loads(plan.to_json())
    assert head["programs"][0][0] == {"op": "Fwd", "stage": 0, "microbatch": 0}
    shuffled = {key: head[key] for key in data.draw(st.permutations(list(head)))}
    assert qs.Plan.from_json(json.dumps(shuffled, indent=data.draw(st.sampled_from([None, 2])))) == plan
    assert qs.Plan.from_json(plan.to_json().encode()) == plan
    del head["routes"]
    assert qs.Plan.from_json(json.dumps(head)) == plan, "one route may be left out"


Edit = Callable[[dict[str, Any]], object]
GONE = "gone"

BROKEN: list[tuple[Edit, str]] = [  # ranges of single numbers are those of docs/reference/plan.schema.json
    (lambda p: p.update(format="x"), "/format: this is not a plan file"),
    (lambda p: p.pop("format"), "/format: this is not a plan file"),
    (lambda p: p.update(version=2), "/version: 2 is from the future"),
    (lambda p: p.update(version=1.0), "/version: it must be a whole number"),
    (lambda p: p.update(version=0), "/version"),
    (lambda p: p.pop("mode"), "/mode: Field required"),
    (lambda p: p.update(mode="dream"), "/mode: "),
    (lambda p: p.update(extra=1), "/extra: unknown key"),
    (lambda p: p["schedule"].update(extra=1), "/schedule/extra: unknown key"),
    (lambda p: p["schedule"].update(name="\x1b[2J"), "/schedule/name"),
    (lambda p: p["schedule"].update(microbatches=True), "/schedule/microbatches"),
    (lambda p: p["schedule"].update(microbatches=2**24), "too few for 16777216"),
    (lambda p: p["schedule"].update(slices=2), "the routes must hold each of the 8 microbatches once"),
    (lambda p: p.update(mesh=[["xp", 2]]), "/mesh/0/0"),
    (lambda p: p.update(mesh=[["pp", 2], ["pp", 2]]), "/mesh: an axis is given twice"),
    (lambda p: p.update(mesh=[["dp", 2**23], ["tp", 2**20]]), "/mesh: mesh: more ranks"),
    (lambda p: p.update(stage_to_pp=[0, 7]), "stage 1 is placed on pipeline rank 7"),
    (lambda p: (p.update(stage_to_pp=[0] * 10**5), p.pop("routes")), "too few for"),
    (lambda p: p.update(blocks_per_stage=[3, -1]), "/blocks_per_stage/1"),
    (lambda p: p["routes"][0].update(stages=[0, 5]), "route 0 must visit stages among 0 to 1"),
    (lambda p: p["routes"][0].update(stages=[0, 1, 0]), "route 0 must visit"),
    (lambda p: p["routes"][0].update(stages=[]), "route 0 visits no stage"),
    (lambda p: p["routes"][0].update(stages=[0]), "no route visits stage 1"),
    (lambda p: p["routes"][0]["microbatches"].pop(), "each of the 4 microbatches once"),
    (lambda p: p["routes"][0]["microbatches"].append(0), "each of the 4 microbatches once"),
    (lambda p: p.update(buckets_per_stage=2**20), "/buckets_per_stage"),
    (lambda p: p["programs"].pop(), "there are 1 programs, but the mesh"),
    (lambda p: p["programs"].__setitem__(0, {}), "/programs/0"),
    (lambda p: p["programs"][0].__setitem__(3, 7), "/programs/0/3: an instruction"),
]

Change = dict[str, object]

BROKEN_INSTRUCTIONS: list[tuple[str, Change, str]] = [
    ("Fwd", {"op": "Fwdd"}, "/op: unknown instruction 'Fwdd'; did you mean 'Fwd'?"),
    ("Fwd", {"op": "Compute"}, "/op: unknown instruction 'Compute'"),
    ("Fwd", {"op": GONE}, "/op: unknown instruction 'null'"),
    ("Fwd", {"stage": GONE}, ": Fwd lacks 'stage'"),
    ("Fwd", {"peer": 1}, "/peer: unknown key of Fwd"),
    ("Fwd", {"stage": True}, "/stage: true is not a whole number"),
    ("Fwd", {"stage": -1}, "/stage: -1 is not a whole number"),
    ("Fwd", {"stage": 2}, "rank 0 instruction 0, Fwd(stage=2, microbatch=0): stage 2 is out of"),
    ("Fwd", {"stage": 1}, "stage 1 is on rank 1, not on rank 0"),
    ("Fwd", {"microbatch": 4}, "microbatch 4 is out of range: there are 4"),
    ("SendAct", {"peer": 0}, "SendAct(stage=0, microbatch=0, peer=0): its peer is rank 0 itself"),
    ("SendAct", {"peer": 9}, "peer 9 does not hold the neighbouring stage; rank 1 does"),
    ("SendAct", {"op": "SendGrad"}, "there is nobody to exchange this with"),
    ("AllReduceBucket", {"bucket": 1}, "bucket 1 is out of range"),
    ("AllReduceBucket", {"axes": ["xp"]}, '/axes: ["xp"] is not a list of axes'),
    ("AllReduceBucket", {"axes": "dp"}, '/axes: "dp" is not a list of axes'),
    ("AllReduceBucket", {"axes": ["tp"]}, "the axes must be those of the replicas"),
    ("OptStep", {"stages": 0}, "/stages: 0 is not a list"),
    ("OptStep", {"stages": [True]}, "/stages: true is not a whole number"),
    ("OptStep", {"stages": [0, 0]}, "a stage is named twice"),
    ("OptStep", {"stages": [0, 1]}, "stage 1 is on rank 1"),
]


@pytest.mark.parametrize(("op", "changes", "message"), BROKEN_INSTRUCTIONS, ids=str)
def test_a_broken_instruction_is_one_error_with_the_place(plan, op, changes, message):
    head = json.loads(plan.to_json())
    index, found = next((k, i) for k, i in enumerate(head["programs"][0]) if i["op"] == op)
    found |= changes
    for key in [key for key, value in changes.items() if value is GONE]:
        del found[key]
    assert_refused(json.dumps(head), message, f"/programs/0/{index}")


def test_a_broken_plan_is_one_error_with_the_place(plan):
    for edit, message in BROKEN:
        head = json.loads(plan.to_json())
        edit(head)
        assert_refused(json.dumps(head), message)


FIELDS: list[tuple[str, object, str]] = [
    ("zero", {"stage": 2}, "/zero/every"),
    ("zero", {"stage": 2, "every": 1, "more": 1}, "/zero/more"),
    ("zero", 2, "/zero"),
    ("recompute", [1], "/recompute: it has 1 value, but there are 3 stages"),
    ("recompute_microbatches", [[0], []], "/recompute_microbatches: it has 2 values, but there are 3 stages"),
    ("recompute_microbatches", [[0], [], [-1]], "/recompute_microbatches/2/0"),
    ("recompute_microbatches", [[0], [], []], "recompute_microbatches: no stage recomputes"),
    ("tied", {"embedding": [0, 1.0]}, "/tied/embedding/1"),
    ("tied", {"embedding": [0]}, "tied: 'embedding' must name at least two stages"),
    ("tied", {"embedding": [0, 3]}, "tied: no route visits all stages of 'embedding', (0, 3)"),
    ("tied", {"\x1b[2J": [0, 1]}, "is not a name"),
    ("skips", {"h": [0, 2, 1]}, "each once and later on the route than the one before"),
    ("skips", {"h": [0]}, "must name the stage that makes it, then those that take it"),
    ("skips", {"h": [0, 7]}, "names stage 7; the plan has the stages 0 to 2"),
    ("skips", {"": [0, 1]}, "is not a name that a block's forward can take"),
    ("skips", {"h": [0, True]}, "/skips/h/1"),
    ("losses", [2, 1], "losses must name stages in the order of the route"),
    ("losses", [0], "and end with the last one"),
]


def test_a_field_that_names_what_is_not_there_is_one_error():
    whole = json.loads(qs.compile("1f1b", mesh="dp=2,pp=3", microbatches=2).to_json())
    for field, value, message in FIELDS:
        assert_refused(json.dumps(whole | {field: value}), message)


def assert_refused(text: str | bytes, message: str = "", place: str = "") -> None:
    with pytest.raises(qs.InputError) as caught:
        qs.Plan.from_json(text)
    assert str(caught.value).startswith(place)
    assert message in str(caught.value)
    assert not {"\n", "\x1b"} & {*str(caught.value)}
    assert len(str(caught.value)) < 500


def test_what_is_no_json():
    for text, message in (
        ("", "the file ends too early"),
        ("[]", "/format"),
        ("{} {}", "Extra data"),
        ('{"a": NaN}', "NaN is not a JSON number at line 1, column 7"),
        ('{"NaN": "NaN",\n"a": -Infinity}', "-Infinity is not a JSON number at line 2, column 6"),
        ('{"a\\"1e999": 1e999}', "1e999 is too large for a number at line 1, column 14"),
        ('{"a": ' + "9" * 5000 + "}", "not JSON: a number of more than 4300 digits at line 1, column 7"),
        ('{"a": 1, "a": 2}', "duplicate key 'a'"),
        (b"\xff\xfe", "not UTF-8 text: byte 0"),
        (b"\xef\xbb\xbf{}", "BOM"),
        ("{'format': 1}", "line 1, column 2"),
    ):
        assert_refused(text, message)


@pytest.mark.parametrize("depth", [10, 200, 500, 990, 1000, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_deep_nesting(plan, depth, opening, closing):
    nested = opening * depth + "1" + closing * depth
    text = plan.to_json()
    for broken in (
        nested,
        text.replace('{"op": "Fwd"', f'{nested}, {{"op": "Fwd"', 1),
        text.replace('"options": {}', f'"options": {{"a": {nested}}}'),
        text.replace('"op": "Fwd"', f'"op": {nested}', 1),
    ):
        assert_refused(broken)


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
