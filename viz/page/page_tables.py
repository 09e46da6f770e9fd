"""Tables of the planner for the interactive page: instructions, data-flow rules, profiles and costs, as JSON data.

The page's JavaScript evaluates these tables, and states none of them itself: so every page that Python writes agrees
with the planner that wrote it. No matplotlib here.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from quintsched.formats.instruction_schema import FIELD_SCHEMAS
from quintsched.formats.plan_file_shared_fields import HeadFile
from quintsched.graph.event_edges import ISSUED
from quintsched.graph.transport_ordering_rules import PROFILES, TransportProfile, each_pair
from quintsched.ir.instruction_columns import FIELDS, NUMBERS
from quintsched.ir.instruction_inputs_and_outputs import RULES
from quintsched.ir.instruction_set import ALL, LOANS, OWN_QUEUES, HostCopy, Instruction, Message, Send
from quintsched.ir.instruction_values import AMBIENT, COUNTED, TRAVELS, WORDS, ValueKind
from quintsched.ir.mesh import EXPERT_REPLICA_AXES, MAX_RANKS, REPLICA_AXES
from quintsched.ir.plan_data import MAX_BLOCKS, MAX_TIED
from quintsched.simulation.costs import INSTEAD, NOT_OF_STAGES, PER_UNIT, TAKEN_AS_IT_IS, Costs
from quintsched.simulation.idle_time import CAUSES, COMPUTING_TIME, OTHERS
from quintsched.simulation.instruction_durations import BETWEEN_INPUTS
from quintsched.simulation.simulated_activation_memory import HELD, HELD_FOR_OTHERS
from quintsched.stalls.stall_report import StallFile
from quintsched.trace.trace_json import RankFile
from quintsched.verify.wellformed import ZERO_STAGES

from ..instruction_colours import CARGO, CAUSE_COLOURS, WORKING_COLOURS, look_of

FORMS: dict[str, type[BaseModel]] = {"plan": HeadFile, "costs": Costs, "trace": RankFile, "stall": StallFile}
"""Models of the files that may be dropped on a page; it reads them by their schemas."""


def page_tables() -> dict[str, object]:
    """Return everything that the page has to know about the planner."""
    return {
        "ops": [_instruction(kind) for kind in ALL],
        "numbers": sorted(NUMBERS),
        "rules": {
            kind.__name__: [[term[0].name, term[1].name, *(part.name for part in term[2:])] for term in terms]
            for kind, terms in RULES.items()
        },
        "kinds": [kind.name for kind in ValueKind],
        "words": [WORDS[kind] for kind in ValueKind],
        "counted": {kind.value: word for kind, word in COUNTED.items()},
        "travels": [kind.name for kind in TRAVELS],
        "ambient": sorted(kind.name for kind in AMBIENT),
        "held": {kind.name: cost for kind, cost in HELD.items()},
        "held_for_others": {kind.name: cost for kind, cost in HELD_FOR_OTHERS.items()},
        "own_queues": [[kind.__name__ for kind in kinds] for kinds in OWN_QUEUES.values()],
        "profiles": [
            {"name": profile.name, "stands_for": profile.stands_for, "queues": _queues(profile)}
            for profile in PROFILES.values()
        ],
        "replica_axes": list(REPLICA_AXES),
        "expert_replica_axes": list(EXPERT_REPLICA_AXES),
        "costs": Costs().model_dump(mode="json"),
        "instead": INSTEAD,
        "costs_as_they_are": sorted(NOT_OF_STAGES | TAKEN_AS_IT_IS),
        "costs_per_slice": sorted(PER_UNIT),
        "causes": {cause: {"meaning": means, "colour": CAUSE_COLOURS[cause]} for cause, means in CAUSES.items()},
        "working": {part: WORKING_COLOURS[part] for part in (COMPUTING_TIME, OTHERS)},
        "forms": {name: _slim(form.model_json_schema()) for name, form in FORMS.items()} | {"fields": FIELD_SCHEMAS},
        "most": {"ranks": MAX_RANKS, "names": MAX_TIED, "blocks": MAX_BLOCKS, "axes": list(REPLICA_AXES)},
        "cargo": {kind.name: {"label": look.label, "colour": look.colour} for kind, look in CARGO.items()},
    }


def _instruction(kind: type[Instruction]) -> dict[str, object]:
    look = look_of(kind)
    return {
        "name": kind.__name__,
        "letters": kind.letters,
        "fields": list(FIELDS[kind]),
        "costs": list(kind.costs),
        "exchanges": list(kind.exchanges),
        "computes": kind.computes,
        "begins_backward": kind.begins_backward,
        "ends_backward": kind.ends_backward,
        "whole_mesh": kind.whole_mesh,
        "among_replicas": kind.among_replicas,
        "on_bucket": kind.on_bucket,
        "message": ("send" if issubclass(kind, Send) else "receive") if issubclass(kind, Message) else None,
        "loan": issubclass(kind, LOANS),
        "host_copy": issubclass(kind, HostCopy),
        "issued": issubclass(kind, ISSUED) and not issubclass(kind, LOANS),
        "between_inputs": issubclass(kind, BETWEEN_INPUTS),
        "zero_stages": ZERO_STAGES.get(kind),
        "label": look.label,
        "colour": look.colour,
    }


def _slim(schema: Any) -> Any:
    """Return a JSON Schema without what is only for readers."""
    if isinstance(schema, dict):
        said = ("title", "description", "default")
        return {key: _slim(value) for key, value in schema.items() if key not in said or isinstance(value, dict)}
    return [_slim(value) for value in schema] if isinstance(schema, list) else schema


def _queues(profile: TransportProfile) -> str:
    """Return how a profile orders messages: one queue for all, one wire, by pair, by channel, or not at all."""
    if profile.one_queue or profile.one_wire:
        return "one" if profile.one_queue else "wire"
    if profile.matches_by_tag:
        return "none"
    return "pair" if profile.message_queues is each_pair else "channel"
