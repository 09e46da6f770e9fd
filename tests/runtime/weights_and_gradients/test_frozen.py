"""Weights that are frozen: from the start, or for a while; with every sharding, and whole stages of them."""

from typing import Any

import pytest
import torch
from torch import nn

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.blocks.block_builders import Blocks, build_block

from ...helpers.training import Outcome, adamw, call_with_share, check_equality, random_batch, squares
from ..trials import on_ranks

WIDTH, STEPS = 4, 5


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def frozen() -> nn.Module:
    return layer().requires_grad_(False)


def thaw(blocks: Any, step: int) -> None:
    """Train the last block alone, then one more in every step; rest block 3 for a step."""
    for number, block in enumerate(blocks):
        block.requires_grad_(number >= 3 - step and not (number == 3 and step == 3))


def check(request_of: dict[str, Any], blocks: Blocks, *, gradually: bool = False, **options: Any) -> list[Outcome]:
    plan, batches = qs.compile(**request_of, microbatches=2), [random_batch(step, 8, WIDTH) for step in range(STEPS)]
    modules = [build_block(block, number, 0, torch.float64) for number, block in enumerate(blocks)]
    return check_equality(plan, modules, squares, adamw, batches, before=thaw if gradually else None, **options)


PLANS: list[dict[str, Any]] = [
    {"schedule": "1f1b", "mesh": "dp=2,pp=2"},
    {"schedule": "zb-h1", "mesh": "pp=4"},
    {"schedule": "1f1b", "mesh": "dp=2", "zero": 1},
    {"schedule": "1f1b", "mesh": "dp=2", "zero": 3},
    {"schedule": "1f1b", "mesh": "pp=2", "recompute": 1},
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("request_of", PLANS, ids=str)
@pytest.mark.parametrize("gradually", [False, True])
def test_frozen_weights_stay_and_all_else_is_as_in_one_process(request_of: dict[str, Any], gradually: bool) -> None:
    blocks: Blocks = [layer] * 4 if gradually else [frozen, frozen, layer, frozen]
    check(request_of, blocks, gradually=gradually)


def test_what_was_frozen_at_first_is_not_trained_in_silence() -> None:
    engine = Engine(qs.compile("1f1b", mesh="dp=1", microbatches=1), [frozen, layer], squares, adamw)
    x, y = (part.float() for part in random_batch(0, 8, WIDTH))
    engine.step(x, y)
    engine.stages[0].blocks["0"].requires_grad_(True)
    with pytest.raises(qs.MisfitError, match=r"0\.0\.weight is to be trained, but was frozen when the engine was made"):
        engine.step(x, y)
    engine.stages[0].blocks["0"].requires_grad_(False)
    engine.step(x, y)
    engine.stages[0].blocks["1"].get_submodule("0").weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    with pytest.raises(qs.MisfitError, match="is another parameter than when the engine was made"):
        engine.step(x, y)


TIES = {"weight": ("0.weight", "3.weight")}


@pytest.mark.parametrize("stages", [1, 2])
def test_a_tied_weight_may_be_frozen_as_a_whole(stages: int) -> None:
    def still() -> nn.Module:
        return nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    ties = {"weight": (0, 1)} if stages == 2 else {}
    request_of = {"schedule": "1f1b", "mesh": f"pp={stages}", "tied": ties}
    check(request_of, [still, layer, layer, still], tied=TIES)
    with pytest.raises(qs.MisfitError, match=r"\(0.weight, 3.weight\) is trained in one block and frozen in"):
        check(request_of, [still, layer, layer, lambda: nn.Linear(WIDTH, WIDTH)], tied=TIES)


@pytest.mark.parametrize("request_of", [{"mesh": "pp=2"}, {"mesh": "dp=2", "zero": 1}], ids=str)
def test_parameters_added_to_an_optimizer_are_refused(request_of: dict[str, Any]) -> None:
    def work(engine: Engine) -> None:
        call_with_share(engine, engine.step, random_batch(0, 8, WIDTH))
        for optimizer in engine.optimizers.values():
            optimizer.add_param_group({"params": list(engine.stages[0].blocks["1"].parameters())})
        call_with_share(engine, engine.step, random_batch(0, 8, WIDTH))

    more = {"optimizer": lambda params: adamw(list(params)[:2]), "dtype": torch.float64, **request_of}
    words = r"built with \d parameters and have \d now .* freeze those that are to learn"
    with pytest.raises(qs.UsageError, match=words):
        on_ranks(work, [layer, layer, layer], squares, **more)
