"""Modes for trial calls of a loss: the dtypes it computes in, and made-up ids that only torch's operators may read.

ids of the data, in another order ─┐            torch's own operators     check or ignore them
ids that may come, or be ignored ──┴▶ MadeUp ──▶ all else                  raises: CTC, kernels of others, numpy
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_UNCHECKED = ("ctc_loss", "sparse", "unsafe_index", "unsafe_masked")


class CallsChecked(TorchFunctionMode):
    """Mode that records the dtypes in which a user's loss computes.

    Attributes:
        dtype: the lowest floating-point precision that a gradient passes through; without gradients, of all results.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.float64

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point() and result.dtype.itemsize < self.dtype.itemsize:
            counts = result.requires_grad or not torch.is_grad_enabled()
            self.dtype = result.dtype if counts else self.dtype
        return result


class MadeUp(Tensor):
    """Tensor of ids that do not come from data, for torch's operators alone: other kernels may index memory unchecked.

    It has no memory of its own.
    """

    _numbers: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, numbers: Tensor) -> MadeUp:
        """Return a wrapper of some ids."""
        sizes = (numbers.shape, numbers.stride(), numbers.storage_offset())
        made = Tensor._make_wrapper_subclass(cls, *sizes, dtype=numbers.dtype, device=numbers.device)
        torch._C._set_throw_on_mutable_data_ptr(made)
        made._numbers = numbers
        return made

    @classmethod
    def from_leaf(cls, leaf: Tensor) -> Tensor:
        """Return a leaf as made-up ids; floating-point tensors and masks as they are."""
        is_whole = not leaf.is_floating_point() and leaf.dtype is not torch.bool
        return cls(leaf) if is_whole and not isinstance(leaf, cls) else leaf

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func.namespace != "aten" or any(word in func.__name__ for word in _UNCHECKED):
            raise ValueError(f"{func} may read memory that is not there by numbers that are made up")
        bare = tree_map(lambda one: one._numbers if isinstance(one, cls) else one, (args, kwargs or {}))
        return tree_map(lambda one: cls.from_leaf(one) if isinstance(one, Tensor) else one, func(*bare[0], **bare[1]))

    def tolist(self) -> Any:
        """Return the ids as a list."""
        return self._numbers.tolist()


def unseen() -> saved_tensors_hooks:
    """Return a context in which outer saved-tensor hooks neither count nor move tensors that graphs save."""
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
