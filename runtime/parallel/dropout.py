"""Dropout whose masks no mesh and no schedule changes: each bit is a hash of its place, not the next of a row.

    seed, step ─┐
    sample ─────┴▶ word of a sample ─┐
    site ────────────────────────────┴▶ word (B) ─┐
    position in the sequence ─────────────────────┴▶ word (B, R) ─┐
    feature ──────────────────────────────────────────────────────┴▶ word (B, R, F) ≥ p · 2³² ? it stays

A site is a dropout of the model: the number of its block, its name in there, and, where a forward calls it several
times, which call it is. Samples are counted over the whole batch, positions over the whole sequence. So a rank draws
just those bits of the masks that belong to what it holds, and draws it again when a forward is recomputed, without a
generator that would have to be kept, restored or shared between threads.

    masks = Masks(seed)
    key_dropouts(block, number, masks)                    every nn.Dropout of the block becomes a `KeyedDropout`
    with masks.of(Unit(step, samples=range(8, 12))):      samples 8 … 11 of this step's batch
        block(x)

Inputs are (samples, …, features), or have samples and tokens in one first dimension. Called outside of a unit, as by
a user between two steps, a keyed dropout is an ordinary one.

Words are 32 bits in int64, mixed by xor-shifts and products that stay below 2⁶³: the same bits on every device. The
two constants are those of the finaliser of least bias in Chris Wellons' "hash prospector" (2018).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quintsched.errors import MisfitError

from ..comm import Group
from .column_row import ColumnRowPair

WORD = 0xFFFF_FFFF
FACTORS = (0x21F0_AAAD, 0x735A_2D97)


@dataclass(frozen=True)
class Unit:
    """What masks are drawn for: samples of a step's batch, by their numbers in it, and a slice of their sequences.

    `positions` are those of the tokens here in the whole sequence, int64 (T,); None: they are all of it.
    """

    step: int
    samples: range
    positions: Tensor | None = None


class Masks:
    """What all dropouts of a rank draw by: the run's seed, and the unit whose forward runs now."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.unit: Unit | None = None
        self._calls: Counter[str] = Counter()
        self._samples: Tensor | None = None

    @contextmanager
    def of(self, unit: Unit) -> Iterator[None]:
        """Let dropouts draw for `unit`; a site's first call in here is its call 0."""
        self.unit = unit
        try:
            yield
        finally:
            self.unit = self._samples = None
            self._calls.clear()

    def keys(self, unit: Unit, site: str, device: torch.device) -> Tensor:
        """Return a word for each sample, (samples), for the call of `site` that comes next."""
        call = self._calls[site]
        self._calls[site] += 1
        if self._samples is None:
            numbers = torch.arange(unit.samples.start, unit.samples.stop, device=device)
            self._samples = _mix(numbers ^ _word(f"step {self.seed} {unit.step}"))
        return _mix(self._samples ^ _word(f"site {site} {call}"))


def key_dropouts(module: nn.Module, number: int, masks: Masks) -> None:
    """Have every nn.Dropout in block `number` draw by `masks`, in place and without showing.

    Names, repr, state dict, pickles, copies and hooks stay as they are. A dropout that was keyed before, for another
    engine, now belongs to this one.

    Raises:
        MisfitError: another block has the same dropout: its masks would depend on how the model is cut.
    """
    for name, layer in module.named_modules():
        if type(layer) is not nn.Dropout and not isinstance(layer, KeyedDropout):
            continue
        site = f"{number}.{name}"
        if isinstance(layer, KeyedDropout) and layer.masks is masks and layer.site != site and layer.p > 0:
            raise MisfitError(
                f"blocks {layer.site.partition('.')[0]} and {number} share the dropout {name or 'itself'!r}; "
                "give each block a dropout for itself"
            )
        layer.__class__ = KeyedDropout
        assert isinstance(layer, KeyedDropout)
        layer.masks, layer.site = masks, site


