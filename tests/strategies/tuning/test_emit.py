"""Strategies become plans and job files."""

import pytest
import yaml

import quintsched as qs
from quintsched.strategies.descriptions.presets_and_files import model_names
from quintsched.strategies.prediction.strategy_plans import plan_of
from quintsched.strategies.tuning.export.emit import built_in, emit, job_file
from tests.helpers.refusals import require_refusals

GPT = qs.Model(layers=6, hidden=64, heads=4, vocab=256, seq=64)


def strategy(**given: object) -> qs.Strategy:
    return qs.Strategy(**{"gpus": 4, "pp": 2, "tp": 2, "batch": 8, "seq": 64, **given})


def test_the_files_say_the_strategy(tmp_path):
    sizes = {"schedule": "interleaved-1f1b", "chunks": 3, "zero": 1, "sequence_parallel": True}
    written = emit(GPT, strategy(gpus=8, dp=2, recompute="full", **sizes), tmp_path / "new")
    plan, job = qs.Plan.load(written.files["plan"]), yaml.safe_load(written.files["job"].read_text())
    assert plan.check().sound
    more = {"mesh": "pp=2,dp=2,tp=2", "microbatches": 4, "stages": [2, 1, 1, 1, 1, 2], "recompute": 1}
    assert job["parallel"] == sizes | more
    options = {"hidden": 64, "depth": 6, "heads": 4, "mlp_ratio": 4, "dropout": 0.1, "norm": "layernorm"}
    options |= {"positions": "learned", "activation": "gelu", "tied": True}
    assert job["model"] == {"name": "gpt", "options": options}
    assert (job["train"]["batch_size"], job["runtime"]["precision"]) == (8, "bfloat16")
    assert (plan.mesh.size, plan.schedule.microbatches, plan.zero.stage) == (8, 4, 1)
    assert dict(plan.tied) == {"embedding": (0, 5)}
    assert not written.notes


def test_as_many_layers_are_recomputed_as_the_strategy_says_or_more():
    for number in range(7):
        plan = plan_of(GPT, strategy(pp=1, gpus=2, schedule="1f1b", chunks=1, recompute=number))
        every = plan.layout.recompute_every(0)
        again = sum(every > 0 and place % every == every - 1 for place in range(1, 7))
        assert number <= again <= max(number + 1, 0 if number < 4 else 6)


@pytest.mark.parametrize("name", model_names())
def test_every_preset_has_a_job_file(name):
    model = qs.find_model(name)
    text = job_file(model, qs.Strategy(gpus=8, dp=8, batch=8, seq=model.images.tokens if model.images else 128))
    job = yaml.safe_load(text)
    own = built_in(model)[1] is not None
    assert (job["model"]["name"] == "my_model.py:build") is not own
    assert ("# model.name: your function that builds" in text) is not own


def test_a_directory_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    require_refusals(("cannot be made", lambda: emit(GPT, strategy(), tmp_path / "file")))
