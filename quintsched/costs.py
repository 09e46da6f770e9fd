"""How long instructions take and what they hold: the cost model of the simulator.

A costs file is JSON, in one unit of time that it names:

    {"unit": "ms", "forward": 18.522, "backward_input": 18.086, "backward_weight": 9.337, "p2p": 0.601,
     "activation": 1.0}

A scalar is for a whole rank's worth of layers, so that a chunk costs 1/chunks of it; a list has one value per
stage, taken as it is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quintsched.errors import InputError, UsageError
from quintsched.strictjson import describe_faults, parse_strict

Cost = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
PerStage = Cost | tuple[Cost, ...]


class Costs(BaseModel):
    """Costs of a rank's computations (scalar) or of each stage's (one value per stage)."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    unit: str = "forward"
    """The unit of all times, for people: "ms", "s", or "forward" for multiples of a forward."""
    forward: PerStage = 1.0
    """A forward."""
    backward_input: PerStage = 1.0
    """The half of a backward that makes the input's gradient."""
    backward_weight: PerStage = 1.0
    """The half of a backward that makes the weights' gradient; a full backward is the sum of the halves."""
    p2p: Cost = 0.0
    """A message between two pipeline ranks."""
    activation: PerStage = 1.0
    """What a microbatch holds in memory from its forward to the end of its backward."""
    activation_after_input: PerStage | None = None
    """What of it still stands between the halves of a backward; None: all of it."""

    @classmethod
    def load(cls, path: Path) -> Costs:
        """Read a costs file; raises `UsageError` (missing) or `InputError` (broken), saying where."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}: cannot read the costs file: {error}") from error
        try:
            return cls.model_validate_json(json.dumps(parse_strict(text)))
        except ValidationError as error:
            raise InputError(f"{path}: {describe_faults(error)}") from error
        except InputError as error:
            raise InputError(f"{path}: {error}") from error

    def check_stages(self, num_stages: int) -> None:
        """Raise `InputError` if a list does not have one value per stage."""
        for name in ("forward", "backward_input", "backward_weight", "activation", "activation_after_input"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != num_stages:
                raise InputError(f"costs: /{name} has {len(value)} values, but the plan has {num_stages} stages")

    def of_part(self, name: str, stage: int, parts: int) -> float:
        """What a computation of `stage` costs, times `parts` (chunks x slices): undivided, whole numbers stay exact."""
        value = getattr(self, name)
        if value is None:
            value = self.activation
        return float(value[stage]) * parts if isinstance(value, tuple) else float(value)
