"""Plans as text, as files that people can read (tests/data/grid_*.txt), and the groups of a mesh as plans use them."""

import re
from pathlib import Path

import pytest

import quintsched as qs
from quintsched.ir.instruction_set import Message
from quintsched.simulation.time_grid import time_grid
from quintsched.text.plan_listing import listing
from quintsched.text.process_groups import group_of, kinds_of, neighbours_of

DATA = Path(__file__).parents[2] / "data"

GRIDS = {
    "grid_gpipe.txt": ("gpipe", "pp=3", 4, None),
    "grid_1f1b.txt": ("1f1b", "pp=4", 6, None),
    "grid_1f1b_short.txt": ("1f1b", "pp=4", 2, None),
    "grid_interleaved.txt": ("interleaved-1f1b", "pp=2", 4, 2),
    "grid_inference.txt": ("inference", "pp=2", 3, 2),
    "grid_overlap.txt": ("dualpipe-v", "pp=2", 5, None),
}


@pytest.mark.parametrize("file", GRIDS)
def test_golden_grid(file):
    name, mesh, microbatches, chunks = GRIDS[file]
    plan = qs.compile(name, mesh=mesh, microbatches=microbatches, chunks=chunks, overlap=file == "grid_overlap.txt")
    assert "\n".join(time_grid(plan.simulate())) + "\n" == (DATA / file).read_text()


def test_golden_listing():
    plan = qs.compile("1f1b", mesh="dp=2,pp=2,tp=2", microbatches=2)
    assert "\n".join(listing(plan.program(5))) + "\n" == (DATA / "listing_1f1b_rank5.txt").read_text()


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
