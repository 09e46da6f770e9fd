"""Attention over parts of a sequence, on every rank its own, is attention over the whole: values, gradients, costs."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import quintsched as qs
from quintsched.runtime.blocks.trees import TensorSpec
from quintsched.runtime.comm import Transport, Work, run_local
from quintsched.runtime.parallel.context import block_attention
from quintsched.runtime.parallel.context.block_attention import (
    CPU_FLASH,
    CUDA_EFFICIENT,
    CUDA_FLASH,
    PLAIN_KERNEL,
    Kernel,
    QueryKeyValue,
    attend,
    choose,
    gradients,
)
from quintsched.runtime.parallel.context.context_parallel import Context, ContextMethod, ContextParallel, SequenceShard
from quintsched.runtime.parallel.context.ring_attention import ring_channels
from quintsched.runtime.train.built_in_losses import cross_entropy_sum

from ....helpers import training
from ....helpers.blocks import of_layers
from ....helpers.refusals import require_refusals
from ...toys import ids_task, tiny_gpt, train_on
from ..lively import LENGTH

Tensors = tuple[Tensor, ...]


def by_autograd(block: Tensors, gradient: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensors]:
    """Return mean, weight and gradients of a block with query heads by key head, in double precision and one piece."""
    query, key, value = (tensor.detach().double().requires_grad_() for tensor in block)
    scores = query @ key[:, :, None].mT / query.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    mean = scores.softmax(-1) @ value[:, :, None]
    back = torch.autograd.grad(mean, (query, key, value), gradient.double())
    return mean.detach(), scores.logsumexp(-1).detach(), back


def draw(samples: int, heads: int, key_heads: int, length: int, size: int) -> Tensors:
    """Return query, key, value and the gradient of the result, for the whole sequence."""
    random = torch.Generator().manual_seed(length)
    shapes = [(samples, count, length, size) for count in (heads, key_heads, key_heads, heads)]
    return tuple(torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes)


def whole(tensors: Tensors, causal: bool) -> Tensors:
    """Return the result of attention in one piece, and the gradients of query, key and value."""
    query, key, value, gradient = tensors
    grouped = (1, (key.shape[1], -1))
    mean, _, (of_query, *others) = by_autograd(
        (query.unflatten(*grouped), key, value), gradient.unflatten(*grouped), causal
    )
    return mean.flatten(1, 2), of_query.flatten(1, 2), *others


def context_on(transport: Transport, method: ContextMethod, length: int) -> Context:
    size = transport.world_size
    group = transport.make_group([tuple(range(size))])
    transport.open_channels(ring_channels(group.ranks))
    return ContextParallel(method, group, transport, False).context_of(TensorSpec((1, length // size), torch.int64))


def in_parts(method: ContextMethod, tensors: Tensors, size: int, causal: bool) -> Tensors:
    """Return what `whole` does, put together from the parts of all ranks."""

    def run(transport: Transport) -> tuple[Tensor, Tensors]:
        context = context_on(transport, method, tensors[0].shape[2])
        *given, gradient = (tensor[:, :, context.positions].contiguous() for tensor in tensors)
        mixed = context.attend(*(tensor.requires_grad_() for tensor in given), causal)
        mixed.backward(gradient)
        return context.positions, (mixed.detach(), *(tensor.grad for tensor in given))

    found = run_local(size, run, rules="nccl")
    back = torch.cat([positions for positions, _ in found]).argsort()
    return tuple(torch.cat(parts, 2)[:, :, back] for parts in zip(*(parts for _, parts in found), strict=True))


def require_close(found: Tensors, expected: Tensors, tolerance: float = 1e-12) -> None:
    assert len(found) == len(expected) == 4
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= tolerance * max(1.0, float(other.abs().max()))


@settings(max_examples=35)
@given(
    size=st.integers(2, 5),
    chunk=st.integers(1, 5),
    samples=st.integers(1, 2),
    key_heads=st.integers(1, 2),
    per_key_head=st.integers(1, 3),
    width=st.integers(1, 5),
    causal=st.booleans(),
    backend=st.sampled_from([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]),
)
def test_a_ring_sees_the_whole(size, chunk, samples, key_heads, per_key_head, width, causal, backend) -> None:
    tensors = draw(samples, key_heads * per_key_head, key_heads, 2 * size * chunk, width)
    with sdpa_kernel(backend):
        require_close(in_parts("ring", tensors, size, causal), whole(tensors, causal))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("method", "heads", "key_heads"), [("gather", 3, 1), ("ulysses", 8, 4), ("ulysses", 4, 4)])
def test_the_alternatives_see_the_whole(method: ContextMethod, heads: int, key_heads: int, causal: bool) -> None:
    tensors = draw(2, heads, key_heads, 24, 5)
    for size in (2, 4):
        require_close(in_parts(method, tensors, size, causal), whole(tensors, causal))


def test_what_a_rank_sends_is_what_the_formula_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard of keys and values: n-1 times forward, and with its gradients 2(n-1) times backward."""
    sent: dict[int, int] = {}
    send = Transport.send

    def counting(self: Transport, tensor: Tensor, peer: int, tag: int) -> Work:
        sent[self.rank] = sent.get(self.rank, 0) + tensor.nbytes
        return send(self, tensor, peer, tag)

    monkeypatch.setattr(Transport, "send", counting)
    for size in (2, 3, 4):
        sent.clear()
        in_parts("ring", draw(1, 4, 2, 24, 5), size, True)
        shard = 2 * (2 * 24 // size * 5) * 8
        assert sent == dict.fromkeys(range(size), 3 * (size - 1) * shard)


def saved_bytes(method: ContextMethod, size: int) -> list[int]:
    """Return how many bytes the attention of each rank keeps for its backward, by storage."""
    tensors = draw(1, 4, 4, 48, 8)

    def run(transport: Transport) -> int:
        context = context_on(transport, method, 48)
        given = [tensor[:, :, context.positions].clone().requires_grad_() for tensor in tensors[:3]]
        storages: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            mixed = context.attend(given[0], given[1], given[2])
        kept = sum(storages.values())
        mixed.sum().backward()
        return kept

    return run_local(size, run)


def test_what_a_rank_keeps_falls_as_the_ranks_grow_in_number() -> None:
    alone = 4 * 48 * (4 * 8 + 1) * 8  # query, key, value, result, and a number per query
    for size in (2, 4, 8):
        assert saved_bytes("ring", size) == [alone // size] * size
    assert min(saved_bytes("gather", 4)) > alone // 2


Shifted = of_layers(
    "Shifted",
    lambda: {"tokens": nn.Embedding(10, 10)},
    lambda self, ids, along, each, context=None: self.tokens(ids) + along[..., None] + each[:, None, None],
)
"""Embeds, and adds what a step brings along: per token, and per sample."""


def test_extras_are_cut_along_the_sequence_unless_they_are_one_number_per_sample() -> None:
    (ids, targets), sgd = ids_task(1, 4, LENGTH).batches[0], training.sgd
    along, each = torch.randn(4, LENGTH, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    plan = qs.compile("1f1b", mesh="cp=2", microbatches=2)
    given = [(ids, targets, {"along": along, "each": each})]
    training.check_equality(plan, [Shifted], cross_entropy_sum, sgd, given, microbatches=2)
    wrong = [(ids, targets, {"along": along[:, :8], "each": each})]
    with pytest.raises(qs.MisfitError, match=r"along of shape \(4, 8\) does not run along the sequence of 16"):
        training.train_ranks(plan, [Shifted], cross_entropy_sum, sgd, wrong, dtype=torch.float64)


def attend_on_two(method: ContextMethod, heads: int, queries: int) -> None:
    query, key = torch.zeros(1, heads, queries, 3), torch.zeros(1, heads, 4, 3)
    run_local(2, lambda transport: context_on(transport, method, 8).attend(query, key, key))


def train(length: int, positions: int, **asked: Any) -> None:
    plan = qs.compile(**{"schedule": "1f1b", "mesh": "cp=2"} | asked, microbatches=2)
    train_on(plan, ids_task(1, 4, length), tiny_gpt(positions), dtype=torch.float64)


SLICES: dict[str, Any] = {"schedule": "seq-1f1b", "mesh": "pp=2,cp=2", "slices": 2}


def test_misfits() -> None:
    require_refusals(
        (r"\(4, 10\).* sequence that divides into 4 equal chunks, .* of cp=2", lambda: train(10, 10)),
        ("over cp, and seq-1f1b cuts it into 2 slices; a run does one or the other", lambda: train(8, 8, **SLICES)),
        ("built for 12 positions; a sequence has 16", lambda: train(16, 12)),
        (r"targets of shape \(8,\)", lambda: SequenceShard(2, 0).cut("targets", torch.zeros(8))),
        (r"5 queries and 4 keys, but of the sequence of 8 there .*cp=2", lambda: attend_on_two("ring", 2, 5)),
        ("ulysses cuts heads over cp=2, but there are 3 query heads", lambda: attend_on_two("ulysses", 3, 4)),
        ("there is no method 'rnig'; did you mean 'ring'", lambda: attend_on_two("rnig", 2, 4)),
        error=qs.QuintschedError,
    )


F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def drawn(dtype: torch.dtype, groups: int, queries: int, keys: int, size: int) -> tuple[QueryKeyValue, Tensor]:
    """Return a block of two key heads with so many query heads each, and the gradient of its mean."""
    random = torch.Generator().manual_seed(queries)
    shapes = [(2, 2, groups, queries, size), (2, 2, keys, size), (2, 2, keys, size), (2, 2, groups, queries, size)]
    query, key, value, gradient = (torch.randn(shape, generator=random, dtype=F64).to(dtype) for shape in shapes)
    return (query, key, value), gradient


GPU = [
    *[(F16, 64, CUDA_FLASH), (BF16, 8, CUDA_FLASH), (BF16, 12, PLAIN_KERNEL), (F32, 64, CUDA_EFFICIENT)],
    *[(F32, 12, CUDA_EFFICIENT), (F32, 6, PLAIN_KERNEL), (F64, 64, PLAIN_KERNEL)],
]


@pytest.mark.parametrize(("dtype", "size", "expected"), GPU)
def test_the_kernel_of_a_gpu_goes_by_type_and_size(monkeypatch, dtype, size, expected) -> None:
    """Tensors of a GPU have shapes and types here, and no numbers; the GPU has all kernels."""
    for kind in ("flash", "efficient"):
        monkeypatch.setattr(torch.backends.cuda, f"can_use_{kind}_attention", lambda asked: True)
    with FakeTensorMode():
        assert choose(torch.empty(1, 2, 16, size, dtype=dtype, device="cuda")) is expected


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
def test_the_kernel_of_a_cpu_is_torchs_unless_switched_off(dtype: torch.dtype) -> None:
    key = torch.empty(1, 2, 16, 5, dtype=dtype)
    assert choose(key) is CPU_FLASH
    assert choose(key.to("meta")) is PLAIN_KERNEL
    with sdpa_kernel(SDPBackend.MATH):
        assert choose(key) is PLAIN_KERNEL


BLOCKS = [(9, 9, True), (130, 130, True), (9, 18, False), (18, 9, False)]


@pytest.mark.parametrize(("queries", "keys", "is_diagonal"), BLOCKS)
@pytest.mark.parametrize(("groups", "most_scores"), [(1, 1), (3, 2000), (3, 1 << 24)])
@pytest.mark.parametrize("kernel", [CPU_FLASH, PLAIN_KERNEL], ids=lambda kernel: kernel.name)
def test_a_block_is_attention(monkeypatch, kernel, groups, most_scores, queries, keys, is_diagonal) -> None:
    monkeypatch.setattr(block_attention, "MOST_SCORES", most_scores)
    block, gradient = drawn(F64, groups, queries, keys, 5)
    mean, weight, expected = by_autograd(block, gradient, is_diagonal)
    found = attend(kernel, block, is_diagonal)
    torch.testing.assert_close(found, (mean, weight), rtol=0, atol=1e-13)
    back = gradients(kernel, gradient, block, mean, weight, is_diagonal)
    torch.testing.assert_close(back, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("dtype", "is_diagonal"), [(F16, True), (BF16, False)])
def test_half_precision_is_as_exact_as_products_with_sums_of_single(dtype: torch.dtype, is_diagonal: bool) -> None:
    block, gradient = drawn(dtype, 2, 256, 256, 32)
    mean, weight, expected = by_autograd(block, gradient, is_diagonal)
    errors = {}
    for kernel in (CPU_FLASH, PLAIN_KERNEL):
        seen, by = attend(kernel, block, is_diagonal)
        back = gradients(kernel, gradient, block, mean.to(dtype), weight.float(), is_diagonal)
        assert by.dtype == F32
        both = zip((seen, *back), (mean, *expected), strict=True)
        errors[kernel.name] = [float((one - other).norm() / other.norm()) for one, other in both]
    for fused, plain in zip(errors[CPU_FLASH.name], errors[PLAIN_KERNEL.name], strict=True):
        assert fused <= plain <= 0.7 * torch.finfo(dtype).eps, errors


class Largest(TorchDispatchMode):
    """The most bytes of any tensor that an operation returns."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(tensor, Tensor):
                self.nbytes = max(self.nbytes, tensor.nbytes)
        return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kernel", [CPU_FLASH, PLAIN_KERNEL], ids=lambda kernel: kernel.name)
def test_no_tensor_grows_with_the_square_of_the_tokens(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    monkeypatch.setattr(block_attention, "MOST_SCORES", 1 << 14)
    for tokens in (64, 512):
        block, gradient = drawn(F32, 2, tokens, tokens, 8)
        with Largest() as largest:
            for is_diagonal in (True, False):
                mean, weight = attend(kernel, block, is_diagonal)
                gradients(kernel, gradient, block, mean, weight, is_diagonal)
        assert largest.nbytes <= max(1 << 14, block[0].nbytes)


def test_half_precision_is_added_up_in_single() -> None:
    tensors = draw(1, 2, 2, 64, 8)
    low = tuple(tensor.bfloat16() for tensor in tensors)
    found = in_parts("ring", low, 4, True)
    assert all(tensor.dtype == torch.bfloat16 for tensor in found)
    require_close(found, whole(tuple(tensor.double() for tensor in low), True), 0.02)
