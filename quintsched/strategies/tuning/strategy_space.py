"""Space of strategies of a search: counted exactly, indexed by numbers, expanded to columns.

    mesh    pp tp cp ep dp                       ┐ a frame: the way in which the work is cut
    frame   … schedule chunks microbatch         ┘
    leaf    … dtype zero zero_every overlap sequence_parallel recompute

A box is a mesh with all its frames, or a frame with all its leaves. Frames are sorted by their columns, and the leaves
of a frame by the order of their choices: (frame, leaf) is the place of a strategy, by which ties are broken. A leaf
with recomputation "per-stage" stands for one strategy per tuple of numbers, one number for each pipeline rank (every
stage of a rank recomputes the same number of layers), without those that are already named "none" or "full"; for none
under bidirectional schedules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quintsched.errors import UsageError
from quintsched.ir.instruction_columns import Ints
from quintsched.ir.mesh import MAX_RANKS
from quintsched.schedules.kit.registry import find_schedule
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.descriptions.strategy_validity import check, has_light_ends, predictable, stage_layers
from quintsched.strategies.prediction.layers_of_ranks import V_SHAPED
from quintsched.strategies.tuning.axis_choices import ALIKE, UNLIMITED, Choices, allows

Mask = NDArray[np.bool_]
Columns = dict[str, Ints]
MESH = ("pp", "tp", "cp", "ep", "dp")
FRAME = (*MESH, "schedule", "chunks", "microbatch")
SWITCHES = ("dtype", "zero", "zero_every", "overlap", "sequence_parallel", "recompute")
FIXED = ("pp_duplex", "ep_overlap", "tp_overlap", "fused_accumulation", "fused_loss")
"""Switches that all strategies of a search share."""
NONE, SELECTIVE, FULL, PER_STAGE = 0, -1, -2, -3
"""Codes of the column `recompute` that are no numbers of layers."""
WORDS = {"none": NONE, "selective": SELECTIVE, "full": FULL, "per-stage": PER_STAGE}


@dataclass(frozen=True)
class Space:
    """All valid strategies for a model, a number of GPUs and a batch, within the user's choices; see the module."""

    model: Model
    gpus: int
    batch: int
    seq: int
    choices: Choices

    @cached_property
    def frames(self) -> Ints:
        """Columns of `FRAME`, (frames, 8), in ascending order; a schedule is an index into `choices.schedule`."""
        rows = [row for mesh in self._meshes() for row in self._frames_of(*mesh)]
        found = np.array(sorted(rows), np.int64).reshape(-1, len(FRAME))
        return found[self._leaves(found) > 0]

    @cached_property
    def starts(self) -> Ints:
        """First frame of each mesh, and the end, (meshes + 1,)."""
        if not len(self.frames):
            return np.zeros(1, np.int64)
        new = np.any(np.diff(self.frames[:, : len(MESH)], axis=0), axis=1)
        return np.concatenate([[0], np.flatnonzero(new) + 1, [len(self.frames)]])

    @cached_property
    def leaves(self) -> Ints:
        """Number of leaves of each frame, (frames,)."""
        return self._leaves(self.frames)

    def _leaves(self, rows: Ints) -> Ints:
        return np.asarray(np.prod(np.stack(self._radices(rows)), axis=0))

    @property
    def num_frames(self) -> int:
        """Number of frames."""
        return len(self.frames)

    def count(self, frames: Ints | None = None) -> int:
        """Return the exact number of strategies in these frames, or in all, as a Python int."""
        chosen = np.arange(len(self.frames)) if frames is None else frames
        leaves = self.leaves[chosen]
        if PER_STAGE not in self.recomputes:
            return int(leaves.sum())
        groups = leaves // self._radices(self.frames[chosen])[-1]
        pp, layers = self.column("pp", chosen), self.stage_layers(chosen)
        solved = groups * self.recomputes_by_stage(chosen)
        large = self.large_ranks(chosen)
        keys = list(zip(pp.tolist(), layers.tolist(), large.tolist(), strict=True))
        alike = {key: self._tuples(*key) for key in {*keys}}
        return int((leaves - groups).sum()) + sum(int(n) * alike[key] for n, key in zip(solved, keys, strict=True))

    def _tuples(self, pp: int, layers: int, large: int) -> int:
        """Return the number of tuples of "per-stage", without those that other choices name."""
        named = sum(code in self.recomputes for code in (NONE, FULL))
        return int((layers + 1) ** large * layers ** (pp - large)) - named

    def recomputes_by_stage(self, frames: Ints) -> Mask:
        """Return whether each stage of these frames may recompute a number of its own: not where it has a twin."""
        twins = np.array([find_schedule(name).bidirectional for name in self.choices.schedule])
        return np.asarray(~twins[self.column("schedule", frames)])

    def column(self, name: str, frames: Ints) -> Ints:
        """Return one of `FRAME`'s columns for these frames."""
        return np.asarray(self.frames[frames, FRAME.index(name)])

    def stage_layers(self, frames: Ints) -> Ints:
        """Return the number of layers of the largest stage of each frame."""
        return _stage_layers(self.model, self.frames[frames])

    def large_ranks(self, frames: Ints) -> Ints:
        """Return the number of ranks of each frame with a stage of `stage_layers` layers; the largest of others has one
        less. These are the first ranks; where both ends are light, all but those that hold ends only."""
        pp, stages = self.column("pp", frames), self.column("pp", frames) * self.column("chunks", frames)
        large = np.minimum(self.model.layers - (self.stage_layers(frames) - 1) * stages, pp)
        return np.where(has_light_ends(self.model.layers, stages), pp - self._ends_only(frames), large)

    def rank_layers(self, frames: Ints, pp: int) -> Ints:
        """Return the layers of the largest stage of each rank, (frames, pp)."""
        rank, stages = np.arange(pp), self.column("pp", frames) * self.column("chunks", frames)
        last = self.large_ranks(frames)[:, None] <= rank
        ends = self._ends_only(frames)[:, None]
        light = (rank == 0) & (ends > 0) | (rank == pp - 1) & (ends == 2)
        small = np.where(has_light_ends(self.model.layers, stages)[:, None], light, last)
        found: Ints = self.stage_layers(frames)[:, None] - small
        return found

    def _ends_only(self, frames: Ints) -> Ints:
        """Return the number of ranks that hold no stages but the first and the last."""
        vs = np.array([name in V_SHAPED for name in self.choices.schedule])[self.column("schedule", frames)]
        return np.where(vs, 1, np.where(self.column("chunks", frames) == 1, 2, 0))

    def tokens_divide(self, frames: Ints) -> Mask:
        """Return whether tp divides a rank's tokens of a sample, as sequence parallelism requires."""
        return _tokens_divide(self.seq, self.frames[frames])

    def expand(self, frames: Ints) -> tuple[Columns, Ints]:
        """Return every leaf of these frames as columns, and its (frame, leaf), (rows, 2)."""
        counts = self.leaves[frames]
        owner = np.repeat(np.arange(len(frames)), counts)
        leaf = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        return self._rows(frames, owner, leaf), np.stack([frames[owner], leaf], axis=1)

    def rows(self, place: Ints) -> Columns:
        """Return the columns of the strategies at these places, (rows, 2)."""
        return self._rows(place[:, 0], np.arange(len(place)), place[:, 1])

    def _rows(self, frames: Ints, owner: Ints, rest: Ints) -> Columns:
        """Return columns, given each row's index into `frames` and its leaf."""
        of_frames = self.frames[frames]
        columns: Columns = {name: values[owner] for name, values in zip(FRAME, of_frames.T.copy(), strict=True)}
        _, zeros, overlaps, spread, recomputes = (radix[owner] for radix in self._radices(of_frames))
        rest, chosen = np.divmod(rest, recomputes)
        columns["recompute"] = self.recomputes[chosen]
        rest, chosen = np.divmod(rest, spread)
        columns["sequence_parallel"] = np.asarray(self.choices.sequence_parallel, np.int64)[chosen]
        columns["sequence_parallel"] *= _tokens_divide(self.seq, of_frames)[owner]
        rest, chosen = np.divmod(rest, overlaps)
        columns["overlap"] = np.asarray(self.choices.overlap, np.int64)[chosen]
        columns["dtype"], chosen = np.divmod(rest, zeros)
        columns["zero"], columns["zero_every"] = self.zeros[chosen].T
        return columns

    def _radices(self, rows: Ints) -> tuple[Ints, ...]:
        """Return the number of choices of each of `SWITCHES` for these frames, (n, 8)."""
        _, tp, cp, ep, dp, *_ = rows.T
        choices = self.choices
        zeros = np.where(dp * cp * ep > 1, len(self.zeros), 1)
        overlaps = np.where(dp * cp * ep > 1, len(choices.overlap), 1)
        spread = np.where(
            _tokens_divide(self.seq, rows), len(choices.sequence_parallel), False in choices.sequence_parallel
        )
        words = sum(isinstance(one, str) for one in choices.recompute)
        most = _stage_layers(self.model, rows) - (FULL in self.recomputes)
        numbers = np.searchsorted(self.recomputes[words:], most, side="right")
        dtypes = np.full(len(rows), len(choices.dtype), np.int64)
        return dtypes, zeros, overlaps, np.where(tp > 1, spread, 1), words + numbers

    @cached_property
    def zeros(self) -> Ints:
        """Choices of ZeRO, with the microbatches after which gradients are reduced, (n, 2)."""
        choices = self.choices
        pairs = [(zero, every) for zero in choices.zero for every in (choices.zero_every if zero > 1 else (1,))]
        return np.array(pairs, np.int64)

    @cached_property
    def words(self) -> dict[str, int]:
        """Codes of recomputation that are no numbers, by name: those of `WORDS`, and below them modules."""
        modules = [one for one in self.choices.recompute if isinstance(one, str) and one not in WORDS]
        return WORDS | {name: PER_STAGE - 1 - number for number, name in enumerate(modules)}

    @cached_property
    def names(self) -> dict[int, Any]:
        """Names of these codes."""
        return {code: name for name, code in self.words.items()}

    @cached_property
    def recomputes(self) -> Ints:
        """Codes of recomputation: words first, then ascending numbers of layers, as far as a frame can have them."""
        words = [self.words[one] for one in self.choices.recompute if isinstance(one, str)]
        numbers = {one for one in self.choices.recompute if not isinstance(one, str)}
        return np.array(words + sorted(numbers - set(words)), np.int64)

    def strategy(self, columns: Columns, row: int, numbers: tuple[int, ...] | None = None) -> Strategy:
        """Return one row as a strategy; `numbers`: layers that each rank's stages recompute, if "per-stage"."""
        at: dict[str, Any] = {name: int(values[row]) for name, values in columns.items()}
        schedule = self.choices.schedule[at["schedule"]]
        recompute = self.names.get(at["recompute"], at["recompute"])
        if numbers is not None:
            recompute = self.by_stage(schedule, at["chunks"], numbers)
        return Strategy(
            gpus=self.gpus,
            batch=self.batch,
            seq=self.seq,
            **{name: at[name] for name in (*MESH, "microbatch", "chunks", "zero", "zero_every")},
            schedule=schedule,
            dtype=self.choices.dtype[at["dtype"]],
            overlap=bool(at["overlap"]),
            **{name: getattr(self.choices, name)[0] for name in FIXED},
            gradients=self.choices.gradients[0],
            sequence_parallel=bool(at["sequence_parallel"]),
            recompute=recompute,
        )

    def by_stage(self, schedule: str, chunks: int, numbers: Sequence[int]) -> tuple[int, ...]:
        """Return the number of recomputed layers of each stage, given the number for each rank's stages."""
        ranks = find_schedule(schedule).placed(len(numbers), chunks)
        layers = stage_layers(self.model.layers, len(ranks))
        return tuple(min(numbers[rank], most) for rank, most in zip(ranks, layers, strict=True))

    def _meshes(self) -> Iterator[tuple[int, ...]]:
        experts = self.model.experts.count if self.model.experts else 1
        for pp in self._sizes("pp", self.gpus, self.model.layers):
            for tp in self._sizes("tp", self.gpus // pp, UNLIMITED):
                for cp in self._sizes("cp", self.gpus // (pp * tp), self.seq):
                    for ep in self._sizes("ep", self.gpus // (pp * tp * cp), experts):
                        dp = self.gpus // (pp * tp * cp * ep)
                        if allows(self.choices.dp, dp) and self._placeable(pp, tp, cp, ep, dp):
                            yield pp, tp, cp, ep, dp

    def _placeable(self, pp: int, tp: int, cp: int, ep: int, dp: int) -> bool:
        sizes: dict[str, Any] = {"gpus": self.gpus, "batch": self.batch, "seq": self.seq}
        try:
            check(self.model, None, Strategy(pp=pp, tp=tp, cp=cp, ep=ep, dp=dp, schedule="1f1b", **sizes))
        except UsageError:
            return False
        return True

    def _sizes(self, axis: str, of: int, most: int) -> list[int]:
        choice = getattr(self.choices, axis)
        return [size for size in divisors(of) if size <= most and allows(choice, size)]

    def _frames_of(self, pp: int, tp: int, cp: int, ep: int, dp: int) -> Iterator[tuple[int, ...]]:
        local = self.batch // (dp * ep)
        sizes = [size for size in divisors(local) if allows(self.choices.microbatch, size)]
        for number, name in enumerate(self.choices.schedule):
            if pp == 1 and self.choices.schedule in ALIKE and number:
                break  # without a pipeline all schedules are alike; try one, unless the user names some
            for chunks in self._chunks(name, pp):
                for size in sizes:
                    if takes(name, pp, local // size, chunks):
                        yield pp, tp, cp, ep, dp, number, chunks, size

    def _chunks(self, name: str, pp: int) -> list[int]:
        """Return the numbers of chunks to try: without empty stages, and only even splits if there are any.

        Else the least number, and its doubles, as far as stages have a layer.
        """
        least, most = find_schedule(name).min_chunks, find_schedule(name).max_chunks
        if pp == 1 and self.choices.chunks is None:
            return [least] if least <= self.model.layers else []
        layers = self.model.layers
        room = [v for v in range(least, min(most, (layers + 2) // pp) + 1) if allows(self.choices.chunks, v)]
        even = [v for v in room if layers % (pp * v) == 0 or has_light_ends(layers, pp * v)]
        room = [v for v in room if pp * v <= layers]
        if even or self.choices.even or not room:
            return even
        return [v for v in room if v % room[0] == 0 and (v // room[0]).bit_count() == 1]


def make_space(model: Model, gpus: int, batch: int, seq: int, choices: Choices) -> Space:
    """Return the space; raises `UsageError` if it is empty."""
    for what, value, most in (("gpus", gpus, MAX_RANKS), ("batch", batch, UNLIMITED), ("seq", seq, UNLIMITED)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise UsageError(f"tune: {what} is {value!r}; give a whole number from 1 to {most}")
    choices = choices.of_model(model)
    for name in choices.schedule:
        predictable(name)
    space = Space(model, gpus, batch, seq, choices)
    if not space.num_frames:
        raise UsageError(
            f"tune: no mesh of {gpus} GPUs can hold {model.name} ({model.layers} layers, {model.heads} heads) with a "
            f"batch of {batch} and these choices: dp·tp·pp·cp·ep = gpus, tp divides the heads, pp is at most the "
            f"layers, and dp·ep and the microbatch divide the batch; {_way_out(space)}"
        )
    return space


def _way_out(space: Space) -> str:
    """Return the single choice that makes the space empty, as text; general advice if no single one does."""
    given = {name: value for name, value in space.choices if value != Choices.model_fields[name].default}
    for name in given:
        freed = Choices.from_values({other: value for other, value in given.items() if other != name}).of_model(
            space.model
        )
        if Space(space.model, space.gpus, space.batch, space.seq, freed).num_frames:
            return f"without {name} = {', '.join(map(str, given[name]))} there would be one"
    return "free an axis or change the number of GPUs"


def divisors(number: int) -> list[int]:
    """Return all divisors of `number`, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _stage_layers(model: Model, rows: Ints) -> Ints:
    stages = rows[:, FRAME.index("pp")] * rows[:, FRAME.index("chunks")]
    return np.asarray(-(-model.layers // stages))


def _tokens_divide(seq: int, rows: Ints) -> Mask:
    tokens = seq // rows[:, FRAME.index("cp")]
    return np.asarray(tokens % rows[:, FRAME.index("tp")] == 0)


@lru_cache(maxsize=2**16)
def takes(name: str, pp: int, microbatches: int, chunks: int) -> bool:
    """Return whether a schedule takes these sizes."""
    try:
        find_schedule(name).shape(pp, microbatches, chunks)
    except UsageError:
        return False
    return True
