"""Costs of single layers, from which stages are cut: a JSON file, or made from a prediction or a trace.

    {"unit": "ms", "p2p": 0.1,
     "layers": [{"kind": "embedding", "forward": 0.1},
                {"kind": "decoder", "count": 61, "forward": 1.0, "activation": 0.2, "state": 1.5},
                {"kind": "mtp", "forward": 1.3},
                {"kind": "loss", "forward": 2.0}]}

The kinds are those of Megatron-LM's layouts. Layers of multi-token prediction (mtp) are one piece that is not cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from quintsched.errors import InputError, counted
from quintsched.files.user_records import read_record
from quintsched.ir.instruction_columns import Amounts, Ints
from quintsched.ir.plan_data import PlanData
from quintsched.simulation.cost_forms import Cost
from quintsched.simulation.costs import Costs

MOST_BYTES, MOST_LAYERS = 2**24, 2**12
Kind = Literal["embedding", "decoder", "mtp", "loss"]
AMOUNTS = ("forward", "backward_input", "backward_weight", "activation", "state")
MODULES: dict[Kind, tuple[str, ...]] = {
    "embedding": ("tok_embeddings",),
    "decoder": ("layers.{}",),
    "mtp": ("mtp_layers.{}",),
    "loss": ("norm", "output"),
}
"""Modules of each kind by torchtitan's names; `{}` counts the layers of the kind."""


class LayerCost(BaseModel):
    """Costs of one or several equal layers."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    kind: Kind = "decoder"
    count: Annotated[int, Field(ge=1, le=MOST_LAYERS, strict=True)] = 1
    """Number of such layers."""
    forward: Cost
    """Time of a microbatch's forward."""
    backward_input: Cost | None = None
    """Time of the input half of its backward; None: as `forward`."""
    backward_weight: Cost | None = None
    """Time of the weight half of its backward; None: as `forward`."""
    activation: Cost = 0.0
    """Memory that a microbatch holds from its forward to the end of its backward."""
    state: Cost = 0.0
    """Memory of weights, gradients and optimizer state."""
    modules: tuple[str, ...] | None = None
    """Names of its modules; `{}` counts the layers of the kind. None: torchtitan's."""

    @classmethod
    def of_kind(cls, kind: Kind, amounts: Mapping[str, float], count: int = 1) -> LayerCost:
        """Return layers of a kind with these amounts, some of `AMOUNTS`."""
        return cls.model_validate({"kind": kind, "count": count, **amounts})

    def amount(self, name: str) -> float:
        """Return one of `AMOUNTS`."""
        value = getattr(self, name)
        return float(self.forward if value is None else value)


class LayerCosts(BaseModel):
    """Costs of the layers of a model, in order: an embedding, decoders, perhaps mtp, and the loss with its head."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    layers: tuple[LayerCost, ...]
    unit: str = "ms"
    """Unit of times."""
    memory_unit: str = "GB"
    p2p: Cost = 0.0
    """Time of a message from one rank to the next."""

    @model_validator(mode="after")
    def _are_in_order(self) -> LayerCosts:
        kinds = [layer.kind for layer in self.layers for _ in range(layer.count)]
        order = sorted(kinds, key=list(MODULES).index)
        if kinds != order or kinds.count("embedding") != 1 or kinds.count("loss") != 1 or "decoder" not in kinds:
            raise PydanticCustomError("layers", "give one embedding, decoders, mtp if there is any, and one loss")
        if len(kinds) > MOST_LAYERS:
            raise PydanticCustomError("layers", f"{counted(len(kinds), 'layer')}; at most {MOST_LAYERS} can be cut")
        return self

    @classmethod
    def load(cls, path: Path) -> LayerCosts:
        """Read a file of layer costs; raises `UsageError` (missing) or `InputError` (broken), with the place."""
        return read_record(cls, path, MOST_BYTES, "the layer costs")

    @classmethod
    def from_stage_costs(cls, plan: PlanData, costs: Costs) -> LayerCosts:
        """Return the costs of layers from those of a plan's stages, as a trace has them; memory is not in a trace.

        Each block of a stage in the middle takes an equal share of its stage. The embedding and the loss take what the
        first and the last stage need beyond their decoders, which are as those of the middle.

        Raises:
            InputError: a plan without blocks, or without a stage that has decoders only.
        """
        blocks = plan.blocks_per_stage
        middle = [stage for stage in range(1, len(blocks) - 1) if blocks[stage]]
        if not middle:
            raise InputError("the plan has no stage of decoders only; trace one compiled with --stages, of 3 or more")
        every = np.arange(len(blocks))
        counts = replace(plan.schedule, chunks=len(blocks) // plan.mesh.pp)
        times = {
            name: costs.of_units(name, every, np.zeros_like(every), counts) / counts.chunks * counts.slices
            for name in AMOUNTS[:3]
        }
        usual = {
            name: float(sum(each[middle]) / sum(blocks[stage] for stage in middle)) for name, each in times.items()
        }
        ends = {
            stage: {
                name: max(float(each[stage]) - (blocks[stage] - 1) * usual[name], 0.0) for name, each in times.items()
            }
            for stage in (0, len(blocks) - 1)
        }
        layers = [LayerCost.of_kind("embedding", ends[0])]
        for stage, number in enumerate(blocks):
            is_end = stage in ends
            each = usual if is_end else {name: float(taken[stage]) / max(number, 1) for name, taken in times.items()}
            if number - is_end > 0:
                layers.append(LayerCost.of_kind("decoder", each, number - is_end))
        layers.append(LayerCost.of_kind("loss", ends[len(blocks) - 1]))
        p2p = costs.p2p if isinstance(costs.p2p, float | int) else costs.p2p.latency
        return cls(layers=tuple(layers), unit=costs.unit, p2p=float(p2p))


@dataclass(frozen=True, eq=False)
class Layers:
    """Layers one by one: kind and modules of each, the pieces that are not cut, and sums of each of `AMOUNTS`.

    `ends` has the number of layers before each piece, and all at last; `sums[name]` the amount of these.
    """

    kinds: tuple[Kind, ...]
    modules: tuple[tuple[str, ...], ...]
    ends: Ints
    sums: dict[str, Amounts]

    @classmethod
    def of(cls, costs: LayerCosts) -> Layers:
        """Return the layers of a file."""
        every = [layer for layer in costs.layers for _ in range(layer.count)]
        kinds = tuple(layer.kind for layer in every)
        seen: dict[str, int] = {}
        modules = []
        for layer in every:
            number = seen[layer.kind] = seen.get(layer.kind, -1) + 1
            modules.append(tuple(name.replace("{}", str(number)) for name in layer.modules or MODULES[layer.kind]))
        cuts = [
            at for at in range(len(every) + 1) if not 0 < at < len(every) or kinds[at - 1 : at + 1] != ("mtp", "mtp")
        ]
        ends = np.array(cuts)
        each = {name: np.array([0.0, *(layer.amount(name) for layer in every)]) for name in AMOUNTS}
        return cls(kinds, tuple(modules), ends, {name: np.cumsum(values)[ends] for name, values in each.items()})

    @property
    def num_pieces(self) -> int:
        """Number of pieces."""
        return len(self.ends) - 1

    @property
    def has_mtp(self) -> bool:
        """Whether there are layers of multi-token prediction: the last piece but one."""
        return "mtp" in self.kinds

    def of_stages(self, name: str, cuts: Ints) -> Amounts:
        """Return an amount of each stage: (cuts, stages), for cuts with the pieces before each stage, and all."""
        found: Amounts = np.diff(self.sums[name][cuts], axis=-1)
        return found
