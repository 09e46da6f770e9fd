"""Averages, full states and changes of weights are those of one process, on every mesh and ZeRO stage."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import quintsched as qs
from quintsched.errors import MisfitError, UsageError
from quintsched.runtime import Engine
from quintsched.runtime.blocks.block_builders import Blocks, build_block
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.train.built_in_losses import cross_entropy_sum

from ...helpers.training import train_alone
from ..toys import adam, cross_entropy_plainly, difference, ids_task, share, tiny_gpt
from .split_models import LENGTH, train_on_ids

DECAY = 0.8
MESHES = [("dp=2,pp=2", 1), ("dp=2,tp=2", 2), ("dp=2,pp=2", 3)]


def make(
    transport: Transport, mesh: str, zero: int, optimizer: Any = adam, *, blocks: Blocks | None = None, **more: Any
) -> Engine:
    plan = qs.compile("1f1b", mesh=mesh, microbatches=4 // qs.Mesh.parse(mesh).axis_size("dp"), zero=zero)
    blocks = tiny_gpt(LENGTH, depth=2) if blocks is None else blocks
    more = {"dtype": torch.float64, "bucket_mb": 0.004, "clip": 1.0, "transport": transport} | more
    return Engine(plan, blocks, cross_entropy_sum, optimizer, **more)


@cache
def alone() -> tuple[dict[str, Tensor], float]:
    """Return the average of the weights of one process after three steps, and its loss on the fourth batch."""
    *batches, last = ids_task(4, 8, LENGTH).batches
    averages: dict[str, Tensor] = {}

    def average(model: nn.Module, step: int) -> None:
        for name, p in model.named_parameters():
            averages[name] = averages.get(name, p.detach()).lerp(p.detach(), 1 - DECAY)
        if step == 2:
            model.load_state_dict(averages)

    def begin(model: nn.Module, step: int) -> None:
        averages.update({name: p.detach().clone() for name, p in model.named_parameters() if step == 0})

    blocks, settings = tiny_gpt(LENGTH, depth=2), {"clip": 1.0, "before": begin, "after": average}
    found = train_alone(blocks, cross_entropy_plainly, adam, batches, evaluated=last, **settings)
    return averages, found.losses[-1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("mesh", "zero"), MESHES)
def test_averages_are_those_of_one_process(mesh: str, zero: int) -> None:
    task = ids_task(4, 8, LENGTH)

    def run(transport: Transport) -> tuple[dict[str, Tensor], float]:
        engine = make(transport, mesh, zero)
        ema = engine.ema(DECAY)
        train_on_ids(engine, [0, 1, 2])
        before = engine.full_weights()
        with ema.applied():
            loss = engine.evaluate(*share(engine, task.inputs[3], task.targets[3])).loss.item()
            with pytest.raises(UsageError, match=r"inside of `with ema\.applied"):
                engine.step(None, None)
        after = engine.full_weights()
        assert all(torch.equal(after[name], weight) for name, weight in before.items())
        state = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
        train_on_ids(engine, [3])
        engine.load_state_dict(state)
        return ema.full_weights(), loss

    expected, loss = alone()
    for weights, found in run_local(4, run, timeout_s=60):
        assert abs(found - loss) <= 1e-12
        assert max(difference(weight, expected[name]) for name, weight in weights.items()) <= 1e-12


@pytest.mark.parametrize(
    ("mesh", "zero", "dtype"),
    [("dp=2", 1, torch.bfloat16), ("dp=2", 3, torch.float64), ("dp=2,tp=2", 2, torch.bfloat16)],
)
def test_weights_that_users_change_are_what_is_stepped(mesh: str, zero: int, dtype: torch.dtype) -> None:
    plain = torch.optim.SGD

    def run(transport: Transport) -> None:
        engine = make(transport, mesh, zero, lambda p: plain(p, lr=0.0), dtype=dtype)
        train_on_ids(engine, [0])
        before = engine.full_weights()
        with engine.gathered(write=True) as stages:
            for stage in stages.values():
                for name, weight in stage.named_weights().items():
                    assert torch.equal(weight, before[name])  # whole, also over tp
                    if name.endswith("bias"):
                        weight.data = weight.data.clamp(-0.01, 0.01)
                    else:
                        weight.data.clamp_(-0.01, 0.01)
        train_on_ids(engine, [1])
        weights = engine.full_weights()
        assert max(float(weight.abs().max()) for weight in weights.values()) <= 0.0101
        name = "1.norm1.weight" if "1.norm1.weight" in weights else sorted(weights)[0]
        engine.set_weights({name: torch.full_like(weights[name], 0.5)})
        train_on_ids(engine, [2])
        assert bool((engine.full_weights()[name] == 0.5).all())
        with pytest.raises(UsageError, match="no weight 'nobody'"):
            engine.set_weights({"nobody": torch.zeros(1)})
        with pytest.raises(MisfitError, match=r"but .* needs"):
            engine.set_weights({name: torch.zeros(1, 2, 3)})

    run_local(qs.Mesh.parse(mesh).size, run, timeout_s=60)


@pytest.mark.parametrize(
    ("mesh", "zero", "dtype", "change"),
    [
        ("dp=2", 0, torch.bfloat16, lambda weight: weight.detach().mul_(0.5)),
        ("tp=2", 0, torch.float64, lambda weight: setattr(weight, "data", weight.data * 0.5)),
        ("tp=2", 0, torch.float64, lambda weight: weight.data.clamp_(-1e-3, 1e-3)),
        ("dp=2", 3, torch.float64, lambda weight: weight.data.zero_()),
    ],
)
def test_changes_that_would_be_lost_or_done_to_shards_are_refused(mesh, zero, dtype, change):
    def run(transport: Transport) -> None:
        engine = make(transport, mesh, zero, dtype=dtype)
        train_on_ids(engine, [0])
        whole = {name: weight.shape for name, weight in engine.full_weights().items()}
        weights = engine.stages[0].named_weights().items()
        name, weight = next((n, p) for n, p in weights if mesh == "dp=2" or p.shape != whole[n])
        change(weight)
        with pytest.raises(UsageError, match=rf"'{name}'.*engine\.gathered\(write=True\)"):
            train_on_ids(engine, [1])

    run_local(2, run)


@pytest.mark.parametrize("zero", [1, 3])
def test_readers_between_steps_see_fresh_weights_also_of_modules_that_a_loop_holds(zero: int) -> None:
    def run(transport: Transport) -> None:
        modules = [build_block(block, number) for number, block in enumerate(tiny_gpt(LENGTH, depth=2))]
        engine = make(transport, "dp=2", zero, blocks=modules)
        for step in range(3):
            train_on_ids(engine, [step])
            if zero < 3:
                seen = {f"{n}.{name}": t for n, m in enumerate(modules) for name, t in m.state_dict().items()}
                seen |= {f"{n}.{name}": p.detach() for n, m in enumerate(modules) for name, p in m.named_parameters()}
            else:
                with pytest.raises(UsageError, match=r"engine\.gathered"):
                    engine.stages[0].blocks["1"].state_dict()
                with engine.gathered() as stages:
                    found = stages[0].blocks["1"].state_dict(keep_vars=True)
                    seen = {f"1.{name}": tensor.clone() for name, tensor in found.items()}
            full = engine.full_weights()
            assert all(torch.equal(full[name], tensor) for name, tensor in seen.items())

    run_local(2, run)


def test_averages_in_another_order_are_refused(tmp_path: Path) -> None:
    def body(transport: Transport) -> None:
        engines = [make(transport, "pp=1", 0) for _ in range(3)]
        for engine, decays in zip(engines, [(0.5, 0.9), (0.9, 0.5), (0.5, 0.99)], strict=True):
            for decay in decays:
                engine.ema(decay)
        saved, swapped, changed = engines
        train_on_ids(saved, [0])
        state, full = saved.state_dict(), saved.full_state_dict()
        save_file(state, tmp_path / "0", metadata=saved.state_metadata())
        loads: list[Callable[[Engine], None]] = [
            lambda engine: engine.load_state_dict(state),
            lambda engine: engine.load_full_state_dict(full),
            lambda engine: engine.load_state_files([tmp_path / "0"]),
        ]
        for load in loads:
            with pytest.raises(MisfitError, match=r"average 0 of the state has a decay of 0\.5, .* 0\.9"):
                load(swapped)
            load(changed)

    run_local(1, body)
