"""The groups of a mesh, against its own partition into groups and the plan's messages; the drawing of a mesh."""

import re

import pytest

import quintsched as qs
from quintsched.ir.instruction_set import Message
from quintsched.text.process_groups import group_of, kinds_of, neighbours_of

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
