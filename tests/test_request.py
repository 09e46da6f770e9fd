"""One request, filled from Python, from the command line and from a job file; and what it refuses."""

import inspect
import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.main import get_command

import quintsched as qs
from quintsched.cli import SECTIONS
from quintsched.cli.app import make_app
from quintsched.cli.request_options import NEEDED, option_of
from quintsched.collectives import Wire
from quintsched.ir.instruction_set import Bwd, Fwd
from quintsched.ir.plan_data import MAX_RECOMPUTE, MAX_TIED, MAX_ZERO_EVERY
from quintsched.request import CompileRequest, entries
from quintsched.request import settings as settings_of
from quintsched.runtime.launch.job_plan import plan_of
from quintsched.runtime.settings.job_file import JobConfig, ParallelConfig
from quintsched.schedules import Order, Schedule, Shape, all_schedules

BUILT_IN = tuple(schedule for schedule in all_schedules() if schedule.built_in)

SAID: dict[str, tuple[Any, Any, list[str]]] = {
    "schedule": ("zb-auto", "zb-auto", ["zb-auto"]),
    "mesh": ("dp=2,pp=2", {"dp": 2, "pp": 2}, ["dp=2,pp=2"]),
    "microbatches": (6, 6, ["6"]),
    "chunks": (1, 1, ["1"]),
    "buckets_per_stage": (2, 2, ["2"]),
    "stage_to_pp": ((1, 0), [1, 0], ["1,0"]),
    "stages": ((3, 1), [3, 1], ["3,1"]),
    "slices": (1, 1, ["1"]),
    "overlap": (False, False, ["--no-overlap"]),
    "costs": (qs.Costs(forward=2.0), "costs.json", ["costs.json"]),
    "memory_cap": (1.5, 1.5, ["1.5"]),
    "recompute": ((0, 1), [0, 1], ["0,1"]),
    "recompute_microbatches": ((0, 1, 4), "0-1,4", [";0-1,4"]),
    "offload": (8, 8, ["8"]),
    "lend": (9, 9, ["9"]),
    "tied": ({"w": (0, 1)}, {"w": [0, 1]}, ["w=0,1"]),
    "skip": ({"h": (0, 1)}, {"h": [0, 1]}, ["h=0,1"]),
    "losses": ((0, 1), [0, 1], ["0,1"]),
    "communication": ("auto", "auto", ["auto"]),
    "latency_s": (1e-3, 1e-3, ["1e-3"]),
    "bandwidth": (2e9, 2e9, ["2e9"]),
    "nodes": (2, 2, ["2"]),
    "node_latency_s": (1e-6, 1e-6, ["1e-6"]),
    "node_bandwidth": (3e11, 3e11, ["3e11"]),
    "zero": (2, 2, ["2"]),
    "zero_every": (3, 3, ["3"]),
}
"""Equal values of each entry in all three forms: Python, a job file, the command line."""

WIRE = ("latency_s", "bandwidth", "nodes", "node_latency_s", "node_bandwidth")
"""Entries that are parts of a wire."""