class KeyedDropout(nn.Dropout):
    """An nn.Dropout whose masks are keyed; it shows as what it was, and is copied and pickled as that.

    Attributes:
        masks, site: what it draws by, and its name in the model.
        pair: while a forward is between column and row, the last dimension is this rank's shard of the features.
        sequence: elsewhere the tokens here are this rank's slice of those of the unit: slice `index` of
            `size` equal ones, one behind the other.
    """

    masks: Masks
    site: str
    pair: ColumnRowPair | None = None
    sequence: Group | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Drop out of (samples, …, features), or (samples x tokens, features)."""
        if not self.training or self.p == 0:
            return input
        return _drop_aside(self, input)

    def drop(self, x: Tensor) -> Tensor:
        """Drop out of x by the masks of the unit."""
        unit = self.masks.unit
        if unit is None:
            self._require_no_backward()
            return super().forward(x)
        scale = 1 / (1 - self.p) if self.p < 1 else 0.0
        dropped = (x * self._mask(unit, x)).mul_(scale)  # for its backward this saves the mask, and only that
        return x.copy_(dropped) if self.inplace else dropped

    @torch.no_grad()
    def _mask(self, unit: Unit, x: Tensor) -> Tensor:
        """Return what stays, bool of the shape of x."""
        samples, device = len(unit.samples), x.device
        if not x.dim() or x.shape[0] % samples:
            raise MisfitError(
                f"the dropout {self.site!r} is given {tuple(x.shape)} for {samples} samples; the first dimension must "
                "be that of the samples, or samples and tokens in one"
            )
        features = x.shape[-1] if x.dim() > 1 else 1
        rows = x.numel() // max(samples * features, 1)
        inside = self.pair is not None and self.pair.is_between
        first = self.pair.group.index * features if self.pair is not None and inside else 0
        places = _places(rows, unit.positions, None if inside else self.sequence, device)
        columns = _mix(torch.arange(first, first + features, device=device))
        keys = self.masks.keys(unit, self.site, device)
        words = _mix(_mix(keys[:, None] ^ places)[..., None] ^ columns)
        return (words >= round(self.p * 2**32)).view(x.shape)

    def _require_no_backward(self) -> None:
        """Raise `MisfitError` if a backward calls this, where nobody knows for which unit it is."""
        if torch._C._current_graph_task_id() != -1:
            raise MisfitError(
                f"the dropout {self.site!r} is run again within a backward, as torch.utils.checkpoint does it, and "
                "would drop out something else; let the plan recompute (recompute=1)"
            )

    def _get_name(self) -> str:
        return "Dropout"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        added = KeyedDropout.__annotations__
        return object.__new__, (nn.Dropout,), {k: v for k, v in self.__dict__.items() if k not in added}


_drop_aside: Callable[[KeyedDropout, Tensor], Tensor] = torch.compiler.disable(KeyedDropout.drop)
"""Outside of compiled code, which would be compiled anew for every unit."""


def _places(rows: int, positions: Tensor | None, sliced: Group | None, device: torch.device) -> Tensor:
    """Return which of the rows of a whole sample the `rows` here are: (rows).

    There may be several rows to a token, one behind the other; rows that are none of tokens count from 0.
    """
    index, size = (sliced.index, sliced.size) if sliced is not None else (0, 1)
    tokens = 0 if positions is None else len(positions) // size
    if positions is None or not tokens or rows % tokens:
        return torch.arange(index * rows, (index + 1) * rows, device=device)
    here, each = positions[index * tokens : (index + 1) * tokens], rows // tokens
    return here if each == 1 else (here[:, None] * each + torch.arange(each, device=device)).flatten()


def _word(text: str) -> int:
    """Return a word that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


def _mix(words: Tensor) -> Tensor:
    """Mix each word, in place; the high bits of the result are the good ones."""
    first, second = FACTORS
    words.bitwise_xor_(words >> 16).mul_(first).bitwise_and_(WORD)
    return words.bitwise_xor_(words >> 15).mul_(second).bitwise_and_(WORD)
