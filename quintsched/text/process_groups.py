"""The process groups of a plan's mesh: who exchanges what with whom.

    over  exchanges                        each     groups
    dp    gradients                        2 ranks  (0 4) (1 5) (2 6) (3 7)
    pp    activations and their gradients  2 ranks  (0 2) (1 3) (4 6) (5 7)
    tp    slices of layers                 2 ranks  (0 1) (2 3) (4 5) (6 7)

Numbers are those of global ranks. A group has the ranks that differ in one coordinate alone; gradients are summed over
all replica axes together, where there are several of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product
from typing import Any

from quintsched.errors import counted
from quintsched.ir.mesh import Mesh
from quintsched.ir.plan_data import PlanData
from quintsched.text.mesh_cube import mesh_cube
from quintsched.text.plan_listing import table

EXCHANGED = {
    "dp": "",
    "pp": "activations and their gradients",
    "tp": "slices of layers",
    "cp": "keys and values of slices of the sequence",
    "ep": "tokens, to their experts and back",
}
MOST_GROUPS, MOST_MEMBERS, MOST_ROWS = 8, 8, 64
"""Number of groups that text shows; `groups_data` has all of them."""


def kinds_of(mesh: Mesh) -> dict[str, tuple[tuple[str, ...], str]]:
    """Return the axes of each kind of group, and what its ranks exchange, by its name: "dp", "dp·cp"."""
    experts, dense = mesh.expert_replica_axes, mesh.replica_axes
    gradients = "gradients of all but experts" if mesh.axis_size("ep") > 1 else "gradients"
    kinds: dict[str, tuple[tuple[str, ...], str]] = {}
    for name, size in mesh.axes:
        summed = [gradients] if dense == (name,) else ["gradients of experts"] if experts == (name,) else []
        if size > 1:
            what = "; ".join(filter(None, [EXCHANGED[name], *summed])) or "gradients, with the other replica axes"
            kinds[name] = ((name,), what)
    for axes, what in ((dense, gradients), (experts, "gradients of experts")):
        if len(axes) > 1:
            kinds["·".join(axes)] = (axes, what)
    return kinds


def group_of(mesh: Mesh, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
    """Return the ranks that differ from `rank` along these axes only, itself included, in rising order."""
    where = mesh.coordinates(rank)
    sizes = {name: range(size) if name in axes else (where[name],) for name, size in mesh.axes}
    return tuple(mesh.rank(dict(zip(sizes, at, strict=True))) for at in product(*sizes.values()))


def neighbours_of(plan: PlanData, rank: int) -> list[int]:
    """Return the ranks of the same pipeline with which a rank exchanges messages in the plan."""
    columns, where = plan.columns, plan.mesh.coordinates(rank)
    peers = columns.peer[columns.rank == where.get("pp", 0)]
    return [plan.mesh.rank({**where, "pp": peer}) for peer in sorted({*peers[peers >= 0].tolist()})]


def rank_data(plan: PlanData, rank: int) -> dict[str, Any]:
    """Return where a rank is in the mesh, its stages and its peers, as plain data; raises `UsageError` outside."""
    mesh = plan.mesh
    where = mesh.coordinates(rank)
    return {
        "rank": rank,
        "coordinates": where,
        "stages": [stage for stage, pp in enumerate(plan.stage_to_pp) if pp == where.get("pp", 0)],
        "pp_neighbours": neighbours_of(plan, rank),
        "groups": {name: list(group_of(mesh, rank, axes)) for name, (axes, _) in kinds_of(mesh).items()},
    }


def groups_data(plan: PlanData) -> dict[str, Any]:
    """Return all groups of the plan's mesh, and `rank_data` of all ranks, as plain data."""
    mesh = plan.mesh
    return {
        "mesh": [list(axis) for axis in mesh.axes],
        "groups": {name: [list(group) for group in mesh.groups(*axes)] for name, (axes, _) in kinds_of(mesh).items()},
        "ranks": [rank_data(plan, rank) for rank in range(mesh.size)],
    }


def describe_groups(plan: PlanData) -> Iterator[str]:
    """Yield the mesh as a cube, the groups of each axis, and a row for each rank."""
    mesh, kinds = plan.mesh, kinds_of(plan.mesh)
    if cube := mesh_cube(mesh):
        yield from (*(f"  {line}".rstrip() for line in cube), "")
    rows = [
        (name, what, f"{counted(_size(mesh, axes), 'rank')}", _some_groups(mesh, axes))
        for name, (axes, what) in kinds.items()
    ]
    yield from table(("over", "exchanges", "each", "groups"), rows) if rows else ["one rank: no groups"]
    yield ""
    shown = [rank_data(plan, rank) for rank in range(min(mesh.size, MOST_ROWS))]
    names = [name for name, _ in mesh.axes]
    yield from table(
        ("rank", *names, "stages", "pp neighbours", *(f"{name} group" for name in kinds if name != "pp")),
        [
            (
                str(rank["rank"]),
                *(str(rank["coordinates"][name]) for name in names),
                _some(rank["stages"]),
                _some(rank["pp_neighbours"]),
                *(_some(group) for name, group in rank["groups"].items() if name != "pp"),
            )
            for rank in shown
        ],
    )
    if mesh.size > MOST_ROWS:
        yield f"… {counted(mesh.size - MOST_ROWS, 'more rank')}; --rank R --groups shows one, --groups --json all"


def describe_rank(plan: PlanData, rank: int) -> Iterator[str]:
    """Yield where one rank is, and all its peers; raises `UsageError` for a rank outside the mesh."""
    found, kinds = rank_data(plan, rank), kinds_of(plan.mesh)
    place = ", ".join(f"{axis}={at}" for axis, at in found["coordinates"].items())
    stages = (
        f"stage{'s' if len(found['stages']) > 1 else ''} {_all(found['stages'])}" if found["stages"] else "no stage"
    )
    yield f"rank {rank}{f' ({place})' if place else ''}, {stages}"
    rows = [("pp neighbours", "messages of the plan", _all(found["pp_neighbours"]))] if found["pp_neighbours"] else []
    rows += [(f"{name} group", kinds[name][1], _all(group)) for name, group in found["groups"].items()]
    yield from table(("with", "exchanges", "ranks"), rows) if rows else ["it is alone: no groups"]


def _size(mesh: Mesh, axes: Sequence[str]) -> int:
    return len(group_of(mesh, 0, axes))


def _some_groups(mesh: Mesh, axes: Sequence[str]) -> str:
    others = [range(1) if name in axes else range(size) for name, size in mesh.axes]
    names = [name for name, _ in mesh.axes]
    firsts = (mesh.rank(dict(zip(names, where, strict=True))) for where in product(*others))
    shown = [f"({_some(group_of(mesh, first, axes))})" for first in islice(firsts, MOST_GROUPS)]
    left = mesh.size // _size(mesh, axes) - len(shown)
    return " ".join([*shown, *([f"… {left} more"] if left else [])])


def _some(numbers: Sequence[int]) -> str:
    """Return numbers with spaces between, without the middle of many."""
    if len(numbers) <= MOST_MEMBERS:
        return _all(numbers)
    return f"{_all(numbers[: MOST_MEMBERS - 2])} … {numbers[-1]}"


def _all(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers)) or "-"
