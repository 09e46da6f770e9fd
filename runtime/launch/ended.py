"""How an attempt of a run ended, and whether another one could end otherwise."""

from __future__ import annotations

from dataclasses import dataclass

DIED = 4
"""The exit code of a run that lost a rank: one that a signal ended has no code of its own."""

SURE = (0, 2, 3)
"""Exit codes that a run would end with again: good, a wrong setting, a misfit."""


@dataclass(frozen=True)
class Ended:
    """The exit code of an attempt, and whether it is not to be followed by another."""

    code: int
    is_final: bool

    def to_text(self) -> str:
        """Return it in words for another launcher."""
        return f"{self.code} {'final' if self.is_final else 'again'}"

    @classmethod
    def from_text(cls, text: str) -> Ended:
        """Return what another launcher said; anything else is a run that ended with `DIED`, for good."""
        code, _, rest = text.partition(" ")
        return cls(int(code), rest != "again") if code.isdecimal() and len(code) < 4 else cls(DIED, is_final=True)
