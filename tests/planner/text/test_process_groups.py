"""The groups of a mesh, against its own partition into groups and the plan's messages; the drawing of a mesh."""

import re

import pytest

import quintsched as qs
from quintsched.ir.instruction_set import Message
from quintsched.text.mesh_cube import mesh_cube
from quintsched.text.process_groups import (
    describe_groups,
    describe_rank,
    group_of,
    groups_data,
    kinds_of,
    neighbours_of,
    rank_data,
)

MESHES = ("dp=2,pp=2,tp=2", "pp=3", "tp=2,ep=2,pp=2", "ep=2,dp=3,cp=2", "dp=1", "pp=2,dp=2,ep=2,cp=2,tp=2", "cp=4,pp=2")


@pytest.mark.parametrize("mesh", [*map(qs.Mesh.parse, MESHES)], ids=str)
def test_groups_are_those_of_the_mesh(mesh):
    for axes, _ in kinds_of(mesh).values():
        assert [group for group in mesh.groups(*axes) for _ in group] == [
            group_of(mesh, rank, axes) for group in mesh.groups(*axes) for rank in group
        ]
    assert {*kinds_of(mesh)} >= {name for name, size in mesh.axes if size > 1}
    summed = {axes for axes, what in kinds_of(mesh).values() if re.search(r"gradients( of all but experts)?$", what)}
    assert (mesh.replica_axes in summed) == bool(mesh.replica_axes)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "dualpipe"])
def test_neighbours_are_those_of_the_program(schedule):
    plan = qs.compile(schedule, mesh="dp=2,pp=4,tp=2", microbatches=8)
    for rank in range(plan.mesh.size):
        peers = {step.peer for step in plan.program(rank) if isinstance(step, Message)}
        assert neighbours_of(plan, rank) == sorted(peers)


def test_plain_data_of_all_and_of_one():
    plan = qs.compile("interleaved-1f1b", mesh="dp=2,pp=2,tp=2", microbatches=2, chunks=2)
    data = groups_data(plan)
    assert data["mesh"] == [["dp", 2], ["pp", 2], ["tp", 2]]
    assert data["groups"]["pp"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert data["ranks"][5] == rank_data(plan, 5)
    assert rank_data(plan, 5) == {
        "rank": 5,
        "coordinates": {"dp": 1, "pp": 0, "tp": 1},
        "stages": [0, 2],
        "pp_neighbours": [7],
        "groups": {"dp": [1, 5], "pp": [5, 7], "tp": [4, 5]},
    }
    with pytest.raises(qs.UsageError, match="rank 8 is not in the mesh"):
        rank_data(plan, 8)


def test_many_ranks_are_not_all_shown():
    plan = qs.compile("1f1b", mesh="dp=64,pp=16,tp=8", microbatches=16)
    lines = [*describe_groups(plan)]
    assert len(lines) < 100
    assert any(line.endswith("(7 135 263 391 519 647 … 8071) … 120 more") for line in lines)
    assert lines[-1] == "… 8128 more ranks; --rank R --groups shows one, --groups --json all"
    assert "tp group       slices of layers                 96 97 98 99 100 101 102 103" in describe_rank(plan, 99)


@pytest.mark.parametrize(
    ("mesh", "drawn"),
    [
        ("pp=3", ["0 ─── 1 ─── 2", "", "→ pp"]),
        ("pp=2,dp=1,tp=2", ["0 ─── 1", "│     │", "2 ─── 3", "", "→ tp   ↓ pp"]),
        (
            "dp=2,pp=2,tp=2",
            [
                "    4 ─────── 5",
                "  ╱ │       ╱ │",
                "0 ──┼──── 1   │",
                "│   │     │   │",
                "│   6 ────┼── 7",
                "│ ╱       │ ╱",
                "2 ─────── 3",
                "",
                "→ tp   ↓ pp   ↗ dp",
            ],
        ),
        ("dp=2,pp=2,cp=2,tp=2", []),
        ("dp=1", []),
    ],
)
def test_a_mesh_is_drawn(mesh, drawn):
    assert mesh_cube(qs.Mesh.parse(mesh)) == drawn


@pytest.mark.parametrize("mesh", ["dp=3,pp=4,tp=4", "pp=16,tp=8", "dp=8,pp=2,tp=8", "ep=4,cp=4"])
def test_every_rank_is_drawn_once(mesh):
    sizes = qs.Mesh.parse(mesh)
    *lines, _, _ = mesh_cube(sizes)
    numbers = re.findall(r"(?<!=)\b\d+", "\n".join(lines))
    assert sorted(map(int, numbers)) == [*range(sizes.size)]
    assert max(map(len, lines)) <= 100
