"""Followed through a run of a whole block: of which rank's tokens each number is made; slices are as ranks here.

    x ─▶ 1 1 2 2 ─▶ linear, norm ─▶ 1 1 2 2 ─▶ context.attend ─▶ 1 1 2 2      apart: the owner of a query stays it
                                               amax(1)        ─▶ 3            joined: it may not reach an output

What joins tokens and is not used for outputs, such as a loss that balances experts, does not matter. `context.whole`
and keys that `past.extend` gave are everybody's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ....autograd.kv_store import Past, Store
from ....comm import SelfGroup
from ...context.context import Context, SequenceShard
from ..feature_owners import FeatureOwners, Place, line
from ..marks.labels import DRAWN
from ..marks.owner_rules import MOVING, Joined, goes_by_data, joined, name_of, require_one

MANY = 127
"""The owner of numbers that are made of several ranks' tokens."""

_BOUNDS = {"low", "high", "from", "to", "n"}
"""Whole numbers that are bounds of draws, and no sizes."""
_READS = {"tolist", "numpy", "__array__", "__dlpack__"}
_SCATTERING = {"index_put", "index_add", "scatter_add", "index_copy", "scatter"}


class TokenOwners(FeatureOwners):
    """Within it, tokens are followed.

    Args:
        flipped: as `FeatureOwners` has it.
        drawn: what a run with all tokens has drawn; one with a part of them draws the same for each.
        mine: 0 where tokens are not there.

    Attributes:
        drawn: what was drawn, in this order.
        draws_otherwise: whether something was drawn that is not known to be the same in a part.
        reasons: where tokens of several ranks met, by the function and line, in this order.
        calls: what was done to tokens, by the function and its numbers, with the line where that first was.
        is_routed: whether Python was given places or counts of tokens, by which it may choose what is done to which.
    """

    def __init__(
        self, flipped: Set[Place] = frozenset(), drawn: Sequence[Tensor] = (), mine: Tensor | None = None
    ) -> None:
        super().__init__(trusts=False, flipped=flipped)
        self.drawn: list[Tensor] = []
        self.draws_otherwise = False
        self._to_draw, self._mine = list(drawn), mine
        self.reasons: dict[str, None] = {}
        self.calls: dict[str, str] = {}
        self.is_routed = False
        self._places: dict[int, torch.UntypedStorage] = {}
        """Memories of what `nonzero` gave, and of comparisons of this: places, which Python may be given."""

    def _see(self, name: str, tensor: Tensor) -> None:
        pass

    def _read(self, number: object, tensor: Tensor, *, is_owned: bool) -> object:
        if is_owned and isinstance(number, float):
            raise Joined(f"reads numbers of tokens on the host (item{line()})")
        is_place = tensor.untyped_storage()._cdata in self._places
        return self._decide(number) if is_owned and isinstance(number, bool) and not is_place else number

    def _follow(self, func: Any, args: Any, given: Mapping[str, Any], result: Any) -> None:
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves((args, given, result))):
            return  # there are shapes alone
        is_moving = func.is_view or func._schema.name.removeprefix("aten::") in MOVING
        if not self._are_places(func, args, result) and not is_moving:
            self.calls.setdefault(_word(func, args, given), line())
        try:
            if not self._looked_up(func, args, given, result):
                super()._follow(func, args, given, result)
        except (Joined, RuntimeError, IndexError) as why:
            self._meet(func, (args, given), result, str(why))

    def _note_draws(self, func: Any, args: Any, given: Mapping[str, Any], drawn: Any) -> None:
        name, tensors = name_of(func), [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, Tensor)]
        if "scaled_dot_product" in name and not any(isinstance(leaf, float) and leaf for leaf in args):
            return
        self.calls.setdefault(_word(func, args, given), line())
        if name == "native_dropout":
            drawn, kept = drawn[1], drawn[0]
        if (name not in DRAWN and name != "native_dropout") or len(tensors) > 1:
            self.draws_otherwise = True
            return
        if self._mine is None:
            self.drawn.append(drawn.clone())
            return
        same = _part_of(self._to_draw.pop(0), drawn.shape, self._mine) if self._to_draw else None
        if same is None:
            self.draws_otherwise = True
        elif name == "native_dropout":
            kept.copy_(tensors[0] * same / (1 - args[1]) if args[1] < 1 else kept)
            drawn.copy_(same)
        else:
            drawn.copy_(same)

    def _are_places(self, func: Any, args: Any, result: Any) -> bool:
        """Whether a function gives places, or compares these with what is the same for all tokens."""
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        self.is_routed |= goes_by_data(func, tensors)
        others = [tensor for tensor in tensors if tensor.untyped_storage()._cdata not in self._places]
        compares = torch.Tag.pointwise in func.tags and len(others) < len(tensors) and not func._schema.is_mutable
        if func._schema.name != "aten::nonzero" and not (compares and not any(self.of(t).any() for t in others)):
            return False
        for found in tree_leaves(result):
            self._places[found.untyped_storage()._cdata] = found.untyped_storage()
        return True

    def _meet(self, func: Any, given: Any, result: Any, why: str) -> None:
        """Note that a function makes numbers of all that it is given, be it of one owner or many."""
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        most = [int(of.max()) for of in map(self.of, tensors) if of.numel()]
        least = [int(of[of > 0].min()) for of in map(self.of, tensors) if bool((of > 0).any())]
        owner = max(most, default=0)
        if owner != min(least, default=owner):
            owner = MANY
            where = "" if " in line " in why else line()
            self.reasons[f"{why.replace('features', 'tokens')}{where}"] = None
        memories = {tensor.untyped_storage()._cdata for tensor in tensors}
        for found in tree_leaves(result):
            if isinstance(found, Tensor) and (
                func._schema.is_mutable or found.untyped_storage()._cdata not in memories
            ):
                self.note(found, torch.full(found.shape, owner, dtype=torch.int8, device=found.device))

    def _looked_up(self, func: Any, args: Sequence[Any], given: Mapping[str, Any], result: Any) -> bool:
        """Follow what is looked up by tokens, or where: as mixtures of experts do; return whether it is such."""
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        if name == "embedding":
            owners = joined(name, require_one(self.of(args[0]), [0, 1], keeps=False), self.of(args[1]))
            self.note(result, owners[..., None].expand(result.shape))
        elif name == "nonzero":  # where there are such: places, and no numbers
            owners = self.of(args[0])[args[0] != 0]
            self.note(result, owners.masked_fill(owners == MANY, 0)[:, None].expand(result.shape))
        elif name in ("index", "gather", "index_select") and any(self.of(i).any() for i in _indices(name, args)):
            moved: Tensor = func(self.of(args[0]), *args[1:], **given)
            self.note(result, joined(name, moved, self._of_places(name, args, result)))
        elif name == "sort" and args[0].dim() == 1 and not args[0].is_floating_point():  # by which experts tokens go to
            self._meet(func, args, result, "sort")
            self.note(result[1], self.of(args[0])[result[1]])
        elif name in _SCATTERING:
            self._scattered(name, func, args, given, result)
        else:
            return False
        return True

    def _of_places(self, name: str, args: Sequence[Any], result: Tensor) -> Tensor:
        """Return the owners of the indices by which each number of a result is looked up."""
        indices = _indices(name, args)
        owners = [self.of(index)[index] if index.dtype is torch.bool else self.of(index) for index in indices]
        of_places = joined(name, *owners)
        if name == "gather":
            return of_places
        chosen = [dim for dim, index in enumerate(args[1]) if index is not None] if name == "index" else [args[1]]
        is_apart = chosen != list(range(chosen[0], chosen[0] + len(chosen)))
        behind = result.dim() - of_places.dim() - (0 if is_apart else chosen[0] % result.dim())
        return of_places.reshape(*of_places.shape, *[1] * max(behind, 0))

    def _scattered(self, name: str, func: Any, args: Sequence[Any], given: Mapping[str, Any], result: Tensor) -> None:
        """Follow numbers to where they are put; by which owners a place is met is counted."""
        at = 2 if name == "index_put" else 3
        base, places = self.of(args[0]), self._of_targets(name, args)
        values = self.of(args[at]) if isinstance(args[at], Tensor) else torch.zeros_like(places)
        values = joined(name, values, places)
        found = base
        for owner in values.unique().tolist():
            hit = torch.zeros(base.shape, dtype=torch.int32, device=base.device)
            mine = (values == owner).int() if owner else torch.zeros_like(values, dtype=torch.int32)
            if name == "index_put":
                hit.index_put_(args[1], mine, accumulate=True)
            elif name in ("index_add", "index_copy"):
                hit.index_add_(args[1], args[2], mine)
            else:
                hit.scatter_add_(args[1], args[2], mine)
            found = joined(name, found, (hit > 0) * torch.tensor(owner, dtype=torch.int8))
        self.note(result, found)

    def _of_targets(self, name: str, args: Sequence[Any]) -> Tensor:
        if name == "index_put":
            indices = [index for index in args[1] if index is not None]
            owners = [self.of(index)[index] if index.dtype is torch.bool else self.of(index) for index in indices]
            places = joined(name, *owners)
            return places.reshape(*places.shape, *[1] * max(args[2].dim() - places.dim(), 0))
        places = self.of(args[2])
        if name in ("index_add", "index_copy"):
            places = places.reshape([-1 if dim == args[1] % args[3].dim() else 1 for dim in range(args[3].dim())])
        return places

    def require_apart(self, outputs: Mapping[str, Tensor]) -> None:
        """Raise `Joined` where what tokens of several ranks were made into reaches an output."""
        if any(bool((self.of(output) == MANY).any()) for output in outputs.values()):
            raise Joined(next(iter(self.reasons), "lets tokens of several ranks meet"))

    def note_common(self, given: Tensor, common: Tensor) -> Tensor:
        """Note that every rank has a tensor whole that was made of a given one."""
        if bool((self.of(given) == MANY).any()):
            self.note(common, torch.full(common.shape, MANY, dtype=torch.int8, device=common.device))
        elif self.of(common).any():
            self.note(common, torch.zeros(common.shape, dtype=torch.int8, device=common.device))
        return common


