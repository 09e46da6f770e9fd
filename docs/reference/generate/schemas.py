"""`*.schema.json`: JSON Schemas of the files that quintsched reads and writes, for those who write them by other means.

Each is that of the model that reads the file. The instructions of a plan are generated from their fields.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from quintsched.collectives.collective_json import CollectiveFile
from quintsched.formats.instruction_schema import INSTRUCTION_SCHEMA
from quintsched.formats.plan_file_shared_fields import PLAN_FORMAT, PlanFile
from quintsched.simulation.costs import Costs
from quintsched.solve.stage_cuts.layer_costs import LayerCosts
from quintsched.stalls.stall_report import STALL_FORMAT, STALL_VERSION, StallFile
from quintsched.strategies.descriptions.hardware import Hardware
from quintsched.strategies.descriptions.model import Model
from quintsched.trace.trace_json import RankFile

DIALECT = "https://json-schema.org/draft/2020-12/schema"
PLAN = "plan.schema.json"
FILES: dict[str, tuple[type[BaseModel], str]] = {
    "collective": (CollectiveFile, "A collective spelled out in messages."),
    "costs": (Costs, "Costs of a plan's instructions, for simulate, compare, render and solve."),
    "hardware": (Hardware, "A cluster, for predict and tune."),
    "layers": (LayerCosts, "Costs of a model's layers, for layout."),
    "model": (Model, "A model, for predict and tune."),
    "plan": (PlanFile, "A plan: one list of instructions for each pipeline coordinate."),
    "stall": (StallFile, "The report of a run that hung or lost a rank."),
    "trace": (RankFile, "Measured times of one rank: when each instruction of its program ran."),
}
"""The model of each kind of file, and what the file is."""

Schema = dict[str, Any]


def schema_texts() -> dict[str, str]:
    """Return the content of each schema file, by its name."""
    return {f"{kind}.schema.json": json.dumps(_schema(kind), indent=1, ensure_ascii=False) + "\n" for kind in FILES}


def _schema(kind: str) -> Schema:
    form, title = FILES[kind]
    found: Schema = _portable(form.model_json_schema())
    if form is PlanFile:
        found["properties"]["format"] = {"const": PLAN_FORMAT}
        found["properties"]["programs"] = {"type": "array", "items": {"type": "array", "items": INSTRUCTION_SCHEMA}}
    if form is StallFile:
        head = {"format": {"const": STALL_FORMAT}, "version": {"const": STALL_VERSION}, "plan": {"$ref": PLAN}}
        found["properties"], found["required"] = head | found["properties"], [*head, *found["required"]]
    return {
        "$schema": DIALECT,
        "$id": f"{kind}.schema.json",
        **found,
        "title": f"quintsched {kind}",
        "description": title,
    }


def _portable(schema: Any) -> Any:
    """Return a schema without patterns of Unicode classes, which not every validator knows."""
    if isinstance(schema, dict):
        kept = {key: value for key, value in schema.items() if key != "pattern" or "{" not in value}
        return {key: _portable(value) for key, value in kept.items()}
    return [_portable(value) for value in schema] if isinstance(schema, list) else schema
