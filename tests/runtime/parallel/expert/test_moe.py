"""Mixtures of experts: against a loop over tokens, cut over ep and tp, and what is refused."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import MoE, apply_tensor_parallel
from quintsched.runtime.blocks.block_builders import build_block
from quintsched.runtime.blocks.block_costs import estimate_costs
from quintsched.runtime.blocks.shape_inference import trace_shapes
from quintsched.runtime.blocks.trees import TensorSpec, TreeSpec
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.models.gpt import MoEGPTOptions
from quintsched.runtime.models.layers import Mlp
from quintsched.runtime.train.built_in_losses import cross_entropy_sum

from ....helpers.training import train_ranks
from ...toys import CLASSES, difference, ids_task, sgd
from .mixtures import DEPTH, HIDDEN, LENGTH, mixture, moe_blocks


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
    for make, wrong, words in (
        (mixture, {"top_k": 6}, "cannot use top_k=6 of 5 experts"),
        (mixture, {"capacity_factor": -1}, "capacity_factor is -1; it must be above 0"),
        (MoEGPTOptions, {"experts": 2, "top_k": 3}, "top_k=3 of experts=2"),
        (MoEGPTOptions, {"top_k": 1, "renormalise": True}, "the router learns nothing"),
        (MoEGPTOptions, {"depth": 2, "every": 3}, "every=3 is more than depth=2"),
    ):
        with pytest.raises(qs.UsageError, match=words):
            make(**wrong)


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


@pytest.mark.parametrize(
    ("mesh", "rules", "words"),
    [
        ("ep=3", {}, "ep=3 does not divide 4 experts; choose ep from 1, 2, 4"),
        ("ep=2,tp=2", {"*.experts.3.*": "replicate"}, r"experts 0 and 3 of '1\.mlp' differently over tp; cut all of"),
    ],
)
def test_experts_that_do_not_divide_or_are_not_cut_alike_are_refused(mesh: str, rules: Any, words: str) -> None:
    plan, batches = qs.compile("1f1b", mesh=mesh, microbatches=1), ids_task(1, 12, LENGTH).batches
    with pytest.raises(qs.MisfitError, match=words):
        train_ranks(plan, moe_blocks(), cross_entropy_sum, sgd, batches, rules=rules)


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
