"""Direct call into autograd's engine, without the checks that `torch.autograd.backward` repeats for every microbatch.

A forward's output is kept as an edge of the autograd graph, not as a tensor: so the memory of an output that was sent
is free as soon as the send is done, unless the graph itself has saved it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch._C import _FunctionBase
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

Root = Tensor | GradientEdge

_run = Variable._execution_engine.run_backward
_edge: Callable[[tuple[Any, int, None]], GradientEdge] = partial(tuple.__new__, GradientEdge)


def edge_of(tensor: Tensor) -> GradientEdge:
    """Return the gradient edge of a tensor, at which its backward starts; the edge keeps the graph alive."""
    node: Any = tensor.grad_fn
    if node is None or isinstance(node, _FunctionBase):
        return get_gradient_edge(tensor)
    return _edge((node, tensor.output_nr, None))


def run_backward(roots: Sequence[Root], gradients: Sequence[Tensor | None]) -> None:
    """Accumulate the gradients of all leaf tensors into their `.grad`, and free the graph.

    `gradients` are those of the roots, of the same shapes, which are agreed on beforehand and not checked.
    """
    if roots:
        _run(
            tuple(roots),
            tuple(gradients),
            False,  # retain_graph
            False,  # create_graph
            (),  # inputs: all leaf tensors
            allow_unreachable=True,
            accumulate_grad=True,
        )
