"""The pages of docs/reference are those that the code gives, and leave out no key, command or public name."""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError

from docs.reference.generate import api, commands
from docs.reference.generate.exit_codes import error_classes
from docs.reference.generate.job import sections
from docs.reference.generate.pages import FOLDER, pages
from docs.reference.generate.schemas import FILES
from quintsched.cli import _command
from quintsched.errors import EXIT_CODES, QuintschedError
from quintsched.files.strictyaml import parse_yaml
from quintsched.runtime.agreement.job_fingerprint_between_ranks import flatten
from quintsched.runtime.settings.job_file import JobConfig
from quintsched.runtime.settings.job_json_schema import job_schema

ROOT = Path(__file__).parents[1]
NAMES = sorted(
    ["api.md", "commands.md", "exit-codes.md", "job.md", "job.schema.json", "since.json"]
    + [f"{kind}.schema.json" for kind in FILES]
)


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return pages()


def committed(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def test_the_committed_pages_are_the_generated_ones(made: dict[str, str]) -> None:
    for name in NAMES:
        assert made[name] == committed(name), f"{name}: run: make reference"


@pytest.mark.parametrize(
    ("page", "entry", "names"),
    [
        (
            "api.md",
            r"^### (\S+)$",
            lambda: {f"{path}.{name}" for path in api.MODULES for name in api.public_names(path)},
        ),
        ("job.md", r"^\| `([\w.]+)`", lambda: {name for name, _ in flatten(JobConfig().model_dump())}),
        ("commands.md", r"^## (quintsched.*)$", lambda: {name for name, _ in commands.walk(_command())}),
        (
            "exit-codes.md",
            r"^\| `(\w+)`",
            lambda: {*map(str, EXIT_CODES), *(w for k in error_classes() for w in (k.__name__, str(k.exit_code)))},
        ),
    ],
)
def test_nothing_is_left_out(page: str, entry: str, names: Callable[[], set[str]]) -> None:
    assert len(names()) > 5
    assert names() <= {*re.findall(entry, committed(page), re.MULTILINE)}


INSIDE = "names inside the package, which any version may change"
"""Words of a page whose imports have no entry in the reference."""


def test_names_that_pages_import_have_an_entry_or_are_said_to_be_inside() -> None:
    headings = set(re.findall(r"^### (\S+)$", committed("api.md"), re.MULTILINE))
    count = 0
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))):
        text = page.read_text(encoding="utf-8")
        lines = re.findall(r"^from (quintsched[\w.]*) import ([\w, ]+)$", text, re.MULTILINE)
        imported = {f"{path}.{name.strip()}" for path, names in lines for name in names.split(",")}
        assert imported <= headings or INSIDE in " ".join(text.split()), f"{page.name}: {imported - headings}"
        count += len(imported)
    assert count > 20


def test_the_overview_has_every_public_name() -> None:
    overview = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`(\w+)", "".join(re.findall(r"^\| (`.*?) \|", overview, re.MULTILINE))))
    assert {name for path in api.MODULES for name in api.public_names(path)} - listed == set()


class _Silent:
    """Has a method without words."""

    def does(self) -> None:
        pass


_Silent.__module__ = "quintsched.somewhere"


def test_what_lacks_a_description_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quintsched.viz.render", _Silent)
    monkeypatch.setattr(api, "MODULES", ("quintsched.viz",))
    with pytest.raises(ValueError, match=r"^public names without a description: quintsched\.viz\.render\.does$"):
        api.api_page()
    option = _command().commands["show"].params[1]
    monkeypatch.setattr(option, "help", "")
    with pytest.raises(ValueError, match="options without a description: quintsched show --rank"):
        commands.commands_page()


def test_every_key_has_a_type_and_a_meaning() -> None:
    for section in sections():
        assert section.meaning
        for key in section.keys:
            assert key.meaning, key.name
            assert "any" not in key.kind.split(), key.name


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    return Draft202012Validator(job_schema())


@pytest.mark.parametrize("job", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_schema_takes_the_examples(job: Path, validator: Draft202012Validator) -> None:
    values = parse_yaml(job.read_bytes(), job.name, QuintschedError)
    assert not [error.message for error in validator.iter_errors(values)]


def test_the_schema_tells_jobs_from_others(validator: Draft202012Validator) -> None:
    job: dict[str, Any]
    for job in (
        {"parallel": "auto"},
        {"parallel": {"auto": True, "stages": [1, 2], "mesh": {"dp": 2}}},
        {"log": {"sinks": ["wandb", {"name": "tensorboard"}]}},
    ):
        assert validator.is_valid(job), job
    for job, words in (
        ({"train": {"epoch": 1}}, "'epoch' was unexpected"),
        ({"train": {"epochs": 0}}, "less than"),
        ({"train": {"optimizer": {"groups": [{"lr": 1}]}}}, "'params' is a required property"),
        ({"parallel": {"microbatches": "4"}}, "'4' is not of type 'integer'"),
        ({"mode": "trains"}, "'trains' is not one of"),
    ):
        assert words in " ".join(messages_of(validator.iter_errors(job))), job


def messages_of(errors: Iterable[ValidationError]) -> Iterator[str]:
    """Yield what is wrong, in each of several forms that are allowed."""
    for error in errors:
        yield error.message
        yield from messages_of(error.context or ())
