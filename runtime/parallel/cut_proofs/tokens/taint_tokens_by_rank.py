"""Taint tracking of tokens in a run of a whole block: the owner (rank, or slice) of each element.

    x ─▶ 1 1 2 2 ─▶ linear, norm ─▶ 1 1 2 2 ─▶ context.attend ─▶ 1 1 2 2      apart: the query's owner
                                               amax(1)        ─▶ `MANY`       joined: must not reach an output

Elements that join tokens, but do not reach an output, such as a balancing loss, are allowed. Results of `context.whole`
and keys from `past.extend` are common to all ranks: they have no owner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ....autograd.slice_kv_cache import Past, Store
from ....comm import SelfGroup
from ...context.context_parallel import Context, SequenceShard
from ..marks.operator_rules_for_taint import MOVING, Joined, JoinedAt, goes_by_data, name_of, require_one
from ..taint_features_by_rank import CodePlace, FeatureOwners, line
from .token_labels import TokenLabels, looked_up, placed

MANY = 127
"""Owner of elements computed from tokens of several ranks."""

Marked = tuple[Tensor, Tensor | None]
"""A tensor and its labels; None: it has none."""

_BOUNDS = {"low", "high", "from", "to", "n"}
"""Integer arguments that are bounds of draws, not sizes."""
_READS = {"tolist", "numpy", "__array__", "__dlpack__"}


class TokenOwners(FeatureOwners):
    """Dispatch mode that tracks the owners and labels of tokens.

    Args:
        flipped: see `FeatureOwners`.
        to_draw: shapes drawn by the run with all tokens; a run with a part of them must draw the same.

    Attributes:
        drawn: shapes of random draws, in order, except keyed dropout masks.
        reasons: operators and lines where tokens of several ranks met, in order.
        calls: operators on tokens with their numeric arguments, to the line of the first call.
        is_routed: whether Python read positions or counts of tokens, by which it may route them.
        seen: tensors at points of comparison (outputs, attention, gathers), with labels, by name.
    """

    def __init__(
        self, flipped: Set[CodePlace] = frozenset(), to_draw: Sequence[Sequence[torch.Size]] | None = None
    ) -> None:
        super().__init__(trusts=False, flipped=flipped)
        self.drawn: list[Sequence[torch.Size]] = []
        self.seen: dict[str, Marked] = {}
        self.labels: TokenLabels
        self._to_draw = to_draw
        self.reasons: dict[str, None] = {}
        self.calls: dict[str, str] = {}
        self.is_routed = False
        self._places: dict[int, torch.UntypedStorage] = {}
        """Storages of results of `nonzero` and comparisons of these: positions, which Python may read."""

    def begin_run(self, labels: TokenLabels) -> None:
        """Start another run, with these labels."""
        self.labels = labels
        self.drawn.clear()
        self.seen.clear()

    def _hear(self, func: Any, args: Any, given: Mapping[str, Any], result: Any, *, is_owned: bool) -> None:
        super()._hear(func, args, given, result, is_owned=is_owned)
        if not _has_meta((args, given, result)):
            self.labels.hear(func, args, given, result, is_owned=is_owned)

    def show(self, what: str, tensor: Tensor) -> None:
        """Record a tensor for comparison between the run on whole sequences and runs on parts."""
        self.seen[f"{what} {len(self.seen)}"] = self.marked(tensor)

    def marked(self, tensor: Tensor) -> Marked:
        """Return a copy of a tensor with its labels."""
        return tensor.detach().clone(), None if self.labels.is_lost(tensor) else self.labels.labels_of(tensor)

    def _see(self, name: str, tensor: Tensor) -> None:
        pass

    def _read(self, number: object, tensor: Tensor, *, is_owned: bool) -> object:
        if is_owned and isinstance(number, float):
            raise Joined(f"reads numbers of tokens on the host (item{line()})")
        is_place = tensor.untyped_storage()._cdata in self._places
        return self._decide(number) if is_owned and isinstance(number, bool) and not is_place else number

    def _follow(self, func: Any, args: Any, given: Mapping[str, Any], result: Any) -> None:
        if _has_meta((args, given, result)):
            return  # meta tensors: shapes only
        is_moving = func.is_view or func._schema.name.removeprefix("aten::") in MOVING
        if not self._are_places(func, args, result) and not is_moving:
            self.calls.setdefault(_word(func, args, given), line())
        try:
            if not self._looked_up(func, args, given, result):
                super()._follow(func, args, given, result)
        except (Joined, RuntimeError, IndexError) as why:
            self._meet(func, (args, given), result, str(why), says_line=isinstance(why, JoinedAt))

    def _note_draws(self, func: Any, args: Any, given: Mapping[str, Any], drawn: Any) -> None:
        name, number = name_of(func), len(self.drawn)
        if "scaled_dot_product" in name and not any(isinstance(leaf, float) and leaf for leaf in args):
            return
        self.calls.setdefault(_word(func, args, given), line())
        tensors = [leaf for leaf in tree_leaves(drawn) if isinstance(leaf, Tensor)]
        self.drawn.append([tensor.shape for tensor in tensors])
        if self._to_draw is not None and self.drawn[number:] != [*self._to_draw[number : number + 1]]:
            raise Joined(
                f"draws by {name} for its part of the tokens{line()}: draw a number for each sample, or use a dropout"
            )
        for tensor in tensors:
            self.labels.set_labels(tensor, placed(tensor, f"draw {number}"))

    def _are_places(self, func: Any, args: Any, result: Any) -> bool:
        """Whether an operator returns positions of tokens, or compares these with untracked numbers."""
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        self.is_routed |= goes_by_data(func, tensors)
        others = [tensor for tensor in tensors if tensor.untyped_storage()._cdata not in self._places]
        compares = torch.Tag.pointwise in func.tags and len(others) < len(tensors) and not func._schema.is_mutable
        if func._schema.name != "aten::nonzero" and not (compares and not any(self.owners_of(t).any() for t in others)):
            return False
        for found in tree_leaves(result):
            self._places[found.untyped_storage()._cdata] = found.untyped_storage()
        return True

    def _meet(self, func: Any, given: Any, result: Any, why: str, *, says_line: bool = False) -> None:
        """Set the owner of all of an operator's results to that of its arguments: one, or `MANY`."""
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        most = [int(of.max()) for of in map(self.owners_of, tensors) if of.numel()]
        least = [int(of[of > 0].min()) for of in map(self.owners_of, tensors) if bool((of > 0).any())]
        owner = max(most, default=0)
        if owner != min(least, default=owner):
            owner = MANY
            self.reasons[f"{why.replace('features', 'tokens')}{'' if says_line else line()}"] = None
        memories = {tensor.untyped_storage()._cdata for tensor in tensors}
        for found in tree_leaves(result):
            if isinstance(found, Tensor) and (
                func._schema.is_mutable or found.untyped_storage()._cdata not in memories
            ):
                self.set_owners(found, torch.full(found.shape, owner, dtype=torch.int8, device=found.device))

    def _looked_up(self, func: Any, args: Sequence[Any], given: Mapping[str, Any], result: Any) -> bool:
        """Propagate owners through lookups and routing by tokens, as in mixtures of experts; False for other calls."""
        name = name_of(func)
        if name == "nonzero":  # positions, not numbers of tokens
            owners = self.owners_of(args[0])[args[0] != 0]
            self.set_owners(result, owners.masked_fill(owners == MANY, 0)[:, None].expand(result.shape))
        elif name == "sort" and args[0].dim() == 1 and not args[0].is_floating_point():  # routing to experts
            self._meet(func, args, result, "sort")
            self.set_owners(result[1], self.owners_of(args[0])[result[1]])
        elif (found := looked_up(func, args, given, result, self.owners_of, self.owners_of)) is not None:
            self.set_owners(result, found)
        else:
            return False
        return True

    def require_apart(self, outputs: Mapping[str, Tensor]) -> None:
        """Raise `Joined` if an output has elements computed from tokens of several ranks."""
        if any(bool((self.owners_of(output) == MANY).any()) for output in outputs.values()):
            raise Joined(next(iter(self.reasons), "lets tokens of several ranks meet"))

    def note_common(self, given: Tensor, common: Tensor, labels: Tensor | None = None) -> Tensor:
        """Mark a tensor that all ranks have (gathered from `given`) as without owner, with these labels; return it."""
        if labels is not None:
            self.labels.set_labels(common, labels)
        if bool((self.owners_of(given) == MANY).any()):
            self.set_owners(common, torch.full(common.shape, MANY, dtype=torch.int8, device=common.device))
        elif self.owners_of(common).any():
            self.set_owners(common, torch.zeros(common.shape, dtype=torch.int8, device=common.device))
        return common


