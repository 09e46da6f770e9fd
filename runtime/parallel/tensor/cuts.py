"""One layer that is cut, and the layers that can be: linear ones, as torch and transformers write them, and embeddings.

    nn.Linear     (out, in)           lora.Linear     x ─▶ base_layer ───────────────▶ + ─▶      base_layer is cut,
    Conv1D        (in, out)                           x ─▶ lora_A ─▶ lora_B ─▶ scale ─┘          and what joins it

A column whose adapter is added to its output has the adapter's second matrix cut alike, a row the first.

A layer is cut only where calling it runs torch's own forward, or one that is known to be the same: `own_forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from ...comm import Group
from ...objects.spaces import hooks_on, is_hooked
from ...settings.tensor_rules import Parts, TensorSplit

_OF_TORCH = (nn.Linear, nn.Embedding, nn.Module, object)
_FORWARDS = {kind: kind.forward for kind in (nn.Linear, nn.Embedding)}
_SAME_FORWARD = {
    "transformers.pytorch_utils.Conv1D",
    "transformers.models.falcon.modeling_falcon.FalconLinear",
    "timm.layers.linear.Linear",
}
"""Classes of libraries whose forwards give what a linear layer's does."""
_CALLED = frozenset(("forward", "__call__", "_call_impl", "_wrapped_call_impl", "_slow_forward", "weight", "bias")) | {
    *("__getattr__", "__getattribute__", "__torch_function__")
}
"""What a call of a layer looks up on it."""

Layer = TypeVar("Layer", bound=nn.Module)

REGISTERED: dict[type[nn.Module], Callable[[Any, Group], nn.Module]] = {}
"""Kinds of layers that users let be cut, and what makes of one what it is on a rank: `register_cut`."""


@dataclass(frozen=True)
class Cut:
    """One layer to be cut: where it hangs, how, its fused blocks (`parts`), and whether its partner is cut too."""

    parent: nn.Module | None
    name: str
    path: str
    layer: nn.Module
    split: TensorSplit
    parts: Parts = 1
    is_paired: bool = False
    is_told: bool = False
    """Whether a rule said what the parts are."""
    scope: nn.Module | None = None
    """The module whose columns and rows feed each other; None: the parent."""
    owners: tuple[nn.Module, ...] = ()
    """The modules that may keep sizes of what is cut, that which calls the columns first."""
    divides: tuple[str, ...] = ()
    """The attributes of owners that become those of this rank: "num_heads", "config.num_heads"."""
    family: str = ""
    """By which names the pair was found, if not by rules."""

    @property
    def pair(self) -> nn.Module | None:
        """The module within which this layer and its partners are."""
        return self.parent if self.scope is None else self.scope


@dataclass(frozen=True)
class Place:
    """A layer where it hangs."""

    parent: nn.Module
    name: str
    path: str
    layer: nn.Module


def join(path: str, name: str) -> str:
    """Return the dotted name of what is called so within a path."""
    return f"{path}.{name}" if path and name else path or name


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' linear layer whose weight is (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "weight")


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer of either kind."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_layer(module: nn.Module) -> bool:
    """Whether a module is a layer that rules are for."""
    return is_linear(module) or isinstance(module, nn.Embedding) or type(module) in REGISTERED


def register_cut(kind: type[Layer], make: Callable[[Layer, Group], nn.Module]) -> None:
    """Let rules cut layers of a kind as "column", on all ranks alike, before the engine is made.

    Args:
        kind: their class, itself and no subclass.
        make: (layer, ranks of tp) → what the layer is on a rank, a `ShardedModule`: it takes and gives full tensors,
            and has a slice of each of the layer's parameters along their first dimension, by the same names.
    """
    REGISTERED[kind] = make


def is_plain(layer: nn.Module, *, strict: bool = True) -> bool:
    """Whether a layer does what its class says, and nothing besides; unless `strict`, subclasses will do."""
    if is_hooked(layer) or has_hooked_weights(layer) or own_forward(layer):
        return False
    if type(layer) in (nn.Linear, nn.Embedding, *REGISTERED) or is_conv1d(layer):
        return True
    is_bare = not layer._modules and not layer._buffers and layer._parameters.keys() <= {"weight", "bias"}
    return not strict and isinstance(layer, nn.Linear) and is_bare and "weight" in layer._parameters


