"""Split backward (zero-bubble): input gradients at once, weight gradients deferred in a queue until it is drained.

    BwdInput    g ─▶ gradient of x = g W ─▶ the stage before       DeferredGradient(W, gᵀ x), … (b, Σ g) ─▶ queue
    BwdWeight                                                          queue ─▶ compute ─▶ add to W.grad, b.grad

`BwdInput` is an ordinary backward of the whole stage, run inside `WeightQueue.deferring()`: linear layers and
embeddings then return the gradient of their input, and queue that of their weights as products. It frees the autograd
graph; only x and g of each product are kept until `Products.drain`. Outside of `deferring()` the same layers compute
both gradients at once, bitwise equal.

Gradients that cannot be deferred (norms, convolutions, functional calls on a weight, weights with hooks or a
parametrization) are computed by the backward as usual. A weight with deferred and other uses gets both gradients, added
in another order than a full backward adds them.

User layers take part by naming their parameters, and offering their products in the backward:

    class Scale(nn.Module):
        deferrable = ("weight",)                       # read by defer_weights

    class ScaleFunction(torch.autograd.Function):
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            waits = defer(weight, gradient_of_scale, held=(grad, x))
            return grad * weight, None if waits else gradient_of_scale(grad, x)

    def gradient_of_scale(grad, x):
        return (grad * x).sum(0)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active, _is_any_autocast_enabled
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack, has_torch_function_unary

from quintsched.check_call_arguments import shown
from quintsched.errors import UsageError

from .engine_owned_layers import TakenOver

Accumulate = Callable[[nn.Parameter, Tensor], None]
_OURS = ("torch.", f"{__name__.rpartition('.autograd.')[0]}.")


class DeferredGradient(NamedTuple):
    """A deferred gradient: its parameter, the function that computes it, that function's tensors and their versions."""

    parameter: nn.Parameter
    compute: Callable[..., Tensor]
    held: list[Tensor]
    versions: list[int]


class Products:
    """The deferred products of one backward; as a context, makes its queue collect them here."""

    def __init__(self, queue: WeightQueue) -> None:
        self._queue = queue
        self._waiting: deque[DeferredGradient] = deque()

    def __enter__(self) -> Products:
        self._queue.collecting = self
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.collecting = None

    def add_product(self, parameter: nn.Parameter, compute: Callable[..., Tensor], held: tuple[Tensor, ...]) -> None:
        """Queue a product, its tensors detached from the autograd graph."""
        kept = [tensor.detach() if tensor.requires_grad else tensor for tensor in held]
        self._waiting.append(DeferredGradient(parameter, compute, kept, [tensor._version for tensor in kept]))

    @torch.no_grad()
    def drain(self, accumulate: Accumulate) -> None:
        """Compute all products, in the order of the backward, and pass each parameter's gradient to `accumulate` once.

        Products of a parameter that was used several times are summed first, in autograd's order. A product's tensors
        are released as soon as it is computed.

        Raises:
            RuntimeError: a tensor was modified in place since the backward, as autograd would.
        """
        last_use = {id(product.parameter): number for number, product in enumerate(self._waiting)}
        sums: dict[int, Tensor] = {}
        for number in range(len(self._waiting)):
            parameter, compute, held, versions = self._waiting.popleft()
            if [tensor._version for tensor in held] != versions:
                raise _was_modified(parameter)
            key = id(parameter)
            found = _as_type(compute(*held), parameter.dtype)
            total = sums.pop(key) + found if key in sums else found
            if last_use[key] == number:
                accumulate(parameter, total)
            else:
                sums[key] = total

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameter of every product still queued."""
        return (product.parameter for product in self._waiting)

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor held by the products, with repetitions."""
        for product in self._waiting:
            yield from product.held


def _was_modified(parameter: nn.Parameter) -> RuntimeError:
    return RuntimeError(
        f"a tensor that is needed for the gradient of a weight of shape {tuple(parameter.shape)} was modified in place "
        "between the two halves of its backward"
    )


class WeightQueue:
    """Queue of deferred products of one stage, filled by its layers while a backward is `deferring`.

    Args:
        compiled: the stage is compiled by torch.compile. Its deferring layers cause graph breaks (compiler.disable):
            otherwise the traced backward would fix whether it defers.
    """

    def __init__(self, *, compiled: bool = False) -> None:
        self.collecting: Products | None = None
        aside = torch.compiler.disable if compiled else _as_it_is
        self.linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = aside(_linear)
        self.embedding: Callable[[Tensor, Tensor, int | None], Tensor] = aside(_embedding)

    def deferring(self) -> Products:
        """Return a new `Products`, to be entered as a context around the backward whose products it collects."""
        return Products(self)

    def __reduce__(self) -> tuple[type[WeightQueue], tuple[()]]:
        """Give a copied or pickled parameter a new queue, which is never filled or drained."""
        return WeightQueue, ()


