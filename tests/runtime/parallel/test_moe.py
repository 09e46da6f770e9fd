"""Mixtures of experts: against a loop over tokens, and shared out over ranks against the same model in one process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine, MoE, apply_expert_parallel, apply_tensor_parallel
from quintsched.runtime.blocks.blocks import Block, Blocks, build_block, build_model
from quintsched.runtime.blocks.costs import estimate_costs
from quintsched.runtime.blocks.shapes import trace_shapes
from quintsched.runtime.blocks.trees import TensorSpec, TreeSpec
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.data import DataSpec
from quintsched.runtime.launch.worker import main
from quintsched.runtime.models.gpt import gpt_tied
from quintsched.runtime.models.layers import Mlp
from quintsched.runtime.models.moe_gpt import MoEGPTOptions, moe_gpt
from quintsched.runtime.parallel.expert.moe import expert_weights, mixtures
from quintsched.runtime.stage.build import Stage
from quintsched.runtime.state.grad_buckets import cut_buckets
from quintsched.runtime.state.master_weights import Masters
from quintsched.runtime.state.state_dict import state_of
from quintsched.runtime.train.losses import cross_entropy_sum

from ..models.test_gpt import COUNTING
from ..toys import CLASSES, Task, difference, ids_task, sgd, share

DEPTH, LENGTH, HIDDEN = 2, 8, 16


def mixture(**options: Any) -> MoE:
    torch.manual_seed(0)
    shared = Mlp(6, 5, bias=False) if options.pop("shared", False) else None
    layer = MoE(6, 5, lambda: Mlp(6, 7, bias=False), shared=shared, **options).double()
    with torch.no_grad():
        layer.router.weight.mul_(4)
    return layer


def slowly(layer: MoE, tokens: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """One token after the other, by the formulas of the papers: output, auxiliary loss, choices of each expert."""
    k, experts = layer.top_k, layer.num_experts
    rows = tokens.reshape(-1, tokens.shape[-1])
    limit = ceil((layer.capacity_factor or experts) * len(rows) * k / experts)
    taken, chosen, probabilities, outputs, z = [0] * experts, [0] * experts, [], [], torch.zeros(()).double()
    for row in rows:
        exponentials = (layer.router.weight @ row).exp()
        probability = exponentials / exponentials.sum()
        best = sorted(range(experts), key=lambda e: -probability[e].item())[:k]
        scale = probability[best].sum() if layer.renormalise else 1.0
        output = torch.zeros_like(row)
        for e in best:
            chosen[e] += 1
            if taken[e] < limit:
                taken[e] += 1
                output = output + probability[e] / scale * layer.experts[str(e)](row)
        if layer.shared is not None:
            output = output + layer.shared(row)
        outputs.append(output)
        probabilities.append(probability)
        z = z + exponentials.sum().log() ** 2
    mean = torch.stack(probabilities).mean(0)
    fractions = torch.tensor(chosen).double() / (len(rows) * k)
    balance = experts * (fractions * mean).sum()
    return torch.stack(outputs).view_as(tokens), len(rows) * layer.balance * balance + layer.z * z, chosen


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"top_k": 2, "balance": 0.3},
        {"top_k": 2, "z": 0.1, "shared": True},
        {"top_k": 3, "renormalise": True, "balance": 0.2, "z": 0.1},
        {"top_k": 2, "capacity_factor": 0.5, "balance": 0.3},
        {"top_k": 5, "capacity_factor": 1.0, "shared": True},
    ],
    ids=str,
)
def test_a_mixture_equals_a_loop_over_tokens(options: dict[str, Any]) -> None:
    layer, tokens = mixture(**options), torch.randn(3, 4, 6, dtype=torch.float64)
    names = [name for name, _ in layer.named_parameters()]
    results = []
    for run in (layer, lambda x: slowly(layer, x)):
        x = tokens.clone().requires_grad_()
        output, auxiliary, *_ = run(x)
        total = (output * torch.arange(72).view_as(output)).sum() + (0.0 if auxiliary is None else auxiliary)
        gradients = torch.autograd.grad(total, [x, *layer.parameters()], allow_unused=True, materialize_grads=True)
        detached = None if auxiliary is None else auxiliary.detach()
        results.append([output.detach(), detached, *gradients])
    found, expected = results
    assert (found[1] is None) == ("balance" not in options and "z" not in options)
    for name, a, b in zip(["output", "auxiliary", "tokens", *names], found, expected, strict=True):
        if a is not None:
            assert difference(a, b) <= 1e-12, name
    assert layer.expert_tokens.tolist() == slowly(layer, tokens)[2]


def test_what_a_mixture_refuses() -> None:
    with pytest.raises(qs.UsageError, match="cannot use top_k=6 of 5 experts"):
        mixture(top_k=6)
    with pytest.raises(qs.UsageError, match="capacity_factor is -1; it must be above 0"):
        mixture(capacity_factor=-1)
    for wrong, words in (
        ({"experts": 2, "top_k": 3}, "top_k=3 of experts=2"),
        ({"top_k": 1, "renormalise": True}, "the router learns nothing"),
        ({"depth": 2, "every": 3}, "every=3 is more than depth=2"),
    ):
        with pytest.raises(qs.UsageError, match=words):
            MoEGPTOptions(**wrong)


def test_only_training_counts_and_has_an_auxiliary_loss() -> None:
    layer, tokens = mixture(top_k=2, balance=0.1), torch.randn(3, 6, dtype=torch.float64)
    expected = layer(tokens)[0]
    output, auxiliary = layer.eval()(tokens)
    assert auxiliary is None
    assert torch.equal(output, expected)
    assert layer.expert_tokens.sum() == 6
    assert "expert_tokens" not in layer.state_dict()


def test_low_precision_is_routed_in_float32() -> None:
    layer, tokens = mixture(top_k=2, z=0.1).bfloat16(), torch.randn(9, 6).bfloat16()
    output, auxiliary = layer(tokens)
    assert output.dtype == torch.bfloat16
    assert auxiliary.dtype == torch.float32
    logits = tokens.float() @ layer.router.weight.float().T
    torch.testing.assert_close(auxiliary, 0.1 * logits.logsumexp(-1).square().sum())


def moe_blocks(length: int = LENGTH, **options: Any) -> Blocks:
    """A transformer with experts of which some are chosen more often than others."""
    settings = {"hidden": HIDDEN, "depth": DEPTH, "experts": 4, "mlp_ratio": 2, "balance": 0.05, "z": 0.01} | options

    def livelier(build: Block) -> Callable[[], nn.Module]:
        def built() -> nn.Module:
            module = build()
            assert isinstance(module, nn.Module)
            with torch.no_grad():
                for parameter in (p for p in module.parameters() if not p.is_meta):
                    parameter.add_(torch.randn_like(parameter) / 4)
            return module

        return built

    data = DataSpec(input_shape=(length,), num_classes=CLASSES)
    return [livelier(block) for block in moe_gpt(data, MoEGPTOptions(**settings))]


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    tokens: dict[str, list[int]]


def train_plainly(task: Task, blocks: Blocks, microbatches: int, clip: float, tied: dict[str, Any]) -> Trained:
    """Train in one process, with auxiliary losses: a loop that owes nothing to the engine."""
    model = build_model(blocks, 0, torch.float64)
    for first, *others in tied.values():
        for other in others:
            owner, _, name = other.rpartition(".")
            setattr(model.get_submodule(owner), name, model.get_parameter(first))
    stepper = sgd(list(model.parameters()))
    losses, norms = [], []
    for inputs, targets in zip(task.inputs, task.targets, strict=True):
        weight, total = (targets != -100).sum(), 0.0
        stepper.zero_grad()
        for some, wanted in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
            given, loss = some, torch.zeros((), dtype=torch.float64)
            for block in model:
                result = block(given)
                given, auxiliary = result if isinstance(result, tuple) else (result, None)
                loss = loss if auxiliary is None else loss + auxiliary
            loss = loss + cross_entropy_sum(given, wanted)[0]
            loss.backward()
            total += loss.item()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= weight
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        stepper.step()
        losses.append(total / float(weight))
    weights = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
    return Trained(losses, norms, weights, {name: m.expert_tokens.tolist() for name, m in mixtures(model).items()})


def train_on(
    plan: qs.Plan, task: Task, blocks: Blocks, clip: float, tied: dict[str, Any], **more: Any
) -> list[Trained]:
    def run(transport: Transport) -> Trained:
        engine = Engine(
            plan,
            blocks,
            cross_entropy_sum,
            sgd,
            clip=clip,
            bucket_mb=0.01,
            dtype=torch.float64,
            tied=tied,
            transport=transport,
            **more,
        )
        results = [engine.step(*share(engine, *step)) for step in zip(task.inputs, task.targets, strict=True)]
        norms = [result.grad_norm.item() for result in results if result.grad_norm is not None]
        tokens = {name: row.tolist() for name, row in engine.expert_tokens().items()}
        assert not any(row.any() for row in engine.expert_tokens().values())
        return Trained([result.loss.item() for result in results], norms, engine.full_weights(), tokens)

    return run_local(plan.mesh.size, run, timeout_s=300, rules="nccl")


def require_equality(plan: qs.Plan, more: dict[str, Any] | None = None, *, tied: bool = False, **options: Any) -> None:
    """Train on a plan by NCCL's rules, and in one process; `more` is for the engine."""
    task, blocks = ids_task(2, 8, LENGTH), moe_blocks(tied=tied, **options)
    ties = gpt_tied(MoEGPTOptions(depth=DEPTH, tied=tied))
    replicas = plan.mesh.axis_size("dp") * plan.mesh.axis_size("ep")
    alone = train_plainly(task, blocks, replicas * plan.schedule.microbatches, 1.0, ties)
    found = train_on(plan, task, blocks, 1.0, ties, **(more or {}))
    assert {name for rank in found for name in rank.weights} == set(alone.weights)
    for rank in found:
        assert rank.losses == pytest.approx(alone.losses, abs=1e-12)
        assert rank.norms == pytest.approx(alone.norms, rel=1e-12)
        assert all(difference(weight, alone.weights[name]) <= 1e-12 for name, weight in rank.weights.items())
        assert rank.tokens == alone.tokens


