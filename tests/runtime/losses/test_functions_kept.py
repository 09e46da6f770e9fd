import copy

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.losses.loss_function_state import FunctionKept

CPU = torch.device("cpu")


class Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.scale = model, nn.Parameter(torch.ones(2))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) * self.scale).square().mean() + next(self.model.parameters()).square().sum()


def test_what_an_engine_reduces_or_steps_meanwhile_stays() -> None:
    """A collective writes the flat buffer behind the views that gradients are, and weights are gathered in place."""
    model = nn.Linear(2, 2, bias=False)
    flat = torch.zeros(4)
    view = flat.view(2, 2).data
    model.weight.grad = model.weight._quintsched_sum = view  # type: ignore[assignment]
    for function in (Loss(model), lambda output, target: model.weight.sum()):
        kept = FunctionKept(function, CPU)
        flat.fill_(3.0)
        with torch.no_grad():
            model.weight.fill_(5.0)
        kept.put_back()
        assert model.weight.grad is view
        assert view.eq(3.0).all()
        assert model.weight.eq(5.0).all()
        flat.fill_(0.0)


def test_what_a_loss_adds_to_gradients_and_its_own_weights_are_put_back() -> None:
    model = nn.Linear(2, 2, bias=False)
    loss, model.weight.grad = Loss(model), torch.ones(2, 2)
    kept = FunctionKept(loss, CPU)
    model.weight.square().sum().backward()
    with torch.no_grad():
        loss.scale.fill_(7.0)
    kept.put_back()
    assert model.weight.grad is not None
    assert model.weight.grad.eq(1.0).all()
    assert loss.scale.eq(1.0).all()


class Trainer:
    """Training loop in one object: the model, its engine, a loss as a method."""

    def __init__(self, plan: qs.Plan, transport: Transport, model: nn.Sequential) -> None:
        self.model = model
        self.history: list[float] = []
        self.engine = Engine(plan, list(model), self.loss, torch.optim.SGD, transport=transport)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target)

    def train(self) -> list[float]:
        for _ in range(3):
            result = self.engine.step(torch.eye(6).chunk(self.engine.num_replicas)[self.engine.replica], self.labels())
            self.history.append(float(result.loss))
        return self.history

    def labels(self) -> Tensor:
        return torch.tensor([3, 1, 4, 1, 5, 2]).chunk(self.engine.num_replicas)[self.engine.replica]


@pytest.mark.parametrize("mesh", ["dp=3", "pp=2", "tp=2"])
def test_a_loss_may_be_a_method_of_what_holds_the_model_and_its_engine(mesh: str) -> None:
    """Our hooks on layers lead to outlines of the model, whose biases are as long as there are classes."""

    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))

    def train(mesh: str, microbatches: int) -> list[float]:
        plan = qs.compile("1f1b", mesh=mesh, microbatches=microbatches)
        return run_local(plan.mesh.size, lambda transport: Trainer(plan, transport, copy.deepcopy(model)).train())[0]

    assert train(mesh, 2) == pytest.approx(train("dp=1", 1), abs=1e-6)
