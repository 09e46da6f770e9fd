"""One call into autograd's engine, without the checks that `torch.autograd.backward` repeats for every microbatch.

What a forward leaves is kept as an edge of the graph, not as a tensor: so the memory of an output that was sent is free
as soon as the send is done, unless the graph itself needs it.
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
    """Return where the gradient of a tensor enters the graph; the graph stays alive with it."""
    node: Any = tensor.grad_fn
    if node is None or isinstance(node, _FunctionBase):
        return get_gradient_edge(tensor)
    return _edge((node, tensor.output_nr, None))


def run_backward(roots: Sequence[Root], gradients: Sequence[Tensor | None]) -> None:
    """Add the gradients of all leaves to where they belong, and free the graph.

    `gradients` are those of the roots, of their shapes; they are not checked. Shapes were agreed on beforehand.
    """
    if roots:
        _run(
            tuple(roots),
            tuple(gradients),
            False,  # keep the graph
            False,  # make a graph of the backward
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )
