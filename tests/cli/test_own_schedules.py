"""A user's own schedule: from a template or a file of theirs, proved over shapes, compiled, watched and compared."""

import re
import runpy
import textwrap
from pathlib import Path

import pytest

import quintsched as qs
from quintsched.import_user_code import load_schedule
from quintsched.passes import TRAIN_PASSES
from quintsched.testing import assert_sound

EXAMPLE = "examples/custom_schedule.py"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a user's file with the usual imports; each test has names of its own."""
    monkeypatch.chdir(tmp_path)

    def save(text, name="mine.py"):
        head = "import quintsched as qs\nfrom quintsched.ir.instruction_set import *\n"
        (tmp_path / name).write_text(head + textwrap.dedent(text))
        return f"{name}:mine"

    return save


def own(name, body, options=""):
    return (
        f"@qs.schedule({name!r}, summary='', bubble='', memory=''{options})\ndef mine(rank, shape):\n"
        + textwrap.indent(textwrap.dedent(body), "    ")
    )


FORGETS = """
for m in range(shape.microbatches):
    yield Fwd(rank, m)
for m in range(shape.microbatches - (shape.pp == 3 and shape.microbatches > 1)):
    yield Bwd(rank, m)
"""


def test_the_example_is_proved(cli, root):
    target = f"{root / EXAMPLE}:paired_1f1b"
    done = cli("check", target, "--pp", "1..4", "--microbatches", "1..8")
    assert done.out.startswith("paired-1f1b: of 32 shapes 16 sound, 16 refused, 0 unsound\n")
    assert "3   1       2, 4, 6, 8             1, 3, 5, 7               -\n" in done.out
    assert "refused by the schedule itself, such as: paired-1f1b: microbatches=1 makes no pairs" in done.out
    data = cli("check", target, "--pp", "2", "--microbatches", "3..4", "--json").data
    assert data["sound"] is True
    assert [(shape["pp"], shape["microbatches"], shape["status"]) for shape in data["shapes"]] == [
        (2, 3, "refused"),
        (2, 4, "sound"),
    ]