class FollowedContext(Context):
    """A context through which tokens are followed; nothing is sent.

    Args:
        owners: follow them.
        length: tokens of a whole sequence.
        shard: which of them are here.
        told: what a run with all tokens was given, of which this one gets its slice; that run itself notes it there.
    """

    def __init__(
        self, owners: TokenOwners, length: int, shard: SequenceShard, device: torch.device, told: list[Tensor]
    ) -> None:
        super().__init__(length, shard, SelfGroup(0, device), self._seen_by)
        self._owners, self._shard, self._told = owners, shard, told

    def _tell(self, make: Callable[[], Tensor]) -> Tensor:
        if self._shard.size == 1:
            self._told.append(made := make())
            return made.clone()
        if not self._told:
            raise Joined("asks its context for more where sequences are cut")
        return self._told.pop(0).clone()

    def _seen_by(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        with self._owners.unfollowed():
            of_query = require_one(self._owners.of(query), [query.dim() - 1], keeps=True)
            mixed = self._tell(lambda: _attention(query, key, value, causal))
            if self._shard.size > 1:
                mixed = self._shard.cut("tokens", mixed.transpose(1, 2)).transpose(1, 2).contiguous()
            many = any(bool((self._owners.of(tensor) == MANY).any()) for tensor in (key, value))
            self._owners.note(mixed, torch.full_like(of_query, MANY) if many else of_query)
        return mixed

    def whole(self, tensor: Tensor) -> Tensor:
        """Return all tokens of what has those here."""
        if tensor.dim() < 2 or tensor.shape[1] != len(self.positions):
            return tensor
        with self._owners.unfollowed():
            return self._owners.note_common(tensor, self._tell(tensor.clone))


class FollowedPast(Past):
    """A past through which tokens are followed."""

    def __init__(self, owners: TokenOwners, store: Store, number: int, slices: int, length: int) -> None:
        super().__init__(store, number, slices, length)
        self._owners = owners

    def extend(self, site: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return all keys and values so far, which are everybody's."""
        with self._owners.unfollowed():
            given = zip((keys, values), super().extend(site, keys, values), strict=True)
            first, second = (self._owners.note_common(one, whole) for one, whole in given)
            return first, second


def _attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    mixed: Tensor = F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=grouped)
    return mixed


def _part_of(drawn: Tensor, shape: torch.Size, mine: Tensor) -> Tensor | None:
    """Return what was drawn for the tokens that are there, in a tensor of this shape; None: it is no such."""
    dims = [dim for dim, size in enumerate(shape) if len(shape) == drawn.dim() and size != drawn.shape[dim]]
    if len(shape) != drawn.dim() or len(dims) > 1:
        return None
    for dim in dims:
        each, left = divmod(drawn.shape[dim], len(mine))
        if left:
            return None
        places = mine.repeat(each) if dim == 0 else mine.repeat_interleave(each)
        drawn = drawn.index_select(dim, places.nonzero()[:, 0])
    return drawn if drawn.shape == shape else None


def _word(func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> str:
    """Return a function with the numbers that it is called with, but for sizes and places."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(given)
    sized = {argument.name for argument in func._schema.arguments if "int" in str(argument.type).lower()} - _BOUNDS
    leaves = [leaf for name, value in named.items() if name not in sized for leaf in tree_leaves(value)]
    numbers = [f"{leaf:g}" for leaf in leaves if isinstance(leaf, (bool, int, float))]
    name = func._schema.name.removeprefix("aten::")
    return " ".join(["attention"] if "scaled_dot_product" in name else [name, *numbers])


class TokenReads(TorchFunctionMode):
    """Within it, `Joined` is raised where Python is given the numbers of tokens, but counts and places."""

    def __init__(self, owners: TokenOwners) -> None:
        super().__init__()
        self._owners = owners

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS and args[0].is_floating_point() and self._owners.of(args[0]).any():
            raise Joined(f"reads numbers of tokens on the host ({name}{line()})")
        return func(*args, **(kwargs or {}))


def _indices(name: str, args: Sequence[Any]) -> list[Tensor]:
    return [index for index in args[1] if index is not None] if name == "index" else [args[2]]
