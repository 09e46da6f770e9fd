"""Tokens shared out over tp between column/row pairs: the same numbers, shorter messages, fewer bytes saved."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.ir.values import Kind, Value
from quintsched.runtime import Carry, Engine
from quintsched.runtime.blocks.blocks import Blocks, build_block
from quintsched.runtime.comm import Group, Transport, run_local
from quintsched.runtime.data import DataSpec
from quintsched.runtime.launch.worker import main
from quintsched.runtime.models.vit import ViTOptions, vit
from quintsched.runtime.parallel.dropout import Masks
from quintsched.runtime.parallel.tensor.apply import apply_tensor_parallel
from quintsched.runtime.train.losses import cross_entropy_sum

from ..models.test_gpt import COUNTING
from ..toys import (
    Outcome,
    Task,
    ids_task,
    sgd,
    share,
    tiny_vit,
    train_on,
    train_plainly,
    train_rank,
    worst_difference,
)
from .test_context import LENGTH, TIES, lively_gpt

AXES = ("dp", "pp", "tp", "cp")
LLAMA: dict[str, Any] = {"positions": "rope", "norm": "rmsnorm", "activation": "swiglu", "heads": 8, "kv_heads": 4}


def difference_on(
    plan: qs.Plan, task: Task, blocks: Blocks, dtype: torch.dtype = torch.float64, *, tied: bool = False, **more: Any
) -> float:
    """Train on a plan by NCCL's rules with tokens shared out, and in one process."""
    ties = TIES if tied else {}
    replicas = plan.mesh.axis_size("dp") * plan.mesh.axis_size("ep")
    alone = train_plainly(task, blocks, replicas * plan.schedule.microbatches, clip=1.0, dtype=dtype, tied=ties)
    alone.weights.update({other: alone.weights[first] for first, *others in ties.values() for other in others})
    found = train_on(
        plan,
        task,
        blocks,
        clip=1.0,
        dtype=dtype,
        tied=ties,
        rules="nccl",
        bucket_mb=0.01,
        sequence_parallel=True,
        **more,
    )
    return worst_difference(found, alone)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("sizes", [sizes for sizes in product((1, 2), repeat=4) if sizes[2] > 1], ids=str)
def test_eight_meshes_equal_one_process(sizes: tuple[int, ...]) -> None:
    plan = qs.compile("1f1b", mesh=qs.Mesh(**dict(zip(AXES, sizes, strict=True))), microbatches=2)
    assert difference_on(plan, ids_task(2, 8, LENGTH), lively_gpt()) <= 1e-12


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("schedule", "mesh", "options"),
    [
        ("zb-h1", "pp=2,tp=2", {}),
        ("zb-h1", "tp=4", {}),
        ("zb-h1", "pp=2,tp=2,cp=2", {"recompute": 1}),
        ("interleaved-1f1b", "tp=2,pp=2", {"chunks": 2, "recompute": 1}),
        ("1f1b", "pp=2,tp=2", {"recompute": 3}),
        ("zbv", "pp=2,tp=2", {}),
        ("dualpipe", "pp=2,tp=2,dp=2", {}),
        ("seq-1f1b", "pp=2,tp=2", {"slices": 2}),
    ],
)
def test_other_schedules_equal_one_process(schedule: str, mesh: str, options: dict[str, int]) -> None:
    plan = qs.compile(schedule, mesh=mesh, microbatches=4, **options)  # type: ignore[arg-type]
    assert difference_on(plan, ids_task(2, 8, LENGTH), lively_gpt()) <= 1e-12


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", ["ring", "gather", "ulysses"])
def test_the_parts_of_llama_equal_one_process(method: str) -> None:
    plan = qs.compile("zb-h1", mesh="cp=2,pp=2,tp=2", microbatches=2)
    assert difference_on(plan, ids_task(2, 8, LENGTH), lively_gpt(**LLAMA), context=method) <= 1e-12


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("schedule", "mesh", "options"),
    [
        ("1f1b", "tp=2", {}),
        ("zb-h1", "dp=2,cp=2,tp=2", {}),
        ("interleaved-1f1b", "pp=2,tp=2", {"chunks": 2, "recompute": 1}),
        ("seq-1f1b", "pp=2,tp=2", {"slices": 2}),
    ],
)
def test_masks_of_dropouts_are_those_of_one_process(schedule: str, mesh: str, options: dict[str, int]) -> None:
    plan = qs.compile(schedule, mesh=mesh, microbatches=2, **options)  # type: ignore[arg-type]
    task, blocks = ids_task(2, 8, LENGTH), [*lively_gpt(dropout=0.3)[:-1], Dropping, lively_gpt()[-1]]
    microbatches = 2 * plan.mesh.axis_size("dp")
    alone = train_plainly(task, blocks, microbatches, dtype=torch.float64, masks=Masks(0))
    found = train_on(plan, task, blocks, dtype=torch.float64, rules="nccl", sequence_parallel=True)
    assert worst_difference(found, alone) <= 1e-12


