"""Data class of a plan: one program per pipeline rank, and its settings. `quintsched.Plan` adds the methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import RLock
from typing import Any, Literal, TypeVar

from quintsched.errors import counted
from quintsched.ir.collective_means_and_wire import NATIVE, Communication
from quintsched.ir.dataflow_analysis import Flows, flows_of
from quintsched.ir.instruction_columns import Columns, Ints
from quintsched.ir.instruction_set import ENDS_BACKWARD, FetchAct, Instruction, LendAct, Overlap, ReclaimAct
from quintsched.ir.layout import Layout, Route
from quintsched.ir.mesh import Mesh
from quintsched.ir.ragged import Ragged
from quintsched.ir.rank_programs import Programs
from quintsched.ir.zero_setting import Zero

T = TypeVar("T")

Mode = Literal["train", "forward"]

_FINDING = RLock()
"""Lock held while a cached result of a plan is computed."""

MAX_BUCKETS = 1024
"""Maximum number of gradient buckets of a stage."""

MAX_RECOMPUTE = 2**16
"""Maximum k for recomputing every k-th block of a stage."""

MAX_ZERO_EVERY = 2**24
"""Maximum number of microbatches whose gradients are reduced together."""

MAX_BLOCKS = 2**24
"""Maximum number of blocks of a stage."""

MOST_LISTED = 16
"""Maximum number of stages listed in a line of text."""

MAX_TIED = 1024
"""Maximum number of named tied weights."""


@dataclass(frozen=True)
class ScheduleSpec:
    """Schedule and counts that a plan was compiled from."""

    name: str
    microbatches: int
    chunks: int = 1
    slices: int = 1
    options: Mapping[str, int | float | str | bool] = field(default_factory=dict)

    @property
    def num_units(self) -> int:
        """Number of units that instructions count as microbatches: microbatches x slices."""
        return self.microbatches * self.slices

    @property
    def parts(self) -> int:
        """Number of pieces of a rank's work on one microbatch: chunks x slices."""
        return self.chunks * self.slices


