"""Logs of training runs: the records that rank 0 writes, one JSON object per line (docs/guide.md, "The log").

log.jsonl  ──▶  TrainingLog  ──▶  .series("loss") = (steps, values)    .summary() = the last and best figures
   grows   ──▶  LogReader    ──▶  .read_new() = the records since the last call
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintsched.errors import InputError, UsageError
from quintsched.files.atomic import read_whole
from quintsched.files.strictjson import parse_strict

MOST_LOG_BYTES = 2**28
ENDS = {"end": "as configured", "stop": "on request", "forward": "as configured"}
"""Ways in which a run ends by itself, by the event of its last record."""
EVENTS = ("start", "step", "epoch", "evaluation", "stop", "end", "forward")
LAST = "step_s", "samples_per_s", "tokens_per_s", "mfu", "bubble", "memory_gb"
"""Figures of the last `step` record that a summary repeats."""

_NUMBERS = (*LAST, "loss", "grad_norm", "lr", "left_s", "planned_bubble", "validation_loss")
_OF_RANKS = "rank_busy", "rank_memory_gb"

Record = Mapping[str, Any]
Series = tuple[list[int], list[float]]


@dataclass(frozen=True)
class TrainingLog:
    """Records of a run, in their order; a resumed run has continued the file of the run before."""

    path: Path
    records: tuple[Record, ...]

    @classmethod
    def load(cls, path: Path) -> TrainingLog:
        """Read a log, or that in a folder; raises `UsageError` if it cannot be opened, `InputError` with the line."""
        file = log_file(path)
        records = tuple(_parsed(read_whole(file, MOST_LOG_BYTES, "the log"), file))
        if not records:
            raise InputError(f"{file}: no record of a run")
        return cls(file, records)

    @property
    def name(self) -> str:
        """Name of the run: that of its file, or of its folder where the file is just `log.jsonl`."""
        return self.path.resolve().parent.name or self.path.stem if self.path.stem == "log" else self.path.stem

    @property
    def plan(self) -> str:
        """Schedule, mesh and microbatches of the last start; "" where the log begins later."""
        return next((str(record["plan"]) for record in reversed(self.records) if "plan" in record), "")

    def series(self, figure: str, events: tuple[str, ...] = ("step",)) -> Series:
        """Return the steps and values of a figure, without those that were not finite.

        Steps that a resumed run has done again are those of the later run.
        """
        found: dict[int, float] = {}
        for record in self.records:
            if record["event"] in events and isinstance(record.get(figure), int | float):
                if found and record["step"] <= next(reversed(found)):
                    found = {step: value for step, value in found.items() if step < record["step"]}
                found[record["step"]] = float(record[figure])
        return list(found), list(found.values())

    def summary(self) -> dict[str, Any]:
        """Return the last figures, the best validation and how the run ended, as JSON data.

        A `loss` of None was not finite; `ended` is None where the log has no end.
        """
        steps = [record for record in self.records if record["event"] == "step"]
        _, validated = self.series("validation_loss", ("epoch", "evaluation"))
        planned = [record["planned_bubble"] for record in self.records if record.get("planned_bubble") is not None]
        return {
            "run": self.name,
            "plan": self.plan,
            "step": max((record.get("step", 0) for record in self.records), default=0),
            **({"loss": steps[-1].get("loss")} if steps else {}),
            **({figure: steps[-1][figure] for figure in LAST if steps[-1].get(figure) is not None} if steps else {}),
            **({"best_validation_loss": min(validated)} if validated else {}),
            **({"planned_bubble": planned[-1]} if planned else {}),
            "ended": ENDS.get(self.records[-1]["event"]),
        }


class LogReader:
    """Reader of a log that may still grow."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._read_bytes = self._lines = 0

    def read_new(self) -> list[Record]:
        """Return the records since the last call; a last line that is not whole yet is left for the next one.

        Raises as `TrainingLog.load` does.
        """
        text = read_whole(self.file, MOST_LOG_BYTES, "the log", after=self._read_bytes)
        whole = text[: text.rfind(b"\n") + 1]
        records = list(_parsed(whole, self.file, self._lines))
        self._read_bytes, self._lines = self._read_bytes + len(whole), self._lines + whole.count(b"\n")
        return records


def log_file(path: Path) -> Path:
    """Return a log, or that in a folder; raises `UsageError` for a folder without one, or with several."""
    if path.suffix.lower() in (".yaml", ".yml"):
        raise UsageError(f"{path}: a job file; name the log of its run, which its log.path says, or the log's folder")
    return _in_folder(path) if path.is_dir() else path


def _in_folder(folder: Path) -> Path:
    logs = sorted(path for path in folder.glob("*.jsonl") if path.is_file())
    if len(logs) != 1:
        names = ", ".join(path.name for path in logs)
        raise UsageError(f"{folder}: {f'name one of its logs: {names}' if logs else 'no log (*.jsonl) in this folder'}")
    return logs[0]


def _parsed(text: bytes, file: Path, before: int = 0) -> Iterator[Record]:
    lines = text.split(b"\n")
    for number, line in enumerate(lines, start=before + 1):
        if not line.strip():
            continue
        try:
            record = parse_strict(line)
        except InputError as error:
            if number == before + len(lines):  # written by a run that goes on, or that was killed in the middle of it
                return
            raise InputError(f"{file}, line {number}: {error}") from error
        if not isinstance(record, dict) or record.get("event") not in EVENTS:
            raise InputError(f"{file}, line {number}: not a record of a run: {json.dumps(record)[:60]}")
        if record["event"] in ("step", "epoch", "evaluation") and type(record.get("step")) is not int:
            raise InputError(f"{file}, line {number}: /step: a whole number is needed")
        for name in _NUMBERS:
            if not isinstance(record.get(name, 0.0), int | float | None):
                raise InputError(f"{file}, line {number}: /{name}: a number is needed")
        for name in _OF_RANKS:
            if not isinstance(record.get(name, []), list) or not all(
                isinstance(one, int | float) for one in record.get(name, [])
            ):
                raise InputError(f"{file}, line {number}: /{name}: a list of numbers is needed")
        yield record