@pytest.mark.parametrize("mesh", ["pp=2,tp=2", "tp=2"])
def test_tied_embeddings_equal_one_process(mesh: str) -> None:
    ties = {"embedding": (0, 1)} if "pp" in mesh else {}
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2, tied=ties)
    assert difference_on(plan, ids_task(2, 8, LENGTH), lively_gpt(), tied=True) <= 1e-12


def test_in_single_precision() -> None:
    plan = qs.compile("1f1b", mesh="dp=2,pp=2,tp=2", microbatches=2)
    assert difference_on(plan, ids_task(2, 8, LENGTH), lively_gpt(), torch.float32) <= 2e-5


def test_a_vision_transformer_where_its_tokens_divide() -> None:
    random = torch.Generator().manual_seed(0)
    images = torch.randn(2, 8, 1, 12, 4, generator=random, dtype=torch.float64)
    task = Task(images, torch.randint(0, 10, (2, 8), generator=random))
    options = ViTOptions(hidden=12, depth=2, heads=4, patch=4)
    blocks = vit(DataSpec(input_shape=(1, 12, 4), num_classes=10), options)  # three patches and the class token
    assert difference_on(qs.compile("1f1b", mesh="pp=2,tp=2", microbatches=2), task, blocks) <= 1e-12
    task = Task.make(2, 8, torch.float64)
    with pytest.raises(MisfitError, match=r"over tp=2, but block 0 leaves float64 \(4, 17, 16\), which does not div"):
        train_on(qs.compile("1f1b", mesh="tp=2", microbatches=2), task, tiny_vit(), sequence_parallel=True)


class Dropping(nn.Module):
    """An MLP that drops out before its pair, between the two, and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)
        self.before, self.between, self.behind = nn.Dropout(0.2), nn.Dropout(0.3), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.behind(self.fc2(self.between(self.fc1(self.before(x)).relu())))
        return out


class Deep(Dropping):
    """One whose dropout between the two stands deeper."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.Sequential(nn.Dropout(0.3), nn.Dropout(0.2))  # type: ignore[assignment]


