"""How long instructions take and what they hold: the cost model of the simulator.

A costs file is JSON, in one unit of time that it names:

    {"unit": "ms", "forward": 18.522, "backward_input": 18.086, "backward_weight": 9.337, "p2p": 0.601,
     "optimizer": 4.1, "activation": 1.0}

What stands for good (`weights`, `gradients`, `optimizer_state`) is in the activations' unit of memory, and what a rank
holds where nothing is shared out.

A scalar is for a whole rank's worth of layers, so that a chunk costs 1/chunks of it; a list has one value per
stage, taken as it is. What is done once per slice, like a forward, costs 1/slices of a scalar.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quintsched.errors import InputError
from quintsched.files.atomic import read_whole
from quintsched.files.strictjson import describe_faults, parse_strict

MAX_BYTES = 2**24
"""Of a costs file."""

MOST = 1e100
"""The largest cost: sums and products of costs stay finite numbers."""

Cost = Annotated[float, Field(ge=0, le=MOST, allow_inf_nan=False, strict=True)]
PerStage = Cost | tuple[Cost, ...]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True)]


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
    recompute: PerStage | None = None
    """A forward run again, where activations were dropped; None: what the forward takes."""
    p2p: Cost = 0.0
    """A message between two pipeline ranks."""
    clip: PerStage = 0.0
    """The gradient norm of a stage; all ranks meet for it, so that the one with the most to do decides."""
    optimizer: PerStage = 0.0
    """The optimizer's step of a stage."""
    reduce_scatter: PerStage = 0.0
    """Adding up a stage's gradients over its replicas, each of which keeps a share of the sum."""
    all_gather: PerStage = 0.0
    """Gathering a stage's weights from the shares that were stepped; an all-reduce is a reduce-scatter and this."""
    gather_params: PerStage = 0.0
    """Gathering a stage's weights for a computation."""
    weights: PerStage = 0.0
    """What the weights hold in memory."""
    gradients: PerStage = 0.0
    """What their gradients hold."""
    optimizer_state: PerStage = 0.0
    """What the optimizer keeps of them."""
    experts: tuple[Share, ...] | Share = 0.0
    """Which share of a stage's weights on a rank are experts', where ep shares them out."""
    activation: PerStage = 1.0
    """What a microbatch holds in memory from its forward to the end of its backward."""
    activation_after_input: PerStage | None = None
    """What of it still stands between the halves of a backward; None: all of it."""
    activation_checkpointed: PerStage = 0.0
    """What stands of it between a forward and its recomputation, on stages that are recomputed."""
    keys: PerStage = 0.0
    """What the keys and values of a whole microbatch hold, from the forward of its first slice to the backward of that
    slice; nothing where microbatches are not cut into slices."""

    @classmethod
    def load(cls, path: Path) -> Costs:
        """Read a costs file; raises `UsageError` (missing) or `InputError` (broken), saying where."""
        text = read_whole(path, MAX_BYTES, "the costs file")
        try:
            return cls.model_validate_json(json.dumps(parse_strict(text)))
        except ValidationError as error:
            raise InputError(f"{path}: {describe_faults(error)}") from error
        except InputError as error:
            raise InputError(f"{path}: {error}") from error

    def check_stages(self, num_stages: int) -> None:
        """Raise `InputError` if a list does not have one value per stage."""
        for name, value in self:
            if isinstance(value, tuple) and len(value) != num_stages:
                raise InputError(f"costs: /{name} has {len(value)} values, but the plan has {num_stages} stages")

    def of_part(self, name: str, stage: int, parts: int) -> float:
        """What a computation of `stage` costs, times `parts` (chunks x slices): undivided, whole numbers stay exact."""
        value = self._of(name)
        return float(value[stage]) * parts if isinstance(value, tuple) else float(value)

    def of_stage(self, name: str, stage: int, chunks: int, slices: int) -> float:
        """What is there or done once for a whole `stage` costs, times chunks x slices likewise."""
        value = self._of(name)
        return float(value[stage]) * chunks * slices if isinstance(value, tuple) else float(value) * slices

    def spread(self, shares: Sequence[float], slices: int) -> Costs:
        """Return these costs with what is for a whole rank's worth of layers spread over stages, a value for each.

        `shares` says how much of a rank's worth each stage is; where it is empty, the costs stay as they are.
        """
        found: dict[str, tuple[float, ...]] = {}
        for name, value in self if shares else ():
            if name not in _NOT_OF_A_STAGE and isinstance(value, float | int):
                parts = slices if name in _OF_A_UNIT else 1
                found[name] = tuple(value * share / parts for share in shares)
        return self.model_copy(update=found)

    def experts_of(self, stage: int) -> float:
        """The share of a stage's weights that are experts'."""
        return self.experts[stage] if isinstance(self.experts, tuple) else self.experts

    def _of(self, name: str) -> PerStage:
        value: PerStage | None = getattr(self, name)
        return getattr(self, _INSTEAD[name]) if value is None else value


_OF_A_UNIT = frozenset(
    {"forward", "backward_input", "backward_weight", "recompute"}
    | {"activation", "activation_after_input", "activation_checkpointed"}
)
"""What costs anew for each slice; all else of a stage is there, or done, once."""

_NOT_OF_A_STAGE = frozenset({"unit", "p2p", "experts"})
"""What does not depend on how much of the model a stage is."""

_INSTEAD = {"recompute": "forward", "activation_after_input": "activation"}
"""Which cost stands for one that is not given."""
