"""A model as a sequence of blocks: how they are built, one at a time, and what is known of them before.

A block is a module, or a function without arguments that builds one. With functions no rank builds the blocks of
the others, and the engine seeds each block by (seed, its number), so that initial weights do not depend on the mesh.
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
from torch.overrides import TorchFunctionMode

from quintsched.errors import MisfitError, QuintschedError

from ..comm.device import GENERATORS, draws_undone, seed_generators
from ..objects.user_code import arguments_of
from .dtensor import is_sharded
from .trees import TensorSpec, TreeSpec

Block = nn.Module | Callable[[], nn.Module]
Blocks = Sequence[Block]

TOKENS = 1
"""The dimension of tokens in what passes between blocks that have them: (samples, tokens, …)."""

TARGETS = "targets"
"""The name by which a block takes the targets of its unit."""


@dataclass(frozen=True)
class Change:
    """A tensor that a block was given, or that rides along with it, or an extra, and that is changed in place.

    Attributes:
        what: its number among the tensors that the block was given, or its name.
        block: the number of the block that changes it: this one, or a later one, which sees it through an alias.
        shared_with: another tensor in the same memory, which changes with it, if there is one.
    """

    what: int | str
    block: int
    shared_with: int | str | None = None


@dataclass(frozen=True)
class State:
    """Something that a block's forward changes besides its weights.

    Attributes:
        name: of what holds it, in a snapshot of the block; or its own, of what classes and globals have.
        is_attribute: whether it is an attribute of a module, and no buffer.
        is_named: whether it belongs to no module.
        owner, key: of what holds it, in a snapshot of the block, and its name there.
        said: of it, in a snapshot of the block; of what a list or set has more, that of all of it.
        is_new: whether there was none before, or None; counts: whether it is a whole number, a flag or a string.
        holds: whether it may be a tensor that the forward was given: neither a number nor a buffer written in place.
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
    """What goes from one block to the next: its output, and by name what rides along to later blocks."""

    output: TreeSpec
    riders: tuple[tuple[str, TensorSpec], ...] = ()
    has_loss: bool = False
    """Whether the block returns a loss beside it."""
    is_resident: bool = False
    """Whether some of it is a weight or a buffer, which may change or be freed while it travels."""
    changes: tuple[Change, ...] = ()
    """Which tensors that the block was given change in place, by it or by a block after it."""
    records: bool = False
    """Whether the block differentiates in its forward what it is given, and has to be run with a graph."""
    state: tuple[State, ...] = field(default=(), repr=False)
    """What the block changes, of which ranks may have run some before, where shapes are found without data."""
    besides: tuple[tuple[int | str, str], ...] = ()
    """What tensors are behind it besides numbers, in words: those of its output, by number, extras and riders."""
    strides: Mapping[int | str, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)
    """Of those tensors that the block was given which do not lie in memory in order."""
    apart: frozenset[int] = field(default=frozenset(), repr=False, compare=False)
    """Which of its `specs` are known to be of no sample, whatever their rows."""

    @property
    def width(self) -> int:
        """How many tensors the output has."""
        return len(self.output.tensors)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of what rides along, in the order in which it is sent."""
        return tuple(dict(self.riders))

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The specs of the output's tensors, then those of the riders: a row of tensors, as it is sent."""
        return (*self.output.tensors, *dict(self.riders).values())

    def place(self, name: str) -> int:
        """Return where a rider is in that row."""
        return self.width + self.names.index(name)

    def __str__(self) -> str:
        return " + ".join([str(self.output), *(f"{name}: {spec}" for name, spec in self.riders)])


class Carry:
    """A block's output, any tree, with tensors that ride along to later blocks that take them by name.

        class Down(nn.Module):
            def forward(self, x):            return Carry(self.pool(x), skip=x)
        class Up(nn.Module):
            def forward(self, x, skip):      return self.join(torch.cat([self.widen(x), skip], 1))

    On the way they cross stages with the activation, and their gradients come back with its gradient. A rider ends its
    ride at the last block whose `forward` has a parameter of its name.

    Without riders it says that an output is nothing else: `Carry((x, y))` is a tuple also where y looks like a loss.
    """

    __slots__ = ("output", "riders")

    def __init__(self, output: Any, /, **riders: Tensor) -> None:
        self.output = output
        self.riders = riders


