"""torch.distributed.pipelining itself: it runs what we export, and we prove what its schedule classes make.

Of its pipelines under its profiler, the plan that `whatif` rebuilds is that of its schedule.
"""

import csv
import inspect
import json
import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.profiler import ProfilerActivity, profile

import quintsched as qs
from quintsched import torch_csv
from quintsched.ir.instruction_set import Instruction, Overlap
from quintsched.runtime.interpreter.program_dataflow import ProgramFlow
from quintsched.runtime.interpreter.send_and_receive import plan_receives
from quintsched.simulation.message_slots import MessageRule
from quintsched.solve.recorded import load_run, what_if

from ..ranks import run_ranks

WORLD, WIDTH, SAMPLES = 4, 8, 24
LOOPED = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")

WAITS = hasattr(schedules._ComputationType, "WAIT_SEND_F")


def bare_stages(numbers: Iterable[int], num_stages: int, pp: int) -> list[Any]:
    """Return stages of rank 0 for one of torch's schedules that is made without processes."""
    told = {"num_stages": num_stages, "group_size": pp, "group_rank": 0, "submod": None}
    return [SimpleNamespace(stage_index=number, **told) for number in numbers]


def made_by_torch(name: str, pp: int, microbatches: int, chunks: int = 1, **options: Any) -> Any:
    """Return one of torch's schedules, made without processes."""
    stages = bare_stages(range(0, pp * chunks, pp), pp * chunks, pp)
    make = schedules.get_schedule_class(name)
    return make(stages if name in LOOPED + V_SHAPED else stages[0], microbatches, loss_fn=lambda *_: None, **options)


def dump(made: Any, path: Path, form: str) -> None:
    """Let torch write a file of one of its schedules."""
    if "format" not in inspect.signature(made._dump_csv).parameters:
        pytest.skip(f"torch {torch.__version__} writes one form of file, which it does not name")
    made._dump_csv(path, form)


def written(plan: qs.Plan, form: str) -> str:
    """Return a file of ours as this torch wants it: since 2.15 with the waits for what has been begun."""
    return torch_csv.dumps(plan, compute_only=form == "compute_only", waits=WAITS and form == "compute_comms")


def as_file(order: dict[int, list[Any]], path: Path) -> str:
    """Write the rows as torch's `_dump_csv` does."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(order[rank] for rank in sorted(order))
    return path.read_text()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "pp", "microbatches"),
    [
        (name, pp, microbatches)
        for name in LOOPED + V_SHAPED
        for pp, microbatches in [(1, 1), (2, 2), (2, 4), (3, 6), (4, 8), (4, 12), (8, 16)]
        if name != "DualPipeV" or microbatches >= 2 * pp  # it wants as many microbatches as stages
    ],
)
def test_torchs_schedules_of_several_stages_are_sound(name, pp, microbatches, tmp_path):
    for chunks in (2,) if name in V_SHAPED else (1, 2, 3):
        made = made_by_torch(name, pp, microbatches, chunks)
        for form in ("compute_only", "compute_comms"):
            dump(made, tmp_path / "out.csv", form)
            plan = torch_csv.loads((tmp_path / "out.csv").read_text(), profile="blocking", name=name).plan
            assert plan.stage_to_pp == tuple(made.stage_index_to_group_rank[s] for s in range(pp * chunks))
            assert plan.schedule.microbatches == microbatches


def overlapping_plans() -> list[qs.Plan]:
    return [
        qs.compile(name, mesh=f"pp={pp}", microbatches=microbatches, overlap=True)
        for name in ("dualpipe-v", "interleaved-1f1b")
        for pp, microbatches in ((1, 3), (4, 8), (3, 9))
    ]


@pytest.mark.parametrize("plan", overlapping_plans(), ids=lambda plan: plan.title)
def test_torch_reads_the_pairs_that_we_write(plan, tmp_path):
    """Each cell as torch's action, and each file as torch's runtime, which lowers the bare order itself."""
    for form in ("compute_only", "compute_comms"):
        text = written(plan, form)
        (tmp_path / "ours.csv").write_text(text)
        rows = [[schedules._Action.from_str(cell) for cell in line.split(",")] for line in text.splitlines()]
        pairs = [action for row in rows for action in row if action.computation_type is schedules.OVERLAP_F_B]
        assert len(pairs) == len(plan.columns.rows_where(Overlap)) > 0
        assert "\n".join(",".join(map(repr, row)) for row in rows) + "\n" == text
        runtime = read_by_torch(plan, tmp_path / "ours.csv", form)
        assert runtime.stage_index_to_group_rank == dict(enumerate(plan.stage_to_pp))
        dump(runtime, tmp_path / "theirs.csv", "compute_comms")
        theirs = (tmp_path / "theirs.csv").read_text()
        if "OVERLAP" not in theirs:
            pytest.skip(f"torch {torch.__version__} writes the parts of a pair one by one")
        back = torch_csv.loads(theirs).plan
        assert [computed(program) for program in back.programs] == [computed(program) for program in plan.programs]


def computed(program: Sequence[Instruction]) -> list[Instruction]:
    return [i for i in program if i.computes]


def read_by_torch(plan: qs.Plan, path: Path, form: str) -> Any:
    """Return torch's runtime with a file loaded, of rank 0, made without processes."""
    mine = bare_stages(plan.layout.stages_of(0), len(plan.stage_to_pp), plan.mesh.pp)
    runtime = schedules._PipelineScheduleRuntime(mine, plan.schedule.microbatches, loss_fn=lambda *_: None)
    runtime._load_csv(str(path), format=form)
    return runtime


