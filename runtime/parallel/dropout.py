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
    unit = Unit(step, samples=range(8, 12))               samples 8 … 11 of this step's batch
    with masks.of(unit):
        y = block(x)
    with masks.again(unit):                               what the block runs again within its backward
        y.sum().backward()

Inputs are (samples, …, features), or have samples and tokens in one first dimension. Called outside of a unit, as by
a user between two steps, a keyed dropout is an ordinary one. All else that blocks draw is seen by `draws`.

Words are 32 bits in int64, mixed by xor-shifts and products that stay below 2⁶³: the same bits on every device. The
two constants are those of the finaliser of least bias in Chris Wellons' "hash prospector" (2018).

What a column layer, the row layer behind it and a dropout between them know of each other.

tokens ──▶ column ──▶ [ between: this rank's shard of the features ] ──▶ row ──▶ tokens
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from quintsched.errors import MisfitError

from ..comm import Group
from ..comm.autograd_collectives import outside_compiled


@dataclass
class ColumnRowPair:
    """The columns of one module and the rows behind them; in between each rank has its shard of the features.

    Column and row note whether a forward is between them, which a dropout there has to know: its mask is that of this
    rank's features. `columns` that take the same tokens let them enter once.
    """

    group: Group
    columns: int = 1
    is_between: bool = False
    is_gathered: bool = False
    """Whether sliced tokens were gathered where they entered the module, and the row has not sliced them yet."""
    _last: tuple[Tensor, Tensor] | None = None

    def enter(self, x: Tensor, how: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `x` as columns take it: `how(x)`, or what that was for the column before if it took the same `x`."""
        if self._last is None or self._last[0] is not x:
            self._last = (x, how(x))
        return self._last[1]

    def leave(self) -> None:
        """Note that a row has taken what the columns gave."""
        self.is_between = self.is_gathered = False
        self._last = None


WORD = 0xFFFF_FFFF
MOST_ALARMS = 3
"""Once there were so many nobody looks at generators any more, for an optimizer may draw too."""
BY_SAMPLES = -1
"""The dimension of heads that are with samples in the first."""

CutSite = tuple[str, bool]
"""A site, and whether it draws between columns and rows."""
FACTORS = (0x21F0_AAAD, 0x735A_2D97)


@dataclass(frozen=True)
class Unit:
    """What masks are drawn for: samples of a step's batch, by their numbers in it, and a slice of their sequences.

    `positions` are those of the tokens here in the whole sequence, int64 (T,); None: they are all of it.
    """

    step: int
    samples: range
    positions: Tensor | None = None


class _Drawing:
    """What is drawn for one unit: how often each site was called, and the words of its samples."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.calls: Counter[str] = Counter()
        self.samples: Tensor | None = None


class Masks:
    """What a rank draws by: the run's seed, the unit whose forward runs now, and the one whose backward does.

    Args:
        seed: of the run.
        device: of the blocks.
    """

    def __init__(self, seed: int, device: torch.device | None = None) -> None:
        self.seed, self.device = seed, device or torch.device("cpu")
        self._forward: _Drawing | None = None
        self._backward: _Drawing | None = None
        self._repeated: set[str] = set()
        self.alarms = 0
        """How often torch's generators moved in a step: something was drawn that is not keyed."""
        self.cut_dims: dict[CutSite, int | None] = {}
        """Sites where ranks of tp draw for unusual parts of tensors (see `words`), to their dimension; None: all."""

    @contextmanager
    def of(self, unit: Unit) -> Iterator[None]:
        """Draw for `unit` in its forward; a site's first call in here is its call 0."""
        self._forward = drawing = _Drawing(unit)
        try:
            yield
        finally:
            self._forward = None
            self._repeated.update(site for site, count in drawing.calls.items() if count > 1)

    @contextmanager
    def again(self, unit: Unit) -> Iterator[None]:
        """Draw for `unit` in its backward, which runs parts of the forward again (torch.utils.checkpoint)."""
        self._backward = _Drawing(unit)
        try:
            yield
        finally:
            self._backward = None

    @property
    def unit(self) -> Unit | None:
        """The unit for which something is drawn now; None: for none. A forward may run beside a backward."""
        drawing = self._drawing
        return None if drawing is None else drawing.unit

    @property
    def _drawing(self) -> _Drawing | None:
        return self._forward if torch._C._current_graph_task_id() == -1 else self._backward

    def keys(self, site: str, device: torch.device) -> Tensor:
        """Return a word for each sample of the unit, (samples), for the call of `site` that comes next."""
        return self.sample_keys(f"{site} {self._next_call(site)}", device)

    def sample_keys(self, name: str, device: torch.device) -> Tensor:
        """Return a word for each sample of the unit, (samples), for what is drawn under a name."""
        drawing = self._drawing
        assert drawing is not None
        if drawing.samples is None:
            unit = drawing.unit
            numbers = torch.arange(unit.samples.start, unit.samples.stop, device=device)
            drawing.samples = _mix(numbers ^ _word(f"step {self.seed} {unit.step}"))
        return _mix(drawing.samples ^ _word(f"site {name}"))

    def key(self, name: str) -> int:
        """Return a word for the whole unit, told from others by its first sample, for what is drawn under a name."""
        drawing = self._drawing
        assert drawing is not None
        return _word(f"unit {self.seed} {drawing.unit.step} {drawing.unit.samples.start} {name}")

    def words_of_part(
        self, site: str, draw: Callable[..., Tensor], shape: Sequence[int], cut: Group | None, sliced: Group | None
    ) -> Tensor:
        """Return words for a rank's part of a tensor; `draw(shape=…, cut=…, sliced=…)` gives them for usual parts."""
        group = cut or sliced
        is_usual = group is None or (site, cut is not None) not in self.cut_dims
        dim = None if is_usual else self.cut_dims[site, cut is not None]
        at = 0 if dim == BY_SAMPLES else dim
        whole = [size * group.size if place == at else size for place, size in enumerate(shape)] if group else shape
        drawn: Tensor = draw(shape=whole, cut=cut if is_usual else None, sliced=sliced if is_usual else None)
        if group is None or dim is None:
            return drawn
        if dim != BY_SAMPLES:
            part: Tensor = drawn.chunk(group.size, dim)[group.index]
            return part
        assert self.unit is not None
        parts = drawn.unflatten(0, (len(self.unit.samples), -1)).chunk(group.size, 1)
        return torch.flatten(parts[group.index], 0, 1)

    def _next_call(self, site: str) -> int:
        """Return the number of the call of a site that comes next.

        Raises `MisfitError` in a backward that runs a part of the forward again where nobody knows which call it is.
        """
        drawing = self._drawing
        assert drawing is not None
        if drawing is self._backward and site in self._repeated:
            raise MisfitError(
                f"{site!r} draws several times in a forward and is run again within a backward, as "
                "torch.utils.checkpoint does it, where nobody knows which time it is; give each call a dropout or a "
                "function for itself, or let the plan recompute (recompute=1)"
            )
        if drawing is self._backward:  # perhaps not for the first time: checkpoints may be within checkpoints
            return 0
        call = drawing.calls[site]
        drawing.calls[site] += 1
        return call


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
        was_between: whether it was there in its last forward; a part of this may run again in a backward.
        was_gathered: whether sliced tokens had been gathered by then.
        shards: the ranks of which each is always given its shard of the features.
        sequence: elsewhere the tokens here are this rank's slice of those of the unit: slice `index` of
            `size` equal ones, one behind the other.
    """

    masks: Masks
    site: str
    pair: ColumnRowPair | None = None
    was_between: bool = False
    was_gathered: bool = False
    shards: Group | None = None
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
            return super().forward(x)
        scale = 1 / (1 - self.p) if self.p < 1 else 0.0
        dropped = (x * self._mask(unit, x)).mul_(scale)  # for its backward this saves the mask, and only that
        return x.copy_(dropped) if self.inplace else dropped

    @torch.no_grad()
    def _mask(self, unit: Unit, x: Tensor) -> Tensor:
        """Return what stays, bool of the shape of x."""
        samples = len(unit.samples)
        if not x.dim() or x.shape[0] % samples:
            raise MisfitError(
                f"the dropout {self.site!r} is given {tuple(x.shape)} for {samples} samples; the first dimension must "
                "be that of the samples, or samples and tokens in one"
            )
        keys = self.masks.keys(self.site, x.device)
        if torch._C._current_graph_task_id() == -1:
            self.was_between = self.pair is not None and self.pair.is_between
            self.was_gathered = self.pair is not None and self.pair.is_gathered
        cut = self.pair.group if self.pair is not None and self.was_between else self.shards
        sliced = None if cut is not None or self.was_gathered else self.sequence
        draw = partial(words, keys, positions=unit.positions)
        return self.masks.words_of_part(f"{self.site}: ", draw, x.shape, cut, sliced) >= round(self.p * 2**32)

    def _get_name(self) -> str:
        return "Dropout"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        added = KeyedDropout.__annotations__
        return object.__new__, (nn.Dropout,), {k: v for k, v in self.__dict__.items() if k not in added}


_drop_aside: Callable[[KeyedDropout, Tensor], Tensor] = outside_compiled(KeyedDropout.drop)
"""Outside of compiled code, which would be compiled anew for every unit."""


def words(
    keys: Tensor, shape: Sequence[int], positions: Tensor | None, cut: Group | None, sliced: Group | None
) -> Tensor:
    """Return a word for every number of a tensor of this shape, whose first dimension is that of the keys, or of
    these and tokens in one.

    Args:
        keys: a word for each sample.
        shape: of the tensor.
        positions: those of the tokens in the whole sequence, if these are not all.
        cut: ranks over which it is cut: along heads, dimension 1, where it has four dimensions, else along the last.
        sliced: ranks over which tokens are sliced.
    """
    device, features = keys.device, shape[-1] if len(shape) > 1 else 1
    rows = prod(shape) // max(len(keys) * features, 1)
    first = cut.index * features if cut is not None and len(shape) < 4 else 0
    if cut is not None and len(shape) > 3:
        positions, sliced = None, cut
    columns = _mix(torch.arange(first, first + features, device=device))
    found = _mix(_mix(keys[:, None] ^ _places(rows, positions, sliced, device))[..., None] ^ columns)
    return found.view(tuple(shape))


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
