"""A model as a sequence of blocks: building them one at a time, their sizes, and the shapes between them.

A block is a module, or a function without arguments that builds one. With functions no rank builds the blocks of
the others, and the engine seeds each block by (seed, its number), so that initial weights do not depend on the mesh.
"""

from __future__ import annotations

import copy
import inspect
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from quintsched.errors import MisfitError

from .dtensor import before_fully_shard, is_sharded

Block = nn.Module | Callable[[], nn.Module]
Blocks = Sequence[Block]

_GLOBAL_GENERATOR = threading.Lock()
"""Ranks that are threads of one process share torch's global generator; one block is built at a time."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor that travels."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Return the spec of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """How many bytes a tensor of this spec has."""
        return prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device | str) -> Tensor:
        """Return an uninitialised tensor of this spec."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


@dataclass(frozen=True)
class Parcel:
    """What goes from one block to the next: the activation, and by name what rides along to later blocks."""

    activation: TensorSpec
    riders: tuple[tuple[str, TensorSpec], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of what rides along, in the order in which it is sent."""
        return tuple(name for name, _ in self.riders)

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The activation's spec, then those of the riders."""
        return (self.activation, *(spec for _, spec in self.riders))

    def __str__(self) -> str:
        return " + ".join([str(self.activation), *(f"{name}: {spec}" for name, spec in self.riders)])


class Carry:
    """A block's output with tensors that ride along, past the blocks between, to later blocks that take them by name.

        class Down(nn.Module):
            def forward(self, x):            return Carry(self.pool(x), skip=x)
        class Up(nn.Module):
            def forward(self, x, skip):      return self.join(torch.cat([self.widen(x), skip], 1))

    On the way they cross stages with the activation, and their gradients come back with its gradient. A rider ends its
    ride at the last block whose `forward` has a parameter of its name.
    """

    __slots__ = ("output", "riders")

    def __init__(self, output: Tensor, /, **riders: Tensor) -> None:
        self.output = output
        self.riders = riders


@contextmanager
def seeded(seed: int, number: int) -> Iterator[None]:
    """Seed torch's global generator for block `number`, and leave it afterwards as it was."""
    with _GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]):
        torch.manual_seed((seed * 1_000_003 + number) % 2**63)
        yield


def build_block(block: Block, number: int, seed: int = 0, dtype: torch.dtype | None = None) -> nn.Module:
    """Return block `number` on the CPU as `dtype` (None: as it was built), the same for every mesh.

    A module is returned as it is; a builder runs with torch's global generator seeded by (seed, number).
    """
    if isinstance(block, nn.Module):
        return block.to(dtype) if dtype else block
    with seeded(seed, number):
        built = block()
    return built.to(dtype) if dtype else built


def build_model(blocks: Blocks, seed: int = 0, dtype: torch.dtype | None = None) -> nn.Sequential:
    """Return the whole model in one piece, with the weights that every mesh starts from."""
    return nn.Sequential(*(build_block(block, number, seed, dtype) for number, block in enumerate(blocks)))


def outlines(blocks: Blocks, *, apart: bool) -> list[nn.Module]:
    """Return the blocks without data, on the meta device; if `apart`, what is cut in place later stays whole here.

    Modules that PyTorch has sharded are not cut, and returned as they are.
    """
    return [
        copy.deepcopy(block, _meta_twins(block))
        if apart and isinstance(block, nn.Module) and not is_sharded(block)
        else _on_meta(block)
        for block in blocks
    ]


