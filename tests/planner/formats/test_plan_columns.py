"""The compressed plan file: the same plan as in JSON, and as strict; nothing is unpacked beyond the limits."""

import json
import tracemalloc
import zlib
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import quintsched as qs
from quintsched.formats import plan_file, plan_json
from quintsched.formats.plan_columns import pack, unpack
from quintsched.ir.instruction_set import Fwd, Overlap, SendAct
from tests.planner.formats.requests import REQUESTS
from tests.planner.verify.mutants import any_mutant, with_program
from tests.planner.verify.small_plans import DRAWN, any_plan

MIB = 2**20


@cache
def compiled(number: int) -> qs.Plan:
    return qs.compile(**REQUESTS[number])


def zipped(*parts: bytes) -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    return b"".join([*map(packer.compress, parts), packer.flush()])


def opened(plan: qs.Plan) -> tuple[dict[str, Any], bytes]:
    """Return the head and the columns of a file."""
    line, _, columns = zlib.decompress(pack(plan), 31).partition(b"\n")
    return json.loads(line), columns


def written(head: dict[str, Any], columns: bytes) -> bytes:
    return zipped(json.dumps(head).encode() + b"\n", columns)


@pytest.mark.parametrize("number", range(len(REQUESTS)))
def test_a_plan_comes_back_as_it_was(number, tmp_path):
    plan, file = compiled(number), tmp_path / "plan.qplan"
    plan.save(file)
    again = qs.Plan.load(file)
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert file.read_bytes() == pack(again) == pack(qs.Plan.from_json(plan.to_json()))
    assert (
        json.loads(zlib.decompress(file.read_bytes(), 31).partition(b"\n")[0])["schedule"]["name"] == plan.schedule.name
    )


def test_what_json_refuses_is_refused_in_the_same_words():
    """Mutants of all kinds; those that are read are the same plan."""
    random, refused = Random(0), 0
    for _ in range(30):
        plan = any_mutant(any_plan(DRAWN, random), random)
        said, found = [], []
        for read, data in ((plan_json.loads, plan_json.dumps(plan)), (unpack, pack(plan))):
            try:
                found.append(read(data))
            except qs.InputError as error:
                said.append(str(error))
        assert said in ([], [said[0]] * 2 if said else [])
        assert not found or found[0] == found[1]
        refused += bool(said)
    assert 2 < refused < 28


@given(number=st.sampled_from(range(len(REQUESTS))), data=st.data())
def test_no_byte_is_changed_or_lost_unseen(number, data):
    good = pack(compiled(number))
    at = data.draw(st.integers(10, len(good) - 1))
    bad = bytes([*good[:at], good[at] ^ data.draw(st.integers(1, 255)), *good[at + 1 :]])
    for broken in (bad, good[:at], good + b"\0", good + good):
        with pytest.raises(qs.InputError):
            plan_file.loads(broken)


FAULTS: dict[str, dict[str, Any]] = {
    "/format": {"format": "quintsched.plan"},
    "/version: 2 is from the future": {"version": 2},
    "/surprise: unknown key": {"surprise": 1},
    "/lengths: 16777216 instructions are more": {"lengths": [2**24]},
    "/ops/0: unknown instruction 'Fwrd'; did you mean 'Fwd'": {"ops": ["Fwrd"]},
    "/ops: an instruction is named twice": {"ops": ["Fwd", "Fwd"]},
    "/columns: these instructions have the columns stage": {"columns": {"stage": 1}},
    "/programs/0/0/op: 1 is no place among the 0 of /ops": {"ops": [], "columns": {}},
    "/programs/0/6/stages: no place among the 0 of /table": {"table": []},
    '/programs/0/6/stages: "dp" is not a whole number': {"table": [["dp"], ["tp"]]},
    "/table: a value is given twice": {"table": [[0], [0]]},
    "/mesh/0/0": {"mesh": [["qq", 1]]},
}


def test_a_fault_of_the_head_is_said_with_its_place():
    head, columns = opened(qs.compile("1f1b", mesh="pp=2", microbatches=1))
    for words, change in FAULTS.items():
        with pytest.raises(qs.InputError) as caught:
            unpack(written(head | change, columns))
        assert words in str(caught.value)


@pytest.mark.parametrize("wrong", [Fwd(-1, 0), Fwd(0, 2**24 + 1), SendAct(0, 0, -1), Overlap((0, 0), (0, -2))])
def test_numbers_that_no_file_holds_are_not_written_as_others(wrong):
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=1)
    plan = with_program(plan, 1, [*plan.programs[1], wrong])
    with pytest.raises(qs.UsageError, match=rf"rank 1 instruction 7, {type(wrong).__name__}.*from 0 to 16777216"):
        pack(plan)


def test_a_bomb_is_refused_before_it_is_unpacked():
    head, columns = opened(qs.compile("1f1b", mesh="pp=1", microbatches=2))
    bombs = {
        "more bytes than the 16777216": [bytes(MIB)] * 40,
        "more follows": [json.dumps(head).encode() + b"\n" + columns, *[bytes(MIB)] * 40],
        "too early": [json.dumps(head | {"lengths": [2**23]}).encode() + b"\n", bytes(MIB)],
        "pairs of a stage and a microbatch": [
            json.dumps(head | {"stage_to_pp": [0] * 9000, "routes": [
                {"stages": list(range(9000)), "microbatches": [0]},
                {"stages": [0], "microbatches": list(range(1, 9000))}],
                "schedule": head["schedule"] | {"microbatches": 9000},
                "lengths": [20000], "ops": ["Fwd"], "columns": {"stage": 1, "microbatch": 1}}).encode() + b"\n",
            bytes(60000),
        ],
    }  # fmt: skip
    for words, parts in bombs.items():
        data = zipped(*parts)
        tracemalloc.start()
        with pytest.raises(qs.InputError, match=words):
            plan_file.loads(data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 * MIB, (words, peak)


def test_a_number_that_is_too_large_is_said_with_its_place():
    head, columns = opened(qs.compile("1f1b", mesh="pp=1", microbatches=2))
    num = sum(head["lengths"])
    stages = num - 2  # not metrics, nor the norm, nor the step, which has its own
    wide = np.frombuffer(columns[num : num + stages - 1], np.uint8).astype("<u4")
    wide[1] = 2**24 + 1
    wider = head | {"columns": head["columns"] | {"stage": 4}}
    with pytest.raises(qs.InputError, match=r"/programs/0/1/stage: not 0 to 16777216"):
        unpack(written(wider, columns[:num] + wide.tobytes() + columns[num + len(wide) :]))
