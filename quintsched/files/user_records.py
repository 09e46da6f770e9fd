"""Records that users build by name: a wrong value is a `UsageError` with the field, as everywhere, and not pydantic's.

`model_validate`, by which files are read, still raises pydantic's `ValidationError`, for who reads to say where.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from quintsched.errors import InputError, UsageError
from quintsched.files.atomic import read_whole
from quintsched.files.strictjson import describe_faults, parse_strict

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


class RecordMetaclass(ModelMetaclass):
    """The class of such records."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        """Build a record; raises `UsageError`."""
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:
            faults = [(fault["type"], *fault["loc"]) for fault in error.errors()]
            fields: dict[str, FieldInfo] = vars(cls)["__pydantic_fields__"]
            if lacks := [str(name) for kind, name, *below in faults if kind == "missing" and not below]:
                call = ", ".join(f"{name}=…" for name, field in fields.items() if field.is_required())
                raise UsageError(
                    f"{cls.__name__}: {' and '.join(lacks)} missing; write {cls.__name__}({call})"
                ) from None
            raise UsageError(f"{cls.__name__}: {describe_faults(error, fields)}") from None


Record = TypeVar("Record", bound=BaseModel)


def _whole(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticCustomError("version", "Input should be 1")
    return value


FormatVersion = Annotated[Literal[1], BeforeValidator(_whole)]
"""Version of a file's format: a literal alone would take true for 1."""


def read_record(kind: type[Record], path: Path, most_bytes: int, what: str) -> Record:
    """Read a JSON file of one record; `what` names it in errors.

    Raises `UsageError` where it cannot be opened, `InputError` with path and place where it is broken.
    """
    content = read_json(path, most_bytes, what)
    try:
        return kind.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise InputError(f"{path}: {describe_faults(error, kind.model_fields)}") from error


def read_json(path: Path, most_bytes: int, what: str) -> object:
    """Return the content of a JSON file; raises as `read_record` does."""
    content = read_whole(path, most_bytes, what)
    try:
        return parse_strict(content)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
