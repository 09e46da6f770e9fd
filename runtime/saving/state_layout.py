"""How what a rank saves lies in the whole model: what makes its file fit any other mesh.

    rank-00002.safetensors   __metadata__  quintsched.layout: {…, "tensors": {"model.3.qkv.weight": 0, …}}
                             "model.3.qkv.weight"                     [▓▓▓▓▓]         numbers 4 to 9 of the flat …
                                                                         │
    layout.placements["model.3.qkv.weight"]     · ▓ · ▓ · ▓  ◀───────────┘            … shard 1 of 2, of three blocks
                                                · ▓ · ▓ · ▓

A tensor of which the layout says nothing is whole. `beside` are states of an optimizer that have not the shape of the
weight, where that is cut: only a rank that cuts it alike can take them, unless they are values that all have alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quintsched.errors import InputError
from quintsched.files.strictjson import describe_faults, parse_strict

from .placement import Placement

LAYOUT = "quintsched.layout"
"""The name of the layout in a file's metadata."""

RUN = "quintsched.run"
"""The name there of the run that wrote the file, where it says so: files of two runs are of no one state."""


@dataclass(frozen=True)
class StateLayout:
    """What a rank's file says of its tensors.

    Attributes:
        replica: which replica of the batch the rank belonged to, and how many there were.
        placements: by tensor, where its numbers lie in the full one; what is not named is whole.
        beside: by tensor that has no place, how the weight is held that it belongs to.
        dtypes: by tensor, the type in which blocks compute with it, where it is kept in another ("bfloat16").
        own_names: what the model itself calls the weights, by our names, where that differs.
        same: names of ours that are one tensor.
    """

    replica: tuple[int, int] = (0, 1)
    placements: Mapping[str, Placement] = field(default_factory=dict)
    beside: Mapping[str, Placement] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    own_names: Mapping[str, str] = field(default_factory=dict)
    same: Sequence[Sequence[str]] = ()

    def to_text(self) -> str:
        """Return the JSON text of it."""
        used = {one: n for n, one in enumerate(dict.fromkeys([*self.placements.values(), *self.beside.values()]))}
        return _Written(
            version=1,
            replica=self.replica,
            placements=list(used),
            tensors={name: used[placement] for name, placement in self.placements.items()},
            beside={name: used[placement] for name, placement in self.beside.items()},
            dtypes=dict(self.dtypes),
            own_names=dict(self.own_names),
            same=[list(names) for names in self.same],
        ).model_dump_json(exclude_none=True)

    def holds_as(self, other: StateLayout) -> bool:
        """Whether two ranks have cut their weights alike; what is kept beside a weight is cut as it is."""
        mine, theirs = ({n: p for n, p in one.placements.items() if n.startswith("model.")} for one in (self, other))
        return mine == theirs

    @classmethod
    def from_text(cls, text: str) -> StateLayout:
        """Return what `to_text` wrote; raises `InputError` with the place of the first fault."""
        try:
            read = _Written.model_validate(parse_strict(text))
            for placement in read.placements:
                _require_consistent(placement)
            tensors, beside = (
                {name: read.placements[number] for name, number in named.items()}
                for named in (read.tensors, read.beside)
            )
        except ValidationError as error:
            raise InputError(f"its layout: {describe_faults(error)}") from None
        except (InputError, IndexError) as error:
            raise InputError(f"its layout: {error}") from None
        return cls(read.replica, tensors, beside, read.dtypes, read.own_names, read.same)


class _Written(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    version: Literal[1]
    replica: tuple[int, int]
    placements: list[Placement]
    tensors: dict[str, int]
    beside: dict[str, int]
    dtypes: dict[str, Annotated[str, Field(pattern="^[a-z0-9_]{1,40}$")]]
    own_names: dict[str, str]
    same: list[list[str]]


def _require_consistent(placement: Placement) -> None:
    """Raise `InputError` for a placement that contradicts itself."""
    dims, cut = len(placement.shape), placement.cut
    if len(placement.local) != dims or len(placement.offsets) != dims or (cut is not None and cut.dim >= dims):
        raise InputError(f"a placement in {dims} dimensions has others")
    sizes = (*placement.shape, *placement.local, *placement.offsets, *(placement.span or ()))
    if min(sizes, default=0) < 0 or (cut is not None and (min(cut.dim, cut.index) < 0 or cut.size < 1)):
        raise InputError("a placement has a size below 0")