class FollowedContext(Context):
    """A `Context` that tracks tokens, without communication.

    Args:
        owners: the mode that tracks them.
        length: tokens of a whole sequence.
        shard: this part of the sequence.
        told: results for the run on whole sequences, which appends them; runs on parts take their slices from it.
    """

    def __init__(
        self, owners: TokenOwners, length: int, shard: SequenceShard, device: torch.device, told: list[Marked]
    ) -> None:
        super().__init__(length, shard, SelfGroup(0, device), self._seen_by)
        self._owners, self._shard, self._told = owners, shard, told

    def _tell(self, make: Callable[[], Marked]) -> Marked:
        if self._shard.size == 1:
            self._told.append(make())
            made, labels = self._told[-1]
            return made.clone(), labels
        if not self._told:
            raise Joined("asks its context for more where sequences are cut")
        made, labels = self._told.pop(0)
        return made.clone(), labels

    def _seen_by(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        with self._owners.unfollowed():
            for tensor in (query, key, value):
                self._owners.show("attention", tensor)
            of_query = require_one(self._owners.owners_of(query), [query.dim() - 1], keeps=True)
            mixed, _ = self._tell(lambda: (_attention(query, key, value, causal), None))
            if self._shard.size > 1:
                mixed = self._shard.cut("tokens", mixed.transpose(1, 2)).transpose(1, 2).contiguous()
            many = any(bool((self._owners.owners_of(tensor) == MANY).any()) for tensor in (key, value))
            self._owners.set_owners(mixed, torch.full_like(of_query, MANY) if many else of_query)
            self._owners.labels.note_attention(query, mixed)
        return mixed

    def whole(self, tensor: Tensor) -> Tensor:
        """Return the whole sequence of a tensor of local tokens; other tensors unchanged."""
        if tensor.dim() < 2 or tensor.shape[1] != len(self.positions):
            return tensor
        with self._owners.unfollowed():
            self._owners.show("whole", tensor)
            return self._owners.note_common(tensor, *self._tell(partial(self._owners.marked, tensor)))


class FollowedPast(Past):
    """A `Past` (KV cache) that tracks tokens."""

    def __init__(self, owners: TokenOwners, store: Store, number: int, slices: int, length: int) -> None:
        super().__init__(store, number, slices, length)
        self._owners = owners

    def extend(self, site: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return all keys and values so far, which have no owner."""
        with self._owners.unfollowed():
            self._owners.show("keys", keys)
            self._owners.show("values", values)
            given = zip((keys, values), super().extend(site, keys, values), strict=True)
            first, second = (self._owners.note_common(one, whole) for one, whole in given)
            self._owners.labels.lose(first, second)
            return first, second


def _attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    mixed: Tensor = F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=grouped)
    return mixed


def _has_meta(leaves: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(leaves))


def _word(func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> str:
    """Return an operator's name with its numeric arguments, except sizes and positions."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(given)
    sized = {argument.name for argument in func._schema.arguments if "int" in str(argument.type).lower()} - _BOUNDS
    leaves = [leaf for name, value in named.items() if name not in sized for leaf in tree_leaves(value)]
    numbers = [f"{leaf:g}" for leaf in leaves if isinstance(leaf, (bool, int, float))]
    name = func._schema.name.removeprefix("aten::")
    return " ".join(["attention"] if "scaled_dot_product" in name else [name, *numbers])


class TokenReads(TorchFunctionMode):
    """Torch function mode that raises `Joined` if Python reads floating-point numbers of tokens."""

    def __init__(self, owners: TokenOwners) -> None:
        super().__init__()
        self._owners = owners

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS and args[0].is_floating_point() and self._owners.owners_of(args[0]).any():
            raise Joined(f"reads numbers of tokens on the host ({name}{line()})")
        result = func(*args, **(kwargs or {}))
        if name == "scaled_dot_product_attention" and self._owners.labels.is_lost(result):
            with self._owners.unfollowed():
                self._owners.labels.note_attention(args[0] if args else kwargs["query"], result)
        return result