@pytest.mark.parametrize(("pp", "microbatches"), [(1, 1), (2, 5), (8, 16)])
def test_torchs_gpipe_is_ours_and_its_1f1b_table_is_wrong_on_its_last_rank_alone(pp, microbatches, tmp_path):
    text = as_file(made_by_torch("GPipe", pp, microbatches).pipeline_order, tmp_path / "out.csv")
    plan = torch_csv.loads(text, mesh=f"dp=2,pp={pp}").plan
    assert plan.programs == qs.compile("gpipe", mesh=f"dp=2,pp={pp}", microbatches=microbatches).programs
    order, forward = made_by_torch("1F1B", pp, microbatches).pipeline_order, schedules.FORWARD
    forwards = [a.microbatch_index for a in order[pp - 1] if a and a.computation_type == forward]
    if forwards != [*range(microbatches)]:  # as up to 2.13 at least
        assert forwards == [m + 1 for m in range(microbatches)]
        with pytest.raises(qs.InputError, match=r"comes without|nothing of microbatch 0"):
            torch_csv.loads(as_file(order, tmp_path / "out.csv"))
        order[pp - 1] = [
            a._replace(microbatch_index=a.microbatch_index - 1) if a and a.computation_type == forward else a
            for a in order[pp - 1]
        ]
    plan = torch_csv.loads(as_file(order, tmp_path / "out.csv")).plan
    assert plan.programs == qs.compile("1f1b", mesh=f"pp={pp}", microbatches=microbatches).programs


PER_POOL = {
    "ZBVZeroBubble": (2, 8, (5, 14, 16, 8), (3, 11, 12, 7)),
    "Interleaved1F1B": (4, 16, (22, 30, 28, 32), (14, 20, 17, 16)),
}
"""Receive slots per rank at pp=4, as measured in PyTorch's pull request 196465, which has a pool for each stage and
direction, and with one pool for a rank: (chunks, microbatches, slots in its pools, slots in one)."""


@pytest.mark.parametrize("name", PER_POOL)
def test_torchs_orders_need_the_receive_slots_that_are_published(name, tmp_path):
    chunks, microbatches, in_pools, in_one = PER_POOL[name]
    dump(made_by_torch(name, 4, microbatches, chunks), tmp_path / "out.csv", "compute_comms")
    plan = torch_csv.loads((tmp_path / "out.csv").read_text(), profile="tagged", name=name).plan

    def of_pools(rank: int) -> int:
        flows = ProgramFlow(plan, rank)
        postings = plan_receives(flows, MessageRule(), lambda value: [(value.kind, value.stage)])
        return len({(p.value.kind, p.value.stage, p.slots) for p in postings})

    assert tuple(map(of_pools, range(4))) == in_pools
    assert plan.check().slots.receive == in_one


