"""Frozen request that a plan is compiled from, filled alike by Python, the command line and job files.

    compile("1f1b", mesh="pp=2", microbatches=4)       ┐
    quintsched compile -s 1f1b --mesh pp=2 -m 4        ├──▶  CompileRequest  ──▶  compile  ──▶  Plan
    parallel: {schedule: 1f1b, mesh: pp=2, …}          ┘                                         │
                                                              the same settings, as the plan stores them ┘

Each setting is one dataclass field: its documentation, its default, its reader, its textual form, and how a plan
stores it. All else derives from that: the signature and documentation of `compile`, the options of the command, the
job section, and the comparison of a job with the plan beside it.

No heavy imports here: `quintsched --help` imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from quintsched.ir.collective_means_and_wire import MEANS, Wire
from quintsched.ir.mesh import Mesh
from quintsched.request import read_setting_values
from quintsched.request.read_setting_values import Read
from quintsched.request.recomputed_microbatches import chosen_in, read_recomputed

if TYPE_CHECKING:
    from quintsched.passes import Watch
    from quintsched.plan import Plan
    from quintsched.schedules import Schedule
    from quintsched.simulation.costs import Costs


@dataclass(frozen=True)
class PlanSetting:
    """Declaration of one setting: how it is read, written and compared."""

    doc: str
    read: Read
    """Checks a value given in Python code."""
    metavar: str
    """Placeholder for the value in the command's help."""
    text: type = str
    """Type of the command-line option: `int`, `float`, `str`, or `list` for an option that may be repeated."""
    parse: Read | None = None
    """Converts the command-line value to one that `read` takes; None if it needs no conversion."""
    letter: str | None = None
    """The command's short option."""
    data: Read | None = None
    """Checks a value from a job file; None: `read` does it."""
    load: Callable[[Any], Any] | None = None
    """Converts text, or a job file's value, to one that `read` takes, such as a path to the costs in it."""
    parts: type | None = None
    """Dataclass whose fields replace the setting where no Python object can be given (command line, job file)."""
    in_plan: Callable[[Plan], object] | None = None
    """Returns the value that a plan stores; None if plans do not store the setting, so that it is not compared."""
    normal: Callable[[Any, Plan], object] = lambda value, _plan: value
    """Brings both sides of a comparison to one form, so that equivalent values are equal."""


def _setting(doc: str, read: Read, metavar: str, *, default: Any = MISSING, first: bool = False, **how: Any) -> Any:
    return field(default=default, kw_only=not first, metadata={"setting": PlanSetting(doc, read, metavar, **how)})


