"""Entry point of `quintsched checkpoint`: `python -m quintsched.runtime.saving.offline show '{"path": "DIR"}'`.

Arguments are those of the command, as JSON; `json` prints for programs.
"""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintsched.errors import InputError, MisfitError, QuintschedError, UsageError
from quintsched.files.terminal import shown, standard_streams, write_error, write_line

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
    found = find_steps(Path(path), step)
    sys.stdout.write(as_json(found) if json else shown(as_text(found)))
    return 0


def _verify(path: str, step: int | None = None, json: bool = False) -> int:
    faults = {str(one.saved.folder): verify(one) for one in find_steps(Path(path), step)}
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

    manifest, saved = _opened(path, step)
    with saved:
        plan = plan_for(manifest, mesh, **given)
        made = reshard(saved, manifest, plan, Path(output))
    words = f"{made}: step {manifest.step} for mesh {plan.mesh}"
    return _say(json, words, folder=str(made), mesh=str(plan.mesh))


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

    _, saved = _opened(path, step)
    with saved:
        made = export(saved, Path(output), average=ema, masters=masters, max_file_bytes=max_file_bytes)
    words = f"{output}: {made.tensors} tensors, {made.num_bytes} bytes, in {len(made.files)} files"
    files = [str(file) for file in made.files]
    return _say(json, words, files=files, tensors=made.tensors, bytes=made.num_bytes, tied=dict(made.tied))


def _import(path: str, output: str, json: bool = False) -> int:
    from .reshard_checkpoint import import_weights

    made = import_weights(Path(path), Path(output))
    return _say(json, f"{made}: weights to begin with; `quintsched run job.yaml --resume`", folder=str(made))


def _opened(path: str, step: int | None) -> tuple[Manifest, SavedState]:
    """Return the newest whole checkpoint, after verifying all of its bytes."""
    from ..checkpoints.manifest import Manifest
    from ..saved_state import SavedState

    found, skipped = newest_whole(Path(path), step)
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
