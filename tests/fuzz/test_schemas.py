"""JSON Schemas of docs/reference: every file that a reader takes is one of its schema, good ones and changed ones."""

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from docs.reference.generate.schemas import FILES

from .harness import feed
from .mutator import Mutator
from .readers import READERS

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
CHANGED = 150


def validator_of(kind: str) -> Draft202012Validator:
    schemas = {path.name: json.loads(path.read_text("utf-8")) for path in FOLDER.glob("*.schema.json")}
    registry = Registry().with_resources(
        (name, Resource.from_contents(schemas[name])) for name in ("plan.schema.json",)
    )
    schema = schemas[f"{kind}.schema.json"]
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema, registry=registry)


@pytest.mark.parametrize("kind", [kind for kind in FILES if kind in READERS])
def test_a_file_that_is_read_is_one_of_the_schema(kind: str) -> None:
    validator, reader = validator_of(kind), READERS[kind]
    seeds, taken = reader.seeds(), 0
    mutator = Mutator(seeds, 3, stays_json=True)
    for data in [*seeds, *(mutator.make() for _ in range(CHANGED))]:
        if feed(reader.read, data).kind == "good":
            errors = [error.message for error in validator.iter_errors(json.loads(data))]
            assert not errors, (data[:300], errors[:1])
            taken += 1
    assert taken
    assert not validator.is_valid({"format": "another", "unknown": 1})


def test_a_plan_with_a_wrong_instruction_is_none_of_the_schema() -> None:
    validator = validator_of("plan")
    plan = json.loads(READERS["plan"].seeds()[0])
    assert validator.is_valid(plan)
    for wrong in ({"op": "Forward"}, {"op": "Fwd", "stage": 0}, {"op": "ClipGrad", "stage": 0}, {"op": "OptStep"}):
        changed = plan | {"programs": [[wrong], *plan["programs"][1:]]}
        assert not validator.is_valid(changed), wrong
