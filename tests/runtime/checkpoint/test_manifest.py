"""A manifest is whole and agrees with itself, or it is refused with one clear error, whatever was done to it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

import quintsched as qs
from quintsched.errors import InputError, MisfitError
from quintsched.runtime.checkpoint.checkpoints import Checkpoints
from quintsched.runtime.checkpoint.manifest import MANIFEST, file_name, make_manifest, read_manifest
from quintsched.runtime.engine import Engine

STEP = 12
PLAN = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=2)
DATA = save({"model.0.weight": torch.ones(2)})


class OneRank:
    """What `Checkpoints` asks of an engine, on one rank of a run whose ranks all hold the same."""

    def __init__(self, plan: qs.Plan, rank: int = 0) -> None:
        self.plan, self.transport = plan, SimpleNamespace(rank=rank)
        self.everyone = SimpleNamespace(barrier=lambda: None, gather_bytes=lambda mine: [mine] * plan.mesh.size)
        self.loaded: dict[str, torch.Tensor] = {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"model.0.weight": torch.ones(2)}

    def state_metadata(self) -> dict[str, str]:
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.loaded = state


def engine(rank: int = 0, plan: qs.Plan = PLAN) -> Engine:
    return cast(Engine, OneRank(plan, rank))


def saved(folder: Path, plan: qs.Plan = PLAN) -> Path:
    """Save a checkpoint of a plan's ranks and return the path of its manifest."""
    checkpoints = Checkpoints(folder, 1)
    for rank in reversed(range(plan.mesh.size)):  # rank 0 ends it
        checkpoints.save(engine(rank, plan), STEP, {"epoch": 1})
    return folder / f"step-{STEP:08d}" / MANIFEST


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = saved(tmp_path)
    manifest = read_manifest(path, STEP)
    assert manifest.to_json() == path.read_bytes()
    assert [file.name for file in manifest.files] == [file_name(rank) for rank in range(4)]
    for rank in range(4):
        assert Checkpoints(tmp_path, 1).load(engine(rank), STEP) == {"epoch": 1}


def test_a_mesh_of_one_rank_has_no_axes(tmp_path: Path) -> None:
    plan = qs.compile("1f1b", mesh=qs.Mesh(), microbatches=1)
    alone = make_manifest(STEP, "0" * 64, qs.Mesh(), [bytes(32)], {})
    path = tmp_path / MANIFEST
    path.write_bytes(alone.to_json())
    assert read_manifest(path, STEP) == alone
    saved(tmp_path, plan)
    assert Checkpoints(tmp_path, 1).load(engine(0, plan), STEP) == {"epoch": 1}


def without(key: str) -> Callable[[Any], object]:
    return lambda manifest: manifest.pop(key)


def put(key: str, value: object) -> Callable[[Any], object]:
    return lambda manifest: manifest.update({key: value})


FAULTS: list[tuple[Callable[[Any], object], str]] = [
    (lambda m: m["files"].pop(), "/files: the mesh dp=2,pp=2 has 4 ranks, but 'rank-00003.safetensors' is missing"),
    (lambda m: m["files"].clear(), "/files: the mesh dp=2,pp=2 has 4 ranks, but 'rank-00000.safetensors' is missing"),
    (
        lambda m: m["files"].pop(1),
        "/files/1/name: the file of rank 1 must be 'rank-00001.safetensors', not 'rank-00002",
    ),
    (lambda m: m["files"].append(m["files"][0]), "4 ranks, so 'rank-00000.safetensors' is one file too many"),
    (lambda m: m["files"].insert(1, m["files"][0]), "/files/1/name: the file of rank 1 must be 'rank-00001"),
    (lambda m: m["files"].reverse(), "/files/0/name: the file of rank 0 must be 'rank-00000"),
    (lambda m: m["files"][2].update(name="../../etc/passwd"), "/files/2/name: the file of rank 2 must be"),
    (lambda m: m["files"][2].update(sha256="00"), "/files/2/sha256: String should match pattern"),
    (lambda m: m["files"][2].update(sha256=7), "/files/2/sha256: Input should be a valid string"),
    (lambda m: m["files"][2].pop("sha256"), "/files/2/sha256: Field required"),
    (lambda m: m["files"][2].update(size=7), "/files/2/size: unknown key"),
    (put("files", {}), "/files: Input should be a valid list"),
    (put("files", [None] * 4), "/files/0: Input should be"),
    (put("mesh", "dp=2,pp=3"), "/files: the mesh dp=2,pp=3 has 6 ranks, but 'rank-00004.safetensors' is missing"),
    (put("mesh", "dp=4"), "/mesh: the mesh is dp=4, but that of its plan is dp=2,pp=2"),
    (put("mesh", "dp=2;pp=2"), "/mesh: mesh: cannot read 'dp=2;pp=2'"),
    (put("mesh", 4), "/mesh: Input should be a valid string"),
    (put("step", STEP + 1), "/step: it is the manifest of step 13, but lies in the folder of step 12"),
    (put("step", -1), "/step: Input should be at least 0"),
    (put("step", float(STEP)), "/step: Input should be a valid integer"),
    (put("plan_sha256", "x" * 64), "/plan_sha256: String should match pattern"),
    (put("progress", []), "/progress: Input should be a valid dictionary"),
    (put("version", 2), "/version: Input should be 1"),
    (put("format", "quintsched.plan"), "/format: Input should be 'quintsched.checkpoint'"),
    (put("notes", ""), "/notes: unknown key"),
    *((without(key), f"/{key}: Field required") for key in make_manifest(0, "0" * 64, qs.Mesh(), [], {}).model_dump()),
]


