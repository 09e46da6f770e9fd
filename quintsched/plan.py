"""A plan: one list of instructions per pipeline rank, and what it was compiled from.

plan = quintsched.compile("1f1b", mesh=Mesh(dp=2, pp=2, tp=2), microbatches=8)
plan.save("plan.json")          plan.check().raise_if_unsound()
plan.program(rank=5)            plan.simulate().bubble
plan.graph()                    the dependency graph, as a networkx DiGraph

This is what people hold: the data of `quintsched.ir.plan_data`, plus verbs, each of which calls a room of its own. The
rooms know the data only.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quintsched.arguments import PATH, WHOLE, ours, takes
from quintsched.errors import UnsoundError
from quintsched.ir.instructions import Instruction, Message
from quintsched.ir.plan_data import PlanData

if TYPE_CHECKING:
    import networkx

    from quintsched.simulation.costs import Costs
    from quintsched.simulation.simulator import Simulation
    from quintsched.verify.soundness import Verdict


@dataclass(frozen=True, eq=False, repr=False)
class Plan(PlanData):
    """A plan: see `PlanData` for what it holds. `compile` and `load` give only well-formed ones."""

    @classmethod
    def of(cls, data: PlanData) -> Plan:
        """Return the plan with this data; what is known of the data is known of the plan."""
        from quintsched.collectives import CollectivePlan

        values = {field.name: getattr(data, field.name) for field in fields(data)}
        if spelled := {name: CollectivePlan.of(mini) for name, mini in data.communication.plans.items()}:
            values["communication"] = replace(data.communication, plans=spelled)
        plan = cls(**values)
        plan._remembered.update(data._remembered)
        plan.__dict__.update({name: data.__dict__[name] for name in ("layout", "flows") if name in data.__dict__})
        return plan

    def _repr_html_(self) -> str:
        """Return the timeline under unit costs as HTML for notebooks; of a plan that is not sound, what is wrong."""
        from quintsched.simulation.notebook import MOST_TIMED, heading

        if self.num_instructions > MOST_TIMED:
            return heading(repr(self))
        verdict = self.check()
        return self.simulate()._repr_html_() if verdict.sound else verdict._repr_html_()

    @takes("plan.program(0)", rank=WHOLE)
    def program(self, rank: int) -> tuple[Instruction, ...]:
        """One global rank's list, with global peer ranks; raises `UsageError` for a rank outside the mesh."""
        coordinates = self.mesh.coordinates(rank)
        program = self.programs[self.mesh.pp_rank(rank)]
        peers = {k: self.mesh.rank(coordinates | {"pp": k}) for k in range(self.mesh.pp)}
        return tuple([replace(i, peer=peers[i.peer]) if isinstance(i, Message) else i for i in program])

    def check(self, profile: str = "channel", memory_cap: float | None = None) -> Verdict:
        """Prove the plan sound (complete, data flow, channels, deadlock, collectives, memory).

        `profile` is the transport profile under which it has to be free of deadlock; `memory_cap` the most
        activations that a rank may hold, in microbatches of a whole rank.
        """
        from quintsched.verify.soundness import check

        return check(self, profile=profile, memory_cap=memory_cap)

    def capture_obstacles(self) -> list[str]:
        """Return why a step cannot be captured in a CUDA graph (`Engine(cuda_graph=True)`); nothing where it can."""
        from quintsched.verify.capture import capture_obstacles

        return capture_obstacles(self)

    def simulate(self, costs: Costs | None = None) -> Simulation:
        """Time the plan under a cost model (default: unit costs); raises `UnsoundError` if it cannot finish."""
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

        return cls.of(loads(text))

    @takes('plan.save("plan.json")', path=PATH)
    def save(self, path: str | Path) -> None:
        """Write the plan file: JSON, or under a name with `.qplan` compressed columns, for millions of instructions.

        Raises `UsageError` where that cannot be done.
        """
        from quintsched.formats.plan_file import save

        save(self, Path(path))

    @classmethod
    @takes('Plan.load("plan.json")', path=PATH)
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file of either form; raises `UsageError` for a missing one, `InputError` for a broken one."""
        from quintsched.formats.plan_file import load

        return cls.of(load(Path(path)))


@takes("simulate(plan, costs)", plan=ours("PlanData"), costs=ours("Costs"))
def simulate(plan: PlanData, costs: Costs | None = None) -> Simulation:
    """Run a plan under `costs` (default: unit costs).

    Raises `UnsoundError` for a plan that is malformed or cannot finish, `InputError` for costs that do not fit it.
    """
    from quintsched.simulation import simulator
    from quintsched.verify.soundness import check, require_wellformed

    require_wellformed(plan)
    try:
        return simulator.simulate(plan, costs)
    except UnsoundError:
        check(plan).raise_if_unsound()
        raise