class Beside(Dropping):
    """One with a product of its own behind the pair, whose features are put together."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.before(self.beside(super().forward(x)))
        return out


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("block", "sequence_parallel"), [(Deep, True), (Deep, False), (Beside, False)])
def test_masks_belong_to_the_features_between_a_pair_only(block: type[nn.Module], sequence_parallel: bool) -> None:
    task, blocks = ids_task(2, 8, LENGTH), [*lively_gpt()[:-1], block, lively_gpt()[-1]]
    plan = qs.compile("1f1b", mesh="tp=2", microbatches=2)
    rules = {"*.beside": "column"} if block is Beside else {}

    def run(transport: Transport) -> Outcome:
        more: dict[str, Any] = {"sequence_parallel": sequence_parallel, "rules": rules}
        return train_rank(transport, plan, task, blocks, dtype=torch.float64, **more)

    alone = train_plainly(task, blocks, 2, dtype=torch.float64, masks=Masks(0))
    assert worst_difference(run_local(2, run), alone) <= 1e-12


def saved_bytes(mesh: str, **more: Any) -> tuple[float, tuple[int, ...]]:
    """Return the most bytes that a stage saves of a unit on any rank, and the shape that the first stage sends."""
    task = ids_task(1, 8, 64)

    def run(transport: Transport) -> tuple[float, tuple[int, ...]]:
        plan = qs.compile("1f1b", mesh=mesh, microbatches=2)
        engine = Engine(plan, lively_gpt(64), cross_entropy_sum, sgd, dtype=torch.float32, transport=transport, **more)
        _, counted = engine.step_counting_saved(*share(engine, task.inputs[0], task.targets[0]))
        costs = engine.saved_costs(counted)
        state = engine._runner.interpreters["train"].state
        (spec,) = state.messages.cargo.specs(Value(Kind.OUTPUT, 0, 0))
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


class Counted(nn.Module):
    """Queries, keys and values apart, and what is done with them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(4, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.o_proj(self.q_proj(x) * self.k_proj(x) * self.v_proj(x))
        return out


def collectives_of(group: Group, model: nn.Module, x: Tensor) -> list[str]:
    """Return the collectives of a forward and a backward, in order."""
    seen: list[str] = []
    kinds = ("all_reduce", "all_gather", "reduce_scatter")

    def noting(kind: str) -> Any:
        plain = getattr(group, kind)

        def noted(*args: Any) -> Any:
            seen.append(kind)
            return plain(*args)

        return noted

    for kind in kinds:
        setattr(group, kind, noting(kind))
    model(x).square().sum().backward()  # the first one has gradients of replicated parameters compared
    seen.clear()
    x.grad = None
    model(x).square().sum().backward()
    for kind in kinds:
        delattr(group, kind)
    return seen


@pytest.mark.parametrize(
    ("model", "sequence_parallel", "expected"),
    [
        (Counted, False, ["all_reduce", "all_reduce"]),
        (Counted, True, ["all_gather", "reduce_scatter", "all_gather", "reduce_scatter"]),
        (lambda: Fused(), False, ["all_reduce", "all_reduce"]),
        (lambda: Fused(), True, ["all_gather", "reduce_scatter", "all_gather", "all_gather", "reduce_scatter"]),
    ],
)
def test_columns_of_the_same_tokens_communicate_once(model: Any, sequence_parallel: bool, expected: list[str]) -> None:
    whole, tokens = build_block(model, 0), torch.randn(2, 4, 4, dtype=torch.float64)

    def run(transport: Transport) -> tuple[list[str], Tensor]:
        group = transport.make_group([(0, 1)])
        cut = apply_tensor_parallel(build_block(model, 0), group, sequence_parallel=sequence_parallel)
        mine = tokens.chunk(2, 1)[group.index] if sequence_parallel else tokens
        x = mine.clone().requires_grad_()
        seen = collectives_of(group, cut, x)
        assert x.grad is not None
        return seen, x.grad

    x = tokens.clone().requires_grad_()
    whole(x).square().sum().backward()
    assert x.grad is not None
    found = run_local(2, run)
    assert [seen for seen, _ in found] == [expected, expected]
    gradient = torch.cat([part for _, part in found], 1) if sequence_parallel else found[0][1]
    assert (gradient - x.grad).abs().max() <= 1e-12


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 8, dtype=torch.float64)
        self.fc2 = nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.fc1(x).tanh())
        return out


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.mlp = Fused().float()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.attention(x, x, x)[0])
        return out


