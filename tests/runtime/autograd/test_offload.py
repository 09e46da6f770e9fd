"""Offload of autograd's saved tensors to the host and back: views, leaves, kept tensors, and in-place changes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from quintsched.runtime.autograd.saved_tensor_offload import SavedActivations, identities, vacate

CPU = torch.device("cpu")
Run = Callable[[Tensor, Tensor], Tensor]
"""(x, weight) → a loss."""


def saved_by(run: Run, x: Tensor, weight: Tensor) -> tuple[SavedActivations, Tensor]:
    resident = identities([weight])
    activations = SavedActivations(CPU, resident.__contains__)
    with activations.saving():
        loss = run(x, weight)
    return activations, loss


def move(activations: SavedActivations) -> list[torch.UntypedStorage]:
    """Move all to the host and back; return weak references to the storages that were left."""
    memories = activations.memories()
    left = [memory.bytes.untyped_storage()._weak_ref() for memory in memories]
    for memory in memories:
        memory.leave(memory.bytes.clone())
    return left


def back(activations: SavedActivations) -> None:
    for memory in activations.memories():
        memory.arrive(memory.bytes.clone())


def attention(x: Tensor, weight: Tensor) -> Tensor:
    """Queries, keys and values are views of one storage; what softmax saves is its output."""
    query, key, value = (x @ weight).chunk(3, -1)
    return ((query @ key.transpose(-1, -2)).softmax(-1) @ value).square().sum()


def several(x: Tensor, weight: Tensor) -> Tensor:
    """Masks, indices, other types, something expanded, and x itself."""
    y = nn.functional.dropout((x @ weight).relu(), 0.5)
    y = torch.where(y > 0.1, y, x.mean().expand_as(y)) * x.float().sigmoid().double().sum()
    values, _ = y.sort(-1)
    return (values.cumsum(0) * x.sum(-1, keepdim=True)).sum() + x.square().sum() + x.clone().exp().sum()


@pytest.mark.parametrize("run", [attention, several])
@pytest.mark.parametrize("layout", ["plain", "transposed", "part"])
def test_gradients_are_those_of_activations_that_stay(run: Run, layout: str) -> None:
    def inputs() -> tuple[Tensor, Tensor]:
        source = torch.Generator().manual_seed(0)
        weight = torch.randn(6, 6, generator=source, dtype=torch.float64, requires_grad=True)
        x = torch.randn(6, 12, generator=source, dtype=torch.float64)
        x = {"plain": x[:, :6].clone(), "transposed": x[:, :6].clone().t(), "part": x[:, ::2]}[layout]
        return x.detach().requires_grad_(), weight

    x, weight = inputs()
    torch.manual_seed(0)
    run(x, weight).backward()
    moved, same_weight = inputs()
    torch.manual_seed(0)
    activations, loss = saved_by(run, moved, same_weight)
    left = move(activations)
    layout_before = moved.size(), moved.stride(), moved.dtype
    vacate([moved])
    back(activations)
    loss.backward()
    assert (moved.size(), moved.stride(), moved.dtype) == layout_before
    assert moved.untyped_storage().nbytes() == 0
    assert all(torch.UntypedStorage._expired(storage) for storage in left)
    for found, expected in ((moved.grad, x.grad), (same_weight.grad, weight.grad)):
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()


def test_views_of_one_storage_share_a_copy_and_weights_have_none() -> None:
    x, weight = torch.randn(4, 6, requires_grad=True), torch.randn(6, 9, requires_grad=True)
    activations, _loss = saved_by(attention, x, weight)
    sizes = sorted(memory.bytes.nbytes for memory in activations.memories())
    assert sizes == sorted(4 * n for n in (4 * 6, 4 * 9, 4 * 4, 4 * 3)), "x; q, k and v; softmax; what is squared"


class Keeping:
    """Its output is saved for the backward of `exp`, and somebody else holds it."""

    def __init__(self) -> None:
        self.held = torch.empty(0)

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        self.held = (x @ weight).exp()
        return self.held.sum()


def test_what_others_hold_stays_theirs() -> None:
    x, weight, run = torch.randn(4, 4, requires_grad=True), torch.eye(4), Keeping()
    activations, loss = saved_by(run, x, weight)
    output = run.held.detach()
    before = output.clone()
    left = move(activations)
    assert not all(torch.UntypedStorage._expired(storage) for storage in left)
    assert torch.equal(output, before)
    back(activations)
    loss.backward()
    assert torch.equal(x.grad, before)


@pytest.mark.parametrize("when", ["never gone", "before it goes", "while it is away", "when it is back"])
def test_what_is_changed_in_place_is_refused_in_the_backward(when: str) -> None:
    x, weight, run = torch.randn(4, 4, requires_grad=True), torch.eye(4), Keeping()
    activations, loss = saved_by(run, x, weight)
    for now, step in (("before it goes", move), ("while it is away", back), ("when it is back", lambda _: None)):
        if when in (now, "never gone"):
            run.held.detach().mul_(2)
        if when != "never gone":
            step(activations)
    with pytest.raises(RuntimeError, match="modified by an inplace operation: it is at version"):
        loss.backward()


def test_a_weight_that_is_changed_in_place_is_refused_too() -> None:
    x, weight = torch.randn(4, 6, requires_grad=True), torch.randn(6, 9, requires_grad=True)
    activations, loss = saved_by(attention, x, weight)
    move(activations)
    back(activations)
    weight.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
