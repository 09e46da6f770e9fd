"""Deferred weight gradients against plain autograd: the same bits, whatever the layer, its hooks and its use."""

import copy
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from quintsched.runtime import Transport, apply_tensor_parallel, run_local
from quintsched.runtime.autograd.deferred_weight_grads import Products, WeightQueue, defer, defer_weights, queue_of

from ...helpers.blocks import of_kind

Gradients = dict[str, Tensor | None]


def drain(products: Products) -> list[nn.Parameter]:
    """Add the gradients to the parameters; return these in order."""
    order: list[nn.Parameter] = []

    def accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
        order.append(parameter)
        assert not gradient.requires_grad
        assert gradient.dtype == parameter.dtype
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)

    products.drain(accumulate)
    return order


def leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.is_floating_point())


def seed_like(y: Tensor) -> Tensor:
    random = torch.Generator().manual_seed(2)
    return torch.randn(y.shape, generator=random, dtype=torch.float64).to(y.dtype)


def backward_plainly(module: nn.Module, batches: list[Tensor]) -> tuple[list[Tensor], list[Tensor | None], Gradients]:
    outputs, inputs = [], [leaf(x) for x in batches]
    for x in inputs:
        outputs.append(module(x))
        torch.autograd.backward(outputs[-1], seed_like(outputs[-1]))
    return outputs, [x.grad for x in inputs], {n: p.grad for n, p in module.named_parameters()}


def backward_in_halves(module: nn.Module, batches: list[Tensor]) -> tuple[list[Tensor], list[Tensor | None], Gradients]:
    """All forwards, all input halves, then all weight halves, as a zero-bubble schedule may have it."""
    queue = WeightQueue()
    defer_weights(module, queue)
    inputs = [leaf(x) for x in batches]
    outputs = [module(x) for x in inputs]
    waiting = []
    for y in outputs:
        with queue.deferring() as products:
            torch.autograd.backward(y, seed_like(y))
        waiting.append(products)
    for products in waiting:
        drain(products)
    return outputs, [x.grad for x in inputs], {n: p.grad for n, p in module.named_parameters()}


def check_same_bits(module: nn.Module, *batches: Tensor, twin: nn.Module | None = None) -> None:
    twin = twin or copy.deepcopy(module)
    y, of_x, of_weights = backward_plainly(module, list(batches))
    halves = backward_in_halves(twin, list(batches))
    torch.testing.assert_close(halves, (y, of_x, of_weights), rtol=0, atol=0)
    twin.zero_grad()
    torch.testing.assert_close(backward_plainly(twin, list(batches)), (y, of_x, of_weights), rtol=0, atol=0)


class Mixed(nn.Module):
    """One of everything: layers that can wait, others that cannot, one used twice, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.norm = nn.LayerNorm(16)
        self.twice = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)
        self.functional = nn.Parameter(torch.randn(16, 16) / 4)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.last = nn.Linear(16, 12)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu(self.first(x), inplace=True)
        x = self.twice(nn.functional.gelu(self.twice(self.norm(x))))
        x = self.frozen(x) + self.up(self.down(x))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.last(nn.functional.linear(x, self.functional))


SHAPES: dict[str, Callable[[], Tensor]] = {
    "vector": lambda: torch.randn(24)[::2],
    "column-major": lambda: torch.randn(12, 7).t(),
    "no rows": lambda: torch.randn(0, 12),
    "3d": lambda: torch.randn(3, 5, 12),
    "4d, transposed": lambda: torch.randn(2, 5, 3, 12).transpose(1, 2),
    "expanded": lambda: torch.randn(1, 1, 12).expand(3, 5, 12),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "bias"), [(torch.float32, True), (torch.float64, False), (torch.bfloat16, True)])
def test_linear(shape: str, bias: bool, dtype: torch.dtype) -> None:
    check_same_bits(nn.Linear(12, 9, bias, dtype=dtype), *(SHAPES[shape]().to(dtype) for _ in range(2)))


@pytest.mark.parametrize("padding", [None, 0, -2])
@pytest.mark.parametrize("shape", [(), (4,), (3, 5), (2, 3, 4)])
def test_embedding(padding: int | None, shape: tuple[int, ...]) -> None:
    check_same_bits(nn.Embedding(6, 8, padding), *(torch.randint(6, shape) for _ in range(3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixture(dtype: torch.dtype) -> None:
    module = Mixed().to(dtype)
    check_same_bits(module, *(torch.randn(3, 5, 12, dtype=dtype) for _ in range(3)))
    layers = (module.first, module.twice, module.down, module.up, module.last)
    trained = sum(p.numel() for layer in layers for p in layer.parameters() if p.requires_grad)
    assert defer_weights(module, WeightQueue()) == trained


class TiedWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(6, 8, padding_idx=1), nn.Linear(8, 6, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        return self.head(self.words(ids) + self.words(ids.flip(0)))


def test_a_weight_of_three_uses_is_handed_over_once() -> None:
    check_same_bits(TiedWords(), torch.randint(6, (3, 5)), torch.randint(6, (3, 5)))
    module, queue = TiedWords(), WeightQueue()
    assert defer_weights(module, queue) == 48
    with queue.deferring() as products:
        torch.autograd.backward(module(torch.randint(6, (3, 5))).sum())
    assert module.words.weight.grad is None
    assert len(drain(products)) == 1


def test_the_graph_is_freed_by_the_input_half() -> None:
    module, queue = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3)), WeightQueue()
    defer_weights(module, queue)
    between: list[weakref.ref[Tensor]] = []
    module[0].register_forward_hook(lambda _, __, y: between.append(weakref.ref(y)))
    x, g = torch.randn(6, 4), torch.randn(6, 3)
    y = module(x)
    with queue.deferring() as products:
        torch.autograd.backward(y, g)
    held = {t.untyped_storage().data_ptr() for t in products.tensors()}
    assert {x.untyped_storage().data_ptr(), g.untyped_storage().data_ptr()} < held
    assert len(held) == 4, "x and g of each layer, not copied"
    assert between[0]() is None, "what the GELU saved is gone"
    assert not any(t.requires_grad for t in products.tensors()), "nor do they lead to the graph"
    inputs = [weakref.ref(t) for t in products.tensors() if t.shape == (6, 5)]
    assert all(ref() is not None for ref in inputs)
    drain(products)
    gc.collect()
    assert all(ref() is None for ref in inputs)


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


class Cast(nn.Sequential):
    """Casts, and computes again what a backward needs."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


