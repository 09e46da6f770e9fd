"""Completeness: a new instruction, schedule or name fails here if a part is missing; the mesh, its groups and peers."""

import inspect
import json
import re
from dataclasses import fields, replace
from importlib import import_module

import pytest
from hypothesis import given
from hypothesis import strategies as st

import quintsched as qs
from quintsched.formats import plan_json as planfile
from quintsched.ir import dataflow_analysis, instruction_inputs_and_outputs, instruction_set, instruction_values
from quintsched.ir.instruction_set import ALL, WHOLE_MESH, Instruction, Message, short
from quintsched.ir.layout import Layout, Route
from quintsched.ir.mesh import AXES
from quintsched.schedules import Schedule, all_schedules, find_schedule
from quintsched.verify import symbolic_run
from tests.helpers.refusals import require_refusals

ROUTE, SKIPS = Route((0, 1, 2), (0, 1)), (("stage", (0, 1, 2)),)
LAYOUT = Layout((0, 1, 0), (ROUTE,), trains=True, mesh=qs.Mesh(dp=2), buckets_per_stage=1, skips=SKIPS)
VALUES = {"int": 1, "str": "stage", "tuple[int, ...]": (0,), "tuple[int, int]": (0, 1), "tuple[str, ...]": ("dp",)}


def test_every_instruction_is_listed():
    found = {one for _, one in inspect.getmembers(instruction_set, inspect.isclass) if issubclass(one, Instruction)}
    assert set(ALL) == {one for one in found if not any(other is not one and issubclass(other, one) for other in found)}
    assert len(ALL) == len(set(ALL))


@pytest.mark.parametrize("kind", ALL)
class TestEveryInstruction:
    def example(self, kind: type[Instruction]) -> Instruction:
        return kind(**{field.name: VALUES[str(field.type)] for field in fields(kind)})

    def test_it_has_a_data_flow_rule(self, kind):
        examples = [self.example(kind)]
        if kind in instruction_set.SKIP_MESSAGES:  # only between certain ranks, where others go through one stage alike
            examples = [replace(examples[0], stage=stage, peer=peer) for stage in range(3) for peer in range(2)]
        found = [dataflow_analysis.flow(example, LAYOUT, 0) for example in examples]
        assert any(flow.consumes or flow.reads or flow.produces for flow in found)

    def test_it_has_letters(self, kind):
        assert kind.letters
        assert kind.letters in short(self.example(kind))
        assert len({other.letters for other in ALL}) == len(ALL)

    def test_it_has_a_codec(self, kind):
        example = self.example(kind)
        assert planfile._decode(json.loads(json.dumps(planfile.encode(example)))) == example

    def test_it_has_a_step_of_the_symbolic_proof(self, kind):
        assert kind in symbolic_run._HANDLERS

    def test_its_time_is_made_of_costs(self, kind):
        assert set(kind.costs) <= set(qs.Costs.model_fields)
        assert kind.costs or not kind.computes
        assert set(kind.exchanges) <= set(qs.Costs.model_fields)
        assert kind.computes or not kind.exchanges

    def test_it_has_a_colour_unless_it_is_an_arrow(self, kind):
        looks = import_module("quintsched.viz.instruction_colours")
        shown = {type(side) for side in self.example(kind).sides}  # of several, each has its own
        assert (shown <= set(looks.LOOKS)) != issubclass(kind, instruction_set.Message)

    def test_a_transport_knows_who_takes_part(self, kind):
        """A computation runs alone; all else is a message, a collective, or said to be of the rank alone."""
        with_others = issubclass(kind, instruction_set.Message) or kind.whole_mesh or kind.among_replicas
        own = (instruction_set.HostCopy, instruction_set.FreeParams, instruction_set.OptStep)
        alone = kind.computes or issubclass(kind, own)
        assert with_others + alone + (kind is instruction_set.SyncTied) == 1


def test_no_table_knows_more():
    assert set(planfile.CODECS) == {kind.__name__ for kind in ALL}
    assert set(instruction_inputs_and_outputs.RULES) == set(ALL) - {
        instruction_set.Overlap
    }  # its rule is that of its sides
    assert set(instruction_values.WORDS) == set(instruction_values.ValueKind)
    assert set(WHOLE_MESH) < set(ALL)


