"""The files of 224 plans, by their SHA-256: however a plan is represented, it is written with the same bytes."""

import hashlib
import json
from pathlib import Path

import quintsched as qs

KNOWN = json.loads((Path(__file__).parents[2] / "data" / "plan_hashes.json").read_text())


def digest(request: dict) -> str:
    costs = {"costs": qs.Costs(**request["costs"])} if "costs" in request else {}
    return hashlib.sha256(qs.compile(**request | costs).to_json().encode()).hexdigest()


def test_plans_are_written_with_the_bytes_that_they_always_had():
    other = [known["request"] for known in KNOWN if digest(known["request"]) != known["sha256"]]
    assert not other
    assert len(KNOWN) >= 200
