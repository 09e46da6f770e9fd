"""Fuzzing of files: each is read or refused in words, and fits its schema; `benchmarks/fuzz.py` feeds a million."""

import json
import time
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from docs.reference.generate.schemas import FILES
from quintsched.errors import InputError, UsageError
from quintsched.files.strictyaml import MOST_BYTES, parse_yaml
from quintsched.runtime.settings.job_file import load_job

from . import harness
from .harness import feed, limited_memory
from .mutator import Mutator
from .readers import READERS

DAILY = 25


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", READERS)
def test_broken_files_are_refused_in_words(name: str) -> None:
    reader = READERS[name]
    seeds = reader.seeds()
    for seed in seeds:
        assert feed(reader.read, seed).kind != "fault", name
    assert any(feed(reader.read, seed).kind == "good" for seed in seeds)
    mutator = Mutator(seeds, 1, stays_json=reader.stays_json)
    with limited_memory():
        for number in range(DAILY // 5 if reader.stays_json else DAILY):
            data = mutator.make()
            found = feed(reader.read, data)
            assert found.kind != "fault", f"input {number} of {name}, {len(data)} bytes: {found.words}"


def test_the_harness_sees_every_kind_of_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "MOST_SECONDS", 0.1)

    def raises(_: bytes) -> None:
        raise KeyError("x")

    def talks(_: bytes) -> None:
        raise InputError("x" * 10**6)

    def sleeps(_: bytes) -> None:
        began = time.process_time()
        while time.process_time() < began + 0.11:
            pass

    def eats(_: bytes) -> None:
        bytearray(2**30)

    def refuses(_: bytes) -> None:
        raise InputError("no")

    with limited_memory():
        kinds = [feed(read, b"").kind for read in (raises, talks, sleeps, eats, refuses, len)]
    assert kinds == ["fault"] * 4 + ["refused", "good"]


LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (LAUGHS, "line 16, column 6: aliases stand for too much"),
        ("a: &a [1, *a]", "line 1, column 4: an alias lies within what it stands for"),
        ("a: &a {b: *a}", "an alias lies within what it stands for"),
        ("[" * 20000, "nested too deeply"),
        ("- " * 20000, "nested too deeply"),
        ("- 1\n" * 20000, "more than 20000 tokens"),
        ("#\n" * MOST_BYTES, f"it has {2 * MOST_BYTES} bytes, more than the {MOST_BYTES} that are read"),
    ],
)
def test_yaml_that_stands_for_much_is_refused_at_once(text: str, fault: str) -> None:
    began = time.process_time()
    with pytest.raises(InputError) as refused:
        parse_yaml(text, "job.yaml")
    assert fault in str(refused.value)
    assert time.process_time() - began < 1.5


def test_a_message_about_long_settings_is_short(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    many = "\n".join(f"  key{number}: 1" for number in range(2000))
    path.write_text(f"train:\n{many}\nparallel: {{mesh: '{'x' * 90000}'}}\ndata: {{{'y' * 1000}: 1}}\n")
    with pytest.raises(UsageError) as refused:
        load_job(path)
    assert len(str(refused.value)) < 5000
    assert str(refused.value).endswith("more")
    assert "train.key0: unknown key" in str(refused.value)


FOLDER = Path(__file__).parents[2] / "docs" / "reference"
CHANGED = 50


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
