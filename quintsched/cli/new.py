"""`quintsched new`: template of a user-defined schedule, with its property test."""

from __future__ import annotations

import keyword
import os
from pathlib import Path
from typing import Annotated

import typer

from quintsched.cli.shared_options import say
from quintsched.errors import UsageError

TEMPLATE = '''\
"""{name}: say here in a sentence what is special about its order, and draw it.

rank 0  F0 F1 .  .  B0 -- F2 B1 -- .  B2 --
rank 1  .  F0 B0 -- F1 B1 -- F2 B2 --

    pytest {file}                                    the property test below
    quintsched check {file}:{function} --pp 1..4 --microbatches 1..8
    quintsched compile --schedule {file}:{function} --mesh pp=4 --microbatches 8 -o plan.json
"""

import quintsched as qs
from quintsched.instructions import Bwd, Fwd
from quintsched.schedules import Order, Shape


def most_activations(rank: int, shape: Shape) -> int:
    """Say how many microbatches' activations this rank ever holds; the test holds you to it."""
    return min(shape.pp - rank, shape.microbatches)


@qs.schedule(
    "{name}",
    # All else may be left out. What `quintsched schedules` prints: a line, and formulas for people to read.
    summary="1F1B, to be changed",
    bubble="(P-1)(F+I+W)",  # the time beyond M(F+I+W)
    memory="min(P-r, M)",
    # placement=loop, min_chunks=2, …    several stages on each rank: from quintsched.schedules.kit import loop
    # routes=lambda shape: [((0, 1), range(2)), ((2, 3), range(2, 4))]    microbatches that go through other stages
    # constraint=lambda shape: "odd" if shape.microbatches % 2 else None    shapes that you do not take, and why
)
def {function}(rank: int, shape: Shape) -> Order:
    """Yield the computations of one rank in their order, and nothing else.

    Sends, receives, reductions and the optimizer are added where they belong. With one stage per rank, `rank` is the
    number of its stage; else `shape.stages_of(rank)` lists them. This is 1F1B: change it.
    """
    # Forwards that fill the ranks after this one: the last rank needs none.
    warmup = min(shape.pp - rank - 1, shape.microbatches)
    for microbatch in range(warmup):
        yield Fwd(rank, microbatch)
    # One forward, one backward: the number of activations in memory stays the same.
    for microbatch in range(warmup, shape.microbatches):
        yield Fwd(rank, microbatch)
        yield Bwd(rank, microbatch - warmup)
    # The backwards of the microbatches that are still under way.
    for microbatch in range(shape.microbatches - warmup, shape.microbatches):
        yield Bwd(rank, microbatch)


def test_{function}() -> None:
    """Prove it at many shapes: free of deadlock, within its memory, and the gradient of the sequential program.

    Where it fails, the message shows the smallest shape that does. Try it: leave out the last loop above.
    """
    from quintsched.testing import assert_sound  # needs hypothesis

    assert_sound({function}, pp=range(1, 7), microbatches=range(1, 13), memory=most_activations)
'''

IMPORTED = {"qs", "Bwd", "Fwd", "Order", "Shape", "most_activations"}
"""Names that the template itself uses."""


def new(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The Python file to write, like my_schedule.py.")],
) -> None:
    """Write a schedule to start from, with its test."""
    from quintsched.files.atomic import write_whole

    text = template(file)
    if os.path.lexists(file):
        raise UsageError(f"{file} is there already; give another name, it will not be overwritten")
    write_whole(file, text, "the schedule")
    say(f"{file}: a schedule and its property test; run: pytest {file}")


def template(file: Path) -> str:
    """Return the text of a new schedule's file; raises `UsageError` for a file name that gives no valid name."""
    from quintsched.schedules import all_schedules

    function = file.stem.removeprefix("test_").replace("-", "_")
    if file.suffix != ".py" or not function.isidentifier() or keyword.iskeyword(function) or function in IMPORTED:
        raise UsageError(f"{file.name} cannot name a schedule; name the file like my_schedule.py")
    name = function.replace("_", "-")
    if any(name in (found.name, *found.aliases) for found in all_schedules()):
        raise UsageError(f"there is a schedule {name!r} already; name the file after a new one")
    return TEMPLATE.format(file=file.name, function=function, name=name)
