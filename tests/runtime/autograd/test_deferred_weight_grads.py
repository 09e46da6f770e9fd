"""Deferred weight gradients against plain autograd: the same bits, whatever the layer and the way it is used."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, weight_norm

from quintsched.runtime.autograd.deferred_weight_grads import (
    DeferringLinear,
    WeightQueue,
    defer,
    defer_weights,
    linear,
    queue_of,
)
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.parallel.tensor.apply import apply_tensor_parallel

from .halves import (
    Mixed,
    backward_in_halves,
    backward_plainly,
    check_same_bits,
    drain,
    leaf,
    seed_like,
)

SHAPES: dict[str, Callable[[], Tensor]] = {
    "vector": lambda: torch.randn(12),
    "strided vector": lambda: torch.randn(24)[::2],
    "matrix": lambda: torch.randn(7, 12),
    "column-major": lambda: torch.randn(12, 7).t(),
    "one row": lambda: torch.randn(1, 12),
    "no rows": lambda: torch.randn(0, 12),
    "3d": lambda: torch.randn(3, 5, 12),
    "3d, none": lambda: torch.randn(3, 0, 12),
    "3d, transposed": lambda: torch.randn(5, 3, 12).transpose(0, 1),
    "4d": lambda: torch.randn(2, 3, 5, 12),
    "4d, transposed": lambda: torch.randn(2, 5, 3, 12).transpose(1, 2),
    "expanded": lambda: torch.randn(1, 1, 12).expand(3, 5, 12),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_linear(shape: str, bias: bool, dtype: torch.dtype) -> None:
    check_same_bits(nn.Linear(12, 9, bias, dtype=dtype), *(SHAPES[shape]().to(dtype) for _ in range(2)))


@pytest.mark.parametrize(("width", "out"), [(1, 1), (1, 5), (5, 1), (256, 384)])
def test_odd_and_large_widths(width: int, out: int) -> None:
    for rows in (1, 2, 64):
        check_same_bits(nn.Linear(width, out), torch.randn(rows, width), torch.randn(2, rows, width))


def test_an_expanded_gradient() -> None:
    check_same_bits(Summed(nn.Linear(12, 9)), torch.randn(3, 5, 12))


class Summed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sum()


@pytest.mark.parametrize("padding", [None, 0, -2])
@pytest.mark.parametrize("shape", [(), (4,), (3, 5), (2, 3, 4)])
def test_embedding(padding: int | None, shape: tuple[int, ...]) -> None:
    check_same_bits(nn.Embedding(6, 8, padding), *(torch.randint(6, shape) for _ in range(3)))


@pytest.mark.parametrize("kind", [{"sparse": True}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_odd_embeddings_are_left_alone(kind: dict[str, float]) -> None:
    embedding = nn.Embedding(6, 8, **kind)
    assert defer_weights(embedding, WeightQueue()) == 0
    assert type(embedding) is nn.Embedding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixture(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = Mixed().to(dtype)
    check_same_bits(module, *(torch.randn(3, 5, 12, dtype=dtype) for _ in range(3)))
    layers = (module.first, module.twice, module.down, module.up, module.last)
    trained = sum(p.numel() for layer in layers for p in layer.parameters() if p.requires_grad)
    assert defer_weights(module, WeightQueue()) == trained


class TiedWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 8, padding_idx=1)
        self.head = nn.Linear(8, 6, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids) + self.words(ids.flip(0)))


def test_a_weight_of_three_uses_is_handed_over_once() -> None:
    check_same_bits(TiedWords(), torch.randint(6, (3, 5)), torch.randint(6, (3, 5)))
    module, queue = TiedWords(), WeightQueue()
    assert defer_weights(module, queue) == 48
    with queue.deferring() as products:
        torch.autograd.backward(module(torch.randint(6, (3, 5))).sum())
    assert module.words.weight.grad is None
    assert len(drain(products)) == 1


def test_the_order_of_the_drain_is_that_of_the_backward() -> None:
    module, queue = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), WeightQueue()
    defer_weights(module, queue)
    with queue.deferring() as products:
        torch.autograd.backward(module(torch.randn(2, 4)).sum())
    assert list(map(id, drain(products))) == [
        id(p) for p in (module[2].weight, module[2].bias, module[0].weight, module[0].bias)
    ]
    assert list(products.tensors()) == []


class HalfFunctional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 8)
        self.copied = nn.Linear(8, 6)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.words(ids), self.words.weight) + self.copied(self.words(ids))


def test_a_weight_that_is_also_used_functionally_gets_both_parts() -> None:
    module = HalfFunctional().double()
    twin, ids = copy.deepcopy(module), torch.randint(6, (3, 5))
    wanted = backward_plainly(module, [ids, ids])[2]
    torch.testing.assert_close(backward_in_halves(twin, [ids, ids])[2], wanted, rtol=1e-12, atol=1e-12)


def test_a_weight_that_another_kind_of_layer_holds_never_waits() -> None:
    module = nn.ModuleList([nn.Linear(4, 3, bias=False), nn.Conv1d(4, 3, 1)])
    module[1].weight = module[0].weight
    assert defer_weights(module, WeightQueue()) == 0


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


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_a_parametrized_weight_does_not_wait(change: Callable[[nn.Module], nn.Module], when: str) -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(4, 5), torch.randn(3, 4)
    twin, queue = copy.deepcopy(module), WeightQueue()
    if when == "after":
        defer_weights(twin, queue)
    torch.manual_seed(1)
    change(module)
    torch.manual_seed(1)
    change(twin)
    if when == "before":
        defer_weights(twin, queue)
    torch.testing.assert_close(backward_in_halves(twin, [x]), backward_plainly(module, [x]), rtol=0, atol=0)


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


def test_an_error_in_the_backward_ends_the_collecting() -> None:
    queue = WeightQueue()
    with pytest.raises(ValueError, match="broken"), queue.deferring():
        raise ValueError("broken")
    module = nn.Linear(4, 3)
    defer_weights(module, queue)
    torch.autograd.backward(module(torch.randn(2, 4)).sum())
    assert module.weight.grad is not None


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


@pytest.mark.parametrize("shape", [(6, 12), (3, 5, 12), (12,)])
def test_autocast(shape: tuple[int, ...]) -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(12, 8), nn.GELU(), nn.Linear(8, 5, bias=False))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x)

    check_same_bits(Cast(), torch.randn(shape), torch.randn(shape))
    check_same_bits(Cast().double(), torch.randn(shape).double())


def test_a_wrong_type_is_refused_as_ever() -> None:
    layer = nn.Linear(3, 2)
    defer_weights(layer, WeightQueue())
    with pytest.raises(RuntimeError, match="dtype"):
        layer(torch.randn(4, 3, dtype=torch.float64))


def test_recomputation_within_the_backward() -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    check_same_bits(Checkpointed(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3)), torch.randn(6, 4), torch.randn(6, 4))


class Scale(nn.Module):
    """A user's own layer, as the module's docstring tells how to write it."""

    deferrable = ("weight",)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

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
    return (grad * x).sum(0)


@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_gradients_wait_where_hooks_unpack_what_was_saved(kind: str) -> None:
    """What autograd then gives the backward in place of a weight is another tensor, which nobody has made wait."""
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


def test_a_users_own_layer() -> None:
    module = nn.Sequential(Scale(), nn.Linear(4, 4), Scale())
    check_same_bits(module, torch.randn(6, 4), torch.randn(6, 4))
    assert defer_weights(module, WeightQueue()) == 4 + 20 + 4
    assert queue_of(module[0].weight) is not None


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


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled() -> None:
    """The layers stay eager, what stands between them is compiled (here without a code generator, for speed)."""
    torch.manual_seed(0)
    module = Words()
    plain, batches = copy.deepcopy(module), [torch.randint(8, (3, 4)) for _ in range(2)]
    queue = WeightQueue(compiled=True)
    defer_weights(module, queue)
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        graphs.append(graph.code)
        return graph.forward

    compiled = torch.compile(module, backend=backend)
    for x in batches:
        y = compiled(x)
        with queue.deferring() as products:
            torch.autograd.backward(y, seed_like(y))
        assert len(drain(products)) == 5
    wanted = backward_plainly(plain, batches)[2]
    torch.testing.assert_close({n: p.grad for n, p in module.named_parameters()}, wanted, rtol=0, atol=0)
    assert any("gelu" in code for code in graphs)
    assert not any("linear" in code or "addmm" in code or "embedding" in code for code in graphs)
