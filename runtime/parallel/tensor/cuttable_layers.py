"""Cuts of single layers, and the layers that can be cut: linear ones (of torch, transformers, LoRA) and embeddings.

    nn.Linear     (out, in)           lora.Linear     x ─▶ base_layer ───────────────▶ + ─▶      base_layer is cut,
    Conv1D        (in, out)                           x ─▶ lora_A ─▶ lora_B ─▶ scale ─┘          and one adapter matrix

With a column the adapter's second matrix (lora_B) is cut in the same way, with a row the first (lora_A).

A layer is cut only if a call runs torch's own forward, or one that is known to be equivalent: `own_forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from ...comm import Group
from ...settings.tensor_parallel_rules import FusedParts, TensorSplit
from ...user_objects.object_contents import hooks_on, is_hooked

_OF_TORCH = (nn.Linear, nn.Embedding, nn.Module, object)
_FORWARDS = {kind: kind.forward for kind in (nn.Linear, nn.Embedding)}
_SAME_FORWARD = {
    "transformers.pytorch_utils.Conv1D",
    "transformers.models.falcon.modeling_falcon.FalconLinear",
    "timm.layers.linear.Linear",
}
"""Library classes whose forward is equivalent to a linear layer's."""
_CALLED = frozenset(("forward", "__call__", "_call_impl", "_wrapped_call_impl", "_slow_forward", "weight", "bias")) | {
    *("__getattr__", "__getattribute__", "__torch_function__")
}
"""Attributes that a call of a layer looks up on it."""

Layer = TypeVar("Layer", bound=nn.Module)

REGISTERED: dict[type[nn.Module], Callable[[Any, Group], nn.Module]] = {}
"""User-registered layer classes, each with the function that makes a rank's sharded layer: `register_cut`."""


@dataclass(frozen=True)
class Cut:
    """Cut of one layer: its parent and name, the kind of split, fused blocks (`parts`), and whether it is in a pair."""

    parent: nn.Module | None
    name: str
    path: str
    layer: nn.Module
    split: TensorSplit
    parts: FusedParts = 1
    is_paired: bool = False
    is_told: bool = False
    """Whether a rule set `parts`."""
    scope: nn.Module | None = None
    """Module that contains the pair; None: the parent."""
    owners: tuple[nn.Module, ...] = ()
    """Modules that may store sizes of cut layers; the caller of the columns comes first."""
    divides: tuple[str, ...] = ()
    """Attributes of owners to divide by the number of ranks: "num_heads", "config.num_heads"."""
    family: str = ""
    """First column name of the family by which the pair was found; empty: by rules."""

    @property
    def pair(self) -> nn.Module | None:
        """Module that contains this layer and its partners."""
        return self.parent if self.scope is None else self.scope


@dataclass(frozen=True)
class NamedLayer:
    """A layer with its parent, its name there, and its full name."""

    parent: nn.Module
    name: str
    path: str
    layer: nn.Module


def join(path: str, name: str) -> str:
    """Join a path and a name by a dot; either may be empty."""
    return f"{path}.{name}" if path and name else path or name


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D: a linear layer whose weight is (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "weight")


