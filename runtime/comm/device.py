"""Device abstraction: all functions of accelerators that the runtime uses, over `torch.accelerator`.

    device   library   order of work
    cpu      gloo      the host computes: no streams, no events, host time
    cuda     nccl      the host runs ahead: work is queued on streams, events mark positions in them
    xpu      xccl      the same

No other file of the runtime names a kind of accelerator or calls its module. To support another, add it to
`_LIBRARIES`, if `torch.accelerator` supports it and its collective library follows NCCL's semantics.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.nn.modules import module

from quintsched.errors import MisfitError

_LIBRARIES: Mapping[str, str] = MappingProxyType({"cuda": "nccl", "xpu": "xccl"})
"""Communication library of each kind of accelerator."""

ACCELERATORS = frozenset(_LIBRARIES)
"""Kinds of accelerators, as `torch.device.type` names them."""

LIBRARIES = frozenset(_LIBRARIES.values())
"""Libraries for accelerators, with NCCL's semantics; the CPU's is gloo."""

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST_QUEUES = 32
"""Maximum number of hardware queues of a GPU that CUDA accepts."""


def find_accelerator() -> torch.device | None:
    """Return the kind of accelerator of this machine, without an index; None where there is no supported one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found if found is not None and found.type in _LIBRARIES else None


def device_kinds() -> tuple[str, ...]:
    """Return the kinds of devices whose torch modes are tracked."""
    return ("cpu", *_LIBRARIES)


def is_accelerator(device: torch.device) -> bool:
    """Whether the host runs ahead of a device."""
    return device.type in _LIBRARIES


def is_at_hand(device: torch.device) -> bool:
    """Whether the host may read a device's numbers directly: it is the CPU, and no dispatch mode captures work."""
    return device.type not in _LIBRARIES and not _len_torch_dispatch_stack()


def numbers_of(tensor: Tensor) -> memoryview[float]:
    """Return a memory view of a tensor that is at hand, to read and write its numbers without torch operations."""
    return cast("memoryview[float]", tensor.numpy().data)


def library_of(device: torch.device) -> str:
    """Return torch.distributed's name of the library for a kind of device: "gloo", "nccl", …."""
    return _LIBRARIES.get(device.type, "gloo")


def library_version(device: torch.device) -> str:
    """Return the version of the library for a kind of device; "" where torch does not say."""
    return ".".join(map(str, torch.cuda.nccl.version())) if library_of(device) == "nccl" else ""


def has_device_for_each(local_ranks: int) -> bool:
    """Whether each rank of this machine can have a device, its own unless NCCL lets ranks share one."""
    if find_accelerator() is None:
        return False
    return torch.accelerator.device_count() >= local_ranks or _may_share()


def num_devices(device: torch.device) -> int | None:
    """Return the number of devices of a kind; None for the CPU, which any number of processes share."""
    return torch.accelerator.device_count() if is_accelerator(device) else None


def use_device(kind: torch.device, index: int) -> torch.device:
    """Make a device of a kind the current one, and return it; the CPU is returned unchanged."""
    if not is_accelerator(kind):
        return kind
    torch.accelerator.set_device_index(index)
    return torch.device(kind.type, index)


def memory_bytes(device: torch.device) -> int:
    """Return the memory of a device, in bytes; for the CPU that of the machine."""
    if not is_accelerator(device):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    total: int = torch.get_device_module(device).get_device_properties(device).total_memory
    return total


def device_kind(library: str) -> torch.device:
    """Return the kind of device of a library: the CPU, unless it is one for accelerators.

    Raises:
        MisfitError: this machine has none.
    """
    if library not in LIBRARIES:
        return torch.device("cpu")
    found = find_accelerator()
    if found is None or library_of(found) != library:
        kind = next(kind for kind, name in _LIBRARIES.items() if name == library)
        raise MisfitError(f"transport {library} wants a {kind.upper()} device and there is none; choose gloo")
    return found


def claim_device(library: str) -> torch.device:
    """Make the device LOCAL_RANK the current one, and return it; for gloo the CPU.

    Raises:
        MisfitError: there is no such device.
    """
    if library in LIBRARIES:
        os.environ.setdefault(QUEUES, str(MOST_QUEUES))  # read when the driver is initialized
    kind = device_kind(library)
    if not is_accelerator(kind):
        return kind
    local_rank, num_devices = int(os.environ.get("LOCAL_RANK", "0")), torch.accelerator.device_count()
    if local_rank >= num_devices and not _may_share():
        raise MisfitError(
            f"local rank {local_rank} wants a device to itself and there are {num_devices}; start fewer ranks per "
            "node, choose gloo (or, from NCCL 2.30 on, let ranks share a device with NCCL_MULTI_RANK_GPU_ENABLE=1)"
        )
    device = torch.device(kind.type, local_rank % num_devices)
    torch.accelerator.set_device_index(device)
    return device