OTHER: dict[str, Any] = {
    **{"schedule": "1f1b", "mesh": "pp=2", "communication": "ring", "stage_to_pp": [0, 1], "stages": [1, 3]},
    **{
        "overlap": True,
        "recompute": 1,
        "recompute_microbatches": [[], [5]],
        "tied": {"v": [0, 1]},
        "skip": {"v": [0, 1]},
        "losses": [1],
    },
}
"""Other values, for entries where doubling gives no valid one."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "costs.json").write_text('{"forward": 2.0}')
    return tmp_path


def from_python(names: set[str]) -> qs.Plan:
    given = {name: SAID[name][0] for name in names}
    parts = {name: given.pop(name) for name in WIRE if name in given}
    return qs.compile(**given, wire=Wire(**parts))


def from_job(names: set[str]) -> qs.Plan:
    section = {name: SAID[name][1] for name in names}
    return plan_of(JobConfig.model_validate({"parallel": section, "train": {"batch_size": 12}}))


def from_command(names: set[str], folder: Path) -> qs.Plan:
    said = {name: SAID[name][2] for name in sorted(names)}
    words = [word for name, text in said.items() for word in ([] if text[0][:2] == "--" else [option_of(name)]) + text]
    with pytest.raises(SystemExit) as end:
        make_app(SECTIONS)(args=["compile", *words, "-o", str(folder / "out.json")])
    assert not end.value.code
    return qs.Plan.load(folder / "out.json")


@settings(deadline=None, max_examples=25)
@given(left_out=st.sets(st.sampled_from(sorted({*SAID} - {"schedule", "mesh", "microbatches"}))))
def test_all_three_fill_the_same_request(tmp_path_factory: pytest.TempPathFactory, left_out: set[str]) -> None:
    for needed, name in (("zero", "zero_every"), ("recompute", "recompute_microbatches")):
        left_out = {*left_out, name} if needed in left_out else left_out
    names = {*SAID} - left_out
    plans = [from_python(names), from_job(names), from_command(names, tmp_path_factory.mktemp("plan"))]
    texts = [plan.to_json() for plan in plans]
    assert texts[0] == texts[1] == texts[2]
    assert "stage_to_pp" in left_out or plans[0].stage_to_pp == (1, 0)


def test_every_setting_is_reachable_from_all_three_and_stated_once() -> None:
    names = [entry.name for entry in entries()]
    assert sorted(names) == sorted(SAID)
    assert len({*names}) == len(names)
    assert {entry.part_of for entry in entries()} == {None, "wire"}
    assert {*inspect.signature(qs.compile).parameters} == {one.name for one in fields(CompileRequest)}
    assert {name for name, _ in settings_of()} == {one.name for one in fields(CompileRequest)} - {"after"}
    assert {*names} <= {*ParallelConfig.model_fields}
    assert not {*names} & {*ParallelConfig.__annotations__}
    options = {option.name: option for option in get_command(make_app(SECTIONS)).commands["compile"].params}
    assert {*names} <= {*options}
    for entry in entries():
        assert (entry.name in NEEDED) == (entry.default is MISSING)
        said = options[entry.name].help, ParallelConfig.model_fields[entry.name].description
        assert {text.lower() for text in said} == {entry.doc.lower()}
    words = " ".join((qs.compile.__doc__ or "").split())
    assert all(f"{name}: {setting.doc}" in words for name, setting in settings_of())


def test_every_default_is_that_of_the_request() -> None:
    for name, parameter in inspect.signature(qs.compile).parameters.items():
        of_field = next(one.default for one in fields(CompileRequest) if one.name == name)
        assert parameter.default is (inspect.Parameter.empty if of_field is MISSING else of_field)
    for entry in entries():
        if entry.default is not MISSING:
            assert getattr(ParallelConfig(), entry.name) == entry.default


def test_every_setting_but_costs_is_compared_with_a_plan() -> None:
    assert [name for name, setting in settings_of() if setting.in_plan is None] == ["costs"]


@pytest.mark.parametrize("name", sorted({*SAID} - {"costs"}))
def test_a_plan_beside_a_job_agrees_with_what_it_was_compiled_from_and_with_nothing_else(folder, name) -> None:
    path = folder / "plan.json"
    plan = from_python({*SAID})
    plan.save(path)
    section = {entry: said[1] for entry, said in SAID.items()}
    assert plan_of(JobConfig.model_validate({"parallel": section, "train": {"batch_size": 12}}), path) == plan
    other = OTHER[name] if name in OTHER else 2 * SAID[name][1]
    job = JobConfig.model_validate({"parallel": {name: other}, "train": {"batch_size": 12}})
    with pytest.raises(qs.MisfitError, match=f"{name} is .* in the job file but .* in the plan"):
        plan_of(job, path)


NUMBERS = ("microbatches", "chunks", "slices", "buckets_per_stage", "recompute", "zero", "zero_every")


@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_whole_number_is_refused(name: str) -> None:
    for value in (True, 1.0, 2.5, "2", None, [None], [True], np.float64(1), np.bool_(True), float("nan")):
        if (name, value) != ("chunks", None):  # as many as the schedule takes at least
            with pytest.raises(qs.UsageError, match=f"{name} is "):
                qs.compile("1f1b", **{"mesh": "dp=2,pp=2", "microbatches": 4, name: value})


@pytest.mark.parametrize("kind", [np.int64, np.uint8])
def test_whole_numbers_of_numpy_are_taken_and_written(kind: type) -> None:
    mesh = {"dp": kind(2), "pp": kind(2)}
    numbers = {"microbatches": kind(4), "chunks": kind(2), "slices": kind(1), "buckets_per_stage": kind(2)}
    stages = {"stage_to_pp": np.array([0, 1, 0, 1], kind), "recompute": np.array([0, 1, 0, 1], kind)}
    tied = {"w": np.array([0, 3], kind)}
    plan = qs.compile("interleaved-1f1b", mesh=mesh, **numbers, **stages, tied=tied, zero=kind(2))
    sizes = {"mesh": "dp=2,pp=2", "microbatches": 4, "chunks": 2, "buckets_per_stage": 2, "recompute": [0, 1, 0, 1]}
    plain = qs.compile("interleaved-1f1b", **sizes, tied={"w": [0, 3]}, zero=2)
    assert plan.to_json() == plain.to_json()
    assert qs.compile("1f1b", mesh=qs.Mesh(pp=kind(2)), microbatches=2).mesh.axes == (("pp", 2),)
    assert type(qs.Mesh(pp=kind(2)).pp) is int


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"mesh": 3}, "a mesh is text"),
    ({"mesh": {"pp": "2"}}, "axis pp has size '2'"),
    ({"mesh": {"pp": 2.0}}, "axis pp has size 2.0"),
    ({"schedule": None}, "schedule is None; give the name"),
    ({"costs": {"forward": 1}}, "costs is .*give a quintsched.Costs"),
    ({"schedule": "zb-auto", "memory_cap": float("inf")}, "memory_cap is inf; give a finite number"),
    ({"schedule": "zb-auto", "memory_cap": "4"}, "memory_cap is '4'"),
    ({"offload": "4"}, "offload is .4.; give a finite number"),
    ({"tied": ["w"]}, "tied is .*give the stages"),
    ({"tied": {"w": "01"}}, "tied 'w' is '01'"),
    ({"skip": ["h"]}, "skip is .*give the stage that makes each"),
    ({"skip": {3: (0, 1)}}, "skips: 3 is not a name"),
    ({"losses": 1}, "losses is 1; give whole numbers"),
    ({"overlap": True}, "1f1b: overlap: it has no forward and backward side by side that do not wait for each other"),
    ({"overlap": 1}, "overlap.*give true or false"),
    ({"communication": None}, "unknown communication None"),
    ({"wire": 3}, "wire is 3"),
    ({"recompute": "11"}, "recompute is '11'"),
    ({"recompute": -1}, "recompute is -1; give a whole number from 0 to 65536"),
    ({"recompute": MAX_RECOMPUTE + 1}, "recompute is 65537"),
    ({"recompute": (1,)}, "recompute names 1 stage, but there are 2"),
    ({"schedule": "inference", "recompute": 1}, "the plan only computes forward; there is nothing"),
    ({"recompute": 1, "recompute_microbatches": "0-a"}, "recompute_microbatches: cannot read '0-a'; give microbatches"),
    ({"recompute": 1, "recompute_microbatches": "1;2;3"}, "is given for 3 stages, but there are 2"),
    ({"recompute": 1, "recompute_microbatches": [[1], []]}, "stage 1 recomputes, but names no microbatch; set its"),
    ({"recompute": [1, 0], "recompute_microbatches": "1;2"}, "stage 1 names microbatches, but keeps the activations"),
    ({"recompute": 1, "recompute_microbatches": [2, 1]}, "stage 0 must name each microbatch once and in rising order"),
    (
        {"recompute": 1, "recompute_microbatches": "3-4"},
        "recompute_microbatches: microbatch 4 is out of range: the plan has no",
    ),
    ({"tied": {"w": (1, 0)}}, "in rising order"),
    ({"tied": {"w": (0, True)}}, "tied 'w' is True; give a whole number"),
    ({"tied": {"stage": (0, 1)}}, "'stage' is not a name of 1 to 200 printable letters other than 'stage'"),
    ({"tied": {f"w{k}": (0, 1) for k in range(MAX_TIED + 1)}}, "1025 names are more than 1024"),
    ({"schedule": "dualpipe", "tied": {"w": (0, 1)}}, "dualpipe: tied: stages have twins here"),
    ({"mesh": "pp=2,tp=2", "zero": 2}, r"ZeRO-2 shares out over replicas; the mesh pp=2,tp=2 has none"),
    ({"mesh": "dp=1,pp=2", "zero": 1}, r"has none \(no dp, cp or ep above 1\)"),
    ({"mesh": "dp=2", "zero": 4}, r"zero is 4; give 0 \(nothing is shared out\), 1"),
    ({"mesh": "dp=2", "zero": 2, "zero_every": 0}, "zero_every is 0; give a whole number of microbatches from 1"),
    ({"mesh": "dp=2", "zero": 3, "zero_every": MAX_ZERO_EVERY + 1}, "zero_every is 16777217"),
    ({"mesh": "dp=2", "zero_every": 2, "zero": 1}, "only ZeRO-2 and 3 reduce gradients before the last microbatch"),
    ({"schedule": "inference", "mesh": "dp=2", "zero": 2}, "only computes forward; there are no gradients"),
]


def test_what_is_no_setting_is_refused_in_words() -> None:
    for setting, words in SETTINGS:
        with pytest.raises(qs.UsageError, match=words):
            qs.compile(**{"schedule": "1f1b", "mesh": "pp=2", "microbatches": 4, **setting})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", BUILT_IN, ids=lambda schedule: schedule.name)
@settings(deadline=None, max_examples=60)
@given(
    where=st.lists(st.integers(-2, 4) | st.integers(0, 1).map(np.int64), max_size=6)
    | st.permutations([0, 1, 1, 0])
    | st.sampled_from([None, "01", (0, None), ("0", 1), (0.0, 1.0), (True, False), 5, {0: 1}, b"\0\1", (10**30, 0)])
)
def test_any_placement_is_refused_or_sound(schedule: Schedule, where: Any) -> None:
    try:
        plan = qs.compile(schedule, mesh="pp=2", microbatches=4, stage_to_pp=where)
    except qs.UsageError as refusal:
        message = str(refusal)
    else:
        message = ""
        assert plan.check(profile="blocking").sound
        assert qs.Plan.from_json(plan.to_json()) == plan
    assert not message or message.startswith(("stage_to_pp is ", f"{schedule.name}: "))
    assert "\n" not in message


def own(order: Any, **fields: Any) -> Schedule:
    return Schedule(name="own", order=order, summary="", bubble="", memory="", **fields)


def good(rank: int, shape: Shape) -> Order:
    for microbatch in range(shape.microbatches):
        yield Fwd(rank, microbatch)
        yield Bwd(rank, microbatch)


def test_a_placement_of_ones_own_that_gives_no_ranks_is_unsound() -> None:
    for placed in (None, 3, "01", [0, None], [0, 1.0], [True, False], [0, 2], [-1, 0], [], {}, [10**30, 0]):
        with pytest.raises(qs.UnsoundError, match="own: for pp=2 and 1 chunk its placement gives "):
            qs.compile(own(good, placement=lambda pp, chunks, placed=placed: placed), mesh="pp=2", microbatches=2)
    plan = qs.compile(own(good, placement=lambda pp, chunks: np.arange(pp)), mesh="pp=2", microbatches=2)
    assert json.loads(plan.to_json())["stage_to_pp"] == [0, 1]


@pytest.mark.parametrize("second", [(Fwd, Fwd, Bwd, Bwd), (Fwd, Bwd), (Fwd, Bwd, Fwd, Bwd, Bwd)])
def test_a_schedule_that_gives_another_order_each_time_is_unsound(second: tuple[type, ...]) -> None:
    asked = []

    def fickle(rank: int, shape: Shape) -> Order:
        asked.append(rank)
        kinds = second if len(asked) > 2 and rank else (Fwd, Bwd, Fwd, Bwd)
        count = {Fwd: 0, Bwd: 0}
        for kind in kinds:
            yield kind(rank, count[kind])
            count[kind] += 1

    with pytest.raises(qs.UnsoundError, match=r"own: asked twice for rank 1, the schedule yields .* and then "):
        qs.compile(own(fickle), mesh="pp=2", microbatches=2)
