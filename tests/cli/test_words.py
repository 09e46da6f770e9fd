"""One vocabulary: a mesh or its axes in every command that takes one, microbatches and batch with one meaning."""

import pytest

import quintsched as qs
from quintsched.cli.request_options import AXIS_OPTIONS
from quintsched.cli.shared_options import MICROBATCHES

GPT = ("--model", "gpt3-175b", "--hardware", "a100-80gb", "--batch", 64)


@pytest.mark.parametrize(
    ("axes", "mesh"),
    [
        (("--dp", 2, "--pp", 2), "pp=2,dp=2"),
        (("--tp", 2, "--pp", 3), "pp=3,tp=2"),
        (("--ep", 2, "--cp", 2, "--tp", 2, "--dp", 1), "dp=1,ep=2,cp=2,tp=2"),
    ],
)
def test_compile_takes_axes(cli, axes, mesh):
    done = cli("compile", "-s", "1f1b", "-m", 4, *axes)
    assert qs.Plan.from_json(done.out) == qs.compile("1f1b", mesh=mesh, microbatches=4)


def test_compile_needs_one_mesh(refused):
    command = ("compile", "-s", "1f1b", "-m", 4)
    assert "--mesh is missing, or its axes: --dp, --pp" in refused(2, *command)
    message = refused(2, *command, "--mesh", "pp=2", "--dp", 2)
    assert "--mesh pp=2 and --dp 2: both say the mesh; give one of them" in message
    assert "mesh: axis pp has size 0" in refused(2, *command, "--pp", 0)
    assert "--schedule is missing" in refused(2, "compile", "--pp", 2, "-m", 4)
    assert "--microbatches is missing" in refused(2, "compile", "-s", "1f1b", "--pp", 2)


def test_an_unknown_option_of_run_leads_to_set(cli):
    assert "--set train.max_steps=100" in cli("run", "job.yaml", "--train.lr", 3).err
    for misused in (("run", "job.yaml", "--restarts"), ("check", "x", "--pofile", 3)):
        assert "--set" not in cli(*misused).err


def test_predict_takes_a_mesh(cli, refused):
    by_axes = cli("predict", *GPT, "--gpus", 128, "--dp", 2, "--pp", 8, "--tp", 8, "--json").data
    by_mesh = ("predict", *GPT, "--mesh", "dp=2,pp=8,tp=8")
    assert cli(*by_mesh, "--json").data == cli(*by_mesh, "--gpus", 128, "--json").data == by_axes
    assert "both say the mesh" in refused(2, *by_mesh, "--dp", 2)
    assert "--gpus 64, but --mesh dp=2,pp=8,tp=8 has 128 ranks" in refused(2, *by_mesh, "--gpus", 64)
    assert "mesh: unknown axis 'xp'" in refused(2, "predict", *GPT, "--mesh", "xp=2")


def test_words_mean_the_same_in_every_command(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    for command in (("compile",), ("compare",), ("check",), ("checkpoint", "reshard")):
        assert MICROBATCHES in joined(cli(*command, "--help").out)
    for command in ("compile", "predict", "tune"):
        shown = joined(cli(command, "--help").out)
        assert "--mesh AXES" in shown
        for axis, words in AXIS_OPTIONS.items():
            assert f"--{axis} N {words.removesuffix('.')}" in shown
    for command in ("predict", "tune"):
        assert "Samples of a step, over all replicas: a job's train.batch_size." in joined(cli(command, "--help").out)


def joined(text: str) -> str:
    return " ".join(text.split())
