"""`quintsched checkpoint show | verify | reshard | export | import`: checkpoints of a run, without running it.

quintsched checkpoint show out               steps, run, mesh, sizes, whether they are complete
quintsched checkpoint verify out             read every byte; exit code 1 with the name of a damaged file
quintsched checkpoint reshard out --mesh pp=4 -o out4        for another mesh, in one process
quintsched checkpoint export out -o model.safetensors        weights under the model's own names
quintsched checkpoint import model.safetensors -o begin      a checkpoint to begin from
"""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Annotated

import typer

from quintsched.cli.run_and_verify import call
from quintsched.cli.shared_options import MICROBATCHES
from quintsched.errors import UsageError

Folder = Annotated[
    str, typer.Argument(metavar="DIR", help="The folder or URL of a run's checkpoints, or one step of it.")
]
StepOption = Annotated[
    int | None, typer.Option("--step", metavar="N", min=0, help="Which step; default: the newest whole.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print machine-readable.")]


def show(
    directory: Folder,
    step: Annotated[int | None, typer.Option("--step", metavar="N", min=0, help="Only this step.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the checkpoints of a run: steps, meshes, sizes, and whether they are complete."""
    _call("show", directory, as_json, step=step)


def verify(
    directory: Folder,
    step: Annotated[int | None, typer.Option("--step", metavar="N", min=0, help="Only this step.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte of a run's checkpoints; exit code 1 if a file does not match its manifest."""
    _call("verify", directory, as_json, step=step)


def reshard(
    directory: Folder,
    mesh: Annotated[str, typer.Option("--mesh", metavar="AXES", help="The mesh to go on on: dp=2,pp=4.")],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="DIR2", help="The folder or URL of the new checkpoint.")
    ],
    zero: Annotated[int | None, typer.Option("--zero", metavar="0-3", min=0, max=3, help="Its ZeRO stage.")] = None,
    schedule: Annotated[str | None, typer.Option("--schedule", "-s", metavar="NAME", help="Its schedule.")] = None,
    microbatches: Annotated[
        int | None, typer.Option("--microbatches", "-m", metavar="M", min=1, help=f"{MICROBATCHES}.")
    ] = None,
    chunks: Annotated[
        int | None, typer.Option("--chunks", metavar="V", min=1, help="Stages per pipeline rank there.")
    ] = None,
    step: StepOption = None,
    as_json: AsJson = False,
) -> None:
    """Reshard a checkpoint for another mesh, in one process and bounded memory.

    `quintsched run --resume` can resume a checkpoint on any mesh without it; this makes each rank's reads local.
    """
    given = {"schedule": schedule, "zero": zero, "microbatches": microbatches, "chunks": chunks}
    _call("reshard", directory, as_json, step=step, mesh=mesh, output=output, **given)


def export(
    directory: Folder,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE|DIR", help="A .safetensors file, or a folder.")
    ],
    ema: Annotated[
        int | None, typer.Option("--ema", metavar="N", min=0, help="The N-th average in place of the weights, from 0.")
    ] = None,
    masters: Annotated[bool, typer.Option("--masters", help="Weights in the type that the optimizer steps.")] = False,
    max_file_bytes: Annotated[
        int, typer.Option("--max-file-bytes", metavar="BYTES", min=1, help="Of the files in a folder.")
    ] = 5 * 10**9,
    step: StepOption = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint's weights as safetensors, under the model's own names."""
    how = {"ema": ema, "masters": masters, "max_file_bytes": max_file_bytes}
    _call("export", directory, as_json, step=step, output=output, **how)


def import_(
    source: Annotated[str, typer.Argument(metavar="FILE|DIR", help="A safetensors file, or a folder of such.")],
    output: Annotated[str, typer.Option("--output", "-o", metavar="DIR", help="The folder or URL of a new run.")],
    as_json: AsJson = False,
) -> None:
    """Make a checkpoint of step 0 from a model's weights, from which `quintsched run --resume` starts on any mesh."""
    _call("import", source, as_json, output=output)


def _call(command: str, path: str, as_json: bool, **given: object) -> None:
    """Run the command in a process of its own, and exit with its code."""
    if importlib.util.find_spec("torch") is None:
        raise UsageError("checkpoints need torch; pip install 'quintsched[runtime]'")
    arguments = json.dumps({"path": path, "json": as_json, **given})
    raise typer.Exit(call([sys.executable, "-m", "quintsched.runtime.saving.offline", command, arguments]))


CHECKPOINT_COMMANDS = (show, verify, reshard, export, import_)
