"""Plans as text, compared with files that people can read: tests/data/grid_*.txt."""

from pathlib import Path

import pytest

import quintsched as qs
from quintsched.simulation.time_grid import time_grid
from quintsched.text.listing import listing, table

DATA = Path(__file__).parents[2] / "data"
GRIDS = {
    "grid_gpipe.txt": ("gpipe", "pp=3", 4, None),
    "grid_1f1b.txt": ("1f1b", "pp=4", 6, None),
    "grid_1f1b_short.txt": ("1f1b", "pp=4", 2, None),
    "grid_interleaved.txt": ("interleaved-1f1b", "pp=2", 4, 2),
    "grid_inference.txt": ("inference", "pp=2", 3, 2),
}


@pytest.mark.parametrize("file", GRIDS)
def test_golden_grid(file):
    name, mesh, microbatches, chunks = GRIDS[file]
    simulation = qs.compile(name, mesh=mesh, microbatches=microbatches, chunks=chunks).simulate()
    assert "\n".join(time_grid(simulation)) + "\n" == (DATA / file).read_text()


def test_golden_listing():
    plan = qs.compile("1f1b", mesh="dp=2,pp=2,tp=2", microbatches=2)
    assert "\n".join(listing(plan.program(5))) + "\n" == (DATA / "listing_1f1b_rank5.txt").read_text()


@pytest.mark.parametrize("width", [1, 10, 30, 31, 79, 1000])
def test_a_grid_wraps(width):
    simulation = qs.compile("1f1b", mesh="pp=2", microbatches=12).simulate()
    whole, wrapped = time_grid(simulation), time_grid(simulation, width)
    assert max(map(len, wrapped)) <= max(width, len("rank 0 F10 "))
    for rank in range(2):
        cells = [cell for line in wrapped if line.startswith(f"rank {rank}") for cell in line.split()[2:]]
        assert cells == whole[rank].split()[2:]


def test_a_grid_of_uneven_costs_keeps_every_cell():
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=3)
    for costs in (qs.Costs(forward=(1.0, 2.5)), qs.Costs(p2p=0.5), qs.Costs(forward=0.0)):
        cells = " ".join(time_grid(plan.simulate(costs)))
        assert all(f"B{microbatch}" in cells for microbatch in range(3))


def test_table():
    assert table(("a", "long"), [("xyz", "b"), ("", "")]) == ["a    long", "xyz  b", ""]