def _as_it_is(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return function


def queue_of(parameter: Tensor) -> WeightQueue | None:
    """Return the queue for products of `parameter`; None: its gradient is never deferred."""
    queue: WeightQueue | None = getattr(parameter, "_quintsched_queue", None)
    return queue


def defer(parameter: nn.Parameter, product: Callable[..., Tensor], held: tuple[Tensor, ...]) -> bool:
    """Defer the gradient of `parameter`, if its queue is collecting; else return False: the caller computes it.

    To be called in the backward of an autograd function.

    Args:
        parameter: one registered by `defer_weights`; all others are never deferred. A tensor that saved-tensor hooks
            unpack in its place is accepted.
        product: computes the gradient later, from `held`; no other tensor should be bound to it.
        held: the tensors that `product` takes.

    Raises:
        UsageError: a parameter that is no tensor, or a product that is no function.
    """
    for name, value, is_right in (
        ("parameter", parameter, isinstance(parameter, Tensor)),
        ("product", product, callable(product)),
    ):
        if not is_right:
            raise UsageError(
                f"defer: {name} is {shown(value)}; write defer(weight, gradient_of_weight, held=(grad, x))"
            )
    return _defer(parameter, product, held)


def _defer(
    parameter: nn.Parameter, product: Callable[..., Tensor], held: tuple[Tensor, ...], accumulator: Any = None
) -> bool:
    """`defer`, without a check of types; `accumulator` is the parameter's node, where it is known."""
    owner = _owner(parameter)
    queue = None if owner is None else queue_of(owner)
    if owner is None or queue is None or queue.collecting is None or owner._backward_hooks or torch.is_grad_enabled():
        return False
    if not _is_accumulated(accumulator or get_gradient_edge(owner).node):
        return False
    queue.collecting.add_product(owner, product, held)
    return True


def _is_accumulated(node: Any) -> bool:
    """Whether the running backward accumulates at a parameter's node; `autograd.grad` within a hook does not."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # autograd.grad returns its gradient instead
        return False


def _owner(tensor: Tensor) -> nn.Parameter | None:
    """Return the parameter that a tensor is, or shares its AccumulateGrad node with (after saved-tensor hooks)."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    node: Any = get_gradient_edge(tensor).node if tensor.is_leaf and tensor.requires_grad else None
    return getattr(node, "variable", None)


def defer_weights(module: nn.Module, queue: WeightQueue) -> int:
    """Register the layers of `module` with `queue`; return the number of trained elements with deferrable gradients.

    The class of every plain nn.Linear and nn.Embedding is replaced in place; names, repr, state dict, pickles, copies
    and hooks stay as they are. Other modules list the parameters that they defer in `deferrable`. A parameter shared
    with a module that does not defer it is left alone.
    """
    for layer in module.modules():
        if type(layer) is nn.Linear and "weight" in layer._parameters:
            layer.__class__ = DeferringLinear
        elif type(layer) is nn.Embedding and not (layer.sparse or layer.scale_grad_by_freq or layer.max_norm):
            layer.__class__ = DeferringEmbedding
    found: dict[nn.Parameter, bool] = {}
    for layer in module.modules():
        names = getattr(type(layer), "deferrable", ())
        for name, parameter in layer.named_parameters(recurse=False):
            found[parameter] = found.get(parameter, True) and name in names and _has_products(parameter)
    deferrable = [parameter for parameter, can_wait in found.items() if can_wait]
    for parameter in deferrable:
        parameter._quintsched_queue = queue  # type: ignore[attr-defined]
    return sum(parameter.numel() for parameter in deferrable if parameter.requires_grad)


def _has_products(parameter: nn.Parameter) -> bool:
    """Whether the products below are bitwise equal to autograd's gradients for a parameter."""
    is_plain = type(parameter) is nn.Parameter and not parameter.is_complex()
    return is_plain and parameter.is_contiguous() and parameter.numel() > 0


class DeferringLinear(TakenOver, nn.Linear):
    """An nn.Linear with deferrable weight gradients."""

    deferrable = ("weight", "bias")

    def forward(self, input: Tensor) -> Tensor:
        """Map (…, in) to (…, out)."""
        return linear(input, self.weight, self.bias)


class DeferringEmbedding(TakenOver, nn.Embedding):
    """An nn.Embedding with deferrable weight gradients."""

    deferrable = ("weight",)

    def forward(self, input: Tensor) -> Tensor:
        """Map ids (…) to rows (…, embedding_dim)."""
        return embedding(input, self.weight, self.padding_idx)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute torch.nn.functional.linear; the gradients of parameters with a queue can be deferred."""
    queue = queue_of(weight)
    return functional.linear(x, weight, bias) if queue is None else queue.linear(x, weight, bias)


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Compute torch.nn.functional.embedding; the gradient of a parameter with a queue can be deferred."""
    queue = queue_of(weight)
    return (
        functional.embedding(ids, weight, padding_idx) if queue is None else queue.embedding(ids, weight, padding_idx)
    )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not _is_recorded(weight, x):
        return functional.linear(x, weight, bias)
    if _is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type) and weight.dtype is not torch.float64:
        x = x.to(torch.get_autocast_dtype(x.device.type))
    elif x.dtype is not weight.dtype:
        return functional.linear(x, weight, bias)
    if x.dim() == 2:
        return _product(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    shape = (*x.shape[:-1], weight.shape[0])
    if bias is None or x.is_contiguous():
        return _product(rows, weight, bias).view(shape)
    # As torch does: it fuses the bias (addmm) only where x is viewable as one matrix without a copy.
    return _product(rows, weight, None).view(shape) + bias.to(rows.dtype)


def _embedding(ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
    if not _is_recorded(weight, ids):
        return functional.embedding(ids, weight, padding_idx)
    rows: Tensor = _Embedding.apply(ids, weight, padding_idx)  # type: ignore[no-untyped-call]
    return rows


def _is_recorded(weight: Tensor, given: Tensor) -> bool:
    """Whether an ordinary backward computes the weight's gradient, and no torch function mode of users is active."""
    if not weight.requires_grad or not torch.is_grad_enabled() or _are_functorch_transforms_active():
        return False
    if not has_torch_function_unary(given):
        return True
    return type(given) is Tensor and all(
        type(m).__module__.startswith(_OURS) for m in _get_current_function_mode_stack()
    )


class _Linear(torch.autograd.Function):
    """x (rows, in) times weightᵀ, plus the bias. Each product is the same call as in autograd's formulas."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
        ctx.bias, ctx.multiplied = bias, weight.detach()
        ctx.save_for_backward(x, weight)
        columns = _as_type(weight, x.dtype).t()
        return x.mm(columns) if bias is None else torch.addmm(_as_type(bias, x.dtype), x, columns)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        bias = ctx.bias
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        of_x = of_weight = of_bias = None
        if needs_x:
            used = ctx.multiplied if _was_swapped(weight, ctx.multiplied) else weight
            of_x = _input_gradient(grad, _as_type(used, x.dtype), x)
        (_, *nodes) = ctx.next_functions
        if needs_weight and not _defer(weight, weight_gradient, (grad, x), nodes[0][0]):
            of_weight = _as_type(weight_gradient(grad, x), weight.dtype)
        if needs_bias and not _defer(bias, bias_gradient, (grad,), nodes[1][0]):
            of_bias = _as_type(bias_gradient(grad), bias.dtype)
        return of_x, of_weight, of_bias


def _was_swapped(weight: Tensor, multiplied: Tensor) -> bool:
    """Whether `weight.data` has been replaced since the forward, as in layers that quantise it there."""
    is_other = isinstance(weight, nn.Parameter) and weight.data_ptr() != multiplied.data_ptr()
    return is_other and not torch.is_grad_enabled()


_product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = _Linear.apply


def _input_gradient(grad: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x (rows, in), with the strides of x."""
    return weight.t().mm(grad.t()).t() if x.stride() == (1, x.shape[0]) else grad.mm(weight)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient (out, in) of a linear layer's weight, from (rows, out) and (rows, in)."""
    return grad.t().mm(x)


def bias_gradient(grad: Tensor) -> Tensor:
    """Return the gradient (out,) of a linear layer's bias, from (rows, out)."""
    return grad.sum(0)


class _Embedding(torch.autograd.Function):
    """Lookup of the weight's rows by ids."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: nn.Parameter, padding_idx: int | None) -> Tensor:
        ctx.padding_idx = -1 if padding_idx is None else padding_idx % weight.shape[0]
        ctx.save_for_backward(ids, weight)
        return functional.embedding(ids, weight, padding_idx)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        ids, weight = ctx.saved_tensors
        product = partial(_rows_gradient, weight.shape[0], ctx.padding_idx)
        return None, None if defer(weight, product, (grad, ids)) else product(grad, ids), None


def _rows_gradient(num_embeddings: int, padding_idx: int, grad: Tensor, ids: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten.embedding_dense_backward(grad, ids, num_embeddings, padding_idx, False)
    return found


def _as_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor` as `dtype`; the check costs a fraction of a call of `to`."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)