@pytest.mark.parametrize(("spoil", "message"), FAULTS, ids=[message[:40] for _, message in FAULTS])
def test_every_fault_is_said_with_its_place(spoil: Callable[[Any], object], message: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    manifest = json.loads(path.read_text())
    spoil(manifest)
    path.write_text(json.dumps(manifest))
    for rank in range(4):
        with pytest.raises(InputError) as refused:
            Checkpoints(tmp_path, 1).load(engine(rank), STEP)
        assert str(refused.value).startswith(f"{path}: ")
        assert message in str(refused.value)
        assert refused.value.exit_code == 1


def test_a_checkpoint_of_another_plan_does_not_fit(tmp_path: Path) -> None:
    saved(tmp_path)
    other = qs.compile("gpipe", mesh="dp=2,pp=2", microbatches=2)
    with pytest.raises(MisfitError, match="written by another plan"):
        Checkpoints(tmp_path, 1).load(engine(0, other), STEP)


@pytest.mark.parametrize("data", [None, b"", DATA[:-1]])
def test_a_file_that_is_gone_or_cut_short_is_named(data: bytes | None, tmp_path: Path) -> None:
    path = saved(tmp_path).with_name(file_name(2))
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(InputError, match=r"rank-00002\.safetensors: (cannot read|the file is damaged)"):
        Checkpoints(tmp_path, 1).load(engine(2), STEP)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=9)
    | st.sampled_from(["dp=4", "one rank"]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of everything in a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in ((value, key), *places(value[key]))]


@given(st.data())
def test_whatever_is_changed_the_manifest_is_good_or_refused(data: st.DataObject) -> None:
    good = make_manifest(STEP, "0" * 64, PLAN.mesh, [bytes(32)] * 4, {"epoch": 1})
    broken = copy.deepcopy(json.loads(good.to_json()))
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(places(broken)))
        match data.draw(st.sampled_from(["remove", "change", "double"])):
            case "remove":
                container.pop(key)
            case "change":
                container[key] = data.draw(VALUES)
            case _ if isinstance(container, list):
                container.insert(key, container[key])
    text = json.dumps(broken).encode()
    text = text[: data.draw(st.integers(0, len(text)))] if data.draw(st.booleans()) else text
    accept_or_refuse(text, STEP)


@given(st.binary(max_size=200))
def test_bytes_of_any_kind_are_refused(content: bytes) -> None:
    accept_or_refuse(content, STEP)


def accept_or_refuse(content: bytes, step: int) -> None:
    """Read a manifest: it says one thing about each of four ranks, or one line says what is wrong with it."""
    path = cast(Path, SimpleNamespace(read_bytes=lambda: content))
    try:
        manifest = read_manifest(path, step)
    except InputError:
        return
    assert manifest.step == step
    assert [file.name for file in manifest.files] == [file_name(rank) for rank in range(len(manifest.files))]
    assert len(manifest.files) == (1 if manifest.mesh == "one rank" else qs.Mesh.parse(manifest.mesh).size)
