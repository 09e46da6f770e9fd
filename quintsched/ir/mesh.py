"""Device mesh: named axes with sizes, and the groups of ranks along them.

dp=2,pp=2,tp=2      rank = row-major index of its coordinates, outermost axis first

     tp0 tp1              groups("tp")  (0 1) (2 3) (4 5) (6 7)
pp0 [ 0   1 ] dp0         groups("pp")  (0 2) (1 3) (4 6) (5 7)
pp1 [ 2   3 ]             groups("dp", "tp")  (0 1 4 5) (2 3 6 7)
pp0 [ 4   5 ] dp1
pp1 [ 6   7 ]
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from quintsched.errors import MisfitError, UsageError, counted, quoted, suggest

AXES = ("dp", "pp", "tp", "cp", "ep")
"""Data, pipeline, tensor, context (sequence) and expert parallelism."""

LAID_OUT = ("pp", "dp", "ep", "cp", "tp")
"""The axes from the outermost to the innermost where sizes alone are given: ranks of tp are nearest neighbours."""

REPLICA_AXES = ("dp", "cp", "ep")
"""Axes over which the gradient of a dense weight is summed."""

EXPERT_REPLICA_AXES = ("dp", "cp")
"""Axes over which the gradient of an expert's weight is summed: along ep the ranks hold different experts."""

OTHER_NAMES = {
    "'dp', with zero=3 (--zero 3, parallel.zero: 3)": ("fsdp", "hsdp", "sdp", "zero", "shard", "dp_shard"),
    "'dp'": ("data", "ddp", "replica", "replicate", "dp_replicate"),
    "'pp'": ("pipe", "pipeline", "stage"),
    "'tp'": ("mp", "model", "tensor"),
    "'cp'": ("sp", "seq", "sequence", "context", "ring"),
    "'ep'": ("expert", "experts", "moe"),
}
"""Other frameworks' names of axes, by what they are here."""

MAX_RANKS = 2**24


def whole_number(value: object) -> int | None:
    """Return an integer of any kind (numpy's included) as an `int`; None for other values, such as True or 1.0."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


@dataclass(frozen=True, init=False)
class Mesh:
    """Named axes with sizes, outermost first: `Mesh(dp=2, pp=2, tp=2)`.

    Any subset of `AXES` in any order; an axis that is left out has size 1.
    Raises `UsageError` for an unknown axis or a size below 1.
    """

    axes: tuple[tuple[str, int], ...]

    def __init__(self, **sizes: int) -> None:
        axes: dict[str, int] = {}
        for name, size in sizes.items():
            if name not in AXES:
                ours = next((ours for ours, theirs in OTHER_NAMES.items() if name.lower() in theirs), "")
                words = f"; did you mean {ours}?" if ours else suggest(name, AXES)
                raise UsageError(f"mesh: unknown axis {quoted(name)}{words}")
            number = whole_number(size)
            if number is None or number < 1:
                raise UsageError(f"mesh: axis {name} has size {quoted(size)}; give a whole number of at least 1")
            axes[name] = number
        if math.prod(axes.values()) > MAX_RANKS:
            raise UsageError(f"mesh: more ranks than the {MAX_RANKS} that are supported")
        object.__setattr__(self, "axes", tuple(axes.items()))

    @classmethod
    def parse(cls, text: Mesh | str | Mapping[str, int]) -> Mesh:
        """Parse `"dp=2,pp=2,tp=2"` or the equivalent mapping; a mesh is returned unchanged. Raises `UsageError`."""
        if isinstance(text, Mesh):
            return text
        if isinstance(text, Mapping) and all(isinstance(name, str) for name in text):
            return cls(**text)
        if not isinstance(text, str):
            raise UsageError(f"a mesh is text such as 'dp=2,pp=2', or a size for each axis, not {quoted(text)}")
        sizes: dict[str, int] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, size = (piece.strip() for piece in part.partition("="))
            if not equals or not size.isdecimal() or len(size) > len(str(MAX_RANKS)):
                raise UsageError(f"mesh: cannot read {quoted(part)} in {quoted(text)}; write it like dp=2,pp=2,tp=2")
            if name in sizes:
                raise UsageError(f"mesh: axis {name} is given twice in {quoted(text)}")
            sizes[name] = int(size)
        if not sizes:
            raise UsageError(f"mesh: {quoted(text)} names no axis (a variable that is not set?); one rank is dp=1")
        return cls(**sizes)

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self.axes)})"

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes) or "one rank"

    @cached_property
    def size(self) -> int:
        """Number of ranks (world size)."""
        return math.prod(size for _, size in self.axes)

    def require_world_size(self, world_size: int) -> None:
        """Raise `MisfitError` unless the number of started processes equals the number of ranks."""
        if world_size != self.size:
            started = "1 process was" if world_size == 1 else f"{world_size} processes were"
            raise MisfitError(
                f"the plan's mesh {self} has {counted(self.size, 'rank')}, but {started} started; "
                f"use torchrun --nproc-per-node {self.size}, or a plan for {world_size}"
            )

    def axis_size(self, name: str) -> int:
        """Size of an axis; 1 for an axis that the mesh does not have."""
        return dict(self.axes).get(name, 1)

    @property
    def pp(self) -> int:
        """Number of pipeline ranks."""
        return self.axis_size("pp")

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinate of `rank` on each axis; raises `UsageError` outside 0..size-1."""
        if not 0 <= rank < self.size:
            raise UsageError(f"rank {rank} is not in the mesh {self}: its ranks are 0 to {self.size - 1}")
        where: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, where[name] = divmod(rank, size)
        return {name: where[name] for name, _ in self.axes}

    def pp_rank(self, rank: int) -> int:
        """Pipeline coordinate of `rank`; raises `UsageError` outside 0..size-1."""
        return self.coordinates(rank).get("pp", 0)

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Rank at these coordinates; a missing axis counts as 0."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coordinates.get(name, 0)
        return rank

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Groups of ranks that differ along `axes` only, each in ascending order.

        The groups are disjoint, cover the mesh, and are sorted by their first rank.
        """
        inside = [range(size) if name in axes else range(1) for name, size in self.axes]
        outside = [range(1) if name in axes else range(size) for name, size in self.axes]
        names = [name for name, _ in self.axes]
        offsets = [self.rank(dict(zip(names, where, strict=True))) for where in product(*inside)]
        return [
            tuple(self.rank(dict(zip(names, where, strict=True))) + offset for offset in offsets)
            for where in product(*outside)
        ]

    def has_ranks(self, *axes: str) -> bool:
        """Return whether there are several ranks along any of these axes."""
        return any(self.axis_size(axis) > 1 for axis in axes)

    @property
    def without_ones(self) -> Mesh:
        """Equivalent mesh without axes of size 1."""
        return Mesh(**{name: size for name, size in self.axes if size > 1})

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """Axes of size > 1 over which dense gradients are summed."""
        return tuple(name for name, size in self.axes if name in REPLICA_AXES and size > 1)

    @property
    def expert_replica_axes(self) -> tuple[str, ...]:
        """Axes of size > 1 over which experts' gradients are summed; () without expert parallelism."""
        has_experts = self.axis_size("ep") > 1
        return tuple(name for name in self.replica_axes if has_experts and name in EXPERT_REPLICA_AXES)