@dataclass(frozen=True)
class CompileRequest:
    """All settings that a plan is compiled from, checked and converted to plain Python; raises `UsageError`.

    Checks that need the schedule or the mesh are made by `compile`.
    """

    schedule: str | Schedule = _setting(
        "a registered schedule (`quintsched schedules` lists them), one of your own as my_file.py:my_schedule, a plan "
        "file, whose order of computation is taken, or in Python a `Schedule`.",
        read_setting_values.read_schedule,
        "NAME",
        first=True,
        letter="s",
        data=read_setting_values.read_text,
        in_plan=lambda plan: plan.schedule.name,
        normal=read_setting_values.name_in,
    )
    mesh: Mesh | str | Mapping[str, int] = _setting(
        "the device mesh, axes and sizes from the outermost: dp=2,pp=2,tp=2.",
        lambda _name, value: Mesh.parse(value),
        "AXES",
        data=read_setting_values.mesh_text,
        in_plan=lambda plan: plan.mesh,
        normal=lambda value, _plan: Mesh.parse(value).without_ones,
    )
    microbatches: int = _setting(
        "how many microbatches each replica's share of the batch is cut into.",
        read_setting_values.read_whole_number,
        "M",
        text=int,
        letter="m",
        in_plan=lambda plan: plan.schedule.microbatches,
    )
    chunks: int | None = _setting(
        "stages per pipeline rank; by default the fewest that the schedule allows.",
        read_setting_values.optional(read_setting_values.read_whole_number),
        "V",
        default=None,
        text=int,
        in_plan=lambda plan: plan.schedule.chunks,
    )
    buckets_per_stage: int = _setting(
        "gradient buckets of a stage.",
        read_setting_values.read_buckets,
        "N",
        default=1,
        text=int,
        in_plan=lambda plan: plan.buckets_per_stage,
    )
    stage_to_pp: Sequence[int] | None = _setting(
        "which pipeline rank holds each stage, 0,1,1,0; by default the schedule's own placement.",
        read_setting_values.optional(read_setting_values.read_wholes),
        "RANKS",
        default=None,
        parse=read_setting_values.parse_stages,
        in_plan=lambda plan: plan.stage_to_pp,
    )
    stages: Sequence[int] | None = _setting(
        "how many blocks of the model each stage has, 3,4,4,2; with 0 it passes on what it gets, or, as the last one, "
        "only finds the loss. By default the run balances what stages cost.",
        read_setting_values.optional(read_setting_values.read_counts),
        "BLOCKS",
        default=None,
        parse=read_setting_values.parse_stages,
        in_plan=lambda plan: plan.blocks_per_stage or None,
    )
    slices: int = _setting(
        "slices of a microbatch's sequence, for schedules that take them.",
        read_setting_values.read_whole_number,
        "Q",
        default=1,
        text=int,
        in_plan=lambda plan: plan.schedule.slices,
    )
    costs: Costs | None = _setting(
        "the costs to plan with, for schedules that search, for offload and lend; a JSON file, in Python a `Costs`.",
        read_setting_values.optional(read_setting_values.read_costs),
        "FILE",
        default=None,
        data=read_setting_values.optional(read_setting_values.read_text),
        load=read_setting_values.load_costs,
    )
    memory_cap: float | None = _setting(
        "the most activations that a rank may hold, in microbatches of a whole rank, for schedules that search.",
        read_setting_values.optional(read_setting_values.read_number),
        "X",
        default=None,
        text=float,
        in_plan=lambda plan: plan.schedule.options.get("memory_cap"),
    )
    overlap: bool = _setting(
        "whether a forward and a backward side by side are one instruction, so that what one of them exchanges inside "
        "its stage (over tp, cp, ep) is on its way while the other computes; without such exchanges it is slower.",
        read_setting_values.read_flag,
        "",
        default=False,
        text=bool,
        in_plan=lambda plan: plan.schedule.options.get("overlap", False),
    )
    recompute: int | Sequence[int] = _setting(
        "0 keeps all activations from a forward to its backward, 1 drops and recomputes them, k does so for every "
        "k-th block of a stage; one number for all stages, or one for each: 0,1,1,0.",
        read_setting_values.read_whole_or_wholes,
        "K",
        default=0,
        parse=read_setting_values.parse_numbers,
        in_plan=lambda plan: tuple(map(plan.layout.recompute_every, range(len(plan.stage_to_pp)))),
        normal=read_setting_values.every_stage,
    )
    recompute_microbatches: str | Sequence[int] | Sequence[Sequence[int]] | None = _setting(
        "the microbatches for which stages that recompute do so, 0-3 or 0-3,6; or those of each stage, 0-3;1,3;; where "
        "stages that keep all their activations name none. By default all.",
        read_recomputed,
        "MICROBATCHES",
        default=None,
        in_plan=lambda plan: plan.recompute_microbatches or None,
        normal=chosen_in,
    )
    offload: float | None = _setting(
        "the most activations that a rank may hold, in microbatches of a whole rank, or in the unit of memory of "
        "costs: what is more goes to the host's memory and comes back.",
        read_setting_values.optional(read_setting_values.read_number),
        "X",
        default=None,
        text=float,
        in_plan=lambda plan: plan.schedule.options.get("offload"),
    )
    lend: float | None = _setting(
        "likewise the most activations that a rank may hold: what is more is lent to ranks with memory to spare, and "
        "comes back for its backward.",
        read_setting_values.optional(read_setting_values.read_number),
        "X",
        default=None,
        text=float,
        in_plan=lambda plan: plan.schedule.options.get("lend"),
    )
    tied: Mapping[str, Sequence[int]] | None = _setting(
        "named weights that several stages hold, and which: embedding=0,3, in Python {'embedding': (0, 3)}. Their "
        "gradients are added up.",
        read_setting_values.read_ties,
        "NAME=STAGES",
        default=None,
        text=list,
        parse=read_setting_values.parse_ties,
        in_plan=lambda plan: dict(plan.tied),
    )
    skip: Mapping[str, Sequence[int]] | None = _setting(
        "named tensors that go past stages: first the stage that makes it, then those that take it, h=0,3,5, in Python "
        "{'h': (0, 3, 5)}. Each goes to a rank once; what no skip names rides through all stages between.",
        read_setting_values.read_skips,
        "NAME=STAGES",
        default=None,
        text=list,
        parse=read_setting_values.parse_skips,
        in_plan=lambda plan: dict(plan.skips),
    )
    losses: Sequence[int] | None = _setting(
        "the stages that have a loss, 1,3; by default the last one. A stage before it has the loss that its blocks "
        "return beside their outputs.",
        read_setting_values.optional(read_setting_values.read_wholes),
        "STAGES",
        default=None,
        parse=read_setting_values.parse_stages,
        in_plan=lambda plan: plan.losses,
        normal=read_setting_values.losses_in,
    )
    communication: str = _setting(
        f"how gradients are summed over replicas, one of {', '.join(MEANS)}: by the library's own collectives, spelled "
        "out in messages, or by what is fastest for a message's size.",
        read_setting_values.read_communication,
        "MEANS",
        default="native",
        in_plan=lambda plan: plan.communication.means,
        normal=read_setting_values.means_in,
    )
    wire: Wire | None = _setting(
        "the latency and bandwidth for communication auto.",
        read_setting_values.optional(read_setting_values.read_wire),
        "WIRE",
        default=None,
        parts=Wire,
        in_plan=read_setting_values.wire_in,
    )
    zero: int = _setting(
        "what is sharded over replicas instead of each holding all of it: 0 nothing, 1 the optimizer's state, 2 "
        "gradients too, 3 weights too.",
        read_setting_values.read_whole_number,
        "0-3",
        default=0,
        text=int,
        in_plan=lambda plan: plan.zero.stage,
    )
    zero_every: int = _setting(
        "with zero 2 and 3, after how many microbatches of a stage its gradients are reduced.",
        read_setting_values.read_whole_number,
        "K",
        default=1,
        text=int,
        in_plan=lambda plan: plan.zero.every,
    )
    after: Watch | None = field(default=None, kw_only=True, compare=False)
    """Observer, called with "order" and the bare order of computation, then with each pass's name and the plan after
    it; every pass is then checked for the points that have to hold after it, not only the last one."""

    def __post_init__(self) -> None:
        for name, setting in settings():
            object.__setattr__(self, name, setting.read(name, getattr(self, name)))

    @classmethod
    def of_data(cls, given: Mapping[str, Any], *, after: Watch | None = None) -> CompileRequest:
        """Return the request for entries by name, as a job file gives them: see `entries`."""
        values: dict[str, Any] = {}
        for name, setting in settings():
            if setting.parts:
                parts = {
                    part.name: given[part.name] for part in fields(setting.parts) if given.get(part.name) is not None
                }
                values |= {name: setting.parts(**parts)} if parts else {}
            elif given.get(name) is not None:
                values[name] = setting.load(given[name]) if setting.load else given[name]
        return cls(**values, after=after)