class OwnAttention(nn.Module):
    """An attention whose layers nobody has heard of."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.all_three, self.back = 2, nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.all_three(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out: Tensor = self.back(nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))
        return out


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = OwnAttention(), Fused().float()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.attention(x))
        return out


class Sending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Fused().float()

    def forward(self, x: Tensor) -> Carry:
        return Carry(self.mlp(x), skip=x)


class Joining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Fused().float()

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        out: Tensor = self.mlp(x) + skip
        return out


class Lone(nn.Module):
    """A pair, and a product beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Fused().float()
        self.beside = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(x) + self.beside(x)
        return out


@pytest.mark.parametrize(
    ("blocks", "rules", "message"),
    [
        ([Opaque], {}, r"slices the tokens around '0.attention', but it is not cut, and would attend to this rank"),
        (
            [Own],
            {},
            r"slices the tokens around '0.attention', but it is not cut, and would attend to this rank's tokens",
        ),
        ([Sending, Joining], {}, r"'skip' rides along behind block 0, which sequence parallelism does not slice"),
        ([Lone], {"0.beside": "column"}, r"slices the tokens around '0.beside', but its partner is not cut"),
    ],
)
def test_what_cannot_work_on_a_slice(blocks: list[Any], rules: dict[str, str], message: str) -> None:
    x = torch.randn(2, 4, 4, dtype=torch.float64)

    def run(transport: Transport, mesh: str = "tp=2", **more: Any) -> Tensor:
        plan = qs.compile("gpipe", mesh=mesh, microbatches=1)
        more = {"rules": rules, "sequence_parallel": True, **more}

        def loss(output: Tensor, _: Tensor) -> Tensor:
            return output.square().sum()

        engine = Engine(plan, blocks, loss, sgd, dtype=torch.float64, transport=transport, **more)
        engine.step(x, torch.zeros(2))
        return engine.step(x, torch.zeros(2)).loss

    with pytest.raises(MisfitError, match=message):
        run_local(2, lambda transport: run(transport, prove="none"))
    (expected,) = run_local(1, lambda transport: run(transport, "pp=1", sequence_parallel=False))
    for loss in run_local(2, run):
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


def test_blocks_that_are_modules_are_outlined_before_they_are_cut() -> None:
    task, blocks = ids_task(2, 8, LENGTH), lively_gpt(**LLAMA)
    plan = qs.compile("1f1b", mesh="pp=2,tp=2", microbatches=2)

    def run(transport: Transport) -> Outcome:
        modules = [build_block(block, number, 0, torch.float64) for number, block in enumerate(blocks)]
        return train_rank(transport, plan, task, modules, dtype=torch.float64, sequence_parallel=True)

    assert worst_difference(run_local(4, run), train_plainly(task, blocks, 2, dtype=torch.float64)) <= 1e-12


JOB = """
model: {name: gpt, options: {hidden: 16, depth: 2, tied: true}}
data: {name: "DATA:load"}
parallel: {mesh: "MESH", microbatches: 2, MORE}
train: {epochs: 1, batch_size: 16, optimizer: {name: adam, lr: 0.01}}
runtime: {transport: local, precision: float64}
log: {path: LOG, every: 1}
"""


def test_a_job_shares_out_tokens_and_cuts_by_rules(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(COUNTING)
    losses: list[list[float]] = []
    more = ["sequence_parallel: true", "rules: {'*.attention.*': replicate, '3.head': row}"]
    for mesh, setting in (("pp=1", ""), ("pp=2,tp=2", more[0]), ("tp=2", more[1])):
        job, log = tmp_path / "job.yaml", tmp_path / f"{len(losses)}.jsonl"
        text = JOB.replace("DATA", str(tmp_path / "data.py")).replace("MESH", mesh)
        job.write_text(text.replace("MORE", setting).replace("LOG", str(log)))
        assert main(["--config", str(job)]) == 0
        records = [json.loads(line) for line in log.read_text().splitlines()]
        losses.append([r.get("validation_loss", r["loss"]) for r in records if r["event"] in ("step", "epoch")])
    assert len(losses[0]) == 5
    assert losses[1] == pytest.approx(losses[0], abs=1e-10)
    assert losses[2] == pytest.approx(losses[0], abs=1e-10)