def _meta_twins(module: nn.Module) -> dict[int, Any]:
    """Return what takes the place of each tensor of a module in a copy without data."""
    twins: dict[int, Any] = {id(b): torch.empty_like(b, device="meta") for b in module.buffers()}
    for parameter in module.parameters():
        twins[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    return twins


def accepted_extras(block: nn.Module) -> Callable[[str], bool]:
    """Return which of a step's extras the block's `forward` takes by name, as a function of the name."""
    parameters = inspect.signature(block.forward).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return lambda name: takes_all or name in parameters


def some_take(name: str, blocks: Blocks) -> bool:
    """Whether any block has a parameter of this name: `past` (see `slices`), `context` (see `context_parallel`)."""
    return any(name in inspect.signature(_on_meta(block).forward).parameters for block in blocks)


BlockResult = Tensor | Carry | tuple[Tensor | Carry, Tensor]


def split_result(result: BlockResult) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
    """Return a block's output, what rides along from there, and the auxiliary loss that may stand beside it."""
    output, auxiliary = result if isinstance(result, tuple) else (result, None)
    return (output.output, output.riders, auxiliary) if isinstance(output, Carry) else (output, {}, auxiliary)


def estimate_costs(blocks: Blocks) -> list[float]:
    """Estimate what each block costs without running it: the weights that its products touch.

    A lookup (`nn.Embedding`) touches one row, and a mixture of experts those that a token goes to: what a module's
    `touched_parameters` say. Builders run on the meta device, so nothing is allocated.
    """
    costs = []
    for block in blocks:
        module = _on_meta(block)
        lookups = {id(m.weight): m.embedding_dim for m in module.modules() if isinstance(m, nn.Embedding)}
        shares = {id(p): share for m in module.modules() for p, share in getattr(m, "touched_parameters", tuple)()}
        touched = (lookups.get(id(p), p.numel() * shares.get(id(p), 1.0)) for p in module.parameters())
        costs.append(float(sum(touched)))
    return costs


def named_modules(blocks: Blocks) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module of the model by its name in the whole; those that builders make are on the meta device."""
    for number, block in enumerate(blocks):
        yield from _on_meta(block).named_modules(prefix=str(number))


def undecayed_weights(blocks: Blocks, tied: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """Return the names, in the whole model, of those parameters that weight decay usually spares.

    They are the ones with less than two dimensions (biases, norms), embeddings, what a module names in its attribute
    `undecayed`, and what is tied to any of these. Found on the meta device, before anything is cut.
    """
    spared: set[str] = set()
    for number, block in enumerate(blocks):
        built = _on_meta(block)
        ids = {
            id(parameter)
            for module in built.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.dim() < 2 or isinstance(module, nn.Embedding) or name in getattr(module, "undecayed", ())
        }
        spared |= {f"{number}.{name}" for name, parameter in built.named_parameters() if id(parameter) in ids}
    return frozenset(spared.union(*(names for names in tied.values() if spared.intersection(names))))


def measure_costs(blocks: Blocks, example: Tensor, seed: int = 0, rounds: int = 3) -> list[float]:
    """Measure each block's forward and backward on one microbatch, in seconds: the best of `rounds`.

    `example` is a microbatch of the model's input; one block is built at a time.
    """
    costs = []
    riders: dict[str, Tensor] = {}
    for number, block in enumerate(blocks):
        dtype = example.dtype if example.is_floating_point() else None
        module = build_block(block, number, seed, dtype).to(example.device)
        accepts = accepted_extras(module)
        beside = {name: tensor for name, tensor in riders.items() if accepts(name)}
        taken = []
        for _ in range(rounds):
            start = _now_s(example.device)
            given = example.detach().requires_grad_(
                number > 0 and (example.is_floating_point() or example.is_complex())
            )
            output, fresh, _ = split_result(module(given, **beside))
            output.sum().backward()
            taken.append(_now_s(example.device) - start)
        module.zero_grad()
        costs.append(min(taken))
        example = output.detach()
        riders.update({name: tensor.detach() for name, tensor in fresh.items()})
    return costs


def _now_s(device: torch.device) -> float:
    """Return the time when everything that was asked of the device so far is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def trace_shapes(
    blocks: Blocks, inputs: TensorSpec, extras: Mapping[str, TensorSpec], dtype: torch.dtype | None = None
) -> list[Parcel]:
    """Return what every block leaves for the next, for one microbatch, found on the meta device: no data, no memory.

    `dtype` is that of the weights; None leaves them as they are built.
    Raises `MisfitError` that names the block that cannot take what the one before gives.
    """
    given = inputs.empty("meta")
    beside = {name: spec.empty("meta") for name, spec in extras.items()}
    left: list[Tensor] = []
    riders: dict[str, _Ride] = {}
    for number, block in enumerate(blocks):
        module = _on_meta(block)
        accepts = accepted_extras(module)
        taken = {name: extra for name, extra in beside.items() if accepts(name)}
        for name, ride in riders.items():
            if accepts(name):
                ride.until = number
                taken[name] = ride.tensor
        try:
            result = _call_on_meta(module, given, taken, dtype)
        except Exception as error:
            raise MisfitError(
                f"block {number} cannot take {TensorSpec.of(given)}: {error} (shapes are found by running the "
                "blocks on torch's meta device)"
            ) from error
        _require_result(number, result)
        given, fresh, _ = split_result(result)
        left.append(given)
        for name, tensor in fresh.items():
            if name in beside or name in riders:
                raise MisfitError(f"block {number} sends {name!r} along, but there is something else of that name")
            riders[name] = _Ride(tensor, number, number)
    for name, ride in riders.items():
        if ride.until == ride.since:
            raise MisfitError(f"block {ride.since} sends {name!r} along, and no later block takes it")
    return [
        Parcel(
            TensorSpec.of(output),
            tuple((name, TensorSpec.of(r.tensor)) for name, r in riders.items() if r.since <= number < r.until),
        )
        for number, output in enumerate(left)
    ]


def _require_result(number: int, result: object) -> None:
    """Raise `MisfitError` unless a block gave a tensor, or (output, auxiliary loss), with or without riders."""
    output, auxiliary = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    found = output.output if isinstance(output, Carry) else output
    if not isinstance(found, Tensor) or isinstance(found, DTensor):
        raise MisfitError(
            f"block {number} returns a {type(found).__name__}; it must return a tensor or a Carry, or one of them "
            "beside an auxiliary loss"
        )
    if auxiliary is not None and not (isinstance(auxiliary, Tensor) and auxiliary.dim() == 0):
        shape = f"of shape {tuple(auxiliary.shape)}" if isinstance(auxiliary, Tensor) else type(auxiliary).__name__
        raise MisfitError(
            f"block {number} returns something {shape} beside its output; only an auxiliary loss may be "
            "there, a tensor of no dimensions"
        )


@dataclass
class _Ride:
    """A tensor that rides along from block `since` to block `until`."""

    tensor: Tensor
    since: int
    until: int


def _on_meta(block: Block) -> nn.Module:
    if isinstance(block, nn.Module):
        return block
    with seeded(0, 0), torch.device("meta"), _Undrawn():
        return block()


class _Undrawn(TorchFunctionMode):
    """Draws no initial weights on the meta device: they are nothing, and torch takes a millisecond for each tensor."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__ or func in (Tensor.normal_, Tensor.uniform_):
            tensor = args[0] if args else given.get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **given)


def _call_on_meta(
    module: nn.Module, given: Tensor, extras: dict[str, Tensor], dtype: torch.dtype | None
) -> BlockResult:
    module = before_fully_shard(module)
    weights = {
        name: t.to("meta", dtype if t.is_floating_point() else None)
        for name, t in (*module.named_parameters(), *module.named_buffers())
    }
    with torch.no_grad():
        result: BlockResult = torch.func.functional_call(module, weights, (given,), extras)
    return result
