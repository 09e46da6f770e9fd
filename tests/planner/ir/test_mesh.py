"""The mesh: ranks and coordinates, groups, and global peers."""

import re

from hypothesis import given
from hypothesis import strategies as st

import quintsched as qs
from quintsched.ir.instruction_set import Message
from quintsched.ir.mesh import AXES
from tests.helpers.refusals import require_refusals


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
