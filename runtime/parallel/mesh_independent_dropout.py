"""Counter-based dropout, independent of mesh and schedule: each mask bit is a hash of its global position.

    seed, step ─┐
    sample ─────┴▶ word of a sample ─┐
    site ────────────────────────────┴▶ word (B) ─┐
    position in the sequence ─────────────────────┴▶ word (B, R) ─┐
    feature ──────────────────────────────────────────────────────┴▶ word (B, R, F) ≥ p · 2³² ? it is kept

A site is a dropout of the model: the number of its block, its name within the block, and the number of the call if a
forward calls it several times. Samples are counted over the whole batch, positions over the whole sequence. So a rank
computes exactly the mask bits of the elements that it holds, and the same bits when a forward is recomputed. No
generator state has to be saved, restored or shared between threads.

    masks = Masks(seed)
    key_dropouts(block, number, masks)                    every nn.Dropout of the block becomes a `KeyedDropout`
    unit = MaskUnit(step, samples=range(8, 12))           samples 8 … 11 of this step's batch
    with masks.draw_for(unit):
        y = block(x)
    with masks.again(unit):                               parts of the forward that are rerun in the backward
        y.sum().backward()

Inputs are (samples, …, features), or have samples and tokens in one first dimension. Outside of a unit, as in user
code between two steps, a keyed dropout is an ordinary one. `seeded_block_draws` handles all other random draws of
blocks.

Words are 32-bit hashes in int64, mixed by xor-shifts and products below 2⁶³: bitwise equal on every device. The
two constants are those of the finaliser of least bias in Chris Wellons' "hash prospector" (2018).

State shared by a column layer, the row layer behind it and a dropout between them (`ColumnRowPair`):

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

import torch
from torch import Tensor, nn

from quintsched.errors import MisfitError, counted

from ..autograd.engine_owned_layers import TakenOver
from ..comm import Group
from ..comm.autograd_collectives import outside_compiled
from ..comm.host_collectives import reduce_numbers, share_texts


@dataclass
class ColumnRowPair:
    """Column layers of one module and the row layer behind them; in between each rank has its shard of the features.

    Column and row layers record whether a forward is between them. A dropout there then draws the mask of this rank's
    features. If several `columns` take the same input, its communication is done once.
    """

    group: Group
    columns: int = 1
    is_between: bool = False
    is_gathered: bool = False
    """Whether sliced tokens have been all-gathered at the columns, and not yet scattered again by the row."""
    _last: tuple[Tensor, Tensor] | None = None

    def enter(self, x: Tensor, how: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the columns' input `how(x)`, cached for columns that take the same `x`."""
        if self._last is None or self._last[0] is not x:
            self._last = (x, how(x))
        return self._last[1]

    def leave(self) -> None:
        """Record that the forward has left the pair: the row layer has run."""
        self.is_between = self.is_gathered = False
        self._last = None


WORD = 0xFFFF_FFFF
MOST_ALARMS = 3
"""Number of alarms after which generators are no longer checked, since an optimizer may draw too."""
BY_SAMPLES = -1
"""Stands for a dimension of heads that is fused with the samples in dimension 0."""

CutSite = tuple[str, bool]
"""A site, and whether it draws between column and row layers."""
FACTORS = (0x21F0_AAAD, 0x735A_2D97)


@dataclass(frozen=True)
class MaskUnit:
    """Unit that masks are drawn for: samples of a step's batch, by their numbers in it, and a slice of their sequences.

    `positions` are those of the local tokens in the whole sequence, int64 (T,); None: the whole sequence is local.
    `run` counts the runs of its program: evaluations between the same two training steps have one number of a step.
    """

    step: int
    samples: range
    positions: Tensor | None = None
    run: int = 0


class _UnitDraws:
    """Drawing state of one unit: number of calls of each site, and hash words of its samples."""

    def __init__(self, unit: MaskUnit) -> None:
        self.unit = unit
        self.calls: Counter[str] = Counter()
        self.samples: Tensor | None = None


