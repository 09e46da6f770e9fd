import torch
from torch import Tensor, nn

from quintsched.runtime.examine.functions_kept import FunctionKept

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
