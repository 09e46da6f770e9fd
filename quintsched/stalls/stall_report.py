"""Stall report: culprits, chain of waits, last states of all ranks, and the plan, in one JSON file.

    {"format": "quintsched.stall", "version": 1,
     "culprits": [{"rank": 2, "host": "a", "fault": "ended", "fate": {"kind": "signal", "code": 9}, "step": 17,
                   "place": {"rank": 2, "index": 9, "instruction": "Fwd(stage=2, microbatch=3)", …}, …}],
     "chain": [{"waiter": {"rank": 1, …}, "waits_for": {"rank": 2, …}, "since_s": 0.4}, …],
     "states": [{"rank": 0, "phase": "step", "index": 4, …}, …],
     "plan": {"format": "quintsched.plan", …}}

No culprit means that none can be told from the others; the text then lists the positions of all ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, ValidationError

from quintsched.errors import InputError, counted
from quintsched.files.atomic import read_whole, write_whole
from quintsched.files.strictjson import describe_faults, parse_strict
from quintsched.formats import plan_json
from quintsched.ir.mesh import MAX_RANKS
from quintsched.ir.plan_data import PlanData
from quintsched.simulation.notebook_html import heading, words
from quintsched.stalls.last_reported_rank_states import RankState
from quintsched.stalls.verdict_data import Culprit, Strict, WaitLink
from quintsched.stalls.verdict_text import in_words

STALL_FORMAT = "quintsched.stall"
STALL_VERSION = 1
MOST_STALL_BYTES = 2**27
MOST_OF_A_RANK = 4
"""Maximum number of culprits, links or states per rank of the mesh."""


class StallReport(Strict):
    """Diagnosis of a stall with all known facts; `culprits` is empty if none can be named."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, arbitrary_types_allowed=True)

    culprits: tuple[Culprit, ...] = Field(max_length=MAX_RANKS)
    chain: tuple[WaitLink, ...] = Field(max_length=MAX_RANKS)
    states: tuple[RankState, ...] = Field(max_length=MAX_RANKS)
    plan: PlanData = Field(exclude=True, repr=False)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Culprit ranks."""
        return tuple(culprit.rank for culprit in self.culprits)

    def words(self) -> str:
        """Return the report as a message of a few lines."""
        return in_words(self.culprits, self.chain, self.states)

    def _repr_html_(self) -> str:
        """Return the report's text as HTML, for notebooks."""
        return f"<div>{heading(f'{self.plan.title}: the run stalled')}{words(self.words())}</div>"

    def to_json(self) -> str:
        """Return the text of a report file, which contains the plan."""
        head: dict[str, Any] = {"format": STALL_FORMAT, "version": STALL_VERSION, **self.model_dump(mode="json")}
        return json.dumps(head, allow_nan=False)[:-1] + ', "plan": ' + plan_json.dumps(self.plan) + "}\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> StallReport:
        """Parse a report file; raises `InputError` with a JSON pointer to the fault."""
        if len(text) > MOST_STALL_BYTES:
            raise InputError(f"the file has {len(text)} bytes; a report has at most {MOST_STALL_BYTES}")
        data = parse_strict(text)
        if not isinstance(data, dict) or data.get("format") != STALL_FORMAT:
            raise InputError(f'/format: this is not a stall report; it must say "format": "{STALL_FORMAT}"')
        version = data.pop("version", None)
        if type(version) is not int or version != STALL_VERSION:
            raise InputError(f"/version: this release reads {STALL_VERSION}, not {json.dumps(version)[:20]}")
        del data["format"]
        if not isinstance(data.get("plan"), dict):
            raise InputError("/plan: a report holds the plan of the run")
        try:
            plan = plan_json.loads(json.dumps(data.pop("plan")))
        except InputError as error:
            raise InputError(f"/plan: {error}") from error
        for name in ("culprits", "chain", "states"):
            found = data.get(name)
            if isinstance(found, list) and len(found) > MOST_OF_A_RANK * plan.mesh.size:
                raise InputError(
                    f"/{name}: there are {len(found)}, but the mesh {plan.mesh} has {counted(plan.mesh.size, 'rank')}"
                )
        try:
            report = StallFile.model_validate_json(json.dumps(data))
        except ValidationError as error:
            raise InputError(describe_faults(error)) from error
        return cls(culprits=report.culprits, chain=report.chain, states=report.states, plan=plan)._fitting()

    def _fitting(self) -> StallReport:
        """Return the report; raises `InputError` for places that its plan does not have."""
        mesh, places = self.plan.mesh, [culprit.place for culprit in self.culprits]
        places += [place for link in self.chain for place in (link.waiter, link.waits_for)]
        ranks = [(place.rank, place.index) for place in places]
        ranks += [(state.rank, state.index if state.program == self.plan.mode else None) for state in self.states]
        for rank, index in ranks:
            if not 0 <= rank < mesh.size:
                raise InputError(f"/states: rank {rank} is not in the mesh {mesh}")
            if index is not None and not 0 <= index < len(self.plan.programs[mesh.pp_rank(rank)]):
                raise InputError(f"/states: rank {rank} has no instruction {index}")
        return self

    def save(self, path: str | Path) -> None:
        """Write the report atomically; raises `UsageError` on failure."""
        write_whole(Path(path), self.to_json(), "the report")

    @classmethod
    def load(cls, path: str | Path) -> StallReport:
        """Read a report; raises `UsageError` if it cannot be opened, `InputError` if it is broken."""
        data = read_whole(Path(path), MOST_STALL_BYTES, "the report")
        try:
            return cls.from_json(data)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error


class StallFile(Strict):
    """Entries of a report's file beside its format and version."""

    culprits: tuple[Culprit, ...] = Field(max_length=MAX_RANKS)
    chain: tuple[WaitLink, ...] = Field(max_length=MAX_RANKS)
    states: tuple[RankState, ...] = Field(max_length=MAX_RANKS)