class Masks:
    """A rank's source of masks: the run's seed, and the units whose forward and backward run now.

    Args:
        seed: of the run.
        device: of the blocks.
    """

    def __init__(self, seed: int, device: torch.device | None = None) -> None:
        self.seed, self.device = seed, device or torch.device("cpu")
        self._forward: _UnitDraws | None = None
        self._backward: _UnitDraws | None = None
        self._repeated: set[str] = set()
        self.alarms = 0
        """Number of times that torch's generators advanced in a step, by draws that are not keyed."""
        self.have_drawn, self.counts, self.parts = False, False, list[tuple[int, int]]()
        """Whether anything was drawn; whether replicas count samples; its own and all, by batch of a step."""
        self.changes = 0
        """Number of times that it was found anew which blocks draw."""
        self.cut_dims: dict[CutSite, int | None] = {}
        """Sites whose tensor is cut along another dimension than in `words`, to that dimension; None: it is whole."""

    def count_late(self, world: Group) -> None:
        """Have replicas count samples from now on if blocks of some rank have begun to draw (collective).

        Raises `MisfitError` if replicas have unlike numbers of samples in the present step.
        """
        was, self.counts = self.counts, self.counts or any(reduce_numbers(world, [self.have_drawn]))
        if self.counts != was and len(set(share_texts(world, str(self.parts)))) > 1:
            raise MisfitError(
                "blocks draw random numbers (dropout, noise) from this step on, and none in the first; draws go by "
                "the places of samples in the batch, which replicas with unlike numbers of samples did not count: give "
                "all replicas as many samples in the step in which draws begin, or draw from the first step on"
            )

    @contextmanager
    def draw_for(self, unit: MaskUnit) -> Iterator[None]:
        """Draw for `unit` in its forward; a site's first call in here is its call 0."""
        self._forward = drawing = _UnitDraws(unit)
        try:
            yield
        finally:
            self._forward = None
            self._repeated.update(site for site, count in drawing.calls.items() if count > 1)

    @contextmanager
    def again(self, unit: MaskUnit) -> Iterator[None]:
        """Draw for `unit` in its backward, which runs parts of the forward again (torch.utils.checkpoint)."""
        self._backward = _UnitDraws(unit)
        try:
            yield
        finally:
            self._backward = None

    @property
    def unit(self) -> MaskUnit | None:
        """Unit that the calling thread draws for, or None. A forward may run beside a backward of another unit."""
        drawing = self._drawing
        return None if drawing is None else drawing.unit

    @property
    def _drawing(self) -> _UnitDraws | None:
        return self._forward if torch._C._current_graph_task_id() == -1 else self._backward

    def keys(self, site: str, device: torch.device) -> Tensor:
        """Return a hash word for each sample of the unit, (samples), for the next call of `site`."""
        return self.sample_keys(f"{site} {self._next_call(site)}", device)

    def sample_keys(self, name: str, device: torch.device) -> Tensor:
        """Return a hash word for each sample of the unit, (samples), for draws under a name."""
        drawing, self.have_drawn = self._drawing, True
        assert drawing is not None
        if drawing.samples is None:
            unit = drawing.unit
            numbers = torch.arange(unit.samples.start, unit.samples.stop, device=device)
            drawing.samples = _mix(numbers ^ _word(f"step {self.seed} {unit.step}"))
        return _mix(drawing.samples ^ _word(f"site {name}"))

    def key(self, name: str) -> int:
        """Return a hash word for the whole unit, identified by its first sample, for draws under a name."""
        drawing = self._drawing
        assert drawing is not None
        return _word(f"unit {self.seed} {drawing.unit.step} {drawing.unit.samples.start} {name}")

    def words_of_part(
        self, site: str, draw: Callable[..., Tensor], shape: Sequence[int], cut: Group | None, sliced: Group | None
    ) -> Tensor:
        """Return words for a rank's part of a tensor, by `draw(shape=…, cut=…, sliced=…)`.

        For a site in `cut_dims` it draws the words of the whole tensor, and takes this rank's chunk of them.
        """
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
        """Return the number of the next call of a site.

        Raises `MisfitError` if a part of the forward is rerun in a backward, and the number is ambiguous there.
        """
        drawing = self._drawing
        assert drawing is not None
        if drawing is self._backward and site in self._repeated:
            raise MisfitError(
                f"{site!r} draws several times in a forward and is run again within a backward, as "
                "torch.utils.checkpoint does it, where nobody knows which time it is; give each call a dropout or a "
                "function for itself, or let the plan recompute (recompute=1)"
            )
        if drawing is self._backward:  # not counted: nested checkpoints may rerun it several times
            return 0
        call = drawing.calls[site]
        drawing.calls[site] += 1
        return call


