"""Mixtures of experts: against a loop over tokens, cut over ep and tp, and padded to their capacity."""

from contextlib import ExitStack
from math import ceil
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import quintsched as qs
from quintsched.runtime import MoE, Transport, apply_expert_parallel, run_local
from quintsched.runtime.blocks.block_builders import Blocks
from quintsched.runtime.models.layers import Mlp
from quintsched.runtime.train.built_in_losses import cross_entropy_sum

from ....helpers.training import require_equal, train_ranks
from ...step_setup import changing
from ...step_setup.changing import Shape
from ...toys import difference, ids_task, sgd
from ..lively import mixture, moe_blocks


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


EXPERTS, WIDTH, LENGTH = 5, 6, 8
ROUTINGS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 2, "balance": 0.3, "z": 0.1, "shared": True},
    {"top_k": 3, "renormalise": True, "balance": 0.2},
    {"top_k": 5, "z": 0.1},
]


def tokens_of(rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))


def results_of(layer: MoE, run: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Return output, auxiliary loss, and the gradients of tokens and parameters."""
    given, names = tokens.clone().requires_grad_(), ["tokens", *(name for name, _ in layer.named_parameters())]
    output, auxiliary, *_ = run(given)
    auxiliary = torch.zeros(()) if auxiliary is None else auxiliary
    total = (output * torch.arange(output.numel()).view_as(output)).sum() + auxiliary
    weights = [given, *layer.parameters()]
    gradients = torch.autograd.grad(total, weights, allow_unused=True, materialize_grads=True)
    found = {"output": output.detach(), "auxiliary": auxiliary.detach()}
    return found | dict(zip(names, gradients, strict=True))


@pytest.mark.parametrize("rows", [1, 13])
@pytest.mark.parametrize("factor", [None, 0.01, 0.5, 1.25, 100.0])
@pytest.mark.parametrize("options", ROUTINGS, ids=str)
def test_a_mixture_with_and_without_padding_equals_a_loop_over_tokens(options, factor, rows) -> None:
    for pads in (False, True) if factor else (False,):
        layer, tokens = mixture(capacity_factor=factor, pad_to_capacity=pads, **options), tokens_of(rows)
        assert (layer(tokens)[1] is None) == ("balance" not in options and "z" not in options)
        layer.expert_tokens.zero_()
        found = results_of(layer, layer, tokens)
        assert layer.expert_tokens.tolist() == slowly(layer, tokens)[2]
        expected = results_of(layer, lambda x, layer=layer: slowly(layer, x), tokens)
        assert {name for name in expected if difference(found[name], expected[name]) > 1e-12} == set()


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


class Direction(nn.Module):
    """Gives the direction of a row, which none has whose length is 0, and notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.given: Tensor = torch.empty(0)
        self.gradient: Tensor = torch.empty(0)

    def forward(self, rows: Tensor) -> Tensor:
        self.given = rows.detach()
        output: Tensor = self.linear(rows) / (rows - 1).norm(dim=-1, keepdim=True) + rows.norm(dim=-1, keepdim=True)
        output.register_hook(self._note)
        return output

    def _note(self, gradient: Tensor) -> None:
        self.gradient = gradient


def test_what_fills_up_is_rows_of_the_rank_and_has_no_gradient() -> None:
    """Rows of zeros would have no derivative, rows of ones no direction, and memory that nobody wrote could be NaN."""
    layer = MoE(WIDTH, EXPERTS, Direction, top_k=2, capacity_factor=2.0, pad_to_capacity=True).double()
    tokens = tokens_of(2).repeat(5, 1).requires_grad_()
    output, _ = layer(tokens)
    output.sum().backward()
    assert tokens.grad.isfinite().all()
    counts = layer.expert_tokens.tolist()
    assert min(counts) == 0 < max(counts)
    for expert, count in zip(layer.experts.values(), counts, strict=True):
        assert len(expert.given) == 8  # ceil(2 · 10 · 2 / 5)
        assert all((row == tokens).all(-1).any() for row in expert.given)
        assert not expert.gradient[count:].any()
        if count:
            mine = expert.given[: min(count, 8)]
            assert all((row == mine).all(-1).any() for row in expert.given), "repeats are of the expert's own rows"
        assert all(parameter.grad.isfinite().all() for parameter in expert.parameters())
        assert count or not any(parameter.grad.any() for parameter in expert.parameters())


@pytest.mark.parametrize(("factor", "rows"), [(0.01, 1), (1.0, 4), (1.25, 5), (2.4, 10), (2.5, 10), (100.0, 10)])
def test_an_expert_is_given_as_many_rows_as_it_may_take_and_no_more_than_tokens(factor: float, rows: int) -> None:
    layer = MoE(WIDTH, EXPERTS, Direction, top_k=2, capacity_factor=factor, pad_to_capacity=True).double()
    layer(tokens_of(10))
    assert [len(expert.given) for expert in layer.experts.values()] == [rows] * EXPERTS


READS = {"tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__", "cpu", "nonzero", "unique"}
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "unique", "repeat_interleave.Tensor")


