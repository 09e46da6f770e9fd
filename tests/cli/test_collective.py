"""`quintsched collective`: the proof, the time, the file and the picture of a collective in messages."""

import json

import pytest

from quintsched.collectives import CollectivePlan, spell


def test_files_are_written_proved_and_refused(cli, tmp_path):
    assert cli("collective", "tree", "--ranks", 5, "-o", "tree.json").code == 0
    assert CollectivePlan.load(tmp_path / "tree.json") == spell("all_reduce", "tree", 5)
    assert "sound: tree all_reduce over 5 ranks, 8 chunks" in cli("collective", "tree.json").out
    data = json.loads((tmp_path / "tree.json").read_text())
    data["programs"][0] = data["programs"][0][1:]
    (tmp_path / "broken.json").write_text(json.dumps(data))
    broken = cli("collective", "broken.json")
    assert broken.code == 1
    assert "not sound: tree all_reduce over 5 ranks" in broken.out
    assert cli("collective", "broken.json", "--json").data["sound"] is False


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
def test_what_is_refused(refused, arguments, words):
    assert words in refused(2, "collective", *arguments)


def test_render_draws_the_steps_of_a_collective_that_a_plan_spells_out(cli, tmp_path, refused):
    shape = ("compile", "-s", "1f1b", "--mesh", "dp=4,pp=2", "-m", 2)
    assert cli(*shape, "--communication", "ring", "-o", "plan.json").code == 0
    done = cli("render", "plan.json", "--collective", "all_reduce-4-ring-4", "-o", "ring.svg")
    assert done.code == 0
    assert "ring all_reduce over 4 ranks" in done.out
    picture = (tmp_path / "ring.svg").read_text()
    assert "rank 3" in picture
    assert cli(*shape, "-o", "native.json").code == 0
    for plan, words in (("plan.json", "all_reduce-4-ring-4"), ("native.json", "none")):
        said = refused(2, "render", plan, "--collective", "ring", "-o", "ring.svg")
        assert f"spells out {words}" in said
