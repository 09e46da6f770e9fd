"""Records that users build by name: a wrong value is a `UsageError` with the field, as everywhere, and not pydantic's.

`model_validate`, by which files are read, still raises pydantic's `ValidationError`, for who reads to say where.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from quintsched.errors import UsageError
from quintsched.files.strictjson import describe_faults

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
            raise UsageError(f"{cls.__name__}: {describe_faults(error)}") from None
