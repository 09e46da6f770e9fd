"""A model as a sequence of blocks: building them one at a time, and inspecting them on the meta device beforehand.

A block is a module, or a builder: a function without arguments that returns one. With builders no rank builds the
blocks of other ranks, and each block is seeded by (seed, its number), so initial weights do not depend on the mesh.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from quintsched.check_call_arguments import ROW, WHOLE_NUMBER, ArgumentKind, instance, takes
from quintsched.errors import MisfitError, QuintschedError, import_advice

from ..comm.device import seed_generators
from ..comm.random_generators import GENERATORS, draws_undone
from ..user_objects.library_or_user import arguments_of
from .dtensor import is_sharded
from .trees import TensorSpec, TreeSpec

BlockOrBuilder = nn.Module | Callable[[], nn.Module]
Blocks = Sequence[BlockOrBuilder]
BLOCKS = ArgumentKind(
    "a list of blocks", lambda given: ROW.holds(given) and not isinstance(given, Tensor) and len(given) > 0
)

TOKENS_DIM = 1
"""Token dimension of activations that pass between blocks: (samples, tokens, …)."""

TARGETS = "targets"
"""Name of the `forward` parameter by which a block takes the targets of its unit."""


@dataclass(frozen=True)
class InputMutation:
    """In-place mutation of a block's input tensor, of a rider or of an extra.

    Attributes:
        what: index among the block's input tensors, or name of the rider or extra.
        block: number of the block that mutates it: this one, or a later one through an alias.
        shared_with: another input in the same storage, which changes with it, if there is one.
    """

    what: int | str
    block: int
    shared_with: int | str | None = None


@dataclass(frozen=True)
class MutatedState:
    """Side effect of a block's forward: host state or a buffer that it mutates.

    Attributes:
        name: label of the holder in a snapshot of the block; for classes and globals, label of the state itself.
        is_attribute: whether it is an attribute of a module, not a buffer.
        is_named: whether it belongs to no module.
        owner, key: label of the holder in a snapshot of the block, and the name or index within the holder.
        said: label of the state in a snapshot of the block; for an item added to a list or set, the container's.
        is_new: whether it was absent or None before; counts: whether it is an int, a bool or a string.
        holds: whether it may be an input tensor of the forward: neither a number nor a buffer written in place.
    """

    name: str
    is_attribute: bool
    is_named: bool = False
    owner: str = ""
    key: str | int = ""
    said: str = ""
    is_new: bool = False
    counts: bool = False
    holds: bool = False


@dataclass(frozen=True)
class Parcel:
    """Specs of the tensors passed from one block to the next: the block's output, and riders by name."""

    output: TreeSpec
    riders: tuple[tuple[str, TensorSpec], ...] = ()
    has_loss: bool = False
    """Whether the block also returns an auxiliary loss."""
    is_resident: bool = False
    """Whether some output is a view of a weight or buffer, which may change or be freed during the send."""
    changes: tuple[InputMutation, ...] = ()
    """In-place mutations of the block's inputs, by itself or by a later block."""
    records: bool = False
    """Whether the block calls autograd within its forward, and so must be run with an autograd graph."""
    state: tuple[MutatedState, ...] = field(default=(), repr=False)
    """Side effects of the block's forward. Some ranks may have run it before, where shapes are found without data."""
    besides: tuple[tuple[int | str, str], ...] = ()
    """Properties that are lost in a send (tensor subclass, attributes), in words, by output index or name."""
    strides: Mapping[int | str, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)
    """Strides of the block's non-contiguous input tensors, by index or name."""
    apart: frozenset[int] = field(default=frozenset(), repr=False, compare=False)
    """Indices into `specs` of tensors that have no sample dimension, whatever their first dimension is."""

    @property
    def width(self) -> int:
        """Number of tensors in the output."""
        return len(self.output.tensors)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the riders, in the order in which they are sent."""
        return tuple(dict(self.riders))

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Specs of the output's tensors, then of the riders: the flat row of tensors that is sent."""
        return (*self.output.tensors, *dict(self.riders).values())

    def place(self, name: str) -> int:
        """Return the index of a rider in that row."""
        return self.width + self.names.index(name)

    def __str__(self) -> str:
        return " + ".join([str(self.output), *(f"{name}: {spec}" for name, spec in self.riders)])


