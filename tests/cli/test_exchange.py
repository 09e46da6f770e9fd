"""`quintsched export` and `quintsched import`."""

import json
import re
from pathlib import Path

import quintsched as qs

PUBLISHED = Path(__file__).parents[1] / "data" / "torch_csv"
EXAMPLE = PUBLISHED / "titan_example_interleaved_2rank_4mb_comms.csv"


def test_there_and_back(cli, plan_file, tmp_path):
    assert cli("export", plan_file, "--to", "torch-csv", "-o", "out.csv").out == (
        "out.csv: 1f1b on dp=2,pp=2,tp=2, 4 microbatches\n"
    )
    done = cli("import", "out.csv", "--mesh", "dp=2,pp=2,tp=2", "--profile", "blocking", "-o", "back.json")
    assert done.code == 0
    assert done.out.startswith("back.json: out on dp=2,pp=2,tp=2, 4 microbatches\nsound: ")
    assert done.err == ""
    assert qs.Plan.load("back.json").programs == qs.Plan.load(plan_file).programs
    assert cli("check", "back.json", "--profile", "blocking").code == 0


def test_an_unsound_file_exits_1_with_the_counter_example(cli, refused, tmp_path):
    message = refused(1, "import", EXAMPLE, "--profile", "pair-stream", "-o", "plan.json")
    assert message.startswith(f"error: {EXAMPLE}: not sound: ")
    assert re.search(r"rank 1: \d+ .* must end before \d+ .* can begin", message)
    assert re.search(r"in the file:\n  line \d, cell \d \(rank \d, step \d\): \d(SEND|RECV)_F\d\n", message)
    assert not (tmp_path / "plan.json").exists()
    done = cli("import", EXAMPLE, "--profile", "blocking", "--json")
    assert done.code == 1
    assert json.loads(done.out)["sound"] is False


def test_a_plan_goes_there_and_back_with_what_the_file_does_not_say(cli, tmp_path):
    sharded = {"zero": 3, "zero_every": 4, "stages": (2, 1), "buckets_per_stage": 2}
    plan = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=4, **sharded)
    plan.save(tmp_path / "plan.json")
    lines = cli("export", "plan.json", "--to", "torch-csv", "-o", "out.csv").err.splitlines()
    assert lines == [
        "out.csv: the file does not say the mesh; import it with --mesh dp=2,pp=2",
        "out.csv: the file does not say that replicas share out weights; import it with --zero 3",
        "out.csv: the file does not say that its stages have 2,1 blocks; a run of what is imported chooses itself",
        "out.csv: the file does not say that a stage has 2 buckets; what is imported has one",
    ]
    back = cli("import", "out.csv", "--mesh", "dp=2,pp=2", "--zero", "3", "-o", "back.json")
    assert back.err == ""
    found = qs.Plan.load(tmp_path / "back.json")
    assert (found.mesh, found.zero) == (plan.mesh, plan.zero)
    assert cli("import", "out.csv", "-o", "alone.json").err.endswith("for two of them write mesh dp=2,pp=2\n")
    assert qs.Plan.load(tmp_path / "alone.json").mesh == qs.Mesh(pp=2)
    qs.compile("1f1b", mesh="pp=2", microbatches=4).save(tmp_path / "plain.json")
    assert cli("export", "plain.json", "--to", "torch-csv", "-o", "plain.csv").err == ""