def key_dropouts(module: nn.Module, number: int, masks: Masks) -> None:
    """Replace in place the class of every nn.Dropout in block `number` by `KeyedDropout`, with masks from `masks`.

    Names, repr, state dict, pickles, copies and hooks stay as they are. A dropout that was keyed for another engine
    is taken over.

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


class KeyedDropout(TakenOver, nn.Dropout):
    """An nn.Dropout with keyed masks.

    Attributes:
        masks, site: source of its masks, and its name in the model.
        pair: while a forward is between column and row layer, its input's last dimension is this rank's shard.
        was_between: whether it was there in its last forward, for a rerun in the backward.
        was_gathered: whether sliced tokens had been gathered by then.
        shards: the group over which its input's features are always sharded.
        sequence: the group over which tokens are sliced elsewhere: this rank has slice `index` of `size` equal
            contiguous slices.
    """

    masks: Masks
    site: str
    pair: ColumnRowPair | None = None
    was_between: bool = False
    was_gathered: bool = False
    shards: Group | None = None
    sequence: Group | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Apply dropout to (samples, …, features), or (samples x tokens, features)."""
        if not self.training or self.p == 0:
            return input
        return _drop_aside(self, input)

    def drop(self, x: Tensor) -> Tensor:
        """Apply dropout to x with the mask of the current unit; outside of a unit with samples, as nn.Dropout."""
        unit = self.masks.unit
        if unit is None or not unit.samples:
            return super().forward(x)
        scale = 1 / (1 - self.p) if self.p < 1 else 0.0
        dropped = (x * self._mask(unit, x)).mul_(scale)  # saves only the mask for the backward
        return x.copy_(dropped) if self.inplace else dropped

    @torch.no_grad()
    def _mask(self, unit: MaskUnit, x: Tensor) -> Tensor:
        """Return the mask, bool of the shape of x: True where an element is kept."""
        samples = len(unit.samples)
        if not x.dim() or x.shape[0] % samples:
            raise MisfitError(
                f"the dropout {self.site!r} is given {tuple(x.shape)} for {counted(samples, 'sample')}; the first "
                "dimension must be that of the samples, or samples and tokens in one"
            )
        keys = self.masks.keys(self.site, x.device)
        if torch._C._current_graph_task_id() == -1:
            self.was_between = self.pair is not None and self.pair.is_between
            self.was_gathered = self.pair is not None and self.pair.is_gathered
        cut = self.pair.group if self.pair is not None and self.was_between else self.shards
        sliced = None if cut is not None or self.was_gathered else self.sequence
        draw = partial(words, keys, positions=unit.positions)
        return self.masks.words_of_part(f"{self.site}: ", draw, x.shape, cut, sliced) >= round(self.p * 2**32)


_drop_aside: Callable[[KeyedDropout, Tensor], Tensor] = outside_compiled(KeyedDropout.drop)
"""`KeyedDropout.drop` outside of compiled code, which would otherwise be recompiled for every unit."""


def words(
    keys: Tensor, shape: Sequence[int], positions: Tensor | None, cut: Group | None, sliced: Group | None
) -> Tensor:
    """Return a hash word for every element of a tensor, int64 of `shape`.

    Args:
        keys: a word for each sample, (samples).
        shape: of the tensor; its first dimension is samples, or samples and tokens in one.
        positions: those of the tokens in the whole sequence; None: all of it.
        cut: group over which it is sharded: along dimension 1 (heads) if it has four dimensions, else along the last.
        sliced: group over which tokens are sliced.
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
    """Return the indices of the `rows` local rows within a whole sample: (rows).

    A token may have several consecutive rows. Rows that do not belong to tokens are counted from 0.
    """
    index, size = (sliced.index, sliced.size) if sliced is not None else (0, 1)
    tokens = 0 if positions is None else len(positions) // size
    if positions is None or not tokens or rows % tokens:
        return torch.arange(index * rows, (index + 1) * rows, device=device)
    here, each = positions[index * tokens : (index + 1) * tokens], rows // tokens
    return here if each == 1 else (here[:, None] * each + torch.arange(each, device=device)).flatten()


def _word(text: str) -> int:
    """Return a 32-bit hash of a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


def _mix(words: Tensor) -> Tensor:
    """Mix each word in place (hash finaliser); the high bits of the result are of better quality."""
    first, second = FACTORS
    words.bitwise_xor_(words >> 16).mul_(first).bitwise_and_(WORD)
    return words.bitwise_xor_(words >> 15).mul_(second).bitwise_and_(WORD)