def test_the_smallest_shape_that_fails_is_shown(cli, write):
    target = write(own("forgets", FORGETS))
    done = cli("check", target, "--pp", "2..4", "--microbatches", "1..5", code=1)
    assert done.out.startswith("forgets: of 15 shapes 11 sound, 0 refused, 4 unsound\n")
    assert "3   1       1                      -                        2..5\n" in done.out
    assert "the smallest shape that fails: pp=3, 1 chunk, 2 microbatches\nnot sound: forgets on pp=3" in done.out
    assert "complete: rank 0 runs Bwd(stage=0, microbatch=1) 0 times instead of once" in done.out
    data = cli("check", target, "--pp", "3", "--microbatches", "2", "--json", code=1).data
    assert (data["sound"], data["shapes"][0]["status"]) == (False, "unsound")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("yield Fwd(rank, shape.microbatches)", "microbatch 2 is out of range: there are 2"),
        ("yield None", "rank 0: the schedule yields None at 0; it may yield computations only"),
        ("yield OptStep((rank,))", "the schedule yields OptStep(stages=(0,)) at 0"),
        ("yield 1 // 0", "mine.py:5: ZeroDivisionError"),
        ("raise SystemExit(7); yield", "mine.py:5: SystemExit: 7"),
        ("return mine.order(rank, shape)", "the schedule failed at"),
        ("return 7", "TypeError: 'int' object is not iterable"),
        ("while True: yield Fwd(rank, 0)", "rank 0 runs Fwd(stage=0, microbatch=0) "),
        ("yield from ()", "runs Fwd(stage=0, microbatch=0) 0 times instead of once"),
        ("yield Overlap((rank, 0), (rank, 0))", "its two sides are one microbatch of one stage; the backward needs"),
        ("yield Fwd(rank, 0); yield Overlap((rank, 1), (1 - rank, 0))", "stage 1 is on rank 1, not on rank 0"),
        ("yield Overlap((rank, 0, 1), (rank, 0))", "forward is (0, 0, 1); give a tuple of stage and microbatch"),
        (
            "yield Fwd(rank, 0); yield Overlap((rank, 1), (rank, 0)); yield Bwd(rank, 1)",
            "rank 0 is stuck at 1 Overlap(forward=(0, 1), backward=(0, 0)): it needs the output's gradient of stage 0, "
            "microbatch 0; rank 1 makes it at 1 Overlap(forward=(1, 1), backward=(1, 0))",
        ),
    ],
)
def test_what_a_schedule_can_get_wrong(refused, cli, write, body, message):
    target = write(own(f"wrong {body}", body))
    assert message in refused(1, "compile", "--schedule", target, "--mesh", "pp=2", "-m", 2)
    done = cli("check", target, "--pp", "2", "--microbatches", "2", code=1)
    assert done.err == ""
    assert message in done.out


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (("1..4", "3"), "takes none of these 4 shapes; paired-1f1b: microbatches=3 makes no pairs"),
        (("1..1000", "1..1000"), "1000000 shapes are more than the 100000"),
    ],
)
def test_shapes_that_cannot_be_checked(refused, root, sizes, message):
    pp, microbatches = sizes
    target = f"{root / EXAMPLE}:paired_1f1b"
    assert message in refused(2, "check", target, "--pp", pp, "--microbatches", microbatches)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def mine(): pass", "is a function, not a schedule; decorate a generator with"),
        (own("1f1b", "pass"), "the schedule name '1f1b' is taken by quintsched.schedules"),
    ],
)
def test_files_that_hold_no_schedule(refused, write, text, message):
    target = write(text)
    for command in (("check", target), ("compile", "--schedule", target, "--mesh", "pp=2", "-m", 2)):
        assert message in refused(2, *command)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("routes=lambda shape: 3", "its routes at pp=2, 2 microbatches are not pairs of stages and microbatches"),
        ("routes=lambda shape: [(0, 1)]", "give ((0, 1, …), (0, 1, …)) for each route"),
        ("routes=lambda shape: [((0, 1), (1 // m for m in [0]))]", "mine.py:3: ZeroDivisionError"),
        ("routes=lambda shape: [((0, 1), range(10**9))]", "the routes must hold each of the 2 microbatches once"),
        ("routes=lambda shape: [([0], [0, 1])]", "no route visits stage 1"),
        ("stage_to_part=lambda shape: [0, 0]", "route 0 visits the pieces of the model in the order [0, 0]"),
    ],
)
def test_routes_that_cannot_be(refused, write, options, message):
    target = write(own(options, "yield Fwd(rank, 0)", f", {options}"))
    assert message in refused(1, "compile", "--schedule", target, "--mesh", "pp=2", "-m", 2)


def test_routes_follow_a_placement_and_uneven_stages(cli, refused, root, tmp_path):
    target = f"{root / 'examples' / 'chimera.py'}:chimera"
    sizes = ("compile", "--schedule", target, "--mesh", "pp=4", "-m", 8)
    others = "3,2,1,0,0,1,2,3,1,0,3,2,2,3,0,1"
    file = tmp_path / "plan.json"
    cli(*sizes, "--stage-to-pp", others, "--stages", ",".join("2131" * 4), "-o", file)
    plan = qs.Plan.load(file)
    assert plan.stage_to_part == (0, 1, 2, 3) * 4
    assert plan.stage_to_pp == tuple(map(int, others.split(",")))
    assert "both on pipeline rank 0; twins are" in refused(2, *sizes, "--stage-to-pp", ",".join(["0,1,2,3"] * 4))
    for more in ((), ("-o", "few.json")):
        assert "it cannot run with stage_to_pp=[0, 1, 2, 3]" in refused(2, *sizes, "--stage-to-pp", "0,1,2,3", *more)


