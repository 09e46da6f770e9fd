"""Sections of a job file that are read whole only when the model and the data are built, as `model.options`.

job.yaml:                                                         the same words as for all other keys
  model.options.hiden: unknown key; did you mean 'hidden'?
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import PrivateAttr

from quintsched.errors import UsageError

from .engine_settings import Settings


class SourcedSection(Settings):
    """A section that remembers which file it is from."""

    _source: str = PrivateAttr("")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__  # wherever they are from

    def take_source(self, source: str) -> None:
        """Remember the file, and overrides, that the section is from."""
        self._source = source

    @contextmanager
    def naming_source(self, section: str) -> Iterator[None]:
        """Name the file in an error about a key of this section within a context."""
        try:
            yield
        except UsageError as error:
            if not self._source or not str(error).startswith(f"{section}."):
                raise
            raise UsageError(f"{self._source}:\n  {error}") from error.__cause__


def source_of(path: str | Path, overrides: Sequence[str]) -> str:
    """Return words for a job file with overrides."""
    return " ".join([str(path), *(f"--set {override}" for override in overrides)])
