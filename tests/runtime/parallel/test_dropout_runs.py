"""Training with dropout: no mesh and no schedule changes the numbers, nor does a run that was interrupted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

import quintsched as qs
from quintsched.errors import MisfitError, UsageError
from quintsched.runtime import Engine
from quintsched.runtime.blocks.block_builders import build_block
from quintsched.runtime.comm import run_local
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import GPTOptions, gpt
from quintsched.runtime.models.vit import ViTOptions
from quintsched.runtime.parallel.mesh_independent_dropout import Masks
from quintsched.runtime.train.built_in_losses import cross_entropy_sum

from ...helpers.training import check_equality
from ..toys import CLASSES, cross_entropy_plainly, ids_task, sgd

LENGTH = 8


def noisy_gpt(dropout=0.3):
    return gpt(DataSpec(input_shape=(LENGTH,), num_classes=CLASSES), GPTOptions(hidden=16, depth=4, dropout=dropout))


class Layouts(nn.Module):
    """Drops out of tokens, of heads, of tokens in one row, and of one vector per sample; of the first of them twice."""

    def __init__(self, first):
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, CLASSES) if first else nn.Linear(CLASSES, CLASSES)
        self.drop, self.heads = nn.Dropout(0.4), nn.Dropout(0.3, inplace=True)
        self.flat, self.never = nn.Dropout(0.2), nn.Dropout(0.0)

    def forward(self, x, past=None, context=None):
        x = self.drop(self.tokens(x))
        x = x + self.drop(x.sin())
        heads = x.unflatten(-1, (2, -1)) * 1.5
        x = x + self.never(self.heads(heads).flatten(-2))
        return x + self.flat(x.flatten(0, 1)).view(x.shape)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("schedule", "mesh", "slices"),
    [("1f1b", "pp=1", 1), ("1f1b", "dp=2,pp=2", 1), ("1f1b", "cp=4", 1), ("seq-1f1b", "pp=2", 4)],
)
def test_tensors_of_any_layout_with_the_samples_first(schedule: str, mesh: str, slices: int) -> None:
    plan, batches = qs.compile(schedule, mesh=mesh, microbatches=2, slices=slices), ids_task(2, 4, LENGTH).batches
    blocks = [lambda: Layouts(True), *[lambda: Layouts(False)] * 3]
    check_equality(plan, blocks, cross_entropy_plainly, sgd, batches, masks=Masks(0), microbatches=4, clip=1.0)


def losses_on(replicas: int, samples: int, *, parts: Sequence[int], drops_late: bool = False) -> list[float]:
    """Train two steps, each accumulated over parts of a batch; return the losses."""
    task = ids_task(2, samples, LENGTH)

    def run(transport):
        plan, losses = qs.compile("gpipe", mesh=f"dp={replicas}", microbatches=2), []
        blocks = noisy_gpt(0.0 if drops_late else 0.3)
        engine = Engine(plan, blocks, cross_entropy_sum, sgd, dtype=torch.float64, transport=transport)
        for step, batch in enumerate(task.batches):
            for module in engine.stages[0].blocks["1"].modules() if drops_late and step else ():
                if isinstance(module, nn.Dropout):
                    module.p = 0.5
            for part, xs in enumerate(zip(*[x.split([*parts]) for x in batch], strict=True), 1):
                mine = [x.tensor_split(replicas)[transport.rank] for x in xs]
                losses.append(engine.step(*mine, last=part == len(parts)).loss.item())
        return losses

    return run_local(replicas, run)[0]


def test_masks_of_an_accumulated_step_go_by_the_samples_of_all_replicas() -> None:
    alone = losses_on(1, 9, parts=[5, 4])
    assert losses_on(3, 9, parts=[5, 4]) == pytest.approx(alone, abs=1e-12)


def test_dropout_from_a_later_step_on_counts_samples_or_is_refused() -> None:
    alone = losses_on(1, 8, parts=[8], drops_late=True)
    assert losses_on(2, 8, parts=[8], drops_late=True) == pytest.approx(alone, abs=1e-12)
    with pytest.raises(MisfitError, match="from this step on, and none in the first"):
        losses_on(2, 7, parts=[7], drops_late=True)


def test_two_runs_are_the_same_and_another_seed_or_step_is_not() -> None:
    """Train three steps on one batch at a rate of 0: only the masks differ."""
    task = ids_task(1, 8, LENGTH)

    def losses_of(seed=0, step=0):
        blocks = [build_block(block, number, 0, torch.float64) for number, block in enumerate(noisy_gpt())]
        plan, still = qs.compile("1f1b", mesh="pp=1", microbatches=2), lambda weights: torch.optim.SGD(weights, lr=0.0)
        engine = Engine(plan, blocks, cross_entropy_sum, still, dtype=torch.float64, seed=seed)
        engine.load_state_dict({**engine.state_dict(), "engine.step": torch.tensor(step)})
        return [engine.step(task.inputs[0], task.targets[0]).loss.item() for _ in range(3)]

    losses = losses_of()
    assert losses == losses_of()
    assert len({*losses, *losses_of(seed=1)}) == 6
    assert losses_of(step=1)[:2] == losses[1:]


def test_a_share_that_is_none_is_refused() -> None:
    for kind in (GPTOptions, ViTOptions):
        for dropout in (-0.1, 1.0):
            with pytest.raises(UsageError, match="dropout"):
                kind(dropout=dropout)
