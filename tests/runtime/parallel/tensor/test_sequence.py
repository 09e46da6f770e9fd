"""Tokens shared out over tp between column/row pairs: shorter messages, less saved, and what cannot be sliced."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.ir.instruction_values import Value, ValueKind
from quintsched.runtime import Engine, Group, Transport, apply_tensor_parallel, run_local
from quintsched.runtime.blocks.block_builders import build_block
from quintsched.runtime.parallel.mesh_independent_dropout import Masks
from quintsched.runtime.train.built_in_losses import cross_entropy_sum

from ....helpers.blocks import of_layers
from ....helpers.training import check_equality
from ...toys import cross_entropy_plainly, ids_task, sgd, share
from ..lively import LENGTH, lively_gpt


def saved_bytes(mesh: str, **more: Any) -> tuple[float, tuple[int, ...]]:
    """Return the most bytes that a stage saves of a unit on any rank, and the shape that the first stage sends."""
    task = ids_task(1, 8, 64)

    def run(transport: Transport) -> tuple[float, tuple[int, ...]]:
        plan = qs.compile("1f1b", mesh=mesh, microbatches=2)
        engine = Engine(plan, lively_gpt(64), cross_entropy_sum, sgd, dtype=torch.float32, transport=transport, **more)
        _, counted = engine.step_counting_saved(*share(engine, task.inputs[0], task.targets[0]))
        costs = engine.saved_costs(counted)
        state = engine._runner.interpreters["train"].state
        (spec,) = state.messages.shape.cargo.specs(Value(ValueKind.OUTPUT, 0, 0))
        return costs.activation[1], spec.shape

    return run_local(qs.Mesh.parse(mesh).size, run)[0]


def test_messages_are_shares_and_less_is_saved() -> None:
    alone, whole = saved_bytes("pp=3,tp=2")
    shared, part = saved_bytes("pp=3,tp=2", sequence_parallel=True)
    assert whole == (4, 64, 16)
    assert part == (4, 32, 16)
    # Per block: what the two norms and the two columns are given, and the norms' two figures per token; all else
    # was shared out before. No masks and no scores are kept (Korthikanti et al., table 2, has 10 + 24/t and 34/t).
    tokens, hidden, blocks = 4 * 64, 16, 2
    assert alone - shared == blocks * (4 * tokens * hidden + 4 * tokens) * 4 / 2


def dropouts() -> dict[str, nn.Module]:
    pair = {"fc1": nn.Linear(16, 32), "fc2": nn.Linear(32, 16)}
    between = nn.Sequential(nn.Dropout(0.3), nn.Dropout(0.2))
    return pair | {"before": nn.Dropout(0.2), "between": between, "behind": nn.Dropout(0.4)}


def drop(self: Any, x: Tensor) -> Tensor:
    return x + self.behind(self.fc2(self.between(self.fc1(self.before(x)).relu())))


Dropping = of_layers("Dropping", dropouts, drop)
"""An MLP that drops out before its pair, between the two, and behind them."""
Beside = of_layers(
    "Beside",
    lambda: {**dropouts(), "beside": nn.Linear(16, 16)},
    lambda self, x: self.before(self.beside(drop(self, x))),
)
"""One with a product of its own behind the pair, whose features are put together."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("block", "sequence_parallel"), [(Dropping, True), (Beside, False)])
def test_masks_belong_to_the_features_between_a_pair_only(block: type[nn.Module], sequence_parallel: bool) -> None:
    blocks = [*lively_gpt(dropout=0.3)[:-1], block, lively_gpt()[-1]]
    rules = {"*.beside": "column"} if block is Beside else {}
    plan, batches = qs.compile("1f1b", mesh="tp=2", microbatches=2), ids_task(2, 8, LENGTH).batches
    how = {"sequence_parallel": sequence_parallel, "rules": rules, "microbatches": 2}
    check_equality(plan, blocks, cross_entropy_plainly, sgd, batches, masks=Masks(0), **how)


Counted = of_layers(
    "Counted",
    lambda: {"num_heads": 2, **{f"{name}_proj": nn.Linear(4, 4, dtype=torch.float64) for name in "qkvo"}},
    lambda self, x: self.o_proj(self.q_proj(x) * self.k_proj(x) * self.v_proj(x)),
)
"""Queries, keys and values apart, and what is done with them."""


def collectives_of(group: Group, model: nn.Module, x: Tensor) -> list[str]:
    """Return the collectives of a second forward and backward, in order."""
    seen: list[str] = []

    def noted(kind: str, plain: Callable[..., Any], *args: Any) -> Any:
        seen.append(kind)
        return plain(*args)

    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        setattr(group, kind, partial(noted, kind, getattr(group, kind)))
    model(x).square().sum().backward()  # has gradients of replicated parameters compared
    first = len(seen)
    model(x).square().sum().backward()
    return seen[first:]


@pytest.mark.parametrize(
    ("sequence_parallel", "expected"),
    [(False, ["all_reduce"] * 2), (True, ["all_gather", "reduce_scatter", "all_gather", "reduce_scatter"])],
)
def test_columns_of_the_same_tokens_communicate_once(sequence_parallel: bool, expected: list[str]) -> None:
    tokens = torch.randn(2, 4, 4, dtype=torch.float64)

    def run(transport: Transport) -> list[str]:
        group = transport.make_group([(0, 1)])
        cut = apply_tensor_parallel(build_block(Counted, 0), group, sequence_parallel=sequence_parallel)
        mine = tokens.chunk(2, 1)[group.index] if sequence_parallel else tokens
        return collectives_of(group, cut, mine.clone().requires_grad_())

    assert run_local(2, run) == [expected, expected]