class Carry:
    """A block's output (any tree of tensors), with riders: named tensors for later blocks that take them by name.

        class Down(nn.Module):
            def forward(self, x):            return Carry(self.pool(x), skip=x)
        class Up(nn.Module):
            def forward(self, x, skip):      return self.join(torch.cat([self.widen(x), skip], 1))

    Riders are sent from stage to stage with the activation, and their gradients return with its gradient. A rider is
    sent as far as the last block whose `forward` has a parameter of its name.

    Without riders it marks the whole as output: `Carry((x, y))` is a tuple even where y looks like an auxiliary loss.
    """

    __slots__ = ("output", "riders")

    def __init__(self, output: Any, /, **riders: Tensor) -> None:
        self.output = output
        self.riders = riders


@contextmanager
def seeded(seed: int, number: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the global generators of torch, Python and numpy for block `number`; restore them afterwards."""
    key = (seed * 1_000_003 + number) % 2**63
    with GENERATORS, draws_undone(device):
        seed_generators(key)
        random.seed(key)
        np.random.seed(key % 2**32)
        yield


def build_block(block: BlockOrBuilder, number: int, seed: int = 0, dtype: torch.dtype | None = None) -> nn.Module:
    """Return block `number` on the CPU as `dtype` (None: as it was built), the same for every mesh.

    A module is cast in place and returned; a builder runs with the global generators seeded by (seed, number).
    """
    if isinstance(block, nn.Module):
        if any(tensor.is_meta for tensor in (*block.parameters(), *block.buffers())):
            raise MisfitError(
                f"block {number} ({type(block).__name__}) has weights on the meta device, without data; load them, or "
                "give a function that builds it"
            )
        return cast(block, dtype)
    with seeded(seed, number):
        built = _built(block)
    return cast(built, dtype)


def cast(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Cast a module's floating-point parameters and buffers to a dtype in place, and return it; None changes nothing.

    Below float32 precision, tensors that would lose their meaning keep their dtype: all of a norm with running
    statistics, and the frequencies of rotary embeddings (`inv_freq`). Complex tensors always keep theirs.
    """
    if dtype is None:
        return module
    types = {id(tensor): kind for _, tensor, kind in typed(module, dtype)}
    module._apply(lambda tensor: tensor.to(types.get(id(tensor)) or tensor.dtype))
    return module


def typed(module: nn.Module, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor, torch.dtype | None]]:
    """Yield each parameter and buffer by name, with the dtype that it is cast to where the module computes in `dtype`.

    None: it keeps its own dtype.
    """
    for prefix, child in module.named_modules():
        is_short = dtype is not None and dtype.itemsize < 4
        keeps = is_short and isinstance(child, _NormBase) and child.running_mean is not None
        parameters = child.named_parameters(prefix, recurse=False)
        for name, tensor in (*parameters, *child.named_buffers(prefix, recurse=False)):
            stays = keeps or (is_short and name.endswith("inv_freq")) or not tensor.is_floating_point()
            yield name, tensor, None if stays else dtype


@takes("build_model(blocks, seed=0)", blocks=BLOCKS, seed=WHOLE_NUMBER, dtype=instance("a torch.dtype", torch.dtype))
def build_model(blocks: Blocks, seed: int = 0, dtype: torch.dtype | None = None) -> nn.Sequential:
    """Return the whole model as one nn.Sequential, with the initial weights that every mesh starts from."""
    return nn.Sequential(*(build_block(block, number, seed, dtype) for number, block in enumerate(blocks)))


def outlines(built: Sequence[nn.Module], *, apart: bool, shared: bool = False) -> list[nn.Module]:
    """Return blocks (see `on_meta`) without data; if `apart`, as meta-device copies that later in-place cuts spare.

    Modules that PyTorch has sharded are not cut, and are returned unchanged. Raises `MisfitError` for a block that
    cannot be copied. If `shared`, ranks of one process may hold the same modules: those that can be are copied.
    """
    if not apart and not shared:
        return list(built)
    return [_outline(number, block, needed=apart) for number, block in enumerate(built)]


def _outline(number: int, block: nn.Module, *, needed: bool) -> nn.Module:
    if is_sharded(block) or all(tensor.is_meta for tensor in (*block.parameters(), *block.buffers())):
        return block
    try:
        return copy.deepcopy(block, meta_twins(block))
    except Exception as error:
        if not needed:
            return block
        raise MisfitError(
            f"block {number} ({type(block).__name__}) cannot be copied: {error}; tensor parallelism cuts blocks in "
            "place, so give the engine a function that builds it"
        ) from error


