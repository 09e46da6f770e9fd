"""Some steps, a save, a load into a new engine and as many steps are twice as many steps, bit for bit."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn, optim

import quintsched as qs
from quintsched.runtime import Engine, Transport, run_local
from quintsched.runtime.optim.loss_scale import LossScale

from ...helpers.blocks import of_layers
from ...helpers.training import Outcome, require_equal, squares, train_alone
from ..toys import share
from ..trials import copied, require_resumable, require_same, save_files
from .optimizers import ODD, InAttributes, InGroups, InObject, Lookahead, Numbers, Unsaid

STEPS = 3
INPUTS = torch.randn(2 * STEPS, 8, 6, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randn(2 * STEPS, 8, 3, generator=torch.Generator().manual_seed(2))

TORCH: dict[str, Callable[..., Any]] = {
    "SGD": partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": partial(optim.Adam, lr=0.01, amsgrad=True),
    "fused Adam": partial(optim.Adam, lr=0.01, fused=True),
    "capturable": partial(optim.Adam, lr=torch.tensor(0.01)),
    "RMSprop": partial(optim.RMSprop, lr=0.01, centered=True, momentum=0.9),
    "Adagrad": partial(optim.Adagrad, lr=0.01, initial_accumulator_value=0.1),
    "ASGD": partial(optim.ASGD, lr=0.05, t0=2, lambd=0.01),
    "Muon and Adam": lambda ps: [
        optim.Muon([p for p in ps if p.dim() == 2]),
        optim.Adam([p for p in ps if p.dim() < 2]),
    ],
    **{n: partial(getattr(optim, n), lr=0.01) for n in ("AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Rprop")},
    "Adafactor": partial(optim.Adafactor, lr=0.01),
    "Lookahead": lambda ps: Lookahead(optim.Adam(ps, lr=0.01)),
}
KINDS = {**TORCH, **{kind.__name__: kind for kind in ODD}}


def make(
    optimizer: Any, mesh: str = "dp=1", transport: Transport | None = None, zero: int = 0, middle: Any = nn.Tanh
) -> Engine:
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2, zero=zero)
    blocks = [partial(nn.Linear, 6, 5), middle, partial(nn.Linear, 5, 3)]
    return Engine(plan, blocks, nn.MSELoss(), optimizer, transport=transport, dtype=torch.float64)


def train(engine: Engine, steps: Sequence[int]) -> None:
    for step in steps:
        share = slice(engine.replica, None, engine.num_replicas)
        engine.step(INPUTS[step, share].double(), TARGETS[step, share].double())


FIRST, SECOND = range(STEPS), range(STEPS, 2 * STEPS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", KINDS)
def test_a_resumed_run_is_the_unbroken_one_whatever_the_form_of_saving(name: str, tmp_path: Path) -> None:
    require_resumable(partial(make, KINDS[name]), train, FIRST, SECOND, tmp_path)


def test_what_cannot_be_saved_is_said_after_the_first_step_and_refused(caplog: pytest.LogCaptureFixture) -> None:
    engine = make(InObject)
    train(engine, [0])
    assert "saving will be refused" in caplog.text
    with pytest.raises(qs.UsageError, match="keeps what no checkpoint can hold"):
        engine.state_dict()


MESHES = [("dp=2", 0), ("pp=2", 0), ("dp=2", 1), ("dp=2", 3)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "mesh", "zero"),
    [
        (kind, mesh, zero)
        for kind in (InGroups, InAttributes, Numbers, Unsaid)
        for mesh, zero in MESHES
        if mesh != "pp=2" or kind is not Unsaid  # which is refused over pp
    ],
)
def test_what_belongs_to_all_ranks_goes_to_another_mesh(kind: Any, mesh: str, zero: int, tmp_path: Path) -> None:
    alone = make(kind)
    train(alone, [*FIRST, *SECOND])

    def first(transport: Transport) -> None:
        engine = make(kind, mesh, transport, zero)
        train(engine, FIRST)
        save_files(engine, tmp_path)
        engine.save_dcp(tmp_path / "dcp")
        same = make(kind, mesh, transport, zero)
        same.load_full_state_dict(engine.full_state_dict(all_blocks=True))
        train(engine, SECOND)
        train(same, SECOND)
        require_same(same.state_dict(), engine.state_dict())

    run_local(2, first, timeout_s=60)
    paths = sorted(tmp_path.glob("rank-*"))
    for load in (lambda one: one.load_state_files(paths), lambda one: one.load_dcp(tmp_path / "dcp")):
        again = make(kind)
        load(again)
        train(again, SECOND)
        found, expected = again.state_dict(), alone.state_dict()
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            if tensor.dtype is torch.uint8:
                assert torch.equal(found[name], tensor)
            torch.testing.assert_close(found[name], tensor, rtol=1e-11, atol=1e-12)


INIT = {"init_scale": 2.0**12, "growth_interval": 2}
LAYERS = [partial(nn.Linear, 4, 4)] * 2


def batches() -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(0)
    found = [torch.randn(2, 4, 4, generator=random) for _ in range(7)]
    found[3][0, 1, 2] = torch.inf
    return [(pair[0], pair[1]) for pair in found]


def test_a_scale_grows_no_further_than_torchs() -> None:
    scale = LossScale(torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1))
    scale.update(skipped=False)
    assert scale.value == 2.0**127


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("mesh", "zero"), [("dp=2,pp=2", 0), ("dp=2", 2), ("pp=2", 0)])
def test_scaled_steps_equal_a_plain_loop(mesh: str, zero: int) -> None:
    plan = qs.compile("1f1b", mesh=mesh, microbatches=4 // qs.Mesh.parse(mesh).axis_size("dp"), zero=zero)
    adam, good = partial(torch.optim.Adam, lr=0.01), [batch for batch in batches() if batch[0].isfinite().all()]
    expected = train_alone(LAYERS, squares, adam, good, microbatches=4, clip=1.0, dtype=None)

    def run(transport: Transport) -> Outcome:
        scaler, scales, losses = torch.amp.GradScaler("cpu", **INIT), [], []
        engine = Engine(plan, LAYERS, squares, adam, clip=1.0, grad_scaler=scaler, transport=transport)
        for number, (inputs, targets) in enumerate(batches()):
            result = engine.step(*share(engine, inputs, targets))
            assert result.skipped == (number == 3)
            losses.append(result.loss.item())
            scales.append(scaler.get_scale() / INIT["init_scale"])
        assert scales == [1, 2, 2, 1, 1, 2, 2]
        other = Engine(plan, LAYERS, squares, torch.optim.Adam, grad_scaler=scaler, transport=transport)
        state = copied(engine.state_dict())
        other.step(*share(other, *batches()[3]))
        other.load_state_dict(state)
        assert scaler.get_scale() == scales[-1] * INIT["init_scale"]
        assert not math.isfinite(losses.pop(3))
        return Outcome(losses, engine.full_weights())

    require_equal(run_local(qs.Mesh.parse(mesh).size, run), expected, 1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [
        (partial(optim.SGD, lr=0.1, momentum=0.9), lambda one: optim.lr_scheduler.CyclicLR(one, 0.01, 0.1, 3)),
        (lambda given: optim.AdamW(given, torch.tensor(0.1)), lambda one: optim.lr_scheduler.OneCycleLR(one, 0.1, 20)),
    ],
)
@pytest.mark.parametrize("engine_is_first", [False, True])
def test_a_scheduler_goes_on_where_it_was(optimizer: Any, scheduler: Any, engine_is_first: bool) -> None:
    def scheduled() -> tuple[Engine, Any]:
        engine = make(optimizer)
        return engine, engine.lr_schedulers(scheduler)

    def go(engine: Engine, schedulers: Any, steps: Sequence[int]) -> None:
        for step in steps:
            train(engine, [step])
            schedulers.step()

    engine, schedulers = scheduled()
    go(engine, schedulers, FIRST)
    again, others = scheduled()
    for part, other in [(engine, again), (schedulers, others)][:: 1 if engine_is_first else -1]:
        other.load_state_dict(part.state_dict())
    go(engine, schedulers, SECOND)
    go(again, others, SECOND)
    require_same(again.state_dict(), engine.state_dict())


@pytest.mark.parametrize("kind", [InAttributes, TORCH["Adam"]])
def test_a_state_goes_into_an_engine_that_has_stepped(kind: Any) -> None:
    engine, other = make(kind), make(kind)
    fresh, weights = engine.state_dict(), engine.full_weights()
    start = copied(fresh)
    train(engine, FIRST)
    stepped = copied(engine.state_dict())
    train(engine, SECOND)
    expected = copied(engine.state_dict())
    engine.load_state_dict(stepped)
    train(engine, SECOND)
    require_same(engine.state_dict(), expected)
    engine.load_state_dict(start)
    other.set_weights({name.removeprefix("model."): start[f"model.{name}"] for name in weights})
    train(engine, FIRST)
    train(other, FIRST)
    require_same(engine.state_dict(), other.state_dict())


HalfUsed = of_layers(
    "HalfUsed",
    lambda: {"used": nn.Linear(5, 5), "unused": nn.Linear(5, 5), "frozen": nn.Linear(5, 5).requires_grad_(False)},
    lambda self, inputs: self.frozen(self.used(inputs)),
)


@pytest.mark.parametrize(("mesh", "zero"), [("dp=1", 0), ("dp=2", 2), ("pp=3", 0)])
def test_a_state_that_lacks_something_or_does_not_fit_is_refused_and_changes_nothing(
    mesh: str, zero: int, tmp_path: Path
) -> None:
    size = qs.Mesh.parse(mesh).size

    def body(transport: Transport) -> None:
        engine, again = (make(TORCH["AdamW"], mesh, transport, zero, HalfUsed) for _ in range(2))
        train(engine, FIRST)
        state = copied(engine.state_dict())
        kept = [name for name in state if name.startswith("optimizer.")]
        again.load_state_dict(state)
        require_same(again.state_dict(), state)
        of_one = kept[0].rpartition(".")[0]
        for lost in ({kept[0]}, {name for name in kept if name.startswith(of_one)}, set(kept), {"engine.step"}):
            first = next(name for name in sorted(state) if name in lost)
            part = {name: tensor for name, tensor in state.items() if name not in lost}
            with pytest.raises(qs.MisfitError, match=rf"the state (lacks|has no) '{first}'.*engine.set_weights"):
                again.load_state_dict(part)
        last = [name for name in state if name.startswith("model.")][-1]
        for more in ({last: torch.zeros(99)}, {"optimizer.nothing.exp_avg": torch.zeros(1)}):
            other = {name: tensor + 1 if name.startswith("model.") else tensor for name, tensor in state.items()}
            with pytest.raises(qs.MisfitError):
                again.load_state_dict(other | more)
        require_same(again.state_dict(), state)
        path = tmp_path / f"{transport.rank}"
        part = {name: tensor for name, tensor in state.items() if not name.startswith(of_one)}
        save_file(part, path, metadata=engine.state_metadata())
        engine.everyone.barrier()
        with pytest.raises(
            qs.MisfitError, match=r"0 lacks 'optimizer\..* without which the optimizer would begin anew"
        ):
            again.load_state_files([tmp_path / str(rank) for rank in range(size)])

    run_local(size, body, timeout_s=60)


def test_a_state_of_another_optimizer_is_refused() -> None:
    engine, other = make(InGroups), make(optim.Adam)
    train(engine, FIRST)
    for load in (other.load_state_dict, other.load_full_state_dict):
        with pytest.raises(qs.MisfitError, match="of another optimizer"):
            load(engine.state_dict())