def own_forward(layer: nn.Module) -> str:
    """Return what of a layer is a forward of its own, or weights of a type of their own; empty: it is torch's."""
    kind = type(layer)
    is_known = f"{kind.__module__}.{kind.__qualname__}" in _SAME_FORWARD
    bases = () if is_known or kind in REGISTERED else (base for base in kind.__mro__ if base not in _OF_TORCH)
    for name, space in [("it", vars(layer)), *((base.__name__, vars(base)) for base in bases)]:
        if not _CALLED.isdisjoint(space):
            return f"{name} has {min(_CALLED & space.keys())!r}"
    if is_replaced():
        return "torch's forward of linear layers or embeddings was replaced"
    odd = (type(p).__name__ for p in layer._parameters.values() if p is not None and type(p) is not nn.Parameter)
    return next((f"its weights are of type {name!r}" for name in odd), "")


def is_replaced() -> bool:
    """Whether somebody has put another forward into torch's own layers."""
    return any(kind.forward is not forward for kind, forward in _FORWARDS.items())


def has_hooked_weights(layer: nn.Module) -> bool:
    """Whether hooks are registered on a layer's weights: they are given whole gradients, and would be lost."""
    return any(map(hooks_on, layer.parameters(recurse=False)))


def sizes_of(layer: nn.Module) -> tuple[int, int]:
    """Return how many features a linear layer takes and gives."""
    weight = layer.get_parameter("weight")
    taken, given = weight.shape if is_conv1d(layer) else reversed(weight.shape)
    return int(taken), int(given)


def cut_width(cut: Cut) -> int:
    """Return how many features or ids are divided; 0 for what is neither a linear layer nor an embedding."""
    if is_linear(cut.layer):
        taken, given = sizes_of(cut.layer)
        return taken if cut.split is TensorSplit.ROW else given
    if type(cut.layer) in REGISTERED:
        return min((len(weight) for weight in cut.layer.parameters()), default=0)
    is_embedding = isinstance(cut.layer, nn.Embedding) and cut.split is not TensorSplit.ROW
    return int(cut.layer.num_embeddings) if is_embedding else 0  # type: ignore[arg-type]


def cut_weights(cut: Cut) -> Iterator[nn.Parameter]:
    """Yield the parameters of which each rank has a shard."""
    return (p for name, p in cut.layer.named_parameters() if cut.split is not TensorSplit.ROW or name != "bias")


def pairs_of(cuts: Sequence[Cut]) -> list[list[Cut]]:
    """Return the cuts by the module whose layers they are: columns and rows that feed each other."""
    pairs: dict[tuple[int, bool, str], list[Cut]] = {}
    for cut in cuts:
        pairs.setdefault((id(cut.pair), cut.is_paired, cut.family), []).append(cut)
    return list(pairs.values())


def is_adapted(module: nn.Module) -> bool:
    """Whether a module adds the product of two small matrices to that of a linear layer (LoRA, as PEFT writes it)."""
    base, first, second = (getattr(module, name, None) for name in ("base_layer", "lora_A", "lora_B"))
    if not (isinstance(base, nn.Module) and is_linear(base)):
        return False
    others = (getattr(module, name, None) for name in ("lora_magnitude_vector", "lora_embedding_A"))
    if any(other is not None and len(other) for other in others):
        return False
    return isinstance(first, nn.ModuleDict) and isinstance(second, nn.ModuleDict) and len(first) == len(second)


def layers_at(scope: nn.Module, path: str, name: str, split: TensorSplit) -> list[Place]:
    """Return the layers that are cut together where a linear layer is named: itself first; none if there is no such."""
    *owners, last = name.split(".")
    parent: nn.Module = scope
    for owner in owners:
        found = parent._modules.get(owner)
        if found is None:
            return []
        parent = found
    child = parent._modules.get(last)
    if child is None:
        return []
    here = join(path, name)
    if not is_adapted(child):
        return [Place(parent, last, here, child)] if is_linear(child) else []
    adapters = child.get_submodule("lora_A" if split is TensorSplit.ROW else "lora_B")
    of_adapters = [
        Place(adapters, key, f"{here}.lora_{'A' if split is TensorSplit.ROW else 'B'}.{key}", layer)
        for key, layer in adapters.named_children()
    ]
    return [Place(child, "base_layer", f"{here}.base_layer", child.get_submodule("base_layer")), *of_adapters]