MESHES = [
    "pp=1",
    "ep=2",
    "ep=4",
    "dp=2,ep=2",
    "ep=2,dp=2",
    "pp=2,ep=2",
    "ep=2,tp=2",
    "tp=2,pp=2",
    "cp=2,ep=2",
    "cp=2,dp=2",
    "dp=2,pp=2,ep=2",
    "ep=2,pp=2,tp=2",
    "dp=2,ep=2,tp=2",
    "cp=2,ep=2,pp=2",
    "cp=2,dp=2,ep=2",
    "tp=2,cp=2,ep=2",
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("mesh", MESHES)
def test_meshes_equal_one_process(mesh: str) -> None:
    sizes = qs.Mesh.parse(mesh)
    microbatches = 2 if sizes.axis_size("dp") * sizes.axis_size("ep") <= 4 else 1
    require_equality(qs.compile("1f1b", mesh=mesh, microbatches=microbatches))


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("schedule", "mesh", "chunks", "recompute"),
    [
        ("zb-h1", "pp=2,ep=2", None, 0),
        ("zb-h1", "dp=2,pp=2,ep=2", None, 1),
        ("interleaved-1f1b", "ep=2,pp=2", 2, 1),
        ("interleaved-1f1b", "pp=2,ep=2,tp=2", 2, 0),
        ("zbv", "pp=2,ep=2", None, 0),
        ("dualpipe", "ep=2,pp=2", None, 0),
        ("1f1b", "ep=2,cp=2", None, 1),
        ("1f1b", "ep=2", None, 2),
        ("gpipe", "ep=2,pp=2", None, 1),
    ],
)
def test_other_schedules_equal_one_process(schedule: str, mesh: str, chunks: int | None, recompute: int) -> None:
    microbatches = 2 if "dp" in mesh else 4
    plan = qs.compile(schedule, mesh=mesh, microbatches=microbatches, chunks=chunks, recompute=recompute)
    require_equality(plan)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "options",
    [
        {"activation": "swiglu", "norm": "rmsnorm", "shared_experts": 2, "renormalise": True, "positions": "rope"},
        {"top_k": 1, "every": 2, "experts": 8, "balance": 0.0},
        {"tied": True, "balance": 0.0, "z": 0.0, "top_k": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("mesh", ["dp=2,ep=2,pp=2", "ep=2,tp=2,pp=2"])
def test_variants_equal_one_process(mesh: str, options: dict[str, Any]) -> None:
    tied = {"embedding": (0, 1)} if "tied" in options else {}
    require_equality(qs.compile("1f1b", mesh=mesh, microbatches=2, tied=tied, buckets_per_stage=2), **options)


LLAMA = {"activation": "swiglu", "norm": "rmsnorm", "shared_experts": 2, "positions": "rope", "kv_heads": 2}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("schedule", "mesh", "more", "options"),
    [
        ("1f1b", "tp=2", {}, {}),
        ("1f1b", "ep=2,tp=2,pp=2", {"recompute": 1}, LLAMA),
        ("zb-h1", "tp=2,cp=2,ep=2", {}, {"shared_experts": 1}),
        ("zb-h1", "pp=2,tp=2", {}, LLAMA),
        ("interleaved-1f1b", "ep=2,pp=2,tp=2", {"chunks": 2}, {}),
    ],
)
@pytest.mark.parametrize("rules", [{}, {"*.experts.*": "replicate"}], ids=str)
def test_tokens_that_are_shared_out_over_tp_equal_one_process(
    schedule: str, mesh: str, more: dict[str, int], options: dict[str, Any], rules: dict[str, str]
) -> None:
    plan = qs.compile(schedule, mesh=mesh, microbatches=2, **more)  # type: ignore[arg-type]
    require_equality(plan, {"sequence_parallel": True, "rules": rules}, **options)


def test_experts_under_tp_communicate_once_for_all() -> None:
    """Forward: one sum over tp. Backward: of the router's weights, of the tokens."""

    def run(transport: Transport) -> list[int]:
        group = transport.make_group([(0, 1)])
        layer = build_block(lambda: nn.Sequential(MoE(6, 5, lambda: Mlp(6, 8, bias=False))), 0)
        cut = apply_tensor_parallel(layer, group)
        cut(torch.randn(3, 6, generator=torch.Generator().manual_seed(0)))[0].sum().backward()
        calls: list[tuple[int, ...]] = []
        plain = group.all_reduce

        def noting(tensor: Tensor, *args: Any) -> Any:
            calls.append(tuple(tensor.shape))
            return plain(tensor, *args)

        group.all_reduce = noting  # type: ignore[method-assign]
        tokens = torch.randn(3, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
        cut(tokens)[0].sum().backward()
        return calls  # type: ignore[return-value]

    assert run_local(2, run) == [[(3, 6), (3, 2), (3, 6)]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_all_five_axes_equal_one_process(sequence_parallel: bool) -> None:
    plan = qs.compile("zb-h1", mesh="dp=2,ep=2,pp=2,cp=2,tp=2", microbatches=2)
    require_equality(plan, {"sequence_parallel": sequence_parallel})


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile wants a C++ compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_stages_equal_one_process() -> None:
    plan = qs.compile("zb-h1", mesh="ep=2,dp=2", microbatches=2)
    require_equality(plan, {"compiled": True}, shared_experts=1)


def test_experts_that_do_not_divide_are_refused() -> None:
    plan = qs.compile("1f1b", mesh="ep=3", microbatches=1)
    with pytest.raises(qs.MisfitError, match="ep=3 does not divide 4 experts; choose ep from 1, 2, 4"):
        train_on(plan, ids_task(1, 3, LENGTH), moe_blocks(), 1.0, {})


def test_experts_that_are_not_cut_alike_are_refused() -> None:
    plan = qs.compile("1f1b", mesh="ep=2,tp=2", microbatches=1)
    rules = {"*.experts.3.*": "replicate"}
    with pytest.raises(qs.MisfitError, match=r"rules cut experts 0 and 3 of '1\.mlp' differently over tp; cut all of"):
        train_on(plan, ids_task(1, 4, LENGTH), moe_blocks(), 1.0, {}, rules=rules)


def test_experts_with_dropout_are_refused() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Dropout(0.1))

    plan = qs.compile("1f1b", mesh="pp=1", microbatches=1)
    with pytest.raises(qs.MisfitError, match="block 0 has a dropout within the experts of 'itself', whose rows are no"):
        Engine(plan, [MoE(4, 2, make)], nn.functional.mse_loss, sgd)


def test_a_rank_holds_its_share_under_the_names_of_the_whole() -> None:
    def run(transport: Transport) -> tuple[list[str], list[int], set[str]]:
        layer = mixture().float()
        apply_expert_parallel(nn.Sequential(layer), transport.make_group([(0, 1, 2, 3, 4)]))
        stage = Stage(3, {7: layer})
        buckets = [bucket for (_, bucket), _ in cut_buckets(stage, 2, 10**6)]
        assert expert_weights(stage) == set(layer.experts.parameters())
        held = set(state_of({3: stage}, {}, Masters({3: stage})))
        return [name for name, _ in layer.named_parameters()], buckets, held

    for rank, (names, buckets, held) in enumerate(run_local(5, run)):
        assert names == ["router.weight", f"experts.{rank}.fc1.weight", f"experts.{rank}.fc2.weight"]
        assert held == {f"model.7.{name}" for name in names}
        assert sorted(buckets) == [0, 2]


def test_shapes_are_found_and_costs_are_those_of_the_experts_that_a_token_uses() -> None:
    blocks = moe_blocks(shared_experts=1)
    parcels = trace_shapes(blocks, TreeSpec.plain(TensorSpec((2, LENGTH), torch.int64)), {}, torch.float64)
    assert [parcel.output.tensors[0].shape for parcel in parcels] == [(2, LENGTH, HIDDEN)] * (DEPTH + 1) + [
        (2, LENGTH, CLASSES)
    ]
    few, many = (estimate_costs(moe_blocks(experts=experts))[1] for experts in (4, 16))
    assert many - few == 12 * HIDDEN  # rows of the router
    with pytest.raises(qs.MisfitError, match="block 0 cannot take"):
        trace_shapes([mixture()], TreeSpec.plain(TensorSpec((2, 7), torch.float64)), {})


JOB = """
model: {name: moe-gpt, options: {hidden: 32, depth: 2, experts: 4, mlp_ratio: 1, capacity_factor: CAPACITY}}
data: {name: "DATA:load"}
parallel: {mesh: "MESH", microbatches: MICROBATCHES}
train: {epochs: 1, batch_size: 16, optimizer: {name: adam, lr: 0.01}, clip: 1.0}
runtime: {transport: local, precision: float64}
checkpoint: {dir: FOLDER}
log: {path: FOLDER/log.jsonl, every: 1}
"""


def train_job(
    folder: Path, mesh: str, microbatches: int, *arguments: str, capacity: str = "null"
) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    (folder / "data.py").write_text(COUNTING)
    words = {"DATA": str(folder / "data.py"), "MESH": mesh, "FOLDER": str(folder), "CAPACITY": capacity}
    text = JOB.replace("MICROBATCHES", str(microbatches))
    for word, value in words.items():
        text = text.replace(word, value)
    (folder / "job.yaml").write_text(text)
    assert main(["--config", str(folder / "job.yaml"), *arguments]) == 0
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_job_trains_on_experts_to_the_same_losses_and_says_how_they_are_loaded(tmp_path: Path) -> None:
    alone = train_job(tmp_path / "alone", "pp=1", 4)
    ranks = train_job(tmp_path / "ranks", "ep=2,pp=2", 2)
    assert len(alone) == len(ranks) == 6
    for one, other in zip(alone, ranks, strict=True):
        assert other.get("loss") == pytest.approx(one.get("loss"), abs=1e-10)
        assert other.get("expert_tokens") == one.get("expert_tokens")
        if one["event"] == "step":
            rows = one["expert_tokens"]
            assert list(rows) == ["1.mlp", "2.mlp"]
            assert all(sum(row) == 16 * 8 * 2 for row in rows.values()), rows
            assert one["expert_imbalance"] == max(max(row) for row in rows.values()) * 4 / (16 * 8 * 2)


def test_a_run_with_experts_that_is_resumed_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    longer = ("--set", "train.epochs=2")
    straight = train_job(tmp_path / "straight", "dp=2,ep=2", 1, *longer, capacity="1.0")
    train_job(tmp_path / "twice", "dp=2,ep=2", 1, capacity="1.0")
    both = train_job(tmp_path / "twice", "dp=2,ep=2", 1, *longer, "--resume", capacity="1.0")
    figures = ("loss", "grad_norm", "expert_tokens", "validation_loss")
    last = [[record.get(name) for name in figures] for record in straight[-5:]]
    assert [[record.get(name) for name in figures] for record in both[-5:]] == last
    assert {record["epoch"] for record in both[-5:]} == {2}