def stage_module(stage: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()


def whole_batch() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(100)
    inputs, targets = torch.randn(2, SAMPLES, WIDTH, generator=random, dtype=torch.float64)
    return inputs, targets


def train_plainly(num_stages: int) -> list[nn.Module]:
    """Return all stages with the gradients of one step in one process, without microbatches."""
    stages = [stage_module(stage) for stage in range(num_stages)]
    inputs, targets = whole_batch()
    nn.functional.mse_loss(nn.Sequential(*stages)(inputs), targets).backward()
    return stages


def train_by_torch(case: dict[str, Any], rank: int, folder: Path) -> dict[int, nn.Module]:
    """Take one step of torch's runtime with the case's file; return this rank's stages with their gradients."""
    home, microbatches = case["stage_to_pp"], case["microbatches"]
    modules = {stage: stage_module(stage) for stage, pp in enumerate(home) if pp == rank}
    given = torch.zeros(SAMPLES // microbatches, WIDTH, dtype=torch.float64)
    passed_on = given.clone().requires_grad_()
    args = {stage: {"input_args": passed_on if stage else given, "output_args": passed_on} for stage in modules}
    device = torch.device("cpu")
    stages = [PipelineStage(module, stage, len(home), device, **args[stage]) for stage, module in modules.items()]
    runtime = schedules._PipelineScheduleRuntime(stages, microbatches, loss_fn=nn.functional.mse_loss)
    runtime._load_csv(str(folder / case["file"]), format=case["format"])
    inputs, targets = whole_batch()
    runtime.step(*([inputs] if 0 in modules else []), target=targets if len(home) - 1 in modules else None)
    return modules


def run_rank(folder: Path) -> None:
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    worst, rank = dict[str, float](), dist.get_rank()
    for case in json.loads((folder / "cases.json").read_text()):
        expected = train_plainly(len(case["stage_to_pp"]))
        found = train_by_torch(case, rank, folder)
        pairs = [
            (mine.grad, theirs.grad)
            for stage, module in found.items()
            for mine, theirs in zip(module.parameters(), expected[stage].parameters(), strict=True)
        ]
        worst[case["name"]] = max(float((mine - theirs).abs().max() / theirs.abs().max()) for mine, theirs in pairs)
        (folder / f"{rank}.json").write_text(json.dumps(worst))
    dist.barrier()
    dist.destroy_process_group()


UNEVEN = "0F0,1F0,0F1,1F1,1B0,0B0,1B1,0B1\n2F0,2F1,2B0,2B1\n3F0,3F1,5F0,5B0,5F1,5B1,3B0,3B1\n4F0,4F1,4B0,4B1\n"


def expressible() -> list[tuple[str, qs.Plan]]:
    """Every schedule of ours that torch can express, at a size or two, and a placement that nobody would plan."""
    found = [
        (schedule.name, qs.compile(schedule, mesh=f"pp={WORLD}", microbatches=microbatches))
        for schedule in qs.all_schedules()
        if schedule.mode == "train" and not schedule.bidirectional
        for microbatches in (8, 12)
    ]
    overlapping = [(f"{plan.title} with overlap", plan) for plan in overlapping_plans() if plan.mesh.pp == WORLD]
    return [*found, *overlapping, ("uneven", torch_csv.loads(UNEVEN).plan)]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(240)
def test_torchs_runtime_trains_our_schedules_to_the_gradients_of_one_process(tmp_path):
    cases = []
    for name, plan in expressible():
        for form in ("compute_only", "compute_comms"):
            case = {"name": f"{name}, {plan.schedule.microbatches} microbatches, {form}", "file": f"{len(cases)}.csv"}
            (tmp_path / case["file"]).write_text(written(plan, form))
            shape = {"stage_to_pp": plan.stage_to_pp, "microbatches": plan.schedule.microbatches}
            cases.append(case | shape | {"format": form})
    control = cases[1] | {"name": "without REDUCE_GRAD", "file": "control.csv"}
    text = (tmp_path / cases[1]["file"]).read_text()
    (tmp_path / "control.csv").write_text(re.sub(r",\d+(WAIT_)?REDUCE_GRAD", "", text))
    (tmp_path / "cases.json").write_text(json.dumps([*cases, control]))
    codes = run_ranks(run_rank, WORLD, tmp_path, timeout_s=150)
    told = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("[0-9].json"))]
    assert codes == [0] * WORLD, f"after {told}"
    for rank, worst in enumerate(told):
        assert set(worst) == {case["name"] for case in [*cases, control]}
        assert worst.pop("without REDUCE_GRAD") > 1, "nobody divides by the number of microbatches"
        assert max(worst.values()) < 1e-12, (rank, worst)


MICROBATCHES, STEPS = 4, 2
PROFILED = {"Interleaved1F1B": ((0, 2), (1, 3)), "ZBVZeroBubble": ((0, 3), (1, 2))}
"""Torch's schedules, with the stages of each rank."""


def train_profiled(name: str, rank: int, folder: Path) -> None:
    """Take steps under the profiler; write the trace, and, on rank 0, torch's file of its schedule."""
    folder.mkdir(exist_ok=True)
    mine, last = PROFILED[name][rank], 3
    made = [
        PipelineStage(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), stage, 4, torch.device("cpu"))
        for stage in mine
    ]
    schedule = schedules.get_schedule_class(name)(made, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    inputs = torch.randn(2 * MICROBATCHES, WIDTH)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(STEPS):
            schedule.step(*([inputs] if 0 in mine else []), target=inputs if last in mine else None)
    profiled.export_chrome_trace(str(folder / f"trace{rank}.json"))
    if rank == 0:
        schedule._dump_csv(str(folder / "schedule.csv"))


def run_profiled(folder: Path) -> None:
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    for name in PROFILED:
        train_profiled(name, dist.get_rank(), folder / name)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.processes
def test_plans_are_rebuilt_exactly_from_profiles(tmp_path: Path) -> None:
    assert run_ranks(run_profiled, 2, tmp_path, timeout_s=150) == [0] * 2
    for name in PROFILED:
        run = load_run(tmp_path / name)
        theirs = torch_csv.loads((tmp_path / name / "schedule.csv").read_text(), mesh=qs.Mesh(pp=2), name="recorded")
        assert run.source == "torch.profiler"
        assert run.plan.to_json() == theirs.plan.to_json()
        assert len(run.steps) == STEPS
        found = what_if(run, effort=1, seconds=1)
        assert found.replayed["all"] == pytest.approx(found.step.makespan, rel=0.01)
        assert found.replayed["computations"] <= found.step.makespan
