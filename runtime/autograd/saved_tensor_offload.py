"""Activation offloading: tensors saved by autograd move to other memory and back, while the graph is unchanged.

    forward      save x ──▶ handle ──▶ memory of x      one memory for all tensors that are views of one storage
    OffloadAct                         └─ copied to the host: device memory is freed, unless another tensor shares it
    FetchAct                           └─ copied back
    backward     x ◀── handle: a view of that memory, with x's shape and strides

`LendAct` and `ReclaimAct` move them to another rank's memory and back; then one storage has several memories.

Weights, buffers and other resident tensors are not moved. A tensor that is changed in place between forward and
backward is refused when the backward unpacks it, as autograd does without handles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

Track = Callable[[Tensor], object]
"""Counts a tensor's memory for as long as the returned object lives."""


class SavedMemory:
    """The bytes of one storage that saved tensors are views of, on the device, in host memory or on another rank."""

    def __init__(self, storage: torch.UntypedStorage, device: torch.device, track: Track | None) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        self.handles: WeakSet[_Handle] = WeakSet()
        self._track = track
        self._count = track(self.bytes) if track else None

    def leave(self, away: Tensor) -> None:
        """Release the device memory, and keep the copy on the host; or no bytes, if another rank has them."""
        for handle in self.handles:
            handle.let_go()
        self.bytes, self._count = away, None

    def arrive(self, on_device: Tensor) -> None:
        """Replace what was kept by the copy on the device, which may be a part of a storage."""
        self.bytes = on_device
        self._count = self._track(on_device) if self._track else None


class _Kept:
    """A saved tensor that is not offloaded."""

    def __init__(self, tensor: Tensor, track: Track | None) -> None:
        self._tensor = tensor.detach()  # otherwise a node that saves its own output is a cycle that is never freed
        self._version = tensor._version
        self._count = track(self._tensor) if track else None

    def unpack(self) -> Tensor:
        """Return the tensor; raises `RuntimeError` if it was changed in place since it was saved."""
        self._require_unchanged()
        return self._tensor

    def _require_unchanged(self) -> None:
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: it is "
                f"at version {self._tensor._version}, and version {self._version} was saved for the backward"
            )


class _Handle(_Kept):
    """A saved tensor whose memory can be offloaded."""

    def __init__(self, tensor: Tensor, memory: SavedMemory) -> None:
        super().__init__(tensor, None)
        self._memory = memory
        self._offset, self._size = tensor.storage_offset(), (tensor.shape, tensor.stride())
        memory.handles.add(self)

    def let_go(self) -> None:
        """Drop the tensor's reference to device memory; offset, shape and strides are kept, and so is its version."""
        self._tensor.data = torch.empty(0, dtype=self._tensor.dtype, device=self._tensor.device)

    def unpack(self) -> Tensor:
        """Return a view of the memory with the tensor's shape and strides; raises `RuntimeError` as above."""
        self._require_unchanged()
        memory = self._memory.bytes
        view = torch.empty(0, dtype=self._tensor.dtype, device=memory.device)
        offset = self._offset + memory.storage_offset() // view.element_size()
        return view.set_(memory.untyped_storage(), offset, *self._size)


class SavedActivations:
    """Tensors saved by autograd in one forward.

    Args:
        device: the compute device; tensors on others are not moved.
        is_resident: maps the `identity` of a storage to whether it stays on the device anyway.
        track: counts memory of saved tensors on the device.
    """

    def __init__(self, device: torch.device, is_resident: Callable[[int], bool], track: Track | None = None) -> None:
        self._device, self._is_resident, self._track = device, is_resident, track
        self._memories: WeakValueDictionary[int, SavedMemory] = WeakValueDictionary()

    def saving(self) -> AbstractContextManager[object]:
        """Return the saved-tensor hooks, as a context for the forward."""
        return saved_tensors_hooks(self._pack, lambda saved: saved.unpack())

    def memories(self) -> list[SavedMemory]:
        """Return the memories of all tensors that are still saved, each once."""
        return list(self._memories.values())

    def _pack(self, tensor: Tensor) -> _Kept:
        if not self._moves(tensor):
            return _Kept(tensor, self._track)
        storage = tensor.untyped_storage()
        memory = self._memories.get(identity(storage))
        if memory is None:
            memory = self._memories[identity(storage)] = SavedMemory(storage, self._device, self._track)
        return _Handle(tensor, memory)

    def _moves(self, tensor: Tensor) -> bool:
        """Whether a tensor is a plain strided activation, which can be restored from its bytes."""
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_quantized
        if not plain or tensor.device.type != self._device.type or tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() > 0 and not self._is_resident(identity(storage))


def identity(storage: torch.UntypedStorage) -> int:
    """Return a key that is unique among living storages, unlike data pointers, which are reused after a free."""
    found: int = storage._cdata
    return found


def identities(tensors: Iterable[Tensor]) -> set[int]:
    """Return the identities of the storages of tensors."""
    return {identity(tensor.untyped_storage()) for tensor in tensors}


def vacate(leaves: Sequence[Tensor]) -> None:
    """Free the memory of leaf tensors whose gradients alone are needed; they keep shape, strides and dtype."""
    for leaf in leaves:
        size, stride, dtype, device = leaf.size(), leaf.stride(), leaf.dtype, leaf.device
        leaf.data = torch.empty(0, dtype=dtype, device=device)
        empty = torch.empty_strided(size, stride, dtype=dtype, device=device)
        empty.untyped_storage().resize_(0)
        leaf.data = empty