@contextmanager
def seeded(seed: int, number: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the global generators, torch's, Python's and numpy's, for block `number`; afterwards they are as before."""
    key = (seed * 1_000_003 + number) % 2**63
    with GENERATORS, draws_undone(device):
        seed_generators(key)
        random.seed(key)
        np.random.seed(key % 2**32)
        yield


def build_block(block: Block, number: int, seed: int = 0, dtype: torch.dtype | None = None) -> nn.Module:
    """Return block `number` on the CPU as `dtype` (None: as it was built), the same for every mesh.

    A module is returned as it is; a builder runs with the global generators seeded by (seed, number).
    """
    if isinstance(block, nn.Module):
        return cast(block, dtype)
    with seeded(seed, number):
        built = _built(block)
    return cast(built, dtype)


def cast(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Let a module compute in a type, in place, and return it; None leaves it as it is.

    What loses its meaning in a type shorter than float32 stays as it is: all of a norm that keeps running statistics,
    and the frequencies of rotary embeddings (`inv_freq`). Complex numbers always do.
    """
    if dtype is None:
        return module
    types = {id(tensor): kind for _, tensor, kind in typed(module, dtype)}
    module._apply(lambda tensor: tensor.to(types.get(id(tensor)) or tensor.dtype))
    return module


def typed(module: nn.Module, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor, torch.dtype | None]]:
    """Yield each parameter and buffer by its name, and the type that it has where the module computes in `dtype`.

    None: it keeps the one it has.
    """
    for prefix, child in module.named_modules():
        is_short = dtype is not None and dtype.itemsize < 4
        keeps = is_short and isinstance(child, _NormBase) and child.running_mean is not None
        parameters = child.named_parameters(prefix, recurse=False)
        for name, tensor in (*parameters, *child.named_buffers(prefix, recurse=False)):
            stays = keeps or (is_short and name.endswith("inv_freq")) or not tensor.is_floating_point()
            yield name, tensor, None if stays else dtype


def build_model(blocks: Blocks, seed: int = 0, dtype: torch.dtype | None = None) -> nn.Sequential:
    """Return the whole model in one piece, with the weights that every mesh starts from."""
    return nn.Sequential(*(build_block(block, number, seed, dtype) for number, block in enumerate(blocks)))


def outlines(built: Sequence[nn.Module], *, apart: bool, shared: bool = False) -> list[nn.Module]:
    """Return blocks (see `on_meta`) without data; if `apart`, what is cut in place later stays whole here.

    Modules that PyTorch has sharded are not cut, and returned as they are. Raises `MisfitError` for one that cannot be
    copied. If `shared`, ranks of one process may have been given the same modules: those that can be are copied.
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
    """Return what takes the place of each tensor of a module in a copy without data; weights keep their attributes."""
    twins: dict[int, Any] = {id(b): torch.empty_like(b, device="meta") for b in module.buffers()}
    for parameter in module.parameters():
        twin = twins[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        twin.__dict__.update({name: its for name, its in vars(parameter).items() if not name.startswith("_quintsched")})
    return twins


def accepted_extras(block: nn.Module) -> Callable[[str], bool]:
    """Return which of a step's extras the block's `forward` takes by name, as a function of the name."""
    parameters = arguments_of(block.forward)
    takes_all = "VAR_KEYWORD" in [parameter.kind.name for parameter in parameters.values()]
    return lambda name: name in parameters or (takes_all and name != TARGETS)


def needed_extras(block: nn.Module) -> list[str]:
    """Return the names that a block's `forward` has to be given beside its input: parameters without defaults."""
    parameters = list(arguments_of(block.forward).values())
    by_name = parameters[1:] if parameters and parameters[0].kind is not parameters[0].VAR_KEYWORD else parameters
    return [p.name for p in by_name if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def takes_targets(block: nn.Module) -> bool:
    """Whether a block finds a loss of its own from the targets."""
    return TARGETS in arguments_of(block.forward)


def split_result(result: Any) -> tuple[Any, dict[str, Tensor], Tensor | None]:
    """Return a block's output, what rides along from there, and the auxiliary loss that may be beside it.

    A tuple of two is (output, auxiliary loss) if its second is a floating-point tensor of no dimensions, or None: no
    loss. Any other is the output itself.
    """
    output, auxiliary = result, None
    if type(result) is tuple and len(result) == 2 and (result[1] is None or _may_be_loss(result[1])):
        output, auxiliary = result
    return (output.output, output.riders, auxiliary) if isinstance(output, Carry) else (output, {}, auxiliary)


def _may_be_loss(found: object) -> bool:
    return isinstance(found, Tensor) and found.dim() == 0 and found.is_floating_point()


def named_modules(blocks: Blocks) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module of the model by its name in the whole; those that builders make are on the meta device."""
    for number, block in enumerate(blocks):
        yield from on_meta(block).named_modules(prefix=str(number))


def undecayed_weights(blocks: Blocks, tied: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """Return the names, in the whole model, of those parameters that weight decay usually spares.

    They are the ones with less than two dimensions (biases, norms), embeddings, what a module names in its attribute
    `undecayed`, and what is tied to any of these. Found on the meta device, before anything is cut.
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


def on_meta(block: Block) -> nn.Module:
    """Return a block of which only the shapes matter: a builder's without memory, a module as it is."""
    if isinstance(block, nn.Module):
        return block
    with seeded(0, 0), torch.device("meta"), _Undrawn():
        return _built(block)


def _built(builder: Callable[[], nn.Module]) -> nn.Module:
    """Return the block that a function builds; raises `MisfitError` where it builds none."""
    try:
        built: object = builder()
    except QuintschedError:
        raise
    except Exception as error:
        raise MisfitError(
            f"{_name(builder)} is to build a block, without arguments, and raised {type(error).__name__}: {error}; "
            "give a module, or a function without arguments: lambda: MyBlock(…)"
        ) from error
    if not isinstance(built, nn.Module):
        raise MisfitError(f"{_name(builder)} is to build a block, and returned a {type(built).__name__}")
    return built


def _name(builder: object) -> str:
    return str(getattr(builder, "__qualname__", builder))


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
