"""Gatherings of weights in PyTorch's schedule files, where replicas share the weights out."""

import pytest

import quintsched as qs
from quintsched import torch_csv
from quintsched.ir.instruction_set import FreeParams, GatherParams
from quintsched.verify.equivalence import equivalence
from tests.planner.formats.torch_files import published, refusal

SHARDED = ("titan_example_interleaved_2rank_4mb_comms", "titan_interleaved1f1b_8ranks_16mb_comms")


def weights(plan: qs.Plan) -> list[list[tuple[str, int]]]:
    """Return the gathers and frees of weights of each rank, in order."""
    return [[(i.op, i.stage) for i in p if isinstance(i, GatherParams | FreeParams)] for p in plan.programs]


@pytest.mark.parametrize("name", SHARDED)
def test_published_gatherings_of_weights_are_kept_where_replicas_share_them_out(name):
    text = published(name)
    lines = text.splitlines()
    imported = torch_csv.loads(text, mesh=f"dp=2,pp={len(lines)}", zero=3)
    for line, found in zip(lines, weights(imported.plan), strict=True):
        said = [cell for cell in line.split(",") if "SHARD" in cell]
        words = [f"{stage}{'UNSHARD' if op == 'GatherParams' else 'RESHARD'}" for op, stage in found]
        assert [word for word in words if word in said] == said
        assert len(words) == 2 * sum("UNSHARD" in cell for cell in said)
    assert imported.notes == (
        f"added {len(lines)} RESHARD, after the last use of weights that the file leaves to FSDP to free",
    )
    assert imported.verdict.sound
    assert equivalence(imported.plan).holds
    written = torch_csv.dumps(imported.plan)
    again = torch_csv.loads(written, mesh=imported.plan.mesh, zero=3)
    assert again.plan.programs == imported.plan.programs
    assert again.notes == ()
    assert torch_csv.dumps(again.plan) == written


@pytest.mark.parametrize("name", SHARDED)
def test_without_shared_weights_gatherings_are_left_out(name):
    text = published(name)
    alone = torch_csv.loads(text)
    assert not any(weights(alone.plan))
    assert alone.notes[0].endswith("in this plan a stage keeps its full weights")
    replicas = torch_csv.loads(text, mesh=f"dp=2,pp={alone.plan.mesh.pp}", zero=1)
    assert not any(weights(replicas.plan))
    assert replicas.notes[0].endswith("in this plan a stage keeps its full weights; zero 3 keeps them")


def test_what_torch_cannot_share_out():
    for zero, words in (
        (1, r"ZeRO-1.*weights as well \(3\)"),
        (2, "ZeRO-2"),
        (3, "every 1 microbatch .* zero_every 4"),
    ):
        with pytest.raises(qs.UsageError, match=words):
            torch_csv.dumps(qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=4, zero=zero))


def test_weights_that_are_used_before_they_are_gathered_are_refused():
    text = published(SHARDED[0]).replace("0UNSHARD,", "", 1)
    message = refusal(text, mesh="dp=2,pp=2", zero=3)
    assert "data flow: rank 0 instruction 1, Fwd(stage=0, microbatch=0)" in message
    assert "in the file:\n  line 1, cell 2 (rank 0, step 1): 0F0" in message
    with pytest.raises(qs.UsageError, match="ZeRO-3 shares out over replicas; the mesh pp=2 has none"):
        torch_csv.loads(text, zero=3)
    with pytest.raises(qs.UsageError, match="zero is 4"):
        torch_csv.loads(text, zero=4)
