"""Which layers' weights a block gives to functions itself: of one that is cut, a rank would give its shard alone.

self.fc1(x)                      the layer's own forward, which knows how it is cut
self.fc1.weight.abs().max()      a shard's, so that the layer is kept whole
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..feature_owners import line

_ALIKE = {
    "dtype", "device", "layout", "requires_grad", "grad_fn", "is_leaf", "is_cuda", "is_cpu", "is_meta", "is_sparse",
    "is_quantized", "is_floating_point", "is_complex", "get_device", "element_size", "itemsize",
    "dim", "ndim", "shape", "size", "numel", "nelement", "__len__", "__hash__",
}  # fmt: skip
"""What may be asked of a shard, too: sizes are those of a run that is compared."""


class WeightReads(TorchFunctionMode):
    """Within it, the functions are noted that are given weights of layers outside of the layers' own forwards.

    Args:
        layers: by name.

    Attributes:
        found: the name of a layer to the first function that is given its weights, in words: "gives …".
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._layers = layers
        self._paths = {id(parameter): path for path, layer in layers.items() for parameter in layer.parameters()}
        self._inside = 0
        self.found: dict[str, str] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which forwards are run, of which those of the layers are their own business."""
        handles = []
        for layer in self._layers.values():
            handles.append(layer.register_forward_pre_hook(self._enter))
            handles.append(layer.register_forward_hook(self._leave, always_call=True))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._inside += 1

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._inside -= 1

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        name = getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name
        if not self._inside and name not in _ALIKE:
            for leaf in tree_leaves((args, kwargs)):
                if (path := self._paths.get(id(leaf))) is not None:
                    self.found.setdefault(path, f"gives the weights of {path!r} to {name}{line()}")
        return func(*args, **(kwargs or {}))
