"""Buffers of messages in a run: made once, as many as the plan says, and at the fullest moment all are in use."""

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.ir.instruction_set import Bwd, BwdInput, BwdWeight, Fwd
from quintsched.passes.place_offloads import least_cap
from quintsched.runtime import Engine
from quintsched.runtime.comm import Rules, Transport, run_local
from quintsched.runtime.interpreter import send_and_receive
from quintsched.runtime.interpreter.instruction_state import RunState
from quintsched.schedules import Order, Schedule, Shape, all_schedules

from ...helpers.blocks import of_layers
from ...helpers.training import check_equality
from ..toys import sgd

WIDTH, LENGTH, SAMPLES = 4, 2, 2
TRAINING = [found for found in all_schedules() if found.mode == "train"]
CHUNKED = [found.name for found in TRAINING if found.name in ("bfs", "interleaved-1f1b", "interleaved-zb")]


Layer = of_layers("Layer", lambda: {"inner": nn.Linear(WIDTH, WIDTH)}, lambda self, x, past=None: self.inner(x))
"""A linear layer: its backward wants its input and the gradient of its output, at once or later."""


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs * targets).square().sum()


class Used(NamedTuple):
    """Buffers that a rank allocated, and the most of them in use at once."""

    made: int
    receives: int
    receive_bytes: int
    sends: int


def buffers_of(state: RunState) -> list[Tensor]:
    """Return all receive buffers of a rank, each as its most recent view."""
    return [next(reversed(views.values())) for views in state.messages.buffers._views.values()]


class Watch:
    """After every call, counts the buffers that somebody looks into or waits for, and the sends in flight."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._buffers = buffers_of(state)
        self._idle = [self._views(buffer) for buffer in self._buffers]
        self.receives = self.receive_bytes = self.sends = 0

    @staticmethod
    def _views(buffer: Tensor) -> int:
        return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)

    def _used(self) -> list[Tensor]:
        cells = self._state.cells._cells.values()
        waiting = {id(tensor) for cell in cells for tensor in cell.value}
        return [
            buffer
            for buffer, idle in zip(self._buffers, self._idle, strict=True)
            if id(buffer) in waiting or self._views(buffer) > idle
        ]

    def wrap(self, index: int, call: Callable[[], None]) -> Callable[[], None]:
        def watched() -> None:
            call()
            used = self._used()
            self.receives = max(self.receives, len(used))
            self.receive_bytes = max(self.receive_bytes, sum(buffer.nbytes for buffer in used))
            self.sends = max(self.sends, sum(cell.sent is not None for cell in self._state.cells.sending))

        return watched


def run(plan: qs.Plan, rules: Rules) -> list[Used]:
    """Train two steps on a plan, and return what each pipeline rank used in the last one."""
    units, length = plan.schedule.microbatches, LENGTH * plan.schedule.slices
    random = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(2, units * SAMPLES, length, WIDTH, generator=random)

    def on_rank(transport: Transport) -> Used:
        engine = Engine(plan, [Layer] * len(plan.stage_to_pp), squares, sgd, transport=transport)
        engine.step(inputs, targets)
        interpreter = engine._runner.interpreters["train"]
        watch = Watch(interpreter.state)
        interpreter.run_program(engine._model.batches(plan, inputs, targets, {}), 2, interpreter.wrapped_by(watch))
        return Used(len(buffers_of(interpreter.state)), watch.receives, watch.receive_bytes, watch.sends)

    return run_local(plan.mesh.size, on_rank, rules=rules)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are taken for large ones, of which two are in flight."""
    monkeypatch.setattr(send_and_receive, "AHEAD_BYTES", 0)


def compiled(name: str, recompute: int = 0, **more: Any) -> qs.Plan:
    schedule = next(found for found in TRAINING if found.name == name)
    shape: dict[str, Any] = {"mesh": "pp=4", "microbatches": 8, "chunks": 2 if name in CHUNKED else None}
    return qs.compile(name, **shape, slices=min(2, schedule.max_slices), recompute=recompute, **more)


OVERLAPPED = ("dualpipe", "dualpipe-v", "interleaved-1f1b")
PLANS: dict[str, Callable[[], qs.Plan]] = {
    **{f"{one.name} {again}": partial(compiled, one.name, again) for one in TRAINING for again in (0, 1)},
    **{f"{name} overlapped": partial(compiled, name, overlap=True) for name in OVERLAPPED},
}


@pytest.mark.sampled(24)
@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("rules", ["nccl", "mailbox"])
@pytest.mark.parametrize("name", PLANS)
def test_a_run_uses_as_many_buffers_as_its_plan_says(name: str, rules: Rules) -> None:
    require_as_planned(PLANS[name](), rules)


@pytest.mark.sampled(8)
@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("rules", ["nccl", "mailbox"])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zbv", "dualpipe", "seq-1f1b"])
def test_what_goes_to_the_host_needs_no_buffer_meanwhile(name: str, rules: Rules) -> None:
    stays = compiled(name)
    plan = compiled(name, offload=least_cap(stays))
    fewer, more = (sum(one.check(profile="channel").slots.receive) for one in (plan, stays))
    assert fewer < more
    require_as_planned(plan, rules)


def require_as_planned(plan: qs.Plan, rules: Rules) -> None:
    profile = "channel" if rules == "nccl" else "tagged"
    slots = plan.check(profile=profile).slots
    num_bytes = SAMPLES * LENGTH * WIDTH * torch.float32.itemsize
    found = run(plan, rules)
    both = zip(slots.receive, slots.send, strict=True)
    assert found == [Used(receives, receives, receives * num_bytes, sends) for receives, sends in both]


def test_of_small_messages_more_are_in_flight() -> None:
    plan = compiled("zb-h1")
    slots = plan.check(profile="tagged").slots
    found = run(plan, "mailbox")
    assert all(used.made == used.receives > slots.receive[rank] for rank, used in enumerate(found))


def put_off(rank: int, shape: Shape) -> Order:
    """Stages on ranks 0, 1, 1; the last one's weight halves come after all backwards of the stage before it."""
    units = range(shape.microbatches)
    if rank == 0:
        return (i for u in units for i in (Fwd(0, u), Bwd(0, u)))
    each = (i for u in units for i in (Fwd(1, u), Fwd(2, u), BwdInput(2, u), Bwd(1, u)))
    return chain(each, (BwdWeight(2, u) for u in units))


PUT_OFF = Schedule("put-off", put_off, "", "", "", placement=lambda pp, chunks: (0, 1, 1))


@pytest.mark.parametrize("rules", ["nccl", "mailbox"])
def test_a_stage_that_changes_nothing_hands_no_buffer_on(rules: Rules) -> None:
    """Inputs that the next stage on its rank keeps for its weights outlive the plan's use of the buffer."""
    batch = tuple(torch.randn(2, 8, LENGTH, WIDTH, dtype=torch.float64))
    plan = qs.compile(PUT_OFF, mesh="pp=2", microbatches=4)
    check_equality(plan, [Layer, nn.Identity, Layer], squares, sgd, [batch], wire=rules)