@dataclass(frozen=True, eq=False)
class PlanData:
    """Plan: one program per pp coordinate; all ranks with that coordinate run the same program.

    `programs[k]` belongs to pp coordinate k; programs may be given as sequences of instructions, and are stored as
    columns. `recompute` gives per stage 0 if its activations are kept, k if those of every k-th block are recomputed
    (1: the whole stage); () if all stages keep theirs. `recompute_microbatches` lists per stage the microbatches of
    which that is so; () if it is so of all. `tied` lists the stages that hold each named weight, `skips` the
    stage that makes each named skip and then those that take it, `losses` the stages with a loss ((): the last one of
    each route), `zero` the state that replicas shard, `communication` the means of gradient exchange.
    `blocks_per_stage` counts the model's blocks per stage; () if the run decides. A plan that is put together by hand
    is not checked before `check`, except for the fields of its instructions: wrong types there raise `UnsoundError`.
    """

    mode: Mode
    schedule: ScheduleSpec
    mesh: Mesh
    stage_to_pp: tuple[int, ...]
    routes: tuple[Route, ...]
    buckets_per_stage: int
    programs: Programs
    stage_to_part: tuple[int, ...] | None = None
    recompute: tuple[int, ...] = ()
    tied: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    skips: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    losses: tuple[int, ...] = ()
    communication: Communication = NATIVE
    zero: Zero = field(default_factory=Zero)
    blocks_per_stage: tuple[int, ...] = ()
    recompute_microbatches: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "programs", Programs.from_programs(self.programs))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlanData):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__dataclass_fields__)

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def _remembered(self) -> dict[str, Any]:
        return {}

    def remember(self, name: str, find: Callable[[], T]) -> T:
        """Return the cached result of `find` under `name`, computed on first use: plans are immutable.

        Concurrent threads, such as ranks of one process, wait for the first one.
        """
        if name not in self._remembered:
            with _FINDING:
                if name not in self._remembered:
                    self._remembered[name] = find()
        found: T = self._remembered[name]
        return found

    @cached_property
    def layout(self) -> Layout:
        """Layout of the plan: placement, routes, and tables derived from them."""
        return Layout(
            stage_to_pp=self.stage_to_pp,
            routes=self.routes,
            trains=self.mode == "train",
            mesh=self.mesh,
            buckets_per_stage=self.buckets_per_stage,
            slices=self.schedule.slices,
            stage_to_part=self.stage_to_part or (),
            recompute=self.recompute,
            tied=tuple(sorted(self.tied.items())),
            skips=tuple(sorted(self.skips.items())),
            losses=self.losses,
            zero=self.zero,
            backward_order=self._backward_order() if self.zero.shards_gradients else (),
            fetches=tuple(zip(*(c.tolist() for c in self._known_cells(FetchAct, ReclaimAct)), strict=True)),
            loans=self._loans(),
            recompute_microbatches=self.recompute_microbatches,
        )

    def _loans(self) -> tuple[tuple[int, int, int], ...]:
        """Return (stage, unit, rank that they are lent to) of all lent activations; of several such ranks the first."""
        columns = self.columns
        rows = columns.rows_where(LendAct)[::-1]
        used = (columns.stage[rows].tolist(), columns.unit[rows].tolist(), columns.peer[rows].tolist())
        return tuple(zip(*used, strict=True))

    def _backward_order(self) -> tuple[tuple[int, ...], ...]:
        """Return the units of each stage in the order in which their backwards end."""
        stage, unit = self._known_cells(*ENDS_BACKWARD)
        return tuple(Ragged.group(stage, unit, len(self.stage_to_pp)).lists())

    def _known_cells(self, *kinds: type[Instruction]) -> tuple[Ints, Ints]:
        """Return stages and units of all instructions of these classes, without those that are out of range."""
        columns = self.columns.apart.columns
        rows = columns.rows_where(*kinds)
        stage, unit = columns.stage[rows], columns.unit[rows]
        known = (stage >= 0) & (stage < len(self.stage_to_pp)) & (unit >= 0) & (unit < self.schedule.num_units)
        return stage[known], unit[known]

    @property
    def columns(self) -> Columns:
        """Instructions of all ranks as arrays."""
        return self.programs.columns

    @cached_property
    def flows(self) -> Flows:
        """Data flow of all instructions, computed once; the plan must be well-formed."""
        return flows_of(self.columns, self.layout)

    def at(self, row: int) -> str:
        """Return place and instruction of a row of `columns` for messages: "rank 0 instruction 3, Fwd(…)"."""
        rank, index = self.columns.place(row)
        return f"rank {rank} instruction {index}, {self.columns.instruction(row)}"

    @property
    def num_instructions(self) -> int:
        """Number of instructions in all programs together."""
        return len(self.columns)

    @cached_property
    def stage_shares(self) -> tuple[float, ...]:
        """Share of each stage, by blocks, in units of 1/pp of the model; () if the blocks per stage are not known."""
        blocks = self.blocks_per_stage
        return shares_of(blocks, sum(blocks[s] for s in self.routes[0].stages), self.mesh.pp) if blocks else ()

    @property
    def title(self) -> str:
        """One line that names the plan: schedule, mesh and microbatches."""
        return f"{self.schedule.name} on {self.mesh}, {self._particulars}"

    @property
    def _particulars(self) -> str:
        """The microbatches, and all that is not as usual."""
        chunks = f", {self.schedule.chunks} chunks" if self.schedule.chunks > 1 else ""
        slices = f", {self.schedule.slices} slices" if self.schedule.slices > 1 else ""
        some = " some microbatches" if self.recompute_microbatches else ""
        recomputing = f", recomputing{some}" if any(self.recompute) else ""
        overlap = ", with overlap" if len(self.columns.rows_where(Overlap)) else ""
        offloading = ", offloading" if "offload" in self.schedule.options else ""
        lending = ", lending" if "lend" in self.schedule.options else ""
        zero = f", ZeRO-{self.zero.stage}" if self.zero.stage else ""
        spelled = f", {self.communication.means} communication" if self.communication.plans else ""
        blocks = f", stages of {listed(self.blocks_per_stage)} blocks" if self.blocks_per_stage else ""
        counts = f"{counted(self.schedule.microbatches, 'microbatch')}{chunks}{slices}{blocks}"
        return f"{counts}{overlap}{recomputing}{offloading}{lending}{zero}{spelled}"

    def __repr__(self) -> str:
        of = f"{self.schedule.name}, {self.mesh}, {self._particulars}"
        return f"{type(self).__name__}({of}, {counted(self.num_instructions, 'instruction')})"


def shares_of(blocks_per_stage: Sequence[int], blocks: int, pp: int) -> tuple[float, ...]:
    """Return the share of each stage in units of 1/pp of the model's blocks, which all count alike."""
    return tuple(count * pp / blocks for count in blocks_per_stage)


def listed(numbers: Sequence[int]) -> str:
    """Return numbers separated by commas, cut after `MOST_LISTED`."""
    more = ",…" if len(numbers) > MOST_LISTED else ""
    return ",".join(map(str, numbers[:MOST_LISTED])) + more
