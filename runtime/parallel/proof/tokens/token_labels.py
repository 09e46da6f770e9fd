"""Labels of what each number is made of, where sequences are cut: tokens are labelled by their places in whole ones.

    whole    a b c d ─▶ [:, :1] * g ─▶ e b c d       a part's tokens have the labels that they have in the whole,
    part         c d ─▶             ─▶     f d       or a block goes by their places among those that are there

What whole numbers that code makes come to is known by their values, `context.positions` and masks made of them too: by
these tokens are chosen as they are in the whole, or are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..feature_owners import line
from ..marks.labels import Labels, start_of
from ..marks.owner_rules import LABEL, Joined, blended, identity, mixed, name_of, require_one
from ..marks.shadows import key_of, memory_of
from .lookups import looked_up


class TokenLabels(Labels):
    """Follows labels through the calls of one run, of whole sequences or a part of their tokens.

    Args:
        block: what is run.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block, trusts=False)
        self._plain: set[int] = set()
        """Memories of whole numbers that are known by their values."""
        self._lost: dict[int, torch.UntypedStorage] = {}
        """Memories of what is made of keys that slices have so far, of which later ones have more."""

    def _begin(self, tensor: Tensor) -> None:
        if key_of(tensor) in self._starts or tensor.is_complex():
            super()._begin(tensor)
            return
        memory = tensor.detach().as_strided((memory_of(tensor),), (1,), 0)
        labels = _by_values(memory)
        if tensor.is_floating_point():  # what the loop may have made: each place has its own
            labels = mixed(labels + placed(memory, line()))
        else:
            self._plain.add(key_of(tensor))
        self._shadows.add(tensor, labels)

    def hear(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any, *, is_owned: bool) -> None:
        """Note the labels of what a function gave or changed; of tokens, if it `is_owned`."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if func.is_view or not found:
            return
        if any(map(self.is_lost, given)):
            self.lose(*found)
            return
        if all(map(self._is_plain, given)) and not any(one.is_floating_point() or one.is_complex() for one in found):
            if func._schema.is_mutable:
                self._shadows.forget(given[0])
            return
        try:
            self._follow_one(func, args, kwargs, result, is_owned=is_owned)
        except (Joined, RuntimeError, IndexError):
            self._lose(func, (args, kwargs), found)

    def _follow_one(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any, *, is_owned: bool) -> None:
        name = name_of(func)
        if name == "arange":
            self.note(result, _by_values(result))
        elif name == "nonzero" and is_owned:  # what is chosen by them is moved by their values
            self.note(result, torch.zeros_like(result, dtype=LABEL))
        elif name == "nonzero":
            self.note(result, self.of(args[0])[args[0] != 0][:, None])
        elif name == "sort" and args[0].dim() == 1:
            for one in result:
                self.note(one, self.of(args[0])[result[1]])
        elif (labels := looked_up(func, args, kwargs, result, self.of, self._of_index)) is not None:
            self.note(result, labels)
        else:
            self.follow(func, args, kwargs, result, of_features=True)

    def lose(self, *made: Tensor) -> None:
        """Note that numbers have no labels from here on."""
        self._lost |= {key_of(tensor): tensor.untyped_storage() for tensor in made}

    def is_lost(self, tensor: Tensor) -> bool:
        """Whether numbers have no labels."""
        return key_of(tensor) in self._lost

    def note_attention(self, query: Tensor, result: Tensor) -> None:
        """Note that each query looks at what it may, by rules that labels do not follow."""
        if not self.is_lost(query):
            self._lost.pop(key_of(result), None)
            self.note(result, require_one(self.of(query), [query.dim() - 1], keeps=True).expand(result.shape))

    def _is_plain(self, tensor: Tensor) -> bool:
        key, is_whole = key_of(tensor), not (tensor.is_floating_point() or tensor.is_complex())
        return is_whole and (key in self._plain or not (key in self._shadows or key in self._starts))

    def _of_index(self, tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor, dtype=LABEL) if self._is_plain(tensor) else self.of(tensor)

    def _lose(self, func: Any, given: Any, results: Sequence[Tensor]) -> None:
        made_of = [identity(self.of(leaf)) for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        for number, result in enumerate(results if made_of else ()):
            self.note(result, blended(f"{name_of(func)} {number}", placed(result, ""), *made_of))


def placed(tensor: Tensor, what: str) -> Tensor:
    """Return labels of a tensor's numbers by what it is and their places."""
    places = torch.arange(tensor.numel(), dtype=LABEL, device=tensor.device)
    return mixed(places + start_of(what)).view(tensor.shape)


def _by_values(tensor: Tensor) -> Tensor:
    """Return labels that equal numbers have in common."""
    bits = tensor.detach().double().view(torch.int64) if tensor.is_floating_point() else tensor.long()
    return mixed((bits ^ (bits >> 32)).to(LABEL) + 1)
