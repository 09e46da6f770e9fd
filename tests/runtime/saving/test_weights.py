"""Averages, full states and changes of weights are those of one process, on every mesh and ZeRO stage.

Every entry of a model's own state dict is in what an engine gives and saves, and is read back into the forward.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quintsched.errors import MisfitError, UsageError
from quintsched.runtime import Engine, split
from quintsched.runtime.blocks.block_builders import build_block
from quintsched.runtime.train.built_in_losses import cross_entropy_sum

from ...helpers.blocks import of_kind, of_layers
from ...helpers.training import call_with_share, train_alone
from ..splitting.models import Traced, Walked, inputs, loss, made
from ..toys import adam, cross_entropy_plainly, difference, ids_task, tiny_gpt
from ..trials import require_same
from .split_models import LENGTH, plan_of, run_engines, train_on_ids

DECAY, TINY = 0.8, tiny_gpt(LENGTH, depth=2)
MESHES = [("dp=2,pp=2", 1), ("dp=2,tp=2", 2), ("dp=2,pp=2", 3)]


def on(
    mesh: str, zero: int, body: Callable[[Engine], Any], blocks: Callable[[], Any] | None = None, **more: Any
) -> Any:
    """Call with an engine on each rank."""
    more = {"dtype": torch.float64, "bucket_mb": 0.004, "clip": 1.0} | more
    return run_engines(plan_of(mesh, zero), blocks or (lambda: TINY), body, cross_entropy_sum, **more)


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

    settings = {"clip": 1.0, "before": begin, "after": average}
    found = train_alone(TINY, cross_entropy_plainly, adam, batches, evaluated=last, **settings)
    return averages, found.losses[-1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("mesh", "zero"), MESHES)
def test_averages_are_those_of_one_process(mesh: str, zero: int) -> None:
    def body(engine: Engine) -> tuple[dict[str, Tensor], float]:
        ema = engine.ema(DECAY)
        train_on_ids(engine, [0, 1, 2])
        before = engine.full_weights()
        with ema.applied():
            loss = call_with_share(engine, engine.evaluate, ids_task(4, 8, LENGTH).batches[3]).loss.item()
            with pytest.raises(UsageError, match=r"inside of `with ema\.applied"):
                engine.step(None, None)
        require_same(engine.full_weights(), before)
        state = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
        train_on_ids(engine, [3])
        engine.load_state_dict(state)
        return ema.full_weights(), loss

    expected, loss = alone()
    for weights, found in on(mesh, zero, body):
        assert abs(found - loss) <= 1e-12
        assert max(difference(weight, expected[name]) for name, weight in weights.items()) <= 1e-12


@pytest.mark.parametrize(
    ("mesh", "zero", "dtype"),
    [("dp=2", 1, torch.bfloat16), ("dp=2", 3, torch.float64), ("dp=2,tp=2", 2, torch.bfloat16)],
)
def test_weights_that_users_change_are_what_is_stepped(mesh: str, zero: int, dtype: torch.dtype) -> None:
    def body(engine: Engine) -> None:
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
        weights, name = engine.full_weights(), "1.norm1.weight"
        assert max(float(weight.abs().max()) for weight in weights.values()) <= 0.0101
        engine.set_weights({name: torch.full_like(weights[name], 0.5)})
        train_on_ids(engine, [2])
        assert bool((engine.full_weights()[name] == 0.5).all())
        for odd, error, words in (("nobody", UsageError, "no weight 'nobody'"), (name, MisfitError, "but .* needs")):
            with pytest.raises(error, match=words):
                engine.set_weights({odd: torch.zeros(1, 2, 3)})

    on(mesh, zero, body, optimizer=partial(torch.optim.SGD, lr=0.0), dtype=dtype)


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
    def body(engine: Engine) -> None:
        train_on_ids(engine, [0])
        whole = {name: weight.shape for name, weight in engine.full_weights().items()}
        weights = engine.stages[0].named_weights().items()
        name, weight = next((n, p) for n, p in weights if mesh == "dp=2" or p.shape != whole[n])
        change(weight)
        with pytest.raises(UsageError, match=rf"'{name}'.*engine\.gathered\(write=True\)"):
            train_on_ids(engine, [1])

    on(mesh, zero, body, dtype=dtype)


@pytest.mark.parametrize("zero", [1, 3])
def test_readers_between_steps_see_fresh_weights_also_of_modules_that_a_loop_holds(zero: int) -> None:
    held: dict[int, list[nn.Module]] = {}

    def build() -> list[nn.Module]:
        return held.setdefault(get_ident(), [build_block(block, number) for number, block in enumerate(TINY)])

    def body(engine: Engine) -> None:
        modules = held[get_ident()]
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
        engine.stages[0].blocks["0"].tokens.weight.data = torch.full_like(full["0.tokens.weight"], 7.0)
        said = r"such as '0\.tokens\.weight' .*, but what is stepped are .* shards"
        with nullcontext() if zero < 3 else pytest.raises(UsageError, match=said):
            assert bool((engine.full_state_dict()["model.0.tokens.weight"] == 7.0).all())

    on("dp=2", zero, body, build)


def test_averages_in_another_order_are_refused(tmp_path: Path) -> None:
    def averaging(act: Callable[[Engine], Any], *decays: float) -> Any:
        def body(engine: Engine) -> Any:
            for decay in decays:
                engine.ema(decay)
            return act(engine)

        return on("pp=1", 0, body)[0]

    def save(engine: Engine) -> tuple[Any, Any]:
        train_on_ids(engine, [0])
        save_file(engine.state_dict(), tmp_path / "0", metadata=engine.state_metadata())
        return engine.state_dict(), engine.full_state_dict()

    state, full = averaging(save, 0.5, 0.9)
    loads: list[Callable[[Engine], object]] = [
        lambda engine: engine.load_state_dict(state),
        lambda engine: engine.load_full_state_dict(full),
        lambda engine: engine.load_state_files([tmp_path / "0"]),
    ]
    for load in loads:
        with pytest.raises(MisfitError, match=r"average 0 of the state has a decay of 0\.5, .* 0\.9"):
            averaging(load, 0.9, 0.5)
        averaging(load, 0.5, 0.99)


def read_between(self: Any, x: Tensor) -> Tensor:
    """Read buffers of the whole model; its teacher is read by nothing."""
    return x * (1 + self.mean) + self.steps + self.passing


X, Y = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
Shift = of_layers("Shift", lambda: {"by": nn.Buffer(torch.rand(1))}, lambda self, x: x.new_ones(1) * self.by)
Passing = of_kind(nn.Linear, lambda self, x, bias, shift: x + nn.Linear.forward(self, x).tanh() * bias + shift)


class ReadsFirst(nn.Module):
    """Reads its buffers before its layers, which are passed them, and goes on with one behind these."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.stem, self.head, self.shift = nn.Linear(8, 8), nn.Linear(8, 8), Shift()
        self.layers = nn.ModuleList(Passing(8, 8) for _ in range(2))
        for name in ("bias", "scale"):
            self.register_buffer(name, torch.rand(1))

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.scale * 2, self.shift(x)
        x = self.stem(x if x.sum() < 1e9 else -x)  # not to be traced
        for layer in self.layers:
            x = layer(x, self.bias, shift)
        return self.head(x) * scale


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("mesh", "kind"), [("dp=1", Traced), ("pp=2", Walked), *((mesh, ReadsFirst) for mesh in ("dp=1", "pp=2", "pp=4"))]
)
def test_all_of_it_goes_and_comes_back(tmp_path: Path, kind: type[nn.Module], mesh: str) -> None:
    def model(steps: int) -> nn.Module:
        if kind is ReadsFirst:
            return kind(steps)
        whole = made(kind, read_between, torch.float32)
        whole.register_buffer("passing", torch.ones(1), persistent=False)
        whole.steps.fill_(steps)
        return whole

    other, x = model(3), X if kind is ReadsFirst else inputs(torch.float32)
    targets = x.flatten(1)[:, 0]
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor += 1
    wanted = other.state_dict()
    save_file(wanted, tmp_path / "model.safetensors")

    def blocks() -> Any:
        return split(model(0), example=None if kind is Traced else x)

    def body(engine: Engine) -> tuple[float, dict[str, Tensor]]:
        engine.load_pretrained(tmp_path)
        result = engine.step(x, targets)
        engine.save_pretrained(tmp_path / "out")
        engine.save_dcp(tmp_path / "dcp")
        return float(result.loss), engine.full_weights()

    ranks = run_engines(plan_of(mesh, 0), blocks, body, loss, optimizer=partial(torch.optim.SGD, lr=0.0))
    own = blocks().own_names
    given = {own[name]: tensor for _, weights in ranks for name, tensor in weights.items()}
    read = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in wanted.items()}
    dcp.load(read, checkpoint_id=tmp_path / "dcp", no_dist=True)
    back = {name.removeprefix("model."): tensor for name, tensor in read.items()}
    saved = {name: t for file in (tmp_path / "out").glob("*.safetensors") for name, t in load_file(file).items()}
    for found in (given, saved, back):
        require_same(found, wanted)
    total, weight = loss(other(x), targets)
    assert ranks[0][0] == pytest.approx(total.item() / weight, rel=1e-5)


class Scaled(nn.Linear):
    """A layer with a weight that has no dimensions, and one that has no numbers."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.scale, self.none = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.none.sum(0)


@pytest.mark.parametrize("zero", [1, 3])
def test_weights_without_dimensions_or_numbers_go_on_under_zero(zero: int) -> None:
    def body(engine: Engine) -> list[float]:
        losses = []
        engine.step(X, Y)
        state = engine.full_state_dict()
        for _ in range(2):
            losses.append(engine.step(X, Y).loss.item())
            engine.load_full_state_dict(state)
        assert state["model.1.none"].shape == (0, 8)
        return losses

    for first, again in run_engines(plan_of("dp=2", zero), lambda: [Scaled, Scaled], body, nn.functional.mse_loss):
        assert first == again
