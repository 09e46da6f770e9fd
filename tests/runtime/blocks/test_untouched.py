"""Runs beside the training leave no trace in blocks: what they keep in attributes is what one process's have."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import quintsched as qs
from quintsched.runtime.blocks.block_builders import build_block, build_model
from quintsched.runtime.blocks.shape_inference import trace_shapes
from quintsched.runtime.blocks.trees import TreeSpec
from quintsched.runtime.blocks.without_side_effects import attributes_untouched, untouched
from quintsched.runtime.comm.random_generators import draws_undone

from ...helpers.training import check_equality, sgd

WIDTH = 4


class Counting(nn.Module):
    """Anneals by a counter, and keeps what it was given in dicts, lists, and a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.calls = 0
        self.average = torch.zeros(WIDTH, dtype=torch.float64)
        self.seen: dict[str, list[int]] = {"calls": []}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen["calls"].append(self.calls)
        if not x.is_meta:
            self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.layer(x + self.average.to(x.device)) / len(self.seen["calls"])


class Caching(nn.Module):
    """Makes a table at the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(float(x.shape[1]), dtype=x.dtype, device=x.device).sin()
        return x + self.layer(x * self.table)


class Initialised(nn.Module):
    """Takes its first input's mean for its bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH))
        self.initialised = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.initialised:
            self.initialised = True
            with torch.no_grad():
                self.bias.copy_(-x.mean(0))
        return self.layer(x + self.bias)


class Looking(Counting):
    """Looks at data, so that it cannot run on the meta device."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (2 if x.sum().item() > 0 else 1))


def loss(output: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    return (output - targets).square().sum(), float(len(output))


def batches() -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(0)
    pairs = (torch.randn(2, 8, WIDTH, generator=random, dtype=torch.float64).unbind() for _ in range(2))
    return [(inputs, targets) for inputs, targets in pairs]


@pytest.mark.parametrize("mesh", ["dp=1", "pp=2"])
@pytest.mark.parametrize("block", [Counting, Caching, Initialised, Looking])
@pytest.mark.parametrize("is_built", [False, True])
def test_what_blocks_keep_in_attributes_is_as_in_one_process(
    block: Callable[[], nn.Module], mesh: str, is_built: bool
) -> None:
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2)
    blocks = list(build_model([block, block], 0, torch.float64)) if is_built else [block, block]
    check_equality(plan, blocks, loss, sgd, batches(), microbatches=2)


def test_weights_and_attributes_are_put_back_also_behind_an_error() -> None:
    block = Initialised()
    tables = [torch.ones(2)]
    block.cache = {"tables": tables}  # type: ignore[assignment]
    memory, state = block.bias.data_ptr(), torch.get_rng_state()

    def spoil() -> None:
        with untouched(block):
            block(torch.randn(2, WIDTH))
            tables.append(torch.ones(1))
            tables[0].zero_()
            block.layer.weight.data = torch.zeros(WIDTH, WIDTH)
            block.extra = 1  # type: ignore[assignment]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        spoil()
    assert not block.initialised
    assert not hasattr(block, "extra")
    assert block.bias.data_ptr() == memory
    assert not block.bias.any()
    assert block.layer.weight.any()
    assert [table.tolist() for table in tables] == [[1.0, 1.0]]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("of_all", [False, True])
def test_what_hooks_set_on_layers_of_torch_is_put_back(of_all: bool) -> None:
    layer = nn.Linear(WIDTH, WIDTH)

    def count(module: nn.Module, *_: object) -> None:
        module.calls = 1  # type: ignore[assignment]

    handle = register_module_forward_hook(count) if of_all else layer.register_forward_hook(count)
    try:
        with attributes_untouched(layer):
            layer(torch.zeros(1, WIDTH))
    finally:
        handle.remove()
    assert not hasattr(layer, "calls")


class Drawn(nn.Module):
    """A block whose weights and forward draw from each generator of the process."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([*draws()]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is given, times a few numbers."""
        return x * sum(draws()) * self.weight.sum()


def draws() -> list[float]:
    return [float(torch.rand(())), random.random(), np.random.rand()]


def test_what_is_built_or_tried_draws_nothing() -> None:
    with draws_undone():
        expected = draws()
    with draws_undone():
        built = [build_block(Drawn, number) for number in (0, 1, 0)]
        trace_shapes(built, TreeSpec.from_tree(torch.ones(2, 3)), {})
        with untouched(built[0]):
            built[0](torch.ones(2, 3))
        assert draws() == expected
    assert torch.equal(built[0].weight, built[2].weight)
    assert (built[0].weight != built[1].weight).all()


def test_draws_that_several_threads_undo_leave_nothing() -> None:
    """Ranks that are threads share torch's generator; one may look where it is while another one's draws move it."""
    entered, left = threading.Barrier(2), threading.Event()

    def first() -> None:
        with draws_undone():
            torch.rand(1)
            entered.wait()
            left.wait(10)
            torch.rand(1)

    def second() -> None:
        entered.wait()
        with draws_undone():
            torch.rand(1)
            left.set()
            one.join()

    before = torch.get_rng_state()
    one, two = threading.Thread(target=first), threading.Thread(target=second)
    for thread in (one, two):
        thread.start()
    for thread in (one, two):
        thread.join()
    assert torch.equal(torch.get_rng_state(), before)
