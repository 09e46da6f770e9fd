"""JSON Schemas of a plan file's instructions, generated from their fields: for those who write plans by other means."""

from __future__ import annotations

from typing import Any

from quintsched.formats.plan_file_shared_fields import LARGEST
from quintsched.formats.plan_json import CODECS, TYPES
from quintsched.ir.mesh import AXES

Schema = dict[str, Any]

_INDEX: Schema = {"type": "integer", "minimum": 0, "maximum": LARGEST}
_TYPES: dict[str, Schema] = {
    "int": _INDEX,
    "str": {"type": "string", "minLength": 1, "maxLength": 200},
    "tuple[int, ...]": {"type": "array", "items": _INDEX},
    "tuple[int, int]": {"type": "array", "items": _INDEX, "minItems": 2, "maxItems": 2},
    "tuple[str, ...]": {"type": "array", "items": {"enum": list(AXES)}},
}

FIELD_SCHEMAS: dict[str, Schema] = {name: _TYPES[kind] for name, kind in TYPES.items()}
"""Schema of each field, by its name."""

INSTRUCTION_SCHEMA: Schema = {
    "oneOf": [
        {
            "type": "object",
            "properties": {"op": {"const": op}} | {name: FIELD_SCHEMAS[name] for name in CODECS[op].names},
            "required": ["op", *CODECS[op].names],
            "additionalProperties": False,
        }
        for op in sorted(CODECS)
    ]
}
