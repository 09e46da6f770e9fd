"""Attention over parts of a sequence, on every rank its own, is attention over the whole: values, gradients, costs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from quintsched.errors import MisfitError, UsageError
from quintsched.runtime.blocks.trees import TensorSpec
from quintsched.runtime.comm import Rules, Transport, Work, run_local
from quintsched.runtime.parallel.context.context_parallel import Context, ContextMethod, ContextParallel, SequenceShard
from quintsched.runtime.parallel.context.ring_attention import ring_channels

METHODS: tuple[ContextMethod, ...] = ("ring", "gather", "ulysses")

Tensors = tuple[Tensor, ...]


def draw(samples: int, heads: int, key_heads: int, length: int, size: int) -> Tensors:
    """Return query, key, value and the gradient of the result, for the whole sequence."""
    random = torch.Generator().manual_seed(length)
    shapes = [(samples, count, length, size) for count in (heads, key_heads, key_heads, heads)]
    return tuple(torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes)


def whole(tensors: Tensors, causal: bool) -> Tensors:
    """Return the result of attention in one piece, and the gradients of query, key and value."""
    query, key, value = (tensor.clone().requires_grad_() for tensor in tensors[:3])
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).mT / query.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    mixed = scores.softmax(-1) @ value.repeat_interleave(groups, 1)
    mixed.backward(tensors[3])
    return mixed.detach(), *(tensor.grad for tensor in (query, key, value) if tensor.grad is not None)


def context_on(transport: Transport, method: ContextMethod, length: int) -> Context:
    size = transport.world_size
    group = transport.make_group([tuple(range(size))])
    transport.open_channels(ring_channels(group.ranks))
    context = ContextParallel(method, group, transport, False).context_of(TensorSpec((1, length // size), torch.int64))
    assert context is not None
    return context


def in_parts(
    method: ContextMethod,
    tensors: Tensors,
    size: int,
    causal: bool,
    rules: Rules = "nccl",
    layout: torch.memory_format = torch.contiguous_format,
) -> Tensors:
    """Return what `whole` does, put together from the parts of all ranks."""

    def run(transport: Transport) -> tuple[Tensor, Tensors]:
        context = context_on(transport, method, tensors[0].shape[2])
        parts = (tensor[:, :, context.positions].contiguous(memory_format=layout) for tensor in tensors)
        query, key, value, gradient = parts
        given = [tensor.requires_grad_() for tensor in (query, key, value)]
        mixed = context.attend(given[0], given[1], given[2], causal)
        mixed.backward(gradient)
        return context.positions, (mixed.detach(), *(tensor.grad for tensor in given if tensor.grad is not None))

    found = run_local(size, run, rules=rules)
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
def test_a_ring_sees_the_whole(
    size: int,
    chunk: int,
    samples: int,
    key_heads: int,
    per_key_head: int,
    width: int,
    causal: bool,
    backend: SDPBackend,
) -> None:
    tensors = draw(samples, key_heads * per_key_head, key_heads, 2 * size * chunk, width)
    with sdpa_kernel(backend):
        require_close(in_parts("ring", tensors, size, causal), whole(tensors, causal))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("method", "heads", "key_heads"), [("gather", 3, 1), ("ulysses", 8, 4), ("ulysses", 4, 4)])
def test_the_alternatives_see_the_whole(method: ContextMethod, heads: int, key_heads: int, causal: bool) -> None:
    tensors = draw(2, heads, key_heads, 24, 5)
    for size in (2, 4):
        require_close(in_parts(method, tensors, size, causal), whole(tensors, causal))


@pytest.mark.parametrize("method", METHODS)
def test_every_kind_of_wire_and_layout_will_do(method: ContextMethod) -> None:
    tensors = draw(1, 3, 3, 18, 4)
    for rules in ("mailbox", "rendezvous", "nccl"):
        require_close(in_parts(method, tensors, 3, True, rules), whole(tensors, True))
    require_close(in_parts(method, tensors, 3, True, layout=torch.channels_last), whole(tensors, True))


def test_large_scores_do_not_overflow() -> None:
    query, *others = draw(1, 2, 2, 16, 4)
    tensors = (query * 1e3, *others)
    found = in_parts("ring", tensors, 4, True)
    assert all(tensor.isfinite().all() for tensor in found)
    require_close(found, whole(tensors, True), 1e-10)


def test_half_precision_is_added_up_in_single() -> None:
    tensors = draw(1, 2, 2, 64, 8)
    low = tuple(tensor.bfloat16() for tensor in tensors)
    found = in_parts("ring", low, 4, True)
    assert all(tensor.dtype == torch.bfloat16 for tensor in found)
    require_close(found, whole(tuple(tensor.double() for tensor in low), True), 0.02)


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


def attend_on_two(method: ContextMethod, heads: int, queries: int) -> None:
    query, key = torch.zeros(1, heads, queries, 3), torch.zeros(1, heads, 4, 3)
    run_local(2, lambda transport: context_on(transport, method, 8).attend(query, key, key))


def test_misfits() -> None:
    for call, words in (
        (
            lambda: SequenceShard(2, 0).cut("ids", torch.zeros(2, 6)),
            r"ids of shape \(2, 6\).* divides into 4 equal chun",
        ),
        (lambda: SequenceShard(2, 0).cut("targets", torch.zeros(8)), r"targets of shape \(8,\)"),
        (lambda: attend_on_two("ring", 2, 5), r"5 queries and 4 keys, but of the sequence of 8 there are 4 .*cp=2"),
        (lambda: attend_on_two("ulysses", 3, 4), r"ulysses cuts heads over cp=2, but there are 3 query heads"),
    ):
        with pytest.raises(MisfitError, match=words):
            call()
    with pytest.raises(UsageError, match="context: there is no method 'rnig'; did you mean 'ring'"):
        run_local(2, lambda t: ContextParallel("rnig", t.make_group([(0, 1)]), t, False))  # type: ignore[arg-type]
