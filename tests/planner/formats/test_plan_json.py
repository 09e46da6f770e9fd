"""The plan file: the same bytes for the same plan, and one clear error with the place for everything else."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import quintsched as qs
from quintsched.ir.plan_data import MAX_RECOMPUTE
from quintsched.plan import Plan


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved-1f1b", "dualpipe-v", "inference"]))
    axes = draw(st.permutations(["dp", "tp", "cp", "ep"]))[: draw(st.integers(0, 4))]
    sizes = {axis: draw(st.integers(1, 3)) for axis in axes}
    pp = draw(st.integers(1, 4))
    microbatches = draw(st.integers(1, 6)) * (pp if name == "interleaved-1f1b" else 1)
    chunks = draw(st.integers(2, 3)) if name == "interleaved-1f1b" else None
    buckets = draw(st.integers(1, 3))
    return qs.compile(
        name,
        mesh=qs.Mesh(pp=pp, **sizes),
        microbatches=microbatches,
        chunks=chunks,
        buckets_per_stage=buckets,
        overlap=name in ("interleaved-1f1b", "dualpipe-v") and draw(st.booleans()),
    )


@given(plan=plans())
def test_round_trip(plan):
    text = plan.to_json()
    again = Plan.from_json(text)
    assert again == plan
    assert again.to_json() == text
    assert Plan.from_json(text.encode()) == plan
    assert json.loads(text)["programs"][0][0] == {"op": "Fwd", "stage": 0, "microbatch": 0}


@given(plan=plans(), data=st.data())
def test_layout_and_order_of_keys_do_not_matter(plan, data):
    head = json.loads(plan.to_json())
    shuffled = {key: head[key] for key in data.draw(st.permutations(list(head)))}
    assert Plan.from_json(json.dumps(shuffled, indent=data.draw(st.sampled_from([None, 2])))) == plan


def test_options_round_trip_in_one_order(plan):
    plans = [
        replace(plan, schedule=replace(plan.schedule, options=options))
        for options in ({"b": 1.0, "a": True, "c": "x", "d": 3}, {"d": 3, "c": "x", "a": True, "b": 1.0})
    ]
    assert plans[0].to_json() == plans[1].to_json()
    options = Plan.from_json(plans[0].to_json()).schedule.options
    assert [(k, type(v)) for k, v in options.items()] == [("a", bool), ("b", float), ("c", str), ("d", int)]


def test_one_route_may_be_left_out(plan):
    head = json.loads(plan.to_json())
    del head["routes"]
    assert Plan.from_json(json.dumps(head)) == plan


def test_the_head_is_that_of_the_design(plan):
    assert plan.to_json().startswith(
        '{"format": "quintsched.plan",\n "version": 1,\n "mode": "train",\n'
        ' "schedule": {"name": "1f1b", "microbatches": 4, "chunks": 1, "slices": 1, "options": {}},\n'
        ' "mesh": [["dp", 2], ["pp", 2], ["tp", 2]],\n "stage_to_pp": [0, 1],\n'
    )


Edit = Callable[[dict[str, Any]], object]

GONE = object()
BROKEN: dict[str, tuple[Edit, str]] = {
    "another format": (lambda p: p.update(format="x"), "/format: this is not a plan file"),
    "no format": (lambda p: p.pop("format"), "/format: this is not a plan file"),
    "a version from the future": (lambda p: p.update(version=2), "/version: 2 is from the future"),
    "a version of the wrong type": (lambda p: p.update(version=True), "/version: it must be a whole number"),
    "a version in float": (lambda p: p.update(version=1.0), "/version: it must be a whole number"),
    "version 0": (lambda p: p.update(version=0), "/version"),
    "no mode": (lambda p: p.pop("mode"), "/mode: Field required"),
    "an unknown mode": (lambda p: p.update(mode="dream"), "/mode: "),
    "an unknown field": (lambda p: p.update(extra=1), "/extra: unknown key"),
    "an unknown field below": (lambda p: p["schedule"].update(extra=1), "/schedule/extra: unknown key"),
    "no name": (lambda p: p["schedule"].update(name=""), "/schedule/name"),
    "a name that moves the cursor": (lambda p: p["schedule"].update(name="\x1b[2J"), "/schedule/name"),
    "a long name": (lambda p: p["schedule"].update(name="n" * 201), "/schedule/name"),
    "true as a number": (lambda p: p["schedule"].update(microbatches=True), "/schedule/microbatches"),
    "a float as a number": (lambda p: p["schedule"].update(microbatches=4.0), "/schedule/microbatches"),
    "text as a number": (lambda p: p["schedule"].update(microbatches="4"), "/schedule/microbatches"),
    "0 microbatches": (lambda p: p["schedule"].update(microbatches=0), "/schedule/microbatches"),
    "absurdly many microbatches": (lambda p: p["schedule"].update(microbatches=10**12), "/schedule/microbatches"),
    "more microbatches than work": (lambda p: p["schedule"].update(microbatches=2**24), "too few for 16777216"),
    "many microbatches, no routes": (
        lambda p: (p["schedule"].update(microbatches=2**24), p.pop("routes")),
        "instructions, too few for 16777216 microbatches on 2 stages",
    ),
    "more slices than the routes have": (
        lambda p: p["schedule"].update(slices=2),
        "the routes must hold each of the 8 microbatches once",
    ),
    "0 slices": (lambda p: p["schedule"].update(slices=0), "/schedule/slices"),
    "absurdly many slices": (lambda p: p["schedule"].update(slices=10**12), "/schedule/slices"),
    "a float of slices": (lambda p: p["schedule"].update(slices=2.0), "/schedule/slices"),
    "true slices": (lambda p: p["schedule"].update(slices=True), "/schedule/slices"),
    "a nested option": (lambda p: p["schedule"].update(options={"a": []}), "/schedule/options/a"),
    "an unknown axis": (lambda p: p.update(mesh=[["xp", 2]]), "/mesh/0/0"),
    "an axis twice": (lambda p: p.update(mesh=[["pp", 2], ["pp", 2]]), "/mesh: an axis is given twice"),
    "an axis of size 0": (lambda p: p.update(mesh=[["dp", 0], ["pp", 2]]), "/mesh/0/1"),
    "an absurd mesh": (lambda p: p.update(mesh=[["dp", 2**23], ["tp", 2**20]]), "/mesh: mesh: more ranks"),
    "a mesh of objects": (lambda p: p.update(mesh={"dp": 2}), "/mesh"),
    "no stages": (lambda p: p.update(stage_to_pp=[]), "/stage_to_pp"),
    "a stage nowhere": (lambda p: p.update(stage_to_pp=[0, 7]), "stage 1 is placed on pipeline rank 7"),
    "stages of absurd number": (lambda p: (p.update(stage_to_pp=[0] * 10**5), p.pop("routes")), "too few for"),
    "the blocks of a stage too many": (
        lambda p: p.update(blocks_per_stage=[3, 4, 4]),
        r"/: blocks are given for 3 stages (3,4,4), but there are 2",
    ),
    "the blocks of no stage": (lambda p: p.update(blocks_per_stage=[]), "/blocks_per_stage"),
    "less than no blocks": (lambda p: p.update(blocks_per_stage=[3, -1]), "/blocks_per_stage/1"),
    "half a block": (lambda p: p.update(blocks_per_stage=[3, 0.5]), "/blocks_per_stage/1"),
    "true blocks": (lambda p: p.update(blocks_per_stage=[True, 3]), "/blocks_per_stage/0"),
    "absurdly many blocks": (lambda p: p.update(blocks_per_stage=[3, 2**30]), "/blocks_per_stage/1"),
    "no blocks for the inputs": (
        lambda p: p.update(blocks_per_stage=[0, 3]),
        "stage 0 has no blocks, but it is a first",
    ),
    "a route to nowhere": (lambda p: p["routes"][0].update(stages=[0, 5]), "route 0 must visit stages among 0 to 1"),
    "a route in a circle": (lambda p: p["routes"][0].update(stages=[0, 1, 0]), "route 0 must visit"),
    "an empty route": (lambda p: p["routes"][0].update(stages=[]), "route 0 visits no stage"),
    "a stage without a route": (lambda p: p["routes"][0].update(stages=[0]), "no route visits stage 1"),
    "a microbatch on no route": (lambda p: p["routes"][0]["microbatches"].pop(), "each of the 4 microbatches once"),
    "a microbatch on two": (lambda p: p["routes"][0]["microbatches"].append(0), "each of the 4 microbatches once"),
    "too many buckets": (lambda p: p.update(buckets_per_stage=2**20), "/buckets_per_stage"),
    "other program axes": (lambda p: p.update(program_axes=["tp"]), "/program_axes/0"),
    "no programs": (lambda p: p.update(programs=[]), "too few"),
    "a program too few": (lambda p: p["programs"].pop(), "there are 1 programs, but the mesh"),
    "a program that is no list": (lambda p: p["programs"].__setitem__(0, {}), "/programs/0"),
    "an instruction that is no object": (lambda p: p["programs"][0].__setitem__(3, 7), "/programs/0/3: an instruction"),
}

Change = dict[str, object]

BROKEN_INSTRUCTIONS: dict[str, tuple[str, Change, str]] = {
    "an unknown op": ("Fwd", {"op": "Fwdd"}, "/op: unknown instruction 'Fwdd'; did you mean 'Fwd'?"),
    "an op of the wrong type": ("Fwd", {"op": ["Fwd"]}, "/op: unknown instruction '[\"Fwd\"]'"),
    "a base class as op": ("Fwd", {"op": "Compute"}, "/op: unknown instruction 'Compute'"),
    "no op": ("Fwd", {"op": GONE}, "/op: unknown instruction 'null'"),
    "a missing field": ("Fwd", {"stage": GONE}, ": Fwd lacks 'stage'"),
    "an unknown field": ("Fwd", {"peer": 1}, "/peer: unknown key of Fwd"),
    "a misspelt field": ("Fwd", {"stage": GONE, "stag": 0}, ": Fwd lacks 'stage'"),
    "true as a stage": ("Fwd", {"stage": True}, "/stage: true is not a whole number"),
    "a negative stage": ("Fwd", {"stage": -1}, "/stage: -1 is not a whole number"),
    "a float stage": ("Fwd", {"stage": 0.0}, "/stage: 0.0 is not a whole number"),
    "a stage out of range": (
        "Fwd",
        {"stage": 2},
        "rank 0 instruction 0, Fwd(stage=2, microbatch=0): stage 2 is out of",
    ),
    "a stage of another rank": ("Fwd", {"stage": 1}, "stage 1 is on rank 1, not on rank 0"),
    "a microbatch out of range": ("Fwd", {"microbatch": 4}, "microbatch 4 is out of range: there are 4"),
    "a peer that is itself": (
        "SendAct",
        {"peer": 0},
        "SendAct(stage=0, microbatch=0, peer=0): its peer is rank 0 itself",
    ),
    "a peer out of range": ("SendAct", {"peer": 9}, "peer 9 does not hold the neighbouring stage; rank 1 does"),
    "a message to nobody": ("SendAct", {"op": "SendGrad"}, "there is nobody to exchange this with"),
    "a bucket out of range": ("AllReduceBucket", {"bucket": 1}, "bucket 1 is out of range"),
    "an unknown axis": ("AllReduceBucket", {"axes": ["xp"]}, '/axes: ["xp"] is not a list of axes'),
    "axes that are no list": ("AllReduceBucket", {"axes": "dp"}, '/axes: "dp" is not a list of axes'),
    "axes that hold lists": ("AllReduceBucket", {"axes": [["dp"]]}, '/axes: [["dp"]] is not a list of axes'),
    "other axes": ("AllReduceBucket", {"axes": ["tp"]}, "the axes must be those of the replicas"),
    "stages that are no list": ("OptStep", {"stages": 0}, "/stages: 0 is not a list"),
    "true among stages": ("OptStep", {"stages": [True]}, "/stages: true is not a whole number"),
    "a stage stepped twice": ("OptStep", {"stages": [0, 0]}, "a stage is named twice"),
    "a stage of another rank stepped": ("OptStep", {"stages": [0, 1]}, "stage 1 is on rank 1"),
}


@pytest.mark.parametrize("name", BROKEN_INSTRUCTIONS)
def test_a_broken_instruction_is_one_error_with_the_place(plan, name):
    op, changes, message = BROKEN_INSTRUCTIONS[name]
    head = json.loads(plan.to_json())
    index, found = next((k, i) for k, i in enumerate(head["programs"][0]) if i["op"] == op)
    for key, value in changes.items():
        if value is GONE:
            del found[key]
        else:
            found[key] = value
    assert_refused(json.dumps(head), message, f"/programs/0/{index}")


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plan_is_one_error_with_the_place(plan, name):
    edit, message = BROKEN[name]
    head = json.loads(plan.to_json())
    edit(head)
    assert_refused(json.dumps(head), message)


FIELDS: list[tuple[str, object, str]] = [
    ("zero", {"stage": 4, "every": 1}, "/zero/stage"),
    ("zero", {"stage": 2, "every": 0}, "/zero/every"),
    ("zero", {"stage": 2}, "/zero/every"),
    ("zero", {"stage": True, "every": 1}, "/zero/stage"),
    ("zero", {"stage": 2, "every": 1, "more": 1}, "/zero/more"),
    ("zero", 2, "/zero"),
    ("zero", {"stage": 0, "every": 2}, "only ZeRO-2 and 3"),
    ("recompute", [1], "/recompute: it has 1 value, but there are 3 stages"),
    ("recompute", [], "/recompute: it has 0 values"),
    ("recompute", [0, -1, 0], "/recompute/1"),
    ("recompute", [0, MAX_RECOMPUTE + 1, 0], "/recompute/1"),
    ("recompute", [0, 1.0, 0], "/recompute/1"),
    ("recompute", [0, True, 0], "/recompute/1"),
    ("recompute", 1, "/recompute"),
    ("tied", [], "/tied"),
    ("tied", {"embedding": 3}, "/tied/embedding"),
    ("tied", {"embedding": [0, 1.0]}, "/tied/embedding/1"),
    ("tied", {"embedding": [0, -1]}, "/tied/embedding/1"),
    ("tied", {"embedding": [0]}, "tied: 'embedding' must name at least two stages"),
    ("tied", {"embedding": [2, 0]}, "in rising order"),
    ("tied", {"embedding": [0, 3]}, "tied: no route visits all stages of 'embedding', (0, 3)"),
    ("tied", {"\x1b[2J": [0, 1]}, "is not a name"),
    ("skips", {"h": [0, 2, 1]}, "each once and later on the route than the one before"),
    ("skips", {"h": [0]}, "must name the stage that makes it, then those that take it"),
    ("skips", {"h": [0, 7]}, "names stage 7; the plan has the stages 0 to 2"),
    ("skips", {"": [0, 1]}, "is not a name that a block's forward can take"),
    ("skips", [0, 1], "/skips"),
    ("skips", {"h": [0, True]}, "/skips/h/1"),
    ("losses", [2, 1], "losses must name stages in the order of the route"),
    ("losses", [0], "and end with the last one"),
    ("losses", 2, "/losses"),
]


@pytest.mark.parametrize(("field", "value", "message"), FIELDS)
def test_a_field_that_names_what_is_not_there_is_one_error(field, value, message):
    head = json.loads(qs.compile("1f1b", mesh="dp=2,pp=3", microbatches=2).to_json()) | {field: value}
    assert_refused(json.dumps(head), message)


def assert_refused(text: str | bytes, message: str = "", place: str = "") -> None:
    with pytest.raises(qs.InputError) as caught:
        Plan.from_json(text)
    assert str(caught.value).startswith(place)
    assert message in str(caught.value)
    assert not {"\n", "\x1b"} & {*str(caught.value)}
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file ends too early"),
        ("[]", "/format"),
        ("null", "/format"),
        ("{} {}", "Extra data"),
        ('{"a": NaN}', "NaN is not a JSON number at line 1, column 7"),
        ('{"NaN": "NaN",\n"a": -Infinity}', "-Infinity is not a JSON number at line 2, column 6"),
        ('{"a\\"1e999": 1e999}', "1e999 is too large for a number at line 1, column 14"),
        ('{"a": ' + "9" * 5000 + "}", "not JSON: a number of more than 4300 digits at line 1, column 7"),
        ('{"a": 1, "a": 2}', "duplicate key 'a'"),
        (b"\xff\xfe", "not UTF-8 text: byte 0"),
        (b"\xef\xbb\xbf{}", "BOM"),
        ('{"format": "quintsched.plan"', "the file ends too early"),
        ("{'format': 1}", "line 1, column 2"),
    ],
)
def test_what_is_no_json(text, message):
    assert_refused(text, message)


@pytest.mark.parametrize("depth", [10, 100, 190, 200, 210, 500, 900, 990, 995, 1000, 5000, 100_000])
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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def test_paths_that_cannot_be_read_or_written(plan, tmp_path):
    with pytest.raises(qs.UsageError, match=r"missing\.json: cannot read the plan: No such file"):
        Plan.load(tmp_path / "missing.json")
    with pytest.raises(qs.UsageError, match="cannot read the plan: Is a directory"):
        Plan.load(tmp_path)
    with pytest.raises(qs.UsageError, match="cannot write the plan"):
        plan.save(tmp_path / "no" / "such" / "plan.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(qs.InputError, match=r"bad\.json: not JSON"):
        Plan.load(tmp_path / "bad.json")
    plan.save(tmp_path / "good.json")
    with pytest.raises(qs.UsageError, match="cannot write the plan"):
        plan.save(Path(tmp_path))
    assert Plan.load(tmp_path / "good.json") == plan
