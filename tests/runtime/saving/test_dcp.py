"""PyTorch's distributed checkpoints: written by any mesh, read by any other, and by PyTorch alone; and the reverse."""

import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import quintsched as qs
from quintsched.runtime.engine import Engine
from quintsched.runtime.saving.dcp import read_table

from ...helpers.training import train_model
from .split_models import Split, loss_of, plan_of, run_engines, train, whole_batches

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
MESHES = [("dp=1", 0), ("pp=2", 0), ("tp=2", 0), ("dp=2", 0), ("dp=2", 1), ("dp=2", 3), ("dp=2,tp=2", 3)]


adamw = partial(torch.optim.AdamW, lr=1e-2, betas=(0.9, 0.95), foreach=False)


def weighed_loss(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return loss_of(output, targets), torch.tensor(float(len(targets)))


def run(plan: qs.Plan, body: Callable[[Engine], Any], blocks: Callable[[], Any] = Split, **more: Any) -> list[Any]:
    return run_engines(plan, blocks, body, weighed_loss, **({"optimizer": adamw} | more))


class Plain(nn.Module):
    """The model in one piece under its own names, as one process has it."""

    def __init__(self) -> None:
        super().__init__()
        first, *layers, last = Split()
        self.embed, self.layers, self.head = first, nn.ModuleList(layers), last

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train_plainly(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    return train_model(model, optimizer, weighed_loss, whole_batches(last)[first:]).losses


def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Plain()
    return model, adamw([p for p in model.parameters() if p.requires_grad])


@pytest.fixture(scope="module")
def uninterrupted() -> list[float]:
    return train_plainly(*plain(), 0, 6)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("mesh", "zero"), MESHES)
def test_any_mesh_goes_on_from_plain_torch_and_plain_torch_from_it(tmp_path, mesh, zero, uninterrupted):
    model, optimizer = plain()
    begun = train_plainly(model, optimizer, 0, 2)
    weights, states = get_state_dict(model, optimizer, options=FLAT)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=tmp_path / "in", no_dist=True)

    def body(engine: Engine) -> list[float]:
        engine.load_dcp(tmp_path / "in")
        losses = train(engine, [2, 3])
        engine.save_dcp(tmp_path / "out")
        return losses

    for found in run(plan_of(mesh, zero), body):
        assert begun + found == pytest.approx(uninterrupted[:4], rel=1e-12)
    model, optimizer = plain()
    weights, states = get_state_dict(model, optimizer, options=FLAT)
    state = {"model": weights, "optimizer": states}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=FLAT)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    assert train_plainly(model, optimizer, 4, 6) == pytest.approx(uninterrupted[4:], rel=1e-12)


class Tied(list[nn.Module]):
    """An embedding and a head that are one weight."""

    def __init__(self) -> None:
        super().__init__([nn.Linear(8, 8, bias=False), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)])
        for number, block in enumerate(self):
            torch.nn.init.normal_(block.double().weight, generator=torch.Generator().manual_seed(number))


def test_each_rank_writes_its_shards_and_nothing_twice_nor_a_tied_weight(tmp_path: Path) -> None:
    def body(engine: Engine, name: str) -> None:
        train(engine, [0])
        engine.save_dcp(tmp_path / name)

    run(plan_of("dp=2,tp=2", 3), partial(body, name="shards"))
    sizes = [os.path.getsize(tmp_path / "shards" / f"__{rank}_0.distcp") for rank in range(4)]
    assert max(sizes) < 0.6 * sum(sizes)
    plan = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=2, zero=3, tied={"embedding": (0, 1)})
    run(plan, partial(body, name="out"), Tied, tied={"embedding": ("0.weight", "2.weight")})
    table = read_table(tmp_path / "out")
    for name, kind in table.state_dict_metadata.items():
        if hasattr(kind, "chunks"):
            assert sum(chunk.sizes.numel() for chunk in kind.chunks) == kind.size.numel(), name
    first, last = (
        {(p.relative_path, p.offset) for i, p in table.storage_data.items() if i.fqn == name}
        for name in ("model.0.weight", "model.2.weight")
    )
    assert first == last != set()
    dcp_to_torch_save(tmp_path / "out", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert found["model"].keys() == nn.Sequential(*Tied()).state_dict().keys()
    assert torch.equal(found["model"]["0.weight"], found["model"]["2.weight"])
    assert int(found["engine"]["step"]) == 1


def refused(path: Path) -> str:
    """Return why all ranks refuse to load, in the same words."""

    def body(engine: Engine) -> tuple[type, str]:
        with pytest.raises(qs.QuintschedError) as caught:
            engine.load_dcp(path)
        return type(caught.value), str(caught.value).partition("\non rank")[0]

    ((_, said),) = set(run(plan_of("pp=2", 0), body))
    return said


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("pwned",)


def test_nothing_is_run_and_damaged_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("in", "cut"):
        dcp.save({"model": Plain().state_dict()}, checkpoint_id=tmp_path / name, no_dist=True)
    path = tmp_path / "in" / ".metadata"
    table = pickle.loads(path.read_bytes())
    table.planner_data["model.head.bias"] = Evil()
    path.write_bytes(pickle.dumps(table))
    assert "it names posix.mkdir" in refused(tmp_path / "in")
    table.planner_data = None
    table.storage_data = {index: info for index, info in table.storage_data.items() if index.fqn != "model.head.bias"}
    path.write_bytes(pickle.dumps(table))
    assert "it has no place of 'model.head.bias'" in refused(tmp_path / "in")
    for info in table.storage_data.values():
        info.relative_path = "../__0_0.distcp"
    path.write_bytes(pickle.dumps(table))
    assert "is not the name of a plain file beside it" in refused(tmp_path / "in")
    path.write_bytes(b"no pickle")
    assert "not a table of torch.distributed.checkpoint" in refused(tmp_path / "in")
    assert not (tmp_path / "pwned").exists()
    os.truncate(tmp_path / "cut" / "__0_0.distcp", 900)
    assert "is damaged, or no plain data" in refused(tmp_path / "cut")
