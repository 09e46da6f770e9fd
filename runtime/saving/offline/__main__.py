"""Entry point of `quintsched checkpoint`: `python -m quintsched.runtime.saving.offline show '{"path": "DIR"}'`.

Arguments are those of the command, as JSON; `json` prints for programs.
"""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintsched.errors import InputError, MisfitError, QuintschedError, UsageError, counted
from quintsched.files.terminal import shown, standard_streams, write_error, write_line

from ..checkpoints.bucket_folder import named_place
from .inspect_folder import as_json, as_text, find_steps, newest_whole, verify

if TYPE_CHECKING:
    from ..checkpoints.manifest import Manifest
    from ..saved_state import SavedState


def main(argv: Sequence[str]) -> int:
    """Run one command; returns the exit code."""
    command, given = argv
    try:
        return OFFLINE_COMMANDS[command](**json_text.loads(given))
    except QuintschedError as error:
        write_error(error)
        return error.exit_code


def _show(path: str, step: int | None = None, json: bool = False) -> int:
    found = find_steps(path, step)
    sys.stdout.write(as_json(found) if json else shown(as_text(found)))
    return 0


def _verify(path: str, step: int | None = None, json: bool = False) -> int:
    faults = {one.where: verify(one) for one in find_steps(path, step)}
    for folder, fault in faults.items():
        if fault is not None:
            write_error(fault)
        elif not json:
            sys.stdout.write(shown(f"{folder}: whole") + "\n")
    if json:
        rows = [{"folder": folder, "whole": fault is None, "fault": fault} for folder, fault in faults.items()]
        sys.stdout.write(json_text.dumps(rows) + "\n")
    return int(any(faults.values()))


def _reshard(path: str, mesh: str, output: str, step: int | None = None, json: bool = False, **given: Any) -> int:
    from .reshard_checkpoint import plan_for, reshard

    with _opened(path, step) as (manifest, saved):
        plan = plan_for(manifest, mesh, **given)
        made = reshard(saved, manifest, plan, named_place(output))
    words = f"{made}: step {manifest.step} for mesh {plan.mesh}"
    return _say(json, words, folder=made, mesh=str(plan.mesh))


def _export(
    path: str,
    output: str,
    step: int | None = None,
    json: bool = False,
    ema: int | None = None,
    masters: bool = False,
    max_file_bytes: int = 5 * 10**9,
) -> int:
    from .export_weights import export

    with _opened(path, step) as (_, saved):
        made = export(saved, _on_disk(output), average=ema, masters=masters, max_file_bytes=max_file_bytes)
    words = (
        f"{output}: {counted(made.tensors, 'tensor')}, {made.num_bytes} bytes, in {counted(len(made.files), 'file')}"
    )
    files = [str(file) for file in made.files]
    return _say(json, words, files=files, tensors=made.tensors, bytes=made.num_bytes, tied=dict(made.tied))


def _import(path: str, output: str, json: bool = False) -> int:
    from .reshard_checkpoint import import_weights

    made = import_weights(_on_disk(path), named_place(output))
    return _say(json, f"{made}: weights to begin with; `quintsched run job.yaml --resume`", folder=made)


def _on_disk(path: str) -> Path:
    place = named_place(path)
    if isinstance(place, str):
        raise UsageError(f"{path}: weights for others are on a disk; name a file or folder there, and copy it")
    return place


@contextmanager
def _opened(path: str, step: int | None) -> Iterator[tuple[Manifest, SavedState]]:
    """Open the newest whole checkpoint within a context, after verifying all of its bytes."""
    from ..checkpoints.manifest import Manifest
    from ..saved_state import SavedState

    found, skipped = newest_whole(path, step)
    manifest = found.manifest
    for one in skipped:
        write_line(f"step {one.saved.step} is not whole, step {found.saved.step} is taken: {one.fault}")
    if not isinstance(manifest, Manifest):
        raise UsageError(f"{found.where}: it is in PyTorch's distributed format, which any mesh reads as it is")
    fault = verify(found)
    if fault is not None:
        raise InputError(fault)
    saved = SavedState.of_files([found.saved.folder / file.name for file in manifest.files])
    if saved.unplaced:
        where = found.home.shown(saved.unplaced[0])
        raise MisfitError(f"{where}: the file does not say where its tensors lie; save it anew by a run")
    yield manifest, saved


def _say(json: bool, words: str, **values: Any) -> int:
    sys.stdout.write((json_text.dumps(values) if json else shown(words)) + "\n")
    return 0


OFFLINE_COMMANDS: dict[str, Callable[..., int]] = {
    "show": _show,
    "verify": _verify,
    "reshard": _reshard,
    "export": _export,
    "import": _import,
}

if __name__ == "__main__":
    with standard_streams():
        sys.exit(main(sys.argv[1:]))
