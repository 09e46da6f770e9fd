"""Plans as text, compared with files that people can read: tests/data/grid_*.txt."""

from pathlib import Path

import pytest

import quintsched as qs
from quintsched.simulation.time_grid import time_grid
from quintsched.text.plan_listing import listing

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