def is_linear(module: nn.Module) -> bool:
    """Whether a module is an nn.Linear or a Conv1D."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_layer(module: nn.Module) -> bool:
    """Whether a module is a layer that rules apply to: linear, embedding or registered."""
    return is_linear(module) or isinstance(module, nn.Embedding) or type(module) in REGISTERED


def register_cut(kind: type[Layer], make: Callable[[Layer, Group], nn.Module]) -> None:
    """Register a layer class that rules can cut as "column"; to be called on all ranks before the engine is made.

    Args:
        kind: the class itself; subclasses do not count.
        make: (layer, ranks of tp) → the rank's sharded layer, a `ShardedModule`: it takes and returns full tensors,
            and has a slice of each of the layer's parameters along their first dimension, by the same names.
    """
    REGISTERED[kind] = make


def is_plain(layer: nn.Module, *, strict: bool = True) -> bool:
    """Whether a layer is a plain layer of its class, without hooks; unless `strict`, nn.Linear subclasses are too."""
    if is_hooked(layer) or has_hooked_weights(layer) or own_forward(layer):
        return False
    if type(layer) in (nn.Linear, nn.Embedding, *REGISTERED) or is_conv1d(layer):
        return True
    is_bare = not layer._modules and not layer._buffers and layer._parameters.keys() <= {"weight", "bias"}
    return not strict and isinstance(layer, nn.Linear) and is_bare and "weight" in layer._parameters


def own_forward(layer: nn.Module) -> str:
    """Return, in words, an override of a layer's forward or a subclass of its weights; empty: both are torch's."""
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
    """Whether the forward of nn.Linear or nn.Embedding has been monkey-patched."""
    return any(kind.forward is not forward for kind, forward in _FORWARDS.items())


def has_hooked_weights(layer: nn.Module) -> bool:
    """Whether hooks are registered on a layer's weights: they expect whole gradients, and a cut would lose them."""
    return any(map(hooks_on, layer.parameters(recurse=False)))


def sizes_of(layer: nn.Module) -> tuple[int, int]:
    """Return the numbers of input and output features of a linear layer."""
    weight = layer.get_parameter("weight")
    taken, given = weight.shape if is_conv1d(layer) else reversed(weight.shape)
    return int(taken), int(given)


def cut_width(cut: Cut) -> int:
    """Return the number of features or ids that a cut divides; 0 for a layer of another kind.

    For a registered layer it is the shortest first dimension of its parameters.
    """
    if is_linear(cut.layer):
        taken, given = sizes_of(cut.layer)
        return taken if cut.split is TensorSplit.ROW else given
    if type(cut.layer) in REGISTERED:
        return min((len(weight) for weight in cut.layer.parameters()), default=0)
    is_embedding = isinstance(cut.layer, nn.Embedding) and cut.split is not TensorSplit.ROW
    return int(cut.layer.num_embeddings) if is_embedding else 0  # type: ignore[arg-type]


def cut_weights(cut: Cut) -> Iterator[nn.Parameter]:
    """Yield the parameters of a layer that the cut shards: all, except a row's bias."""
    return (p for name, p in cut.layer.named_parameters() if cut.split is not TensorSplit.ROW or name != "bias")


def pairs_of(cuts: Sequence[Cut]) -> list[list[Cut]]:
    """Group cuts by pair: columns and rows of one module and family."""
    pairs: dict[tuple[int, bool, str], list[Cut]] = {}
    for cut in cuts:
        pairs.setdefault((id(cut.pair), cut.is_paired, cut.family), []).append(cut)
    return list(pairs.values())


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is a LoRA adapter of PEFT around a linear layer, without DoRA or embedding adapters."""
    base, first, second = (getattr(module, name, None) for name in ("base_layer", "lora_A", "lora_B"))
    if not (isinstance(base, nn.Module) and is_linear(base)):
        return False
    others = (getattr(module, name, None) for name in ("lora_magnitude_vector", "lora_embedding_A"))
    if any(other is not None and len(other) for other in others):
        return False
    return isinstance(first, nn.ModuleDict) and isinstance(second, nn.ModuleDict) and len(first) == len(second)


def layers_at(scope: nn.Module, path: str, name: str, split: TensorSplit) -> list[NamedLayer]:
    """Return the linear layer of a name, followed by the adapter matrices that are cut with it; empty if none."""
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
        return [NamedLayer(parent, last, here, child)] if is_linear(child) else []
    adapters = child.get_submodule("lora_A" if split is TensorSplit.ROW else "lora_B")
    of_adapters = [
        NamedLayer(adapters, key, f"{here}.lora_{'A' if split is TensorSplit.ROW else 'B'}.{key}", layer)
        for key, layer in adapters.named_children()
    ]
    return [NamedLayer(child, "base_layer", f"{here}.base_layer", child.get_submodule("base_layer")), *of_adapters]
