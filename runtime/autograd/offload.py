"""What autograd saves of one forward, moved to the host's memory and back while the graph stays where it is.

    forward      save x ──▶ handle ──▶ memory of x      one memory for all tensors that look into a storage
    OffloadAct                         └─ copied to the host: the device's is free, unless somebody else looks at it
    FetchAct                           └─ copied back
    backward     x ◀── handle: a view of that memory, as x was

Weights, buffers and what else is resident anyway are left alone. A tensor that is changed in place between forward and
backward is refused when the backward comes to it, as autograd does without handles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

Track = Callable[[Tensor], object]
"""Counts a tensor as long as what it returns lives."""


class SavedMemory:
    """The memory that saved tensors look into: the bytes of one storage, on the device or in the host's memory."""

    def __init__(self, storage: torch.UntypedStorage, device: torch.device, track: Track | None) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        self.handles: WeakSet[_Handle] = WeakSet()
        self._track = track
        self._count = track(self.bytes) if track else None

    def leave(self, on_host: Tensor) -> None:
        """Let the device's memory go: from now on the bytes are those on the host."""
        for handle in self.handles:
            handle.let_go()
        self.bytes, self._count = on_host, None

    def arrive(self, on_device: Tensor) -> None:
        """Let the bytes be those on the device again."""
        self.bytes = on_device
        self._count = self._track(on_device) if self._track else None


class _Kept:
    """A saved tensor that stays where it is."""

    def __init__(self, tensor: Tensor, track: Track | None) -> None:
        self._tensor = tensor.detach()  # else a graph that saves its own output would live for ever
        self._version = tensor._version
        self._count = track(self._tensor) if track else None

    def unpack(self) -> Tensor:
        """Return the tensor; raises `RuntimeError` where it was changed in place since it was saved."""
        self._require_unchanged()
        return self._tensor

    def _require_unchanged(self) -> None:
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: it is "
                f"at version {self._tensor._version}, and version {self._version} was saved for the backward"
            )


class _Handle(_Kept):
    """A saved tensor whose memory moves."""

    def __init__(self, tensor: Tensor, memory: SavedMemory) -> None:
        super().__init__(tensor, None)
        self._memory = memory
        self._place = tensor.storage_offset(), tensor.shape, tensor.stride()
        memory.handles.add(self)

    def let_go(self) -> None:
        """Only remember how the tensor looks into its memory; its version is still counted."""
        self._tensor.data = torch.empty(0, dtype=self._tensor.dtype, device=self._tensor.device)

    def unpack(self) -> Tensor:
        """Return a view of the memory that looks like the tensor; raises `RuntimeError` as above."""
        self._require_unchanged()
        memory = self._memory.bytes
        view = torch.empty(0, dtype=self._tensor.dtype, device=memory.device)
        return view.set_(memory.untyped_storage(), *self._place)


class SavedActivations:
    """What autograd saves of one forward.

    Args:
        device: where it computes; what is elsewhere stays there.
        is_resident: says of the `identity` of a storage whether it is resident anyway.
        track: counts what is saved on the device.
    """

    def __init__(self, device: torch.device, is_resident: Callable[[int], bool], track: Track | None = None) -> None:
        self._device, self._is_resident, self._track = device, is_resident, track
        self._memories: WeakValueDictionary[int, SavedMemory] = WeakValueDictionary()

    def saving(self) -> AbstractContextManager[object]:
        """Return a context for the forward."""
        return saved_tensors_hooks(self._pack, lambda saved: saved.unpack())

    def memories(self) -> list[SavedMemory]:
        """Return the memory of all that is saved still, each once."""
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
        """Whether a tensor is an activation like most, which can be had again from its bytes."""
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_quantized
        if not plain or tensor.device.type != self._device.type or tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() > 0 and not self._is_resident(identity(storage))


def identity(storage: torch.UntypedStorage) -> int:
    """Return what tells storages apart while they live, also where their memory is freed and taken again."""
    found: int = storage._cdata
    return found


def identities(tensors: Iterable[Tensor]) -> set[int]:
    """Return the identities of the storages that tensors look into."""
    return {identity(tensor.untyped_storage()) for tensor in tensors}


def vacate(leaves: Sequence[Tensor]) -> None:
    """Take their memory away from leaves of a graph that only their gradients are wanted of; they keep their layout."""
    for leaf in leaves:
        size, stride, dtype, device = leaf.size(), leaf.stride(), leaf.dtype, leaf.device
        leaf.data = torch.empty(0, dtype=dtype, device=device)
        empty = torch.empty_strided(size, stride, dtype=dtype, device=device)
        empty.untyped_storage().resize_(0)
        leaf.data = empty