def current_device(library: str) -> torch.device:
    """Return the device that this process uses with a library."""
    kind = device_kind(library)
    return torch.device(kind.type, torch.accelerator.current_device_index()) if is_accelerator(kind) else kind


def require_queues(rank: int, streams: int) -> None:
    """Raise `MisfitError` where streams would share a hardware queue: implicit waits that plans do not model."""
    queues = int(os.environ.get(QUEUES, MOST_QUEUES))
    if queues < min(streams, MOST_QUEUES):
        raise MisfitError(
            f"{QUEUES}={queues}, but rank {rank} has {streams} streams, which would wait behind each other; "
            f"leave it unset, or set it to {MOST_QUEUES}"
        )


def seed_generators(seed: int) -> None:
    """Seed torch's generators of the CPU and of all accelerators.

    `torch.manual_seed` records the call stack for accelerators that are initialized later, which takes half a
    millisecond; blocks are built many times, so without an accelerator only the CPU's generator is seeded.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on a device is done."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def timing_event(device: torch.device) -> torch.Event:
    """Record an event on the accelerator's current stream; `elapsed_time` between two of them is in milliseconds."""
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def new_stream(device: torch.device) -> torch.Stream | None:
    """Return a new stream beside the current one; None on the CPU."""
    return torch.Stream(device) if is_accelerator(device) else None


def peak_bytes(device: torch.device) -> int:
    """Return the most memory that this process has had allocated: on an accelerator, or resident on the host.

    0 where the system does not say.
    """
    if is_accelerator(device):
        return int(torch.accelerator.max_memory_allocated(device))
    if sys.platform == "win32":
        return 0
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def device_name(device: torch.device) -> str:
    """Return the name of an accelerator, as its driver says it."""
    return str(torch.get_device_module(device).get_device_name(device))


def current_stream(device: torch.device) -> torch.Stream:
    """Return the accelerator's current stream."""
    return torch.accelerator.current_stream(device)


def on_stream(stream: torch.Stream | None) -> AbstractContextManager[object]:
    """Return a context in which a stream is the current one; None changes nothing."""
    return nullcontext() if stream is None else stream


def settings_of_torch(device: torch.device) -> tuple[object, ...]:
    """Return the torch settings that affect which kernels run, and hooks on all modules."""
    backends = torch.backends.cuda
    return (
        torch.is_autocast_enabled(device.type),
        torch.get_autocast_dtype(device.type),
        backends.matmul.fp32_precision,
        torch.are_deterministic_algorithms_enabled(),
        backends.flash_sdp_enabled(),
        backends.mem_efficient_sdp_enabled(),
        backends.math_sdp_enabled(),
        tuple(module._global_forward_hooks),
        tuple(module._global_forward_pre_hooks),
    )


class DeviceGraph(Protocol):
    """Work of a device that is captured once, and then launched as a whole, in the same memory each time.

        with graph.capturing():  F0 F1 B0 F2 …   nothing runs: the device records launches and memory
        graph.replay()                           all of it runs, in one launch

    Captured code may not read a number from the device, nor copy from host memory that is not pinned: both raise. Host
    code is not captured, and host numbers stay as they were at the capture.

    Source: CUDA C++ Programming Guide, "CUDA Graphs"; torch.cuda.graph.
    """

    def capturing(self) -> AbstractContextManager[object]:
        """Return a context in which all work of the current thread is captured; errors of its body are raised as is."""

    def replay(self) -> None:
        """Launch the work, after all work queued on the device before."""


def graphs_of(device: torch.device) -> Callable[[], DeviceGraph] | None:
    """Return a factory of a device's graphs, which share one memory pool; None without graphs (all but CUDA)."""
    if device.type != "cuda":
        return None
    return partial(_CudaGraph, torch.cuda.graph_pool_handle())


class _CudaGraph:
    def __init__(self, pool: Any) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    @contextmanager
    def capturing(self) -> Iterator[None]:
        problem: BaseException | None = None
        stream, collects = torch.cuda.current_stream(), gc.isenabled()
        gc.collect()  # device memory must not be freed during a capture
        gc.disable()
        try:
            # Other threads (loaders that pin memory, the watch) may go on asking the device.
            with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
                try:
                    yield
                except BaseException as error:
                    problem = error
                    raise
        except Exception as error:
            _leave_capture(torch.cuda.default_generators[stream.device_index])
            if problem is None or error is problem:
                raise
            raise problem from None  # a failed capture cannot be ended either
        finally:
            torch.cuda.set_stream(stream)
            if collects:
                gc.enable()

    def replay(self) -> None:
        self._graph.replay()


def _leave_capture(generator: torch.Generator) -> None:
    """Have a generator draw again: it does not learn that a capture has failed, and would wait for its end."""
    generator.graphsafe_set_state(generator.clone_state())


def _may_share() -> bool:
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