class NoReads(TorchFunctionMode):
    """Raises for a call of torch that hands numbers to Python."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.__name__ not in READS, f"{func.__name__} makes a device's host wait"
        return func(*args, **(kwargs or {}))


class NoWaits(TorchDispatchMode):
    """Raises for an operation, of a backward too, whose shape is known only when the device has computed it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(word in str(func) for word in WAITS), f"{func} makes a device's host wait"
        indices = [index for given in args if isinstance(given, list | tuple) for index in given]
        masks = [index for index in indices if isinstance(index, Tensor) and index.dtype is torch.bool]
        assert "aten.index" not in str(func) or not masks, f"{func} by a mask makes a device's host wait"
        return func(*args, **(kwargs or {}))


def narrow() -> nn.Module:
    return Mlp(WIDTH, 7, bias=False)


def test_nothing_is_read() -> None:
    """Tensors without data: what wants to know a number, or a shape that follows from numbers, raises."""
    options = {"capacity_factor": 2.5, "pad_to_capacity": True, "renormalise": True, "balance": 0.1, "z": 0.1}
    with FakeTensorMode():
        layer = MoE(WIDTH, EXPERTS, narrow, shared=narrow(), **options)
        tokens = torch.randn(3, 4, WIDTH, requires_grad=True)
        output, auxiliary = layer(tokens)
        (output.sum() + auxiliary).backward()
        assert output.shape == tokens.shape
        assert all(parameter.grad is not None for parameter in [tokens, *layer.parameters()])


@pytest.mark.parametrize(("tokens_alike", "calls"), [(True, ["rows"] * 4), (False, ["counts", *["rows"] * 4])])
def test_ranks_swap_as_many_rows_and_no_counts(tokens_alike: bool, calls: list[str]) -> None:
    """Exchange rows there and back, forward and backward; counts are read only unless tokens are known to be equal."""

    def run(transport: Transport) -> tuple[list[str], bool]:
        group, found = transport.make_group([(0, 1)]), list[str]()
        plain = group.all_to_all

        def noting(output: Tensor, tensor: Tensor, *splits: list[int]) -> Any:
            found.append("counts" if tensor.dtype is torch.int64 else "rows")
            if tokens_alike:
                assert splits == ([8, 8], [8, 8])  # two experts a rank, ceil(1.25 · 6 · 2 / 4) of each
            return plain(output, tensor, *splits)

        group.all_to_all = noting
        torch.manual_seed(0)
        layer = MoE(WIDTH, 4, narrow, capacity_factor=1.25, pad_to_capacity=True, balance=0.1)
        assert not layer.waits_for_routing
        apply_expert_parallel(layer, group, tokens_alike=tokens_alike)
        tokens = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(transport.rank), requires_grad=True)

        with ExitStack() as stack:
            for mode in (NoReads(), NoWaits()) if tokens_alike else ():
                stack.enter_context(mode)
            output, auxiliary = layer(tokens)
            (output.square().sum() + auxiliary).backward()
        return found, layer.waits_for_routing

    assert run_local(2, run, rules="nccl") == [(calls, not tokens_alike)] * 2


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


UNEVEN = [
    *map(Shape, ([(12, 8), (12, 8)], [(11, 8), (11, 8)], [(12, 8), (7, 8)], [(6, 8), (3, 16)])),
    Shape([(6, 8), (0, 8)], evaluates=True),
    *map(Shape, ([(0, 8), (5, 4)], [(12, 8), (12, 8)], [(12, 8), (5, 8)])),
]
"""Of two replicas: uneven microbatches, other numbers of samples, other lengths, none; the first of them may not see
from its own samples that something has changed."""


def padding(*, pads: bool = True) -> Blocks:
    return moe_blocks(16, capacity_factor=0.75, pad_to_capacity=pads, dropout=0.1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", ["ep=2", "pp=2,ep=2", "ep=2,tp=2"])
def test_replicas_of_other_shapes_have_the_same_numbers(mesh: str) -> None:
    plan = qs.compile("1f1b", mesh=mesh, microbatches=4)
    padded, plain = (changing.train_on(plan, padding(pads=pads), UNEVEN, prove="all") for pads in (True, False))
    for one, other in zip(padded, plain, strict=True):
        require_equal([one], other)


def test_overlapped_computations_refuse_other_shapes() -> None:
    plan = qs.compile("dualpipe-v", mesh="pp=2,ep=2", microbatches=4, overlap=True)
    shapes = [*[Shape([(8, 8), (8, 8)])] * 3, Shape([(8, 8), (4, 8)])]
    with pytest.raises(qs.MisfitError, match="give all replicas as many samples of the same length, or compile the pl"):
        changing.train_on(plan, padding(), shapes)
