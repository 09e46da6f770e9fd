"""Settings that must be equal on all ranks: compared by SHA-256 digests, then named one by one where these differ.

    sections   {"job": {"train.seed": 0, …}, "loss": None}           None: this rank does not take part in it
        │ one all-gather of a digest per section ──▶ equal: go on
        └ not ──▶ one rank of each digest sends its text (bounded JSON) ──▶ MisfitError, on all ranks in the same words:
                  … (rank 2 differs from the others): train.seed is 1 on rank 2, but 0 on ranks 0, 1 and 3

The minority is called odd. Between two ranks, or two halves, neither is a minority, and both are named.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from quintsched.errors import MisfitError, listed_ranks

from ..comm import Group
from ..comm.host_collectives import broadcast_bytes, share_bytes

_logger = logging.getLogger("quintsched.runtime")

Plain = None | bool | int | float | str
"""Types that a value of a setting may have."""

Record = Mapping[str, Plain]
"""Settings by name."""

MOST_KEYS = 10
"""Differing settings that a message names at most."""

MOST_SECTION_BYTES = 2**20
"""Longest text of a section, in bytes, that one rank sends to the others."""

_SHOWN, _BEFORE = 100, 30
_MOST_VERSIONS = 8
_ABSENT = "not there"


@dataclass(frozen=True)
class Section:
    """Settings that are compared together: a canonical text of them all, and a function that returns them by name."""

    text: str
    record: Callable[[], Record]

    @classmethod
    def from_settings(cls, record: Record) -> Section:
        """Return a section of the given settings."""
        return cls(json.dumps(record, sort_keys=True), lambda: record)


Sections = Mapping[str, Section | None]
"""This rank's sections, by names that are the same on all ranks; None: the rank takes no part in the comparison."""

Versions = list[tuple[list[int], Record]]
"""Distinct versions of a section: for each, the group members that have it, and its settings."""


def require_same(sections: Sections, group: Group, what: str, advice: str) -> None:
    """Raise `MisfitError`, with the same message on all members of a group, where their sections differ (collective).

    Args:
        sections: the sections of this rank.
        group: the members that are compared.
        what: the compared object, in words.
        advice: the remedy, in words.
    """
    found, who = _find_differences(sections, group)
    if found:
        raise MisfitError(f"the ranks do not agree on {what}{who}: {_listed(found)}; {advice}")


def agree(what: str, fingerprint: str, group: Group) -> None:
    """Raise `MisfitError`, on every member, unless all of them have the same fingerprint of `what` (collective).

    The message names each fingerprint and the ranks that have it.
    """
    require_same({what: Section.from_settings({what: fingerprint})}, group, what, "give all of them the same")


def warn_of_differences(sections: Sections, group: Group, what: str, advice: str) -> None:
    """Log a warning, on the first member of a group, where sections differ but may (collective)."""
    found, who = _find_differences(sections, group)
    if found and group.index == 0:
        _logger.warning("the ranks do not have the same %s%s: %s; %s", what, who, _listed(found), advice)


def _find_differences(sections: Sections, group: Group) -> tuple[list[str], str]:
    """Return, on all members, the differences, and the odd ranks in brackets if there is a minority; else ""."""
    if group.size == 1:
        return [], ""
    said = _gather_digests(sections, group)
    odd = Counter[int]()
    found: dict[str, str] = {}
    is_clear = True
    for number, (name, section) in enumerate(sections.items()):
        digests = [row[number] for row in said]
        if len({digest for digest in digests if any(digest)}) < 2:
            continue
        versions = _exchange(section, digests, group)
        for key, others, words in _differences(versions, name, group.ranks):
            found.setdefault(key, words)
            is_clear = is_clear and others is not None
            odd.update(others or ())
    clearly = is_clear and bool(found)
    who = f" ({listed_ranks([*odd])} {'differs' if len(odd) == 1 else 'differ'} from the others)" if clearly else ""
    return [*found.values()], who


def _gather_digests(sections: Sections, group: Group) -> list[list[bytes]]:
    """Return the digest (32 bytes) of each section, by member; zeros where a member takes no part."""
    mine = b"".join(
        bytes(32) if section is None else hashlib.sha256(section.text.encode()).digest()
        for section in sections.values()
    )
    rows = share_bytes(group, mine)
    return [[row[start : start + 32] for start in range(0, len(mine), 32)] for row in rows]


def _exchange(section: Section | None, digests: Sequence[bytes], group: Group) -> Versions:
    """Broadcast the settings of each distinct digest from its first member; return them with all its members."""
    members: dict[bytes, list[int]] = {}
    for member, digest in enumerate(digests):
        if any(digest):
            members.setdefault(digest, []).append(member)
    versions: Versions = []
    for same in list(members.values())[:_MOST_VERSIONS]:
        speaks = group.index == same[0]
        text = json.dumps(section.record(), sort_keys=True).encode() if speaks and section is not None else b""
        if len(text) > MOST_SECTION_BYTES:
            text = json.dumps({"": hashlib.sha256(text).hexdigest()}).encode()
        versions.append((same, json.loads(broadcast_bytes(group, text, same[0]))))
    return versions


def _differences(versions: Versions, section: str, ranks: Sequence[int]) -> list[tuple[str, list[int] | None, str]]:
    """Return the differences: the setting, the odd ranks in it (None: there is no minority), and the words."""
    found = []
    for key in sorted({key for _, record in versions for key in record}):
        by_value: dict[str, list[int]] = {}
        for members, record in versions:
            value = json.dumps(record[key], sort_keys=True) if key in record else _ABSENT
            by_value.setdefault(value, []).extend(ranks[member] for member in members)
        if len(by_value) > 1:
            found.append((key or section, *_told_apart(key or section, by_value)))
    return found


def _told_apart(key: str, by_value: Mapping[str, list[int]]) -> tuple[list[int] | None, str]:
    """Return the odd ranks, if there is a minority, and a sentence: each value with its ranks, odd ones first."""
    excerpts = _excerpts(list(by_value))
    sizes = sorted(map(len, by_value.values()), reverse=True)
    is_clear = sizes[0] > sizes[1]
    order = sorted(by_value, key=lambda value: (len(by_value[value]) if is_clear else 0, min(by_value[value])))
    each = [f"{excerpts[value]} on {listed_ranks(by_value[value])}" for value in order]
    odd = [rank for value in order[:-1] for rank in by_value[value]] if is_clear else None
    return odd, f"{key} is {', '.join(each[:-1])}, but {each[-1]}"


def _excerpts(values: Sequence[str]) -> dict[str, str]:
    """Return values as a message shows them: long ones from shortly before the place where they differ."""
    alike = next((k for k, letters in enumerate(zip(*values, strict=False)) if len(set(letters)) > 1), 0)
    start = max(alike - _BEFORE, 0)
    return {value: value if len(value) <= _SHOWN else _cut(value, start) for value in values}


def _cut(value: str, start: int) -> str:
    end = start + _SHOWN
    return f"{'…' if start else ''}{value[start:end]}{'…' if end < len(value) else ''}"


def _listed(words: Sequence[str]) -> str:
    more = len(words) - MOST_KEYS
    return "; ".join([*words[:MOST_KEYS], *([f"and {more} more"] if more > 0 else [])])