def meta_twins(module: nn.Module) -> dict[int, Any]:
    """Return a deepcopy memo that maps each tensor of a module to a meta tensor; weights keep their attributes."""
    twins: dict[int, Any] = {id(b): torch.empty_like(b, device="meta") for b in module.buffers()}
    for parameter in module.parameters():
        twin = twins[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        twin.__dict__.update({name: its for name, its in vars(parameter).items() if not name.startswith("_quintsched")})
    return twins


def accepted_extras(block: nn.Module) -> Callable[[str], bool]:
    """Return a predicate on names: whether the block's `forward` takes an extra or rider of that name."""
    parameters = arguments_of(block.forward)
    takes_all = "VAR_KEYWORD" in [parameter.kind.name for parameter in parameters.values()]
    return lambda name: name in parameters or (takes_all and name != TARGETS)


def needed_extras(block: nn.Module) -> list[str]:
    """Return the names of the arguments that `forward` requires beside its input: parameters without defaults."""
    parameters = list(arguments_of(block.forward).values())
    by_name = parameters[1:] if parameters and parameters[0].kind is not parameters[0].VAR_KEYWORD else parameters
    return [p.name for p in by_name if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def takes_targets(block: nn.Module) -> bool:
    """Whether a block takes the targets, and so computes a loss of its own."""
    return TARGETS in arguments_of(block.forward)


def split_result(result: Any) -> tuple[Any, dict[str, Tensor], Tensor | None]:
    """Return a block's output, its riders, and its auxiliary loss or None.

    A tuple of two is (output, auxiliary loss) if its second item is a 0-dimensional floating-point tensor, or None (no
    loss). Any other result is the output itself.
    """
    output, auxiliary = result, None
    if type(result) is tuple and len(result) == 2 and (result[1] is None or _may_be_loss(result[1])):
        output, auxiliary = result
    return (output.output, output.riders, auxiliary) if isinstance(output, Carry) else (output, {}, auxiliary)


def _may_be_loss(found: object) -> bool:
    return isinstance(found, Tensor) and found.dim() == 0 and found.is_floating_point()


def named_modules(blocks: Blocks) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module by its qualified name in the whole model; builders run on the meta device."""
    for number, block in enumerate(blocks):
        yield from on_meta(block).named_modules(prefix=str(number))


def undecayed_weights(blocks: Blocks, tied: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """Return the qualified names of the parameters that are usually exempt from weight decay.

    They are parameters of less than two dimensions (biases, norms), embeddings, those that a module names in its
    attribute `undecayed`, and weights tied to any of these. Found on the meta device, before any cut.
    """
    spared: set[str] = set()
    for number, block in enumerate(blocks):
        built = on_meta(block)
        ids = {
            id(parameter)
            for module in built.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.dim() < 2 or isinstance(module, nn.Embedding) or name in getattr(module, "undecayed", ())
        }
        spared |= {f"{number}.{name}" for name, parameter in built.named_parameters() if id(parameter) in ids}
    return frozenset(spared.union(*(names for names in tied.values() if spared.intersection(names))))


def on_meta(block: BlockOrBuilder) -> nn.Module:
    """Return a block for shape inference: a builder's module on the meta device, a given module unchanged."""
    if isinstance(block, nn.Module):
        return block
    with seeded(0, 0), torch.device("meta"):
        return _built(block)


def _built(builder: Callable[[], nn.Module]) -> nn.Module:
    """Return the module that a builder makes; raises `MisfitError` if it fails or returns no module."""
    try:
        built: object = builder()
    except QuintschedError:
        raise
    except Exception as error:
        advice = import_advice(error) or "; give a module, or a function without arguments: lambda: MyBlock(…)"
        raise MisfitError(
            f"{_name(builder)} is to build a block, without arguments, and raised {type(error).__name__}: "
            f"{error}{advice}"
        ) from error
    if not isinstance(built, nn.Module):
        raise MisfitError(f"{_name(builder)} is to build a block, and returned a {type(built).__name__}")
    return built


def _name(builder: object) -> str:
    return str(getattr(builder, "__qualname__", builder))