def test_only_the_name_of_a_schedule_is_needed(cli, tmp_path):
    (tmp_path / "bare.py").write_text(
        "import quintsched as qs\nfrom quintsched.instructions import Bwd, Fwd\n\n\n"
        '@qs.schedule("bare")\ndef bare(rank, shape):\n    """All forwards, then all backwards."""\n'
        "    for kind in (Fwd, Bwd):\n        yield from (kind(rank, m) for m in range(shape.microbatches))\n"
    )
    for command in (
        ("check", "bare.py:bare", "--pp", "1..3", "--microbatches", "1..3"),
        ("compile", "-s", "bare.py:bare", "--mesh", "pp=2", "-m", 3, "-o", "plan.json"),
        *(("check", "plan.json"), ("show", "plan.json")),
        ("compare", "bare.py:bare", "gpipe", "--pp", 2, "--microbatches", 4),
    ):
        cli(*command)
    listed = cli("schedules").out
    assert "bare: All forwards, then all backwards\n    bubble not stated;  memory not stated\n" in listed
    (entry,) = (entry for entry in cli("schedules", "--json").data if entry["name"] == "bare")
    assert (entry["bubble"], entry["memory"]) == (None, None)
    sizes = qs.find_model("gpt3-175b"), qs.find_hardware("a100-80gb"), 64, 64
    best = qs.tune(*sizes, fixed={"schedule": ["bare"], "pp": [8]}, top=1).best[0]
    assert best.strategy.schedule == "bare"


@pytest.fixture
def fresh(cli, tmp_path) -> Path:
    done = cli("new", "my_schedule.py")
    assert done.err == ""
    assert done.out == "my_schedule.py: a schedule and its property test; run: pytest my_schedule.py\n"
    return tmp_path / "my_schedule.py"


STUCK = (
    "my-schedule fails; the smallest shape that does: pp=2, 1 chunk, 2 microbatches",
    "deadlock: the order of computation itself cannot run",
    "rank 0 is stuck at 1 Bwd(stage=0, microbatch=0): it needs the output's gradient of stage 0, microbatch 0; "
    "rank 1 makes it at 2 Bwd(stage=1, microbatch=0)",
    "rank 0  F0 B0 F1 B1",
    "rank 1  F0 F1 B0 B1",
)
"""Lines of the message on a warm-up that is the wrong way round."""


def test_the_template_is_green_as_written(fresh):
    written = runpy.run_path(str(fresh))
    (test,) = (value for name, value in written.items() if name.startswith("test_"))
    test()


def test_the_template_works_with_the_other_commands(fresh, cli):
    target = "my_schedule.py:my_schedule"
    done = cli("check", target, "--pp", "1..4", "--microbatches", "1..4")
    assert done.out.startswith("my-schedule: of 16 shapes 16 sound, 0 refused, 0 unsound\n")
    cli("compile", "--schedule", target, "--mesh", "pp=2", "-m", 3, "-o", "plan.json")
    grid = cli("show", "plan.json").out.splitlines()[1:]
    drawn = [line.replace("--", "- ") for line in fresh.read_text().splitlines() if line.startswith("rank ")]
    assert [line.split()[2:] for line in grid] == [
        (line.split()[2:] + ["."] * 12)[: len(grid[0].split()) - 2] for line in drawn
    ], "the picture in the template is the schedule's"


def test_breaking_the_order_shows_the_smallest_shape(fresh):
    right = fresh.read_text()
    fresh.write_text(right.replace("min(shape.pp - rank - 1, shape.microbatches)", "min(rank, shape.microbatches)"))
    with pytest.raises(AssertionError) as failed:
        assert_sound(load_schedule(f"{fresh}:my_schedule"))
    assert {*STUCK} <= {*str(failed.value).splitlines()}


def test_nothing_is_overwritten(fresh, refused):
    fresh.write_text("mine")
    assert "my_schedule.py is there already" in refused(2, "new", "my_schedule.py")
    assert fresh.read_text() == "mine"


ARGUMENTS = ("compile", "-s", "1f1b", "--mesh", "dp=2,pp=2", "-m", 2, "-o", "plan.json")


def test_print_after_all(cli):
    done = cli(*ARGUMENTS, "--print-after", "all", "--json")
    assert done.data["sound"] is True
    heads = re.findall(r"^== after ([\w-]+): ", done.err, re.MULTILINE)
    assert heads == ["order", *(step.name for step in TRAIN_PASSES)]
    assert done.err.count("OptStep") == 2, "only after the last one"