def settings() -> Iterator[tuple[str, PlanSetting]]:
    """Yield the name and the declaration of each setting."""
    return ((one.name, one.metadata["setting"]) for one in fields(CompileRequest) if "setting" in one.metadata)


@dataclass(frozen=True)
class RequestOption:
    """One option of the command line or key of a job file: a setting, or one part of a setting."""

    name: str
    setting: PlanSetting
    doc: str
    metavar: str
    default: Any
    """`MISSING` if it is required."""
    part_of: str | None = None
    """The setting that this is a part of."""

    def check(self, value: Any) -> Any:
        """Return a job file's value, checked; raises `UsageError`."""
        if not self.setting.parts:
            return (self.setting.data or self.setting.read)(self.name, value)
        number = read_setting_values.read_number(self.name, value)
        self.setting.parts(**{self.name: number})
        return number

    def difference(self, value: Any, plan: Plan) -> tuple[object, object] | None:
        """Return the values of a job and of a plan, in one form, if they disagree; else None."""
        said = self.setting.in_plan(plan) if self.setting.in_plan else None
        if value is None or (said is None and (self.part_of or not self.setting.in_plan)):
            return None
        sides = (value, getattr(said, self.name) if self.part_of else said)
        normal = tuple(self.setting.normal(side, plan) for side in sides)
        return (normal[0], normal[1]) if normal[0] != normal[1] else None


def entries() -> Iterator[RequestOption]:
    """Yield all entries, in the order of the settings."""
    for one in fields(CompileRequest):
        setting: PlanSetting | None = one.metadata.get("setting")
        if setting is None:
            continue
        if setting.parts:
            yield from (_part(part, one.name, setting) for part in fields(setting.parts))
        else:
            yield RequestOption(one.name, setting, setting.doc, setting.metavar, one.default)


def _part(part: Field[Any], whole: str, setting: PlanSetting) -> RequestOption:
    return RequestOption(
        part.name,
        setting,
        part.metadata["doc"],
        part.metadata["metavar"],
        part.default,
        part_of=whole,
    )
