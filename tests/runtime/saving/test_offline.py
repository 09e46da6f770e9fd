"""Checkpoints shown, verified, resharded, exported and imported in one process, and runs that go on from these."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file
from torch import nn

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.blocks.block_builders import Blocks, build_model
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import GPTOptions, gpt, gpt_tied
from quintsched.runtime.saving import saved_state
from quintsched.runtime.saving.checkpoints.folder_owner import lock_folder
from quintsched.runtime.train.built_in_losses import cross_entropy_sum

from ..toys import CLASSES, tiny_gpt
from ..trials import require_same
from .split_models import (
    LENGTH,
    Split,
    State,
    load_state,
    plan_of,
    run_command,
    run_engines,
    save_state,
    train_on_ids,
    weights_of,
)


def on(mesh: str, body: Callable[[Engine], Any], zero: int = 0, plan_tied: Any = None, **more: Any) -> State:
    """Call with an engine that has an average on each rank; return what the first one gives."""

    def with_average(engine: Engine) -> Any:
        engine.ema(0.5)
        return body(engine)

    plan = qs.compile("1f1b", mesh=mesh, microbatches=2, zero=zero, tied=plan_tied)
    blocks: Blocks = more.pop("blocks", None) or tiny_gpt(LENGTH, depth=2)
    return run_engines(plan, lambda: blocks, with_average, cross_entropy_sum, **{"dtype": torch.float64} | more)[0]


def save(folder: Path, mesh: str = "dp=2,tp=2", zero: int = 2, **more: Any) -> State:
    """Save after two steps; return the full state."""

    def body(engine: Engine) -> State:
        train_on_ids(engine, [0, 1])
        return save_state(engine, folder, 2, {"epoch": 1, "batch": 3})

    return on(mesh, body, zero, **more)


def resume(folder: Path, mesh: str, zero: int = 0) -> State:
    return on(mesh, lambda engine: load_state(engine, folder), zero)


def run(capsys: pytest.CaptureFixture[str], command: str, path: object, *, code: int = 0, **given: Any) -> Any:
    """Run a command with `json`, and return what it prints; where it fails, its message."""
    assert run_command(command, path, json=True, **given) == code
    said = capsys.readouterr()
    return json.loads(said.out) if not code else said.err


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    folder = tmp_path_factory.mktemp("saved") / "out"
    return folder, save(folder)


Made = tuple[Path, State]


def test_show(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = run(capsys, "show", made[0])
    folder = made[0] / "step-00000002"
    assert found["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert (found["step"], found["mesh"], found["ranks"], found["whole"]) == (2, "dp=2,tp=2", 4, True)
    assert found["progress"] == {"epoch": 1, "batch": 3}
    assert run(capsys, "show", folder) == [found]
    assert run_command("show", made[0]) == 0
    assert capsys.readouterr().out.split()[:3] == ["step", "2", "dp=2,tp=2"]
    assert "there is no checkpoint" in run(capsys, "show", made[0] / "none", code=2)
    assert "no checkpoint of step 7" in run(capsys, "show", made[0], step=7, code=2)


def test_verify_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "out", "pp=2", 0)
    assert run(capsys, "verify", tmp_path / "out")[0]["whole"]
    path = tmp_path / "out" / "step-00000002" / "rank-00001.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert run(capsys, "show", tmp_path / "out")[0]["whole"]  # a look at sizes alone
    assert f"{path}: the file is damaged" in run(capsys, "verify", tmp_path / "out", code=1)
    words, one = ("export", tmp_path / "out"), tmp_path / "a.safetensors"
    assert f"{path}: the file is damaged" in run(capsys, *words, output=one, code=1)
    path.write_bytes(good[:-1])
    assert str(path) in run(capsys, "show", tmp_path / "out")[0]["fault"]
    assert str(path) in run(capsys, "verify", tmp_path / "out", code=1)
    path.write_bytes(good)
    path.parent.with_name("step-00000005").mkdir()
    (tmp_path / "out" / "step-00000005" / "rank-00000.safetensors").write_bytes(b"")
    assert "interrupted" in run(capsys, "show", tmp_path / "out")[0]["fault"]
    assert run_command(*words, output=one) == 0
    assert "step 5 is not whole, step 2 is taken" in capsys.readouterr().err


def test_a_resharded_checkpoint_is_the_same(made, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(saved_state, "WINDOW_BYTES", 256)
    (folder, state), new = made, tmp_path / "new"
    run(capsys, "reshard", folder, mesh="dp=2,pp=2", zero=3, output=new)
    (found,) = run(capsys, "show", new)
    assert (found["step"], found["mesh"], found["ranks"], found["whole"]) == (2, "dp=2,pp=2", 4, True)
    assert run(capsys, "verify", new)[0]["whole"]
    require_same(resume(new, "dp=2,pp=2", 3), state)
    shares = [load_file(path).values() for path in (new / "step-00000002").glob("*.safetensors")]
    assert sum(t.numel() for share in shares for t in share) == sum(tensor.numel() for tensor in state.values())
    for mesh, code, words in (("pp=0", 2, "pp"), ("pp=9", 3, "blocks cannot fill 9 stages")):
        assert words in run(capsys, "reshard", folder, mesh=mesh, output=tmp_path / "no", code=code)
    assert not (tmp_path / "no").exists()


def test_export_and_import(made, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(saved_state, "WINDOW_BYTES", 200)
    folder, state = made
    one, several = tmp_path / "model.safetensors", tmp_path / "several"
    assert run(capsys, "export", folder, output=one)["files"] == [str(one)]
    require_same(load_file(one), weights_of(state))
    assert len(run(capsys, "export", folder, output=several, max_file_bytes=10000)["files"]) > 2
    index = json.loads((several / "model.safetensors.index.json").read_text())["weight_map"]
    require_same({name: load_file(several / home)[name] for name, home in index.items()}, weights_of(state))
    for source, mesh in ((one, "pp=2"), (several / "model.safetensors.index.json", "tp=2")):
        run(capsys, "import", source, output=tmp_path / mesh)
        found = resume(tmp_path / mesh, mesh)
        require_same(weights_of(found), weights_of(state))
        assert found["engine.step"] == 0
        assert not any(name.startswith("optimizer.") for name in found)
        averages = {n.removeprefix("ema.0."): t for n, t in found.items() if n[:4] == "ema." and n.count(".") > 2}
        require_same(averages, weights_of(state))
    assert "no such file" in run(capsys, "import", tmp_path / "none", output=tmp_path / "x", code=2)
    one.write_bytes(one.read_bytes()[:50])
    assert "not a safetensors file" in run(capsys, "import", one, output=tmp_path / "x", code=1)


def test_averages_and_masters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = save(tmp_path / "out", "dp=2", 3, dtype=torch.bfloat16)
    weights = weights_of(state)
    run(capsys, "export", tmp_path / "out", output=tmp_path / "w.safetensors")
    require_same(load_file(tmp_path / "w.safetensors"), {name: tensor.bfloat16() for name, tensor in weights.items()})
    run(capsys, "export", tmp_path / "out", masters=True, output=tmp_path / "m.safetensors")
    require_same(load_file(tmp_path / "m.safetensors"), weights)
    run(capsys, "export", tmp_path / "out", masters=True, ema=0, output=tmp_path / "e.safetensors")
    average = {name: state[f"ema.0.{name}"] for name in weights}
    require_same(load_file(tmp_path / "e.safetensors"), average)
    odd = run(capsys, "export", tmp_path / "out", ema=1, output=tmp_path / "x.safetensors", code=2)
    assert "no average of weights 1" in odd
    assert not (tmp_path / "x.safetensors").exists()


def test_a_model_that_was_split_has_its_own_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (state, _) = run_engines(plan_of("pp=2", 0), Split, lambda engine: save_state(engine, tmp_path / "out", 0, {}))
    run(capsys, "export", tmp_path / "out", output=tmp_path / "model.safetensors")
    own = Split().own_names
    found = load_file(tmp_path / "model.safetensors")
    require_same(found, {own[name]: tensor for name, tensor in weights_of(state).items()})
    save_file({name: tensor + 1 for name, tensor in found.items()}, tmp_path / "more.safetensors")
    run(capsys, "import", tmp_path / "more.safetensors", output=tmp_path / "begin")
    (resumed, _) = run_engines(plan_of("tp=2", 0), Split, lambda engine: load_state(engine, tmp_path / "begin"))
    require_same(weights_of(resumed), {name: tensor + 1 for name, tensor in weights_of(state).items()})


def test_tied_weights_are_exported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = GPTOptions(hidden=16, depth=2, tied=True)
    blocks = gpt(DataSpec(input_shape=(LENGTH,), num_classes=CLASSES), options)
    more = {"blocks": blocks, "tied": gpt_tied(options), "plan_tied": {"embedding": (0, 1)}}
    state = save(tmp_path / "out", "pp=2", 0, **more)
    said = run(capsys, "export", tmp_path / "out", output=tmp_path / "model.safetensors")
    ((first, others),) = said["tied"].items()
    found = load_file(tmp_path / "model.safetensors")
    assert first in found
    assert not set(others) & found.keys()
    whole = nn.ModuleDict({str(number): block for number, block in enumerate(build_model(blocks, 0, torch.float64))})
    whole.get_submodule(others[0].rpartition(".")[0]).weight = whole.get_parameter(first)
    load_model(whole, tmp_path / "model.safetensors")
    require_same(dict(whole.state_dict()), weights_of(state))


def test_the_folder_of_a_run_is_not_written_into(made, tmp_path, capsys):
    folder, one, live = made[0], tmp_path / "one.safetensors", tmp_path / "live"
    step = folder / "step-00000002"
    run(capsys, "export", folder, output=one)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    live.mkdir()
    lock = lock_folder(live, "0" * 16, 0.0)
    for command, path, more in (("import", one, {}), ("reshard", folder, {"mesh": "dp=2"}), ("export", folder, {})):
        said = run(capsys, command, path, output=folder, **more, code=2)
        assert said == f"error: {folder}: a run has saved there, up to step 2; give -o another folder\n"
        said = run(capsys, command, path, output=live, **more, code=2)
        assert said.startswith(f"error: {live}: another run saves its checkpoints there (process ")
        assert said.endswith("; give -o another folder\n")
    for output in (step, step / "rank-00000.safetensors"):
        said = run(capsys, "export", folder, output=output, code=2)
        assert said == f"error: {step}: it is a checkpoint of a run; give -o another folder\n"
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert [path.name for path in live.iterdir()] == ["run.lock"]
    lock.release()
    run(capsys, "import", one, output=live)
    assert sorted(path.name for path in live.iterdir()) == ["run.lock", "step-00000000"]
