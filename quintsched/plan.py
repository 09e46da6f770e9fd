"""A plan: one list of instructions per pipeline rank, and what it was compiled from.

plan = quintsched.compile("1f1b", mesh=Mesh(dp=2, pp=2, tp=2), microbatches=8)
plan.save("plan.json")          plan.check().raise_if_unsound()
plan.program(rank=5)            plan.simulate().bubble
plan.graph()                    the dependency graph, as a networkx DiGraph

`Plan` is the public class: the data of `quintsched.ir.plan_data`, plus methods that each call one package (proof,
simulator, file formats). Those packages know the data class only.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quintsched.check_call_arguments import PATH, PLAN, WHOLE_NUMBER, ours, takes
from quintsched.errors import UnsoundError
from quintsched.ir.instruction_set import Instruction, Message
from quintsched.ir.plan_data import PlanData

if TYPE_CHECKING:
    import networkx

    from quintsched.simulation.costs import Costs
    from quintsched.simulation.simulator import Simulation
    from quintsched.verify.soundness import Verdict


@dataclass(frozen=True, eq=False, repr=False)
class Plan(PlanData):
    """A plan with its methods; see `PlanData` for its fields. `compile` and `load` return only well-formed plans."""

    @classmethod
    def of(cls, data: PlanData) -> Plan:
        """Return the plan with this data, and with the results already cached for it."""
        from quintsched.collectives import CollectivePlan

        values = {field.name: getattr(data, field.name) for field in fields(data)}
        if spelled := {name: CollectivePlan.from_program(mini) for name, mini in data.communication.plans.items()}:
            values["communication"] = replace(data.communication, plans=spelled)
        plan = cls(**values)
        plan._remembered.update(data._remembered)
        plan.__dict__.update({name: data.__dict__[name] for name in ("layout", "flows") if name in data.__dict__})
        return plan

    def _repr_html_(self) -> str:
        """Return the timeline under unit costs as HTML for notebooks; of a plan that is not sound, what is wrong."""
        from quintsched.simulation.notebook_html import MOST_TIMED, heading

        if self.num_instructions > MOST_TIMED:
            return heading(repr(self))
        verdict = self.check()
        return self.simulate()._repr_html_() if verdict.sound else verdict._repr_html_()

    @takes("plan.program(0)", rank=WHOLE_NUMBER)
    def program(self, rank: int) -> tuple[Instruction, ...]:
        """Return the program of one global rank, with global ranks as peers; raises `UsageError` outside the mesh."""
        coordinates = self.mesh.coordinates(rank)
        program = self.programs[self.mesh.pp_rank(rank)]
        peers = {k: self.mesh.rank(coordinates | {"pp": k}) for k in range(self.mesh.pp)}
        return tuple([replace(i, peer=peers[i.peer]) if isinstance(i, Message) else i for i in program])

    def check(self, profile: str = "channel", memory_cap: float | None = None) -> Verdict:
        """Prove the plan sound (complete, data flow, channels, deadlock, collectives, memory).

        `profile` is the transport profile under which the plan must be free of deadlock; `memory_cap` is the
        maximum of activations that a rank may hold, in microbatches of a whole rank.
        """
        from quintsched.verify.soundness import check

        return check(self, profile=profile, memory_cap=memory_cap)

    def capture_obstacles(self) -> list[str]:
        """Return reasons why a step cannot be captured in a CUDA graph (`Engine(cuda_graph=True)`); [] if it can be."""
        from quintsched.verify.cuda_graph_capture import capture_obstacles

        return capture_obstacles(self)

    def simulate(self, costs: Costs | None = None) -> Simulation:
        """Simulate the plan's timing under `costs` (default: unit costs); raises `UnsoundError` if it cannot finish."""
        return simulate(self, costs)

    def graph(self) -> networkx.DiGraph[int]:
        """Return the dependency graph as a networkx `DiGraph`: see `quintsched.formats.networkx_graph.to_networkx`."""
        from quintsched.formats.networkx_graph import to_networkx

        return to_networkx(self)

    def to_json(self) -> str:
        """Return the text of the plan file; equal plans give identical bytes."""
        from quintsched.formats.plan_json import dumps

        return dumps(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Parse the text of a plan file; raises `InputError` with a JSON pointer to the fault."""
        from quintsched.formats.plan_json import loads

        return cls.of(loads(text))

    @takes('plan.save("plan.json")', path=PATH)
    def save(self, path: str | Path) -> None:
        """Write the plan file: JSON, or compressed columns (for millions of instructions) if the name ends in `.qplan`.

        Raises `UsageError` if it cannot be written.
        """
        from quintsched.formats.plan_file import save

        save(self, Path(path))

    @classmethod
    @takes('Plan.load("plan.json")', path=PATH)
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file of either form; raises `UsageError` for a missing one, `InputError` for a broken one."""
        from quintsched.formats.plan_file import load

        return cls.of(load(Path(path)))


@takes("simulate(plan, costs)", plan=PLAN, costs=ours("Costs"))
def simulate(plan: PlanData, costs: Costs | None = None) -> Simulation:
    """Simulate a plan under `costs` (default: unit costs).

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
