"""`python -m quintsched.runtime.saving.offline show DIR`: what `quintsched checkpoint` calls."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintsched.errors import InputError, MisfitError, QuintschedError, UsageError
from quintsched.files.terminal import shown, standard_streams, write_error, write_line

from .inspect import as_json, as_text, find_steps, newest_whole, verify

if TYPE_CHECKING:
    from ..checkpoints.manifest import Manifest
    from ..saved_state import SavedState


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except QuintschedError as error:
        write_error(error)
        return error.exit_code
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m quintsched.runtime.saving.offline", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for run in (_show, _verify, _reshard, _export, _import):
        command = commands.add_parser(run.__name__.removeprefix("_"))
        command.set_defaults(run=run)
        command.add_argument("path", type=Path)
        command.add_argument("--json", action="store_true")
        if run is not _import:
            command.add_argument("--step", type=int)
        if run in (_reshard, _export, _import):
            command.add_argument("--output", type=Path, required=True)
        if run is _reshard:
            command.add_argument("--mesh", required=True)
            command.add_argument("--schedule")
            for name in ("--zero", "--microbatches", "--chunks"):
                command.add_argument(name, type=int)
        if run is _export:
            command.add_argument("--ema", type=int)
            command.add_argument("--masters", action="store_true")
            command.add_argument("--max-file-bytes", type=int, default=5 * 10**9)
    return parser


def _show(arguments: argparse.Namespace) -> int:
    found = find_steps(arguments.path, arguments.step)
    sys.stdout.write(as_json(found) if arguments.json else shown(as_text(found)))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    faults = {str(one.saved.folder): verify(one) for one in find_steps(arguments.path, arguments.step)}
    for folder, fault in faults.items():
        if fault is not None:
            write_error(fault)
        elif not arguments.json:
            sys.stdout.write(shown(f"{folder}: whole") + "\n")
    if arguments.json:
        sys.stdout.write(json.dumps([{"folder": f, "whole": x is None, "fault": x} for f, x in faults.items()]) + "\n")
    return int(any(faults.values()))


def _reshard(arguments: argparse.Namespace) -> int:
    from .reshard import plan_for, reshard

    manifest, saved = _opened(arguments)
    with saved:
        given = {name: getattr(arguments, name) for name in ("schedule", "zero", "microbatches", "chunks")}
        plan = plan_for(manifest, arguments.mesh, **given)
        made = reshard(saved, manifest, plan, arguments.output)
    return _say(arguments, f"{made}: step {manifest.step} for mesh {plan.mesh}", folder=str(made), mesh=str(plan.mesh))


def _export(arguments: argparse.Namespace) -> int:
    from .export import export

    _, saved = _opened(arguments)
    with saved:
        made = export(
            saved,
            arguments.output,
            average=arguments.ema,
            masters=arguments.masters,
            max_file_bytes=arguments.max_file_bytes,
        )
    return _say(
        arguments,
        f"{arguments.output}: {made.tensors} tensors, {made.num_bytes} bytes, in {len(made.files)} files",
        files=[str(path) for path in made.files],
        tensors=made.tensors,
        bytes=made.num_bytes,
        tied=dict(made.tied),
    )


def _import(arguments: argparse.Namespace) -> int:
    from .reshard import import_weights

    made = import_weights(arguments.path, arguments.output)
    return _say(arguments, f"{made}: weights to begin with; `quintsched run job.yaml --resume`", folder=str(made))


def _opened(arguments: argparse.Namespace) -> tuple[Manifest, SavedState]:
    """Return the newest whole checkpoint, all of whose bytes were verified."""
    from ..checkpoints.manifest import Manifest
    from ..saved_state import SavedState

    found, skipped = newest_whole(arguments.path, arguments.step)
    manifest, folder = found.manifest, found.saved.folder
    for one in skipped:
        write_line(f"step {one.saved.step} is not whole, step {found.saved.step} is taken: {one.fault}")
    if not isinstance(manifest, Manifest):
        raise UsageError(f"{folder}: it is in PyTorch's distributed format, which any mesh reads as it is")
    fault = verify(found)
    if fault is not None:
        raise InputError(fault)
    saved = SavedState.of_files([folder / file.name for file in manifest.files])
    if saved.unplaced:
        raise MisfitError(f"{saved.unplaced[0]}: the file does not say where its tensors lie; save it anew by a run")
    return manifest, saved


def _say(arguments: argparse.Namespace, words: str, **found: Any) -> int:
    values: Mapping[str, Any] = found
    sys.stdout.write((json.dumps(values) if arguments.json else shown(words)) + "\n")
    return 0


if __name__ == "__main__":
    with standard_streams():
        sys.exit(main())
