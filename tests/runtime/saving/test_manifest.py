"""A manifest is whole and agrees with itself, or it is refused with one clear error, whatever was done to it."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quintsched as qs
from quintsched.runtime.saving.checkpoints.manifest import (
    MANIFEST,
    DcpManifest,
    WrittenFile,
    parse_manifest,
    read_manifest,
    seal,
)

from .holders import Holder, load, on_ranks, opened
from .holders import save as save_step

STEP = 12
PLAN = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=2)


def saved(folder: Path, plan: qs.Plan = PLAN) -> Path:
    """Save a checkpoint of a plan's ranks and return the path of its manifest."""
    save_step(folder, STEP, 1.0, plan=plan)
    return folder / f"step-{STEP:08d}" / MANIFEST


def refusals(folder: Path, plan: qs.Plan = PLAN) -> list[Exception]:
    """Return what each rank raises as it loads."""

    def refused(holder: Holder) -> Exception:
        with pytest.raises(qs.QuintschedError) as error, opened(holder, folder) as saves:
            saves.newest_whole()
        return error.value

    return on_ranks(refused, plan)


def read_json(path: Path) -> Any:
    """Return what a manifest says beside its checksum."""
    found = json.loads(path.read_text())
    found.pop("sha256")
    return found


def write_sealed(path: Path, manifest: Any) -> None:
    """Write a manifest with a checksum that is right, whatever is in it."""
    path.write_bytes(seal(json.dumps(manifest).encode()))


def without(key: str) -> Callable[[Any], object]:
    return lambda manifest: manifest.pop(key)


def put(key: str, value: object) -> Callable[[Any], object]:
    return lambda manifest: manifest.update({key: value})


FAULTS: list[tuple[Callable[[Any], object], str]] = [
    (lambda m: m["files"].pop(), "/files: the mesh dp=2,pp=2 has 4 ranks, but 'rank-00003.safetensors' is missing"),
    (lambda m: m["files"].pop(1), "/files/1/name: the file of rank 1 must be 'rank-00001.safetensors', not 'rank-00"),
    (lambda m: m["files"].append(m["files"][0]), "4 ranks, so 'rank-00000.safetensors' is one file too many"),
    (lambda m: m["files"][2].update(name="../../etc/passwd"), "/files/2/name: the file of rank 2 must be"),
    (lambda m: m["files"][2].update(sha256="00"), "/files/2/sha256: String should match pattern"),
    (put("mesh", "dp=2,pp=3"), "/files: the mesh dp=2,pp=3 has 6 ranks, but 'rank-00004.safetensors' is missing"),
    (put("mesh", "dp=2;pp=2"), "/mesh: mesh: cannot read 'dp=2;pp=2'"),
    (put("step", STEP + 1), "/step: it is the manifest of step 13, but is in the folder of step 12"),
    (put("step", float(STEP)), "/step: Input should be a valid integer"),
    (put("plan_sha256", "x" * 64), "/plan_sha256: String should match pattern"),
    (put("progress", []), "/progress: Input should be a valid dictionary"),
    (put("version", 1), "/version: Input should be 2"),
    (put("version", 3), "/version: 3 is newer than the 2 that"),
    (put("version", "2"), "it is no manifest with a version"),
    (put("run", "../../../../etc/x"), "/run: String should match pattern"),
    (lambda m: m["files"][2].update(bytes=-1), "/files/2/bytes: Input should be at least 0"),
    (lambda m: m["files"][2].update(name="x" * 999), "/files/2/name: String should have at most 200 characters"),
    (put("format", "quintsched.plan"), "/format: Input should be 'quintsched.checkpoint'"),
    (put("notes", ""), "/notes: unknown key"),
    (without("version"), "it is no manifest with a version"),
    *((without(key), f"/{key}: Field required") for key in ("run", "step", "plan_sha256", "files", "progress")),
]


def test_every_fault_is_said_with_its_place_and_by_all_ranks_alike(tmp_path: Path) -> None:
    path = saved(tmp_path)
    whole = read_json(path)
    for spoil, message in FAULTS:
        manifest = copy.deepcopy(whole)
        spoil(manifest)
        write_sealed(path, manifest)
        with pytest.raises(qs.InputError) as refused:
            read_manifest(path, STEP)
        assert str(refused.value).startswith(f"{path}: ")
        assert message in str(refused.value)
    write_sealed(path, whole | {"mesh": "dp=4"})
    said = f"{path}: /mesh: the mesh is dp=4, but that of its plan is dp=2,pp=2"
    assert all(isinstance(error, qs.InputError) and said in str(error) for error in refusals(tmp_path))


def test_every_bit_of_a_manifest_counts(tmp_path: Path) -> None:
    content = saved(tmp_path).read_bytes()
    assert parse_manifest(content, STEP).progress == {"number": 1.0}
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(qs.InputError):
            parse_manifest(bytes(changed), STEP)


def test_a_file_of_the_distributed_format_lies_in_the_folder() -> None:
    common: Any = {"format": "quintsched.dcp", "version": 2, "run": None, "settings": {}, "progress": {}}
    for name in ("../step-00000002/.metadata", "/etc/passwd", "..", "", "a/b"):
        file = WrittenFile(name=name, bytes=1, sha256="0" * 64)
        made = DcpManifest(step=STEP, replicas=1, files=[file], **common)
        with pytest.raises(qs.InputError, match=r"^/files/0/name: '.*' is not the name of a file in the folder"):
            parse_manifest(made.to_json(), STEP)


def test_a_manifest_of_version_1_is_read(tmp_path: Path) -> None:
    path = saved(tmp_path)
    manifest = read_json(path)
    for file in manifest["files"]:
        del file["bytes"]
    old = {key: value for key, value in manifest.items() if key not in ("run", "settings")} | {"version": 1}
    path.write_text(json.dumps(old, indent=1))
    found = load(tmp_path, PLAN)
    assert found.manifest.run is None
    path.write_text(json.dumps(manifest, indent=1))
    for refused in refusals(tmp_path):
        assert "the file is damaged: its first line is not a checksum" in str(refused)


def test_a_checkpoint_of_another_plan_does_not_fit(tmp_path: Path) -> None:
    saved(tmp_path)
    other = qs.compile("gpipe", mesh="dp=2,pp=2", microbatches=2)
    for refused in refusals(tmp_path, other):
        assert isinstance(refused, qs.MisfitError)
        assert "written by another plan" in str(refused)
