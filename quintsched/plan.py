"""A plan: one list of instructions per pipeline rank, and what it was compiled from.

plan = quintsched.compile("1f1b", mesh=Mesh(dp=2, pp=2, tp=2), microbatches=8)
plan.save("plan.json")          plan.check().raise_if_unsound()
plan.program(rank=5)            plan.simulate().bubble
plan.graph()                    the dependency graph, as a networkx DiGraph
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from quintsched.collectives.choice import NATIVE, Communication
from quintsched.ir.columns import Columns
from quintsched.ir.dataflow import Flows, flows_of
from quintsched.ir.instructions import ENDS_BACKWARD, Instruction, Message
from quintsched.ir.layout import Layout, Route, Zero
from quintsched.ir.mesh import Mesh

if TYPE_CHECKING:
    import networkx

    from quintsched.simulation.costs import Costs
    from quintsched.simulation.simulator import Simulation
    from quintsched.verify.soundness import Verdict

Mode = Literal["train", "forward"]
Program = tuple[Instruction, ...]

MAX_BUCKETS = 1024
"""The most gradient buckets of a stage."""

MAX_RECOMPUTE = 2**16
"""The largest k of which every k-th block of a stage is recomputed."""

MAX_ZERO_EVERY = 2**24
"""The most microbatches whose gradients are reduced together."""

MAX_TIED = 1024
"""The most named weights that several stages hold."""


@dataclass(frozen=True)
class ScheduleSpec:
    """The request that a plan was compiled from."""

    name: str
    microbatches: int
    chunks: int = 1
    slices: int = 1
    options: Mapping[str, int | float | str | bool] = field(default_factory=dict)

    @property
    def num_units(self) -> int:
        """What instructions count as microbatches: microbatches x slices."""
        return self.microbatches * self.slices

    @property
    def parts(self) -> int:
        """How many pieces the work of a rank on a microbatch is cut into: chunks x slices."""
        return self.chunks * self.slices


@dataclass(frozen=True)
class Plan:
    """One program per pp coordinate; all ranks with that coordinate run the same one.

    `programs[k]` belongs to pp coordinate k. `recompute` says per stage whether its activations are kept (0), or those
    of every k-th block recomputed (k; 1: of the whole stage); () where all stages keep theirs. `tied` says which stages
    hold each named weight, `zero` what replicas share out among them, `communication` how buckets are exchanged. A plan
    that was put together by hand is not
    checked before `check()` is asked; `compile` and `load` give only well-formed ones.
    """

    mode: Mode
    schedule: ScheduleSpec
    mesh: Mesh
    stage_to_pp: tuple[int, ...]
    routes: tuple[Route, ...]
    buckets_per_stage: int
    programs: tuple[Program, ...]
    stage_to_part: tuple[int, ...] | None = None
    recompute: tuple[int, ...] = ()
    tied: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    communication: Communication = NATIVE
    zero: Zero = field(default_factory=Zero)

    @cached_property
    def layout(self) -> Layout:
        """Where stages lie and in which order microbatches visit them."""
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
            zero=self.zero,
            backward_order=self._backward_order() if self.zero.shares_gradients else (),
        )

    def _backward_order(self) -> tuple[tuple[int, ...], ...]:
        """Return the microbatches of each stage in the order in which their backwards end."""
        columns = self.columns
        ends = columns.are(*ENDS_BACKWARD)
        stage, unit = columns.stage[ends], columns.unit[ends]
        return tuple(tuple(unit[stage == number].tolist()) for number in range(len(self.stage_to_pp)))

    @cached_property
    def columns(self) -> Columns:
        """All instructions as arrays."""
        return Columns.of(self.programs)

    @cached_property
    def flows(self) -> Flows:
        """What every instruction takes, reads and makes; the plan has to be well-formed."""
        return flows_of(self.columns, self.programs, self.layout)

    def at(self, row: int) -> str:
        """Say where a row of `columns` stands and what is there, for messages: "rank 0 instruction 3, Fwd(…)"."""
        rank, index = self.columns.place(row)
        return f"rank {rank} instruction {index}, {self.programs[rank][index]}"

    @property
    def num_instructions(self) -> int:
        """The number of instructions in all programs together."""
        return sum(map(len, self.programs))

    @property
    def title(self) -> str:
        """One line that names the plan: schedule, mesh and microbatches."""
        chunks = f", {self.schedule.chunks} chunks" if self.schedule.chunks > 1 else ""
        slices = f", {self.schedule.slices} slices" if self.schedule.slices > 1 else ""
        recomputing = ", recomputing" if any(self.recompute) else ""
        zero = f", ZeRO-{self.zero.stage}" if self.zero.stage else ""
        spelled = f", {self.communication.means} communication" if self.communication.plans else ""
        microbatches = f"{self.schedule.microbatches} microbatches"
        return f"{self.schedule.name} on {self.mesh}, {microbatches}{chunks}{slices}{recomputing}{zero}{spelled}"

    def program(self, rank: int) -> Program:
        """One global rank's list, with global peer ranks; raises `UsageError` for a rank outside the mesh."""
        coordinates = self.mesh.coordinates(rank)
        program = self.programs[coordinates.get("pp", 0)]
        peers = {k: self.mesh.rank(coordinates | {"pp": k}) for k in range(self.mesh.pp)}
        return tuple(replace(i, peer=peers[i.peer]) if isinstance(i, Message) else i for i in program)

    def check(self, profile: str = "channel", memory_cap: float | None = None) -> Verdict:
        """Prove the plan sound (DESIGN: complete, data flow, channels, deadlock, collectives, memory).

        `profile` is the transport profile under which it has to be free of deadlock; `memory_cap` the most
        activations that a rank may hold, in microbatches of a whole rank.
        """
        from quintsched.verify.soundness import check

        return check(self, profile=profile, memory_cap=memory_cap)

    def simulate(self, costs: Costs | None = None) -> Simulation:
        """Time the plan under a cost model (default: unit costs); raises `UnsoundError` if it cannot finish."""
        from quintsched.simulation.simulator import simulate

        return simulate(self, costs)

    def graph(self) -> networkx.DiGraph[int]:
        """Return the dependency graph as a networkx `DiGraph`: see `quintsched.formats.networkx_graph.to_networkx`."""
        from quintsched.formats.networkx_graph import to_networkx

        return to_networkx(self)

    def to_json(self) -> str:
        """Return the plan file's text; the same plan always gives the same bytes."""
        from quintsched.formats.plan_json import dumps

        return dumps(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Read a plan file's text; raises `InputError` with a JSON pointer to what is wrong."""
        from quintsched.formats.plan_json import loads

        return loads(text)

    def save(self, path: str | Path) -> None:
        """Write the plan file; raises `UsageError` where that cannot be done."""
        from quintsched.formats.plan_json import save

        save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file; raises `UsageError` for a missing one, `InputError` for a broken one."""
        from quintsched.formats.plan_json import load

        return load(Path(path))
