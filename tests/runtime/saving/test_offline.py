"""Checkpoints shown, verified, resharded, exported and imported in one process, and runs that go on from these."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn

import quintsched as qs
from quintsched.errors import UsageError
from quintsched.runtime import Engine
from quintsched.runtime.blocks.block_builders import Blocks, build_model
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import GPTOptions, gpt, gpt_tied
from quintsched.runtime.saving import saved_state
from quintsched.runtime.saving.checkpoints.folder_owner import lock_folder
from quintsched.runtime.saving.checkpoints.manifest import MANIFEST, read_manifest
from quintsched.runtime.saving.checkpoints.save_and_load_checkpoints import Checkpoints
from quintsched.runtime.saving.offline import reshard_checkpoint as resharding
from quintsched.runtime.saving.write_tensors import hash_file
from quintsched.runtime.train.built_in_losses import cross_entropy_sum

from ..toys import CLASSES, adam, ids_task, share, tiny_gpt
from .offline_command import main
from .split_models import Split

LENGTH = 8


def engine_of(transport: Transport, mesh: str, zero: int = 0, **more: Any) -> Engine:
    blocks: Blocks = more.pop("blocks", None) or tiny_gpt(LENGTH, depth=2)
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2, zero=zero, tied=more.pop("plan_tied", None))
    more = {"dtype": torch.float64} | more
    return Engine(plan, blocks, cross_entropy_sum, adam, transport=transport, **more)


def train(engine: Engine, first: int, last: int) -> list[float]:
    task = ids_task(4, 8, LENGTH)
    return [engine.step(*share(engine, task.inputs[s], task.targets[s])).loss.item() for s in range(first, last)]


def on(mesh: str, body: Callable[[Engine], Any], zero: int = 0, **more: Any) -> list[Any]:
    size = qs.Mesh.parse(mesh).size
    return run_local(size, lambda transport: body(engine_of(transport, mesh, zero, **more)), timeout_s=60)


def save(folder: Path, mesh: str = "dp=2,tp=2", zero: int = 2, **more: Any) -> dict[str, Tensor]:
    """Save after two steps, with an average; return the full state."""

    def body(engine: Engine) -> dict[str, Tensor]:
        engine.ema(0.5)
        train(engine, 0, 2)
        with Checkpoints(folder, 2).opened(engine.saves) as saves:
            saves.save_step(2, {"epoch": 1, "batch": 3})
        return engine.full_state_dict(all_blocks=True)

    found: dict[str, Tensor] = on(mesh, body, zero, **more)[0]
    return found


def resume(folder: Path, mesh: str, zero: int = 0, **more: Any) -> dict[str, Tensor]:
    def body(engine: Engine) -> dict[str, Tensor]:
        engine.ema(0.5)
        with Checkpoints(folder, 2).opened(engine.saves, "resume") as saves:
            found = saves.newest_whole()
            assert found is not None
            found.load_step()
        return engine.full_state_dict(all_blocks=True)

    found: dict[str, Tensor] = on(mesh, body, zero, **more)[0]
    return found


def weights_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in state.items() if name.startswith("model.")}


def require_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def run(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> Any:
    """Run a command with --json and return what it prints; where it fails, its message."""
    assert main([*map(str, words), "--json"]) == code
    said = capsys.readouterr()
    return json.loads(said.out) if not code else said.err


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("saved") / "out"
    return folder, save(folder)


Made = tuple[Path, dict[str, Tensor]]


def test_show(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = run(capsys, "show", made[0])
    folder = made[0] / "step-00000002"
    assert found["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert (found["step"], found["mesh"], found["ranks"], found["whole"]) == (2, "dp=2,tp=2", 4, True)
    assert found["progress"] == {"epoch": 1, "batch": 3}
    assert run(capsys, "show", folder) == [found]
    assert main(["show", str(made[0])]) == 0
    assert capsys.readouterr().out.split()[:3] == ["step", "2", "dp=2,tp=2"]
    assert "there is no checkpoint" in run(capsys, "show", made[0] / "none", code=2)
    assert "no checkpoint of step 7" in run(capsys, "show", made[0], "--step", 7, code=2)


def test_verify_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "out", "pp=2", 0)
    assert run(capsys, "verify", tmp_path / "out")[0]["whole"]
    path = tmp_path / "out" / "step-00000002" / "rank-00001.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert run(capsys, "show", tmp_path / "out")[0]["whole"]  # a look at sizes alone
    assert f"{path}: the file is damaged" in run(capsys, "verify", tmp_path / "out", code=1)
    assert f"{path}: the file is damaged" in run(
        capsys, "export", tmp_path / "out", "--output", tmp_path / "a.safetensors", code=1
    )
    path.write_bytes(good[:-1])
    assert str(path) in run(capsys, "show", tmp_path / "out")[0]["fault"]
    assert str(path) in run(capsys, "verify", tmp_path / "out", code=1)
    (path.parent / "manifest.json").unlink()
    assert "interrupted" in run(capsys, "show", tmp_path / "out")[0]["fault"]
    assert main(["show", str(tmp_path / "out")]) == 0
    assert "interrupted" in capsys.readouterr().out


@pytest.mark.parametrize(("mesh", "zero"), [("pp=4", 0), ("dp=2,pp=2", 3)])
def test_a_resharded_checkpoint_is_the_same(
    made: Made,
    mesh: str,
    zero: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(saved_state, "WINDOW_BYTES", 256)
    folder, state = made
    run(capsys, "reshard", folder, "--mesh", mesh, "--zero", zero, "--output", tmp_path / "new")
    (found,) = run(capsys, "show", tmp_path / "new")
    assert (found["step"], found["mesh"], found["ranks"], found["whole"]) == (2, mesh, 4, True)
    assert run(capsys, "verify", tmp_path / "new")[0]["whole"]
    require_equal(resume(tmp_path / "new", mesh, zero), state)
    stored = 0
    for path in sorted((tmp_path / "new" / "step-00000002").glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            stored += sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    assert stored == sum(tensor.numel() for tensor in state.values())


def test_export_and_import(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, state = made
    one = tmp_path / "model.safetensors"
    said = run(capsys, "export", folder, "--output", one)
    assert said["files"] == [str(one)]
    require_equal(load_file(one), weights_of(state))
    run(capsys, "import", one, "--output", tmp_path / "begin")
    found = resume(tmp_path / "begin", "pp=2")
    require_equal(weights_of(found), weights_of(state))
    assert found["engine.step"] == 0
    assert not any(name.startswith("optimizer.") for name in found)
    require_equal(
        {name.removeprefix("ema.0."): t for name, t in found.items() if name[:4] == "ema." and name.count(".") > 2},
        weights_of(state),
    )
    assert "no such file" in run(capsys, "import", tmp_path / "none", "--output", tmp_path / "x", code=2)
    one.write_bytes(one.read_bytes()[:50])
    assert "not a safetensors file" in run(capsys, "import", one, "--output", tmp_path / "x", code=1)


def test_export_in_several_files(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_state, "WINDOW_BYTES", 200)
    folder, state = made
    said = run(capsys, "export", folder, "--output", tmp_path / "out", "--max-file-bytes", 10000)
    assert len(said["files"]) > 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    found = {name: load_file(tmp_path / "out" / home)[name] for name, home in index["weight_map"].items()}
    require_equal(found, weights_of(state))
    run(capsys, "import", tmp_path / "out", "--output", tmp_path / "begin")
    require_equal(weights_of(resume(tmp_path / "begin", "tp=2")), weights_of(state))


def test_averages_and_masters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = save(tmp_path / "out", "dp=2", 3, dtype=torch.bfloat16)
    weights = weights_of(state)
    run(capsys, "export", tmp_path / "out", "--output", tmp_path / "w.safetensors")
    require_equal(load_file(tmp_path / "w.safetensors"), {name: tensor.bfloat16() for name, tensor in weights.items()})
    run(capsys, "export", tmp_path / "out", "--masters", "--output", tmp_path / "m.safetensors")
    require_equal(load_file(tmp_path / "m.safetensors"), weights)
    run(capsys, "export", tmp_path / "out", "--masters", "--ema", 0, "--output", tmp_path / "e.safetensors")
    average = {name: state[f"ema.0.{name}"] for name in weights}
    require_equal(load_file(tmp_path / "e.safetensors"), average)
    odd = run(capsys, "export", tmp_path / "out", "--ema", 1, "--output", tmp_path / "x.safetensors", code=2)
    assert "no average of weights 1" in odd
    assert not (tmp_path / "x.safetensors").exists()


def test_a_model_that_was_split_has_its_own_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def loss_of(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return output.square().sum(), torch.tensor(1.0, dtype=output.dtype)

    def body(transport: Transport, folder: Path, start: str) -> dict[str, Tensor]:
        mesh = "pp=2" if start == "new" else "tp=2"
        plan = qs.compile("1f1b", mesh=mesh, microbatches=2)
        engine = Engine(plan, Split(), loss_of, adam, transport=transport)
        with Checkpoints(folder, 2).opened(engine.saves, start) as saves:  # type: ignore[arg-type]
            if start == "new":
                saves.save_step(0, {})
            else:
                found = saves.newest_whole()
                assert found is not None
                found.load_step()
        return engine.full_state_dict(all_blocks=True)

    state = run_local(2, lambda transport: body(transport, tmp_path / "out", "new"))[0]
    run(capsys, "export", tmp_path / "out", "--output", tmp_path / "model.safetensors")
    own = Split().own_names
    found = load_file(tmp_path / "model.safetensors")
    require_equal(found, {own[name]: tensor for name, tensor in weights_of(state).items()})
    save_file({name: tensor + 1 for name, tensor in found.items()}, tmp_path / "more.safetensors")
    run(capsys, "import", tmp_path / "more.safetensors", "--output", tmp_path / "begin")
    resumed = run_local(2, lambda transport: body(transport, tmp_path / "begin", "resume"))[0]
    require_equal(weights_of(resumed), {name: tensor + 1 for name, tensor in weights_of(state).items()})


def test_tied_weights_are_exported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = GPTOptions(hidden=16, depth=2, tied=True)
    blocks = gpt(DataSpec(input_shape=(LENGTH,), num_classes=CLASSES), options)
    more = {"blocks": blocks, "tied": gpt_tied(options), "plan_tied": {"embedding": (0, 1)}}
    state = save(tmp_path / "out", "pp=2", 0, **more)
    said = run(capsys, "export", tmp_path / "out", "--output", tmp_path / "model.safetensors")
    ((first, others),) = said["tied"].items()
    found = load_file(tmp_path / "model.safetensors")
    assert first in found
    assert not set(others) & found.keys()
    whole = nn.ModuleDict({str(number): block for number, block in enumerate(build_model(blocks, 0, torch.float64))})
    whole.get_submodule(others[0].rpartition(".")[0]).weight = whole.get_parameter(first)  # type: ignore[assignment]
    load_model(whole, tmp_path / "model.safetensors")
    require_equal(dict(whole.state_dict()), weights_of(state))


def test_what_cannot_be_compiled_is_refused(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = run(capsys, "reshard", made[0], "--mesh", "pp=0", "--output", tmp_path / "new", code=2)
    assert "pp" in said
    said = run(capsys, "reshard", made[0], "--mesh", "pp=9", "--output", tmp_path / "new", code=3)
    assert "blocks cannot fill 9 stages" in said
    assert not list(tmp_path.iterdir())


def test_the_newest_step_that_is_whole_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = save(tmp_path / "out", "pp=2", 0)
    (tmp_path / "out" / "step-00000005").mkdir()
    (tmp_path / "out" / "step-00000005" / "rank-00000.safetensors").write_bytes(b"")
    assert main(["export", str(tmp_path / "out"), "--output", str(tmp_path / "a.safetensors")]) == 0
    assert "step 5 is not whole, step 2 is taken" in capsys.readouterr().err
    require_equal(load_file(tmp_path / "a.safetensors"), weights_of(state))


def test_files_that_do_not_say_how_they_lie(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "out", "dp=2", 0)
    path = tmp_path / "out" / "step-00000002" / "rank-00000.safetensors"
    save_file(load_file(path), path)
    manifest = read_manifest(path.parent / MANIFEST, 2)
    files = [hash_file(path), manifest.files[1]]
    (path.parent / MANIFEST).write_bytes(manifest.model_copy(update={"files": files}).to_json())
    said = run(capsys, "export", tmp_path / "out", "--output", tmp_path / "a.safetensors", code=3)
    assert f"{path}: the file does not say where its tensors lie" in said


def test_a_step_that_is_no_folder_or_may_not_be_read(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(made[0], folder)
    (folder / "step-00000007").write_bytes(b"no folder")
    (folder / "step-00000009").mkdir()
    (folder / "step-00000009" / "manifest.json").write_bytes(b"{}")
    listed = os.listdir

    def refusing(path: Any = ".") -> list[str]:
        if str(path).endswith("step-00000009"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return listed(path)

    monkeypatch.setattr(os, "listdir", refusing)
    unreadable, no_folder, whole = run(capsys, "show", folder)
    assert unreadable["fault"] == f"{folder / 'step-00000009'}: cannot read the checkpoint: Permission denied"
    assert no_folder["fault"].endswith("step-00000007: cannot read the checkpoint: it is a file, not a directory")
    assert whole["whole"]
    assert main(["show", str(folder)]) == 0
    assert "interrupted" not in capsys.readouterr().out
    assert main(["verify", str(folder)]) == 1
    assert "Permission denied" in capsys.readouterr().err


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_folder_of_a_run_is_not_written_into(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    folder, one = made[0], made[0].parent / "one.safetensors"
    step = folder / "step-00000002"
    run(capsys, "export", folder, "--output", one)
    before = contents(folder)
    saved = "a run has saved there, up to step 2; give -o another folder"
    for words in (["import", one], ["reshard", folder, "--mesh", "dp=2"], ["export", folder]):
        assert f"error: {folder}: {saved}\n" == run(capsys, *words, "--output", folder, code=2)
    for output in (step, step / "rank-00000.safetensors"):
        said = run(capsys, "export", folder, "--output", output, code=2)
        assert said == f"error: {step}: it is a checkpoint of a run; give -o another folder\n"
    assert contents(folder) == before


def test_the_folder_of_a_run_that_lives_is_not_written_into(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, folder = tmp_path / "one.safetensors", tmp_path / "live"
    run(capsys, "export", made[0], "--output", one)
    folder.mkdir()
    lock = lock_folder(folder, "0" * 16, 0.0)
    try:
        for words in (["import", one], ["reshard", made[0], "--mesh", "dp=2"], ["export", made[0]]):
            said = run(capsys, *words, "--output", folder, code=2)
            assert said.startswith(f"error: {folder}: another run saves its checkpoints there (process ")
            assert said.endswith("; give -o another folder\n")
        assert [path.name for path in folder.iterdir()] == ["run.lock"]
    finally:
        lock.release()
    run(capsys, "import", one, "--output", folder)
    assert sorted(path.name for path in folder.iterdir()) == ["run.lock", "step-00000000"]


def test_what_fails_leaves_no_half_of_a_step(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise UsageError("no room")

    monkeypatch.setattr(resharding, "write_tensors", fails)
    assert "no room" in run(capsys, "reshard", made[0], "--mesh", "dp=2", "--output", tmp_path / "new", code=2)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["run.lock"]
