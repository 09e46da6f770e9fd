"""`quintsched export`, `import`, `collective` and `data`: files of other kinds are written, proved and refused."""

import json
import re
from pathlib import Path

import pytest

import quintsched as qs
from quintsched.collectives import CollectivePlan, spell

PUBLISHED = Path(__file__).parents[1] / "data" / "torch_csv"
EXAMPLE = PUBLISHED / "titan_example_interleaved_2rank_4mb_comms.csv"


def test_an_unsound_file_exits_1_with_the_counter_example(cli, refused, tmp_path):
    message = refused(1, "import", EXAMPLE, "--profile", "pair-stream", "-o", "plan.json")
    assert message.startswith(f"error: {EXAMPLE}: not sound: ")
    assert re.search(r"rank 1: \d+ .* must end before \d+ .* can begin", message)
    assert re.search(r"in the file:\n  line \d, cell \d \(rank \d, step \d\): \d(SEND|RECV)_F\d\n", message)
    assert not (tmp_path / "plan.json").exists()
    assert cli("import", EXAMPLE, "--profile", "blocking", "--json", code=1).data["sound"] is False


def test_a_plan_goes_there_and_back_with_what_the_file_does_not_say(cli, tmp_path):
    sharded = {"zero": 3, "zero_every": 4, "stages": (2, 1), "buckets_per_stage": 2}
    plan = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=4, **sharded)
    plan.save(tmp_path / "plan.json")
    done = cli("export", "plan.json", "--to", "torch-csv", "-o", "out.csv")
    assert done.out == "out.csv: 1f1b on dp=2,pp=2, 4 microbatches, stages of 2,1 blocks, ZeRO-3\n"
    assert done.err.splitlines() == [
        "out.csv: the file does not say the mesh; import it with --mesh dp=2,pp=2",
        "out.csv: the file does not say that replicas share out weights; import it with --zero 3",
        "out.csv: the file does not say that its stages have 2,1 blocks; a run of what is imported chooses itself",
        "out.csv: the file does not say that a stage has 2 buckets; what is imported has one",
    ]
    back = cli("import", "out.csv", "--mesh", "dp=2,pp=2", "--zero", "3", "-o", "back.json")
    assert back.out.startswith("back.json: out on dp=2,pp=2, 4 microbatches, ZeRO-3\nsound: ")
    assert back.err == ""
    found = qs.Plan.load(tmp_path / "back.json")
    assert (found.mesh, found.zero) == (plan.mesh, plan.zero)
    assert cli("import", "out.csv", "-o", "alone.json").err.endswith("for two of them write mesh dp=2,pp=2\n")
    assert qs.Plan.load(tmp_path / "alone.json").mesh == qs.Mesh(pp=2)
    qs.compile("1f1b", mesh="pp=2", microbatches=4).save(tmp_path / "plain.json")
    assert cli("export", "plain.json", "--to", "torch-csv", "-o", "plain.csv").err == ""


def test_files_are_written_proved_and_refused(cli, tmp_path):
    cli("collective", "tree", "--ranks", 5, "-o", "tree.json")
    assert CollectivePlan.load(tmp_path / "tree.json") == spell("all_reduce", "tree", 5)
    assert "sound: tree all_reduce over 5 ranks, 8 chunks" in cli("collective", "tree.json").out
    data = json.loads((tmp_path / "tree.json").read_text())
    data["programs"][0] = data["programs"][0][1:]
    (tmp_path / "broken.json").write_text(json.dumps(data))
    assert "not sound: tree all_reduce over 5 ranks" in cli("collective", "broken.json", code=1).out
    assert cli("collective", "broken.json", "--json", code=1).data["sound"] is False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ring",), "--ranks"),
        (("ring", "--ranks", 4, "--latency", -1), "latency of -1.0 s"),
        (("none.json",), "cannot read the collective"),
        (("ring.json", "--ranks", 3), "leave out --ranks"),
        (("ring", "--ranks", 4, "-o", "ring.gif"), "cannot draw this format"),
    ],
)
def test_collectives_that_cannot_be(refused, arguments, words):
    assert words in refused(2, "collective", *arguments)


def test_render_draws_the_steps_of_a_collective_that_a_plan_spells_out(cli, tmp_path, refused):
    shape = ("compile", "-s", "1f1b", "--mesh", "dp=4,pp=2", "-m", 2)
    cli(*shape, "--communication", "ring", "-o", "plan.json")
    done = cli("render", "plan.json", "--collective", "all_reduce-4-ring-4", "-o", "ring.svg")
    assert "ring all_reduce over 4 ranks" in done.out
    assert "rank 3" in (tmp_path / "ring.svg").read_text()
    cli(*shape, "-o", "native.json")
    for plan, words in (("plan.json", "all_reduce-4-ring-4"), ("native.json", "none")):
        said = refused(2, "render", plan, "--collective", "ring", "-o", "ring.svg")
        assert f"spells out {words}" in said


def test_tokenize_and_show(cli, tmp_path):
    Path("a.txt").write_text("hello world")
    Path("b.jsonl").write_text('{"body": "one"}\n{"body": "two more"}\n')
    options = ("-o", "corpus", "--tokenizer", "bytes", "--field", "body", "--shard-tokens", 12)
    done = cli("data", "tokenize", "a.txt", "b.jsonl", *options)
    said = "corpus: 25 tokens of 3 documents in 2 shards, uint16; tokenizer bytes, vocabulary 256, end 0\n"
    assert done.out == said
    assert Path("corpus/shard-00000.tokens").read_bytes() == "hello world\0".encode("utf-16-le")
    shown = cli("data", "show", "corpus", "--verify")
    assert shown.out.startswith(said + "shard 0: 12 tokens, 1 document, SHA-256 ")
    assert shown.out.endswith("every byte is as it was written\n")
    data = cli("data", "show", "corpus", "--json").data
    assert (data["tokens"], data["documents"], data["vocabulary"], data["verified"]) == (25, 3, 256, False)
    with Path("corpus/shard-00001.tokens").open("r+b") as file:
        file.write(b"x")
    cli("data", "show", "corpus")
    broken = cli("data", "show", "corpus", "--verify", code=1)
    assert broken.err.startswith("error: corpus/shard-00001.tokens: its content is not that which was written")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("show", "nothing"), "nothing: there is no such folder of tokens"),
        (("tokenize", "nothing", "-o", "c"), "nothing: there is no such text file"),
        (("tokenize", "a.txt", "-o", "."), ".: the folder is not empty"),
        (("tokenize", "a.txt", "-o", "c", "--vocabulary", 200), "--vocabulary 200: the tokenizer bytes has 256 ids"),
    ],
)
def test_texts_and_tokens_that_cannot_be(refused, command, words):
    Path("b.jsonl").write_text('{"text": "a"}\n{"text": \n')
    said = refused(1, "data", "tokenize", "b.jsonl", "-o", "other")
    assert "b.jsonl, line 2: not JSON: Expecting value at column 9" in said
    Path("a.txt").write_text("text")
    assert words in refused(2, "data", *command)
    assert not Path("c").exists()