def test_layers_that_tp_has_cut_wait_too() -> None:
    """The grid has their numbers."""
    layers = {"words": nn.Embedding(8, 6), "fc1": nn.Linear(6, 12), "act": nn.GELU(), "fc2": nn.Linear(12, 6)}

    def body(transport: Transport) -> int:
        torch.manual_seed(0)
        full, group = copy.deepcopy(nn.Sequential(OrderedDict(layers))), transport.make_group([(0, 1)])
        return defer_weights(apply_tensor_parallel(full, group, {"words": "vocabulary"}), WeightQueue())

    assert run_local(2, body) == [4 * 6 + (6 * 6 + 6) + 6 * 6] * 2


class Quantised(nn.Module):
    """Gives its layer other numbers for a forward, and adds up what that makes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 9)

    def forward(self, x):
        kept = self.layer.weight.data
        self.layer.weight.data = kept.sign() * kept.abs().mean()
        found = self.layer(x)
        self.layer.weight.data = kept
        return found.sum()  # whose gradient is expanded


class Scale(nn.Module):
    """A user's own layer, as the module's docstring tells how to write it."""

    deferrable = ("weight",)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12))

    def forward(self, x: Tensor) -> Tensor:
        return ScaleFunction.apply(x, self.weight)


class ScaleFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        waits = defer(weight, gradient_of_scale, held=(grad, x))
        return grad * weight, None if waits else gradient_of_scale(grad, x)


def gradient_of_scale(grad: Tensor, x: Tensor) -> Tensor:
    return (grad * x).sum((0, 1))


ODD: dict[str, Callable[[], nn.Module]] = {
    "gradients that a hook asks for": lambda: nn.Sequential(nn.Linear(12, 4), Implicit(), nn.Linear(4, 4)),
    "recomputation within the backward": lambda: Cast(nn.Linear(12, 8), nn.GELU(), nn.Linear(8, 5, bias=False)),
    "recomputation in double": lambda: Cast(nn.Linear(12, 8), nn.GELU(), nn.Linear(8, 5, bias=False)).double(),
    "other numbers for a forward": Quantised,
    "a user's own layers": lambda: nn.Sequential(Scale(), nn.Linear(12, 12), Scale()),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_modules(name: str) -> None:
    module = ODD[name]()
    check_same_bits(module, *torch.randn(2, 3, 5, 12, dtype=next(module.parameters()).dtype))


def test_odd_embeddings_and_weights_that_other_kinds_of_layers_hold_never_wait() -> None:
    for kind in ({"sparse": True}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}):
        embedding = nn.Embedding(6, 8, **kind)
        assert defer_weights(embedding, WeightQueue()) == 0
        assert type(embedding) is nn.Embedding
    module = nn.ModuleList([nn.Linear(4, 3, bias=False), nn.Conv1d(4, 3, 1)])
    module[1].weight = module[0].weight
    assert defer_weights(module, WeightQueue()) == 0


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


def half_functional(self, ids):
    return nn.functional.linear(self.words(ids), self.words.weight) + self.words(ids).sum(-1, keepdim=True)


def test_a_weight_that_is_also_used_functionally_gets_both_parts() -> None:
    module = of_kind(TiedWords, half_functional)().double()
    twin, ids = copy.deepcopy(module), torch.randint(6, (3, 5))
    wanted = backward_plainly(module, [ids, ids])[2]
    torch.testing.assert_close(backward_in_halves(twin, [ids, ids])[2], wanted, rtol=1e-12, atol=1e-12)


def test_an_error_in_the_backward_ends_the_collecting() -> None:
    module, queue = nn.Linear(4, 3), WeightQueue()
    defer_weights(module, queue)
    with pytest.raises(ZeroDivisionError), queue.deferring():
        _ = 1 / 0
    module(torch.randn(2, 4)).sum().backward()
    assert module.weight.grad is not None


def test_weights_of_a_users_own_layer_wait() -> None:
    module = nn.Sequential(Scale(), nn.Linear(12, 12))
    assert defer_weights(module, WeightQueue()) == 12 + 12 * 13
    assert queue_of(module[0].weight) is not None


def test_transforms_of_functions() -> None:
    layer, x = nn.Linear(3, 2), torch.randn(5, 4, 3)
    wanted = layer(x)
    defer_weights(layer, WeightQueue())
    torch.testing.assert_close(torch.vmap(layer)(x), wanted)
    replaced = torch.func.functional_call(layer, {"weight": torch.zeros(2, 3, requires_grad=True)}, x)
    torch.testing.assert_close(replaced, layer.bias.expand(5, 4, 2))