def test_public_names_are_there_and_stay_what_they_are():
    for name in qs.__all__:
        assert not inspect.ismodule(getattr(qs, name)), f"a module hides quintsched.{name}"
        assert getattr(qs, name) is getattr(qs, name)
    assert dir(qs) == sorted(qs.__all__)
    with pytest.raises(AttributeError, match="no attribute 'compiel'"):
        qs.compiel  # noqa: B018


@pytest.mark.parametrize("found", all_schedules(), ids=lambda found: found.name)
def test_every_schedule_says_what_to_know(found: Schedule):
    assert found.summary
    assert found.bubble
    assert found.memory
    assert found.order.__doc__
    assert all(find_schedule(name) is found for name in (found.name, *found.aliases))


@st.composite
def meshes(draw: st.DrawFn) -> qs.Mesh:
    axes = draw(st.permutations(AXES))[: draw(st.integers(0, 5))]
    return qs.Mesh(**{axis: draw(st.integers(1, 3)) for axis in axes})


@given(mesh=meshes())
def test_rank_and_coordinates_are_one_to_one(mesh):
    seen = [tuple(mesh.coordinates(rank).items()) for rank in range(mesh.size)]
    assert len(set(seen)) == mesh.size
    assert seen == sorted(seen), "row-major: the last axis runs fastest"
    for rank, where in enumerate(seen):
        assert mesh.rank(dict(where)) == rank
        assert [name for name, _ in where] == [name for name, _ in mesh.axes]
        assert all(0 <= at < mesh.axis_size(name) for name, at in where)


@given(mesh=meshes(), data=st.data())
def test_groups_are_disjoint_and_cover_the_mesh(mesh, data):
    axes = data.draw(st.lists(st.sampled_from(AXES), unique=True))
    groups = mesh.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    assert groups == sorted(groups)
    for group in groups:
        assert list(group) == sorted(group)
        outside = {tuple((k, v) for k, v in mesh.coordinates(rank).items() if k not in axes) for rank in group}
        assert len(outside) == 1, "the members differ along the axes only"


@given(mesh=meshes())
def test_text_round_trip(mesh):
    if mesh.axes:
        assert qs.Mesh.parse(str(mesh)) == mesh
    assert qs.Mesh.parse(dict(mesh.axes)) == mesh
    assert {"dp", "cp", "ep"}.issuperset(mesh.replica_axes)
    assert all(mesh.axis_size(axis) > 1 for axis in mesh.replica_axes)


def test_what_is_no_mesh():
    for text, message in (
        ("ddp=2", "unknown axis 'ddp'; did you mean 'dp'"),
        ("dp=0", "axis dp has size 0"),
        *((text, f"cannot read '{text}'") for text in ("dp=-1", "dp=x", "dp", "dp=²")),
        ("dp=2,dp=2", "axis dp is given twice"),
        ("dp=2 pp=2", "cannot read"),
        ("dp=" + "9" * 5000, "cannot read"),
        ("dp=16777217", "more ranks than"),
        ("dp=16777216,pp=2", "more ranks than"),
    ):
        require_refusals((f"^mesh: .*{re.escape(message)}", lambda text=text: qs.Mesh.parse(text)))
    for size in (0, -1, True, 2.0, "2", 10**5000):
        require_refusals((r"^mesh: ", lambda size=size: qs.Mesh(dp=size)))
    for rank in (-1, 8):
        require_refusals(("its ranks are 0 to 7", lambda rank=rank: qs.Mesh(dp=2, pp=2, tp=2).coordinates(rank)))


@given(data=st.data(), pp=st.integers(1, 3))
def test_a_ranks_program_has_global_peers(data, pp):
    axes = data.draw(st.permutations(["dp", "pp", "tp"]))
    mesh = qs.Mesh(**{axis: pp if axis == "pp" else 2 for axis in axes})
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2)
    for rank in range(mesh.size):
        where = mesh.coordinates(rank)
        shared = plan.programs[where["pp"]]
        for own, common in zip(plan.program(rank), shared, strict=True):
            if not isinstance(common, Message):
                assert own == common
                continue
            peer = mesh.coordinates(own.peer)
            assert peer == where | {"pp": common.peer}
            assert (own.stage, own.microbatch) == (common.stage, common.microbatch)
