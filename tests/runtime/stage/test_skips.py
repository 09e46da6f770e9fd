"""Skip connections: tensors that ride along past stages, and their gradients back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Carry, Engine
from quintsched.runtime.blocks.block_outlines import build_block
from quintsched.runtime.comm import Rules, Transport, run_local

from ..toys import difference, sgd

SIZE = 6


class Down(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.layer = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Carry:
        h = torch.tanh(self.layer(x))
        return Carry(h, **{self.name: h * 2})


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class UpFirst(Middle):
    def forward(self, x: Tensor, first: Tensor) -> Tensor:  # type: ignore[override]
        return torch.tanh(self.layer(x) + first)


class UpSecond(Middle):
    def forward(self, x: Tensor, second: Tensor) -> Tensor:  # type: ignore[override]
        return torch.tanh(self.layer(x) + second)


class Net(nn.Module):
    """The same network written as one module."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks[0](x), None
        second = self.blocks[1](first.output)
        h = self.blocks[3](self.blocks[2](second.output))
        h = self.blocks[4](h, second.riders["second"])
        return self.blocks[5](h, first.riders["first"])  # type: ignore[no-any-return]


BUILDERS = [lambda: Down("first"), lambda: Down("second"), Middle, Middle, UpSecond, UpFirst]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rules", ["mailbox", "nccl"])
@pytest.mark.parametrize(
    ("schedule", "pp", "recompute"),
    [("1f1b", 2, 0), ("1f1b", 3, 0), ("gpipe", 6, 0), ("zb-h1", 3, 0), ("zbv", 3, 0), ("1f1b", 3, 1), ("1f1b", 2, 2)],
)
def test_a_u_shaped_net_equals_one_process(schedule: str, pp: int, recompute: int, rules: Rules) -> None:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(8, SIZE, generator=random, dtype=torch.float64)
    targets = torch.randn(8, SIZE, generator=random, dtype=torch.float64)
    plan = qs.compile(schedule, mesh=qs.Mesh(pp=pp), microbatches=4, recompute=recompute)

    def run(transport: Transport) -> tuple[list[float], dict[str, Tensor]]:
        engine = Engine(plan, BUILDERS, nn.functional.mse_loss, sgd, dtype=torch.float64, transport=transport)
        return [engine.step(inputs, targets).loss.item() for _ in range(3)], engine.full_weights()

    model = Net(nn.ModuleList(build_block(b, n, 0, torch.float64) for n, b in enumerate(BUILDERS)))
    optimizer = sgd(list(model.parameters()))
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    weights = {name.removeprefix("blocks."): p.detach() for name, p in model.named_parameters()}
    for losses, found in run_local(pp, run, rules=rules):
        assert losses == pytest.approx(expected, abs=1e-12)
        assert all(difference(weight, weights[name]) <= 1e-12 for name, weight in found.items())


def test_a_rider_that_nobody_takes_is_refused() -> None:
    plan = qs.compile("1f1b", mesh="pp=1", microbatches=1)
    engine = Engine(plan, [lambda: Down("lost"), Middle], nn.functional.mse_loss, sgd)
    with pytest.raises(qs.MisfitError, match="block 0 sends 'lost' along, and no later block takes it"):
        engine.step(torch.randn(2, SIZE), torch.randn(2, SIZE))


def test_two_of_one_name_are_refused() -> None:
    plan = qs.compile("1f1b", mesh="pp=1", microbatches=1)
    engine = Engine(plan, [lambda: Down("first"), lambda: Down("first"), UpFirst], nn.functional.mse_loss, sgd)
    with pytest.raises(qs.MisfitError, match="something else of that name"):
        engine.step(torch.randn(2, SIZE), torch.randn(2, SIZE))
