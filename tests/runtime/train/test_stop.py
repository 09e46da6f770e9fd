"""A run that is asked to stop: all ranks finish the same step, save, and the run goes on to the same numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quintsched.runtime import JobConfig

from ...helpers.jobs import figures, fit, job

STEPS_PER_EPOCH = 5


@pytest.mark.parametrize(
    ("parallel", "asked", "at_step"),
    [
        pytest.param({"mesh": "pp=2,tp=2", "microbatches": 2}, 2, STEPS_PER_EPOCH, marks=pytest.mark.slow),
        ({"mesh": "dp=2,pp=2", "microbatches": 2, "zero": 2}, 1, 7),
    ],
)
def test_all_ranks_stop_after_the_same_step_and_go_on_to_the_same_numbers(
    data_file: Path, tmp_path: Path, parallel: dict[str, Any], asked: int, at_step: int
) -> None:
    """With dropouts, and rates that rise and fall."""
    model = {"options": {"hidden": 8, "depth": 2, "heads": 2, "dropout": 0.1}}
    train = {"epochs": 2, "evaluate_every": 1, "lr_schedule": {"name": "cosine", "warmup_steps": 3}}
    config = job(data_file, model=model, parallel=parallel, train=train, checkpoint={"dir": str(tmp_path / "saved")})
    whole = fit(config.model_copy(update={"checkpoint": job(data_file).checkpoint}))
    assert sum(line.startswith("step 7  validation") for line in whole[0][2]) == 1
    stopped = fit(config, asked=(asked, at_step))
    assert stopped[0][2][-1] == f"stopped as asked: saved at step {at_step}"
    resumed = fit(config, resume=True)
    assert f"resumed after step {at_step}" in resumed[0][2]
    assert sum(line.startswith("step 7  validation") for line in stopped[0][2] + resumed[0][2]) == 1
    for (found, weights, _), (expected, same, _) in zip(resumed, whole, strict=True):
        assert figures(found) == figures(expected)
        assert all(torch.equal(weights[name], same[name]) for name in same)


LOSS = """
def squares(output, targets):
    return (output - targets.clamp(min=0)[:, None]).square().mean()
"""


@pytest.mark.parametrize(
    ("step", "second"),
    [
        pytest.param(STEPS_PER_EPOCH + 2, {}, marks=pytest.mark.slow),
        pytest.param(2, {"mesh": "pp=2", "microbatches": 4}, marks=pytest.mark.slow),
        (2, {"mesh": "dp=4"}),
    ],
)
def test_a_loss_without_weight_has_the_mean_of_a_run_that_was_not_stopped(data_file, tmp_path, step, second):
    """With microbatches of other sizes, a loss without a weight of its own is weighted by other numbers."""
    (tmp_path / "mine.py").write_text(LOSS)
    settings: dict[str, Any] = {
        "train": {"epochs": 2, "loss": f"{tmp_path / 'mine.py'}:squares"},
        "checkpoint": {"dir": str(tmp_path / "saved")},
    }
    first: dict[str, Any] = {"mesh": "dp=2", "microbatches": 1}
    whole = losses(job(data_file, parallel=first, train=settings["train"]))
    losses(job(data_file, parallel=first, **settings), asked=(0, step))
    resumed = losses(job(data_file, parallel=first | second, **settings), resume=True)
    assert resumed == (whole if not second else pytest.approx(whole, abs=1e-5))


def losses(config: JobConfig, **more: Any) -> list[float]:
    """Return the mean training loss of each epoch."""
    return [record["loss"] for record in fit(config, **more)[0][0]]
