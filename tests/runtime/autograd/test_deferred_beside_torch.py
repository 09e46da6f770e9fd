"""Deferred weight gradients beside all else that torch does with layers: hooks, transforms, autocast, compiling, tp."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, weight_norm

from quintsched.runtime.autograd.deferred_weight_grads import DeferringLinear, WeightQueue, defer_weights, linear
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.parallel.tensor.apply_tensor_parallel import apply_tensor_parallel

from .halves import backward_in_halves, backward_plainly, check_same_bits, drain, leaf


def test_hooks() -> None:
    seen: list[str] = []

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
        module[0].register_forward_hook(lambda *_: seen.append("forward"))
        module[0].register_full_backward_hook(lambda *_: seen.append("backward"))
        module[1].weight.register_hook(lambda grad: 2 * grad)
        return module

    check_same_bits(build(), torch.randn(6, 4), twin=build())
    assert seen.count("forward") == seen.count("backward") == 3
    module, queue = build(), WeightQueue()
    defer_weights(module, queue)
    with queue.deferring() as products:
        torch.autograd.backward(module(leaf(torch.randn(6, 4))).sum())
    assert list(map(id, drain(products))) == [id(p) for p in (module[1].bias, module[0].weight, module[0].bias)]


class Implicit(nn.Module):
    """A fixed point, whose backward asks for gradients of its input alone, within a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            again = torch.tanh(self.inner(at))
        y: Tensor = torch.tanh(self.inner(x))
        y.register_hook(lambda g: g + torch.autograd.grad(again, at, g, retain_graph=True)[0])
        return y


def test_gradients_that_a_hook_asks_for_leave_those_of_weights_alone() -> None:
    torch.manual_seed(0)
    check_same_bits(nn.Sequential(nn.Linear(4, 4), Implicit(), nn.Linear(4, 4)), torch.randn(6, 4))


@pytest.mark.parametrize("change", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_a_weight_that_is_parametrized_before_or_after_does_not_wait(change: Callable[[nn.Module], nn.Module]) -> None:
    module, x = nn.Linear(4, 5), torch.randn(3, 4)
    for is_later in (False, True):
        plain, twin = copy.deepcopy(module), copy.deepcopy(module)
        torch.manual_seed(1)
        expected = backward_plainly(change(plain), [x])
        if is_later:
            defer_weights(twin, WeightQueue())
        torch.manual_seed(1)
        change(twin)
        torch.testing.assert_close(backward_in_halves(twin, [x]), expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_the_old_weight_norm() -> None:
    layer = nn.Linear(4, 5)
    check_same_bits(weight_norm(copy.deepcopy(layer)), torch.randn(3, 4), twin=weight_norm(layer))


def test_nothing_shows() -> None:
    plain = nn.Sequential(nn.Embedding(6, 4, padding_idx=2), nn.Linear(4, 3), nn.Linear(3, 3, bias=False))
    module = copy.deepcopy(plain)
    defer_weights(module, WeightQueue())
    assert repr(module) == repr(plain)
    torch.testing.assert_close(module.state_dict(), plain.state_dict())
    assert isinstance(module[1], nn.Linear)
    assert isinstance(module[1], DeferringLinear)
    ids = torch.tensor([[0, 2, 5]])
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(saved, weights_only=False)]
    for twin in copies:
        assert [type(layer) for layer in twin] == [nn.Embedding, nn.Linear, nn.Linear]
        torch.testing.assert_close(backward_plainly(twin, [ids])[2], backward_plainly(copy.deepcopy(plain), [ids])[2])
    with torch.no_grad():
        torch.testing.assert_close(module(ids), plain(ids), rtol=0, atol=0)


def test_tensors_modified_in_place() -> None:
    module, queue = nn.Linear(4, 3), WeightQueue()
    defer_weights(module, queue)
    x = torch.randn(2, 4)
    y = module(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(y.sum())
    y = module(x)
    with queue.deferring() as products:
        torch.autograd.backward(y.sum())
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"weight of shape \(3, 4\) was modified in place between the two halves"):
        drain(products)


def test_higher_derivatives() -> None:
    layer, queue = nn.Linear(3, 2).double(), WeightQueue()
    defer_weights(layer, queue)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    arguments = (x, layer.weight, layer.bias)
    assert torch.autograd.gradcheck(linear, arguments)
    with queue.deferring() as products:
        assert torch.autograd.gradgradcheck(linear, arguments)
        torch.autograd.grad(layer(x).square().sum(), arguments, create_graph=True)
    assert drain(products) == [], "what is to be differentiated again cannot wait"


def test_transforms_of_functions() -> None:
    layer, x = nn.Linear(3, 2), torch.randn(5, 4, 3)
    wanted = layer(x)
    defer_weights(layer, WeightQueue())
    torch.testing.assert_close(torch.vmap(layer)(x), wanted)
    replaced = torch.func.functional_call(layer, {"weight": torch.zeros(2, 3, requires_grad=True)}, x)
    torch.testing.assert_close(replaced, layer.bias.expand(5, 4, 2))


class Cast(nn.Sequential):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Checkpointed(nn.Sequential):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("kind", [Cast, Checkpointed])
def test_autocast_and_recomputation_within_the_backward(kind: type[nn.Sequential]) -> None:
    for dtype in (torch.float32, torch.float64):
        module = kind(nn.Linear(12, 8), nn.GELU(), nn.Linear(8, 5, bias=False)).to(dtype)
        check_same_bits(module, *torch.randn(2, 3, 5, 12, dtype=dtype))


@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_gradients_wait_where_hooks_unpack_what_was_saved(kind: str) -> None:
    """Autograd then gives the backward another tensor in place of a weight, which was not set up for deferral."""
    layer = nn.Linear(4, 3) if kind == "linear" else nn.Embedding(4, 3)
    queue = WeightQueue()
    defer_weights(layer, queue)
    x = torch.randn(2, 4) if kind == "linear" else torch.tensor([0, 3, 3])
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor):
        loss = layer(x).square().sum()
    products = queue.deferring()
    with products:
        loss.backward()
    assert {*products.parameters()} == {*layer.parameters()}
    assert all(parameter.grad is None for parameter in layer.parameters())


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 6, padding_idx=5)
        self.fc1, self.fc2 = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, ids: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(self.words(ids))))


def test_tensor_parallel_layers() -> None:
    torch.manual_seed(0)
    full = Words()
    batches = [torch.randint(8, (3, 4)) for _ in range(2)]

    def body(transport: Transport) -> int:
        group = transport.make_group([(0, 1)])
        modules = [apply_tensor_parallel(copy.deepcopy(full), group, {"words": "vocabulary"}) for _ in range(2)]
        wanted, halves = backward_plainly(modules[0], batches), backward_in_halves(modules[1], batches)
        torch.testing.assert_close(halves, wanted, rtol=0, atol=0)
        return defer_weights(modules[1], WeightQueue())

    assert run_local(2, body) == [4 * 6 + (6 * 6 + 6) + 6 * 6] * 2
