"""What a user's loss calls while it is tried: in which numbers, and whole numbers that torch alone reads.

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
    """While it is entered, the types of numbers that a user's loss is found in are noted.

    Attributes:
        dtype: the shortest type of floating numbers that a gradient goes through; without gradients, of all.
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
    """Whole numbers that no data have shown so, for torch's operators alone: others may read memory by them unchecked.

    There is no memory behind it.
    """

    _numbers: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, numbers: Tensor) -> MadeUp:
        """Return what stands for some numbers."""
        sizes = (numbers.shape, numbers.stride(), numbers.storage_offset())
        made = Tensor._make_wrapper_subclass(cls, *sizes, dtype=numbers.dtype, device=numbers.device)
        torch._C._set_throw_on_mutable_data_ptr(made)
        made._numbers = numbers
        return made

    @classmethod
    def of(cls, leaf: Tensor) -> Tensor:
        """Return numbers that were made up; floating ones, and masks, as they are."""
        is_whole = not leaf.is_floating_point() and leaf.dtype is not torch.bool
        return cls(leaf) if is_whole and not isinstance(leaf, cls) else leaf

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func.namespace != "aten" or any(word in func.__name__ for word in _UNCHECKED):
            raise ValueError(f"{func} may read memory that is not there by numbers that are made up")
        bare = tree_map(lambda one: one._numbers if isinstance(one, cls) else one, (args, kwargs or {}))
        return tree_map(lambda one: cls.of(one) if isinstance(one, Tensor) else one, func(*bare[0], **bare[1]))

    def tolist(self) -> Any:
        """Return its numbers."""
        return self._numbers.tolist()


def unseen() -> saved_tensors_hooks:
    """Return a context in which what graphs save is neither counted nor moved by hooks around it."""
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
