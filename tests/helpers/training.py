"""The one reference: a plain loop in one process, beside the engine on every rank of a plan, on the same batches.

    model, loss, batches ─┬▶ train_alone   ─▶ Outcome                 nothing of the engine's
                          └▶ train_ranks   ─▶ an Outcome per rank     ─▶ require_equal(ranks, alone)

A batch is `(inputs, targets)`, or `(inputs, targets, extras)` with what blocks take by name; each is a tree of tensors
whose first dimension counts samples. A model is a module, or a sequence of blocks as the engine takes it: builders,
or modules, of which each run trains a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import quintsched as qs
from quintsched.runtime.blocks.block_outlines import build_model, split_result
from quintsched.runtime.comm import Rules, Transport, run_local
from quintsched.runtime.engine import Engine
from quintsched.runtime.parallel.dropout import Masks, MaskUnit, key_dropouts
from quintsched.runtime.splitting.split_model import split

Batch = Sequence[Any]
Change = Callable[[Any, int], object]
"""Change that the user's loop makes to the model, called with (model, step): nothing else may change it in training."""


@dataclass(frozen=True)
class Outcome:
    """Result of training, on one rank or alone: losses, and norms of clipped gradients, of all steps; whole weights."""

    losses: list[float]
    weights: dict[str, Tensor]
    norms: list[float] = field(default_factory=list)
    idle: frozenset[str] = frozenset()
    """Names of what a whole module has and its training gives no gradient, which need not be on any rank."""


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD without state, for tests that do not care."""
    return torch.optim.SGD(parameters, lr=0.1)


def train_alone(
    model: Any,
    loss: Callable[[Any, Any], Any],
    optimizer: Callable[[Any], Any],
    batches: Sequence[Batch],
    *,
    microbatches: int = 1,
    seed: int = 0,
    dtype: torch.dtype | None = torch.float64,
    clip: float | None = None,
    tied: Mapping[str, Sequence[str]] | None = None,
    masks: Masks | None = None,
    before: Change | None = None,
    after: Change | None = None,
    evaluated: Batch | None = None,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Outcome:
    """Train in one process; of ours are initial weights, and the masks of dropouts where `masks` is given.

    A loss is (sum, weight), or a mean over its microbatch; gradients are divided by the weight of the whole batch. The
    loss of the batch `evaluated` comes last.
    """
    is_whole = isinstance(model, nn.Module)
    model = copy.deepcopy(model) if is_whole else build_model(copied(model), seed, dtype)
    for number, block in enumerate(model.children() if masks else ()):
        key_dropouts(block, number, masks)  # type: ignore[arg-type]
    tie(model, tied or {})
    stepper, losses, norms, trained = optimizer(list(model.parameters())), [], [], set[str]()

    def run(batch: Batch, step: int, count: int, *, learns: bool) -> float:
        total, weight, first = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), 0
        for number in range(count):
            inputs, targets, extras = cut_batch(batch, number, count)
            samples = num_samples(inputs)
            with around(), masks.draw_for(MaskUnit(step, range(first, first + samples))) if masks else nullcontext():
                found, auxiliary = run_model(model, inputs, targets, extras)
                value = loss(found, targets)
                own, its_weight = value if isinstance(value, tuple) else (value, 1.0)
                own = own if auxiliary is None else own + auxiliary
                if learns:
                    own.backward()
            total, weight, first = total + own.detach(), weight + its_weight, first + samples
        trained.update(_divided_gradients(model, weight) if learns else ())
        return float(total / weight)

    for step, batch in enumerate(batches):
        if before is not None:
            before(model, step)
        stepper.zero_grad()
        losses.append(run(batch, step, microbatches, learns=True))
        if clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        stepper.step()
        if after is not None:
            after(model, step)
    if evaluated is not None:
        model.eval()
        losses.append(run(evaluated, len(batches), microbatches, learns=False))
    weights = {name: held.detach().clone() for name, held in model.state_dict().items()}
    return Outcome(losses, weights, norms, frozenset(weights.keys() - trained if is_whole else ()))


def _divided_gradients(model: nn.Module, weight: torch.Tensor) -> Iterator[str]:
    """Divide the gradients by the weight of the batch; yield the names of the weights that have one."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            parameter.grad /= weight.to(parameter.grad.dtype)
            yield name


def train_ranks(
    plan: qs.Plan,
    model: Any,
    loss: Callable[[Any, Any], Any] | None,
    optimizer: Any,
    batches: Sequence[Batch],
    *,
    wire: Rules = "mailbox",
    before: Change | None = None,
    after: Change | None = None,
    evaluated: Batch | None = None,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    cut: Callable[[nn.Module], Any] | None = None,
    **settings: Any,
) -> list[Outcome]:
    """Train with the engine on every rank of the plan, in this process; a module is split, by `cut` if given."""

    def run(transport: Transport) -> Outcome:
        own = copied(model) if not isinstance(model, nn.Module) else copy.deepcopy(model)
        with around():
            return train_rank(transport, plan, own, loss, optimizer, batches, before, after, evaluated, cut, **settings)

    return run_local(plan.mesh.size, run, timeout_s=60, rules=wire)


def train_rank(
    transport: Transport,
    plan: qs.Plan,
    model: Any,
    loss: Callable[[Any, Any], Any] | None,
    optimizer: Any,
    batches: Sequence[Batch],
    before: Change | None = None,
    after: Change | None = None,
    evaluated: Batch | None = None,
    cut: Callable[[nn.Module], Any] | None = None,
    **settings: Any,
) -> Outcome:
    """Train with the engine on one rank, on this replica's share of each batch; without a loss, by the model's own."""
    blocks = model
    if isinstance(model, nn.Module):
        blocks = cut(model) if cut else split(model, example=batches[0][0])
    engine = Engine(plan, blocks, loss or blocks.loss_fn, optimizer, transport=transport, **settings)
    losses, norms = [], []
    for step, batch in enumerate(batches):
        if before is not None:
            before(model, step)
        result = call_with_share(engine, engine.step, batch)
        losses.append(result.loss.item())
        if result.grad_norm is not None:
            norms.append(result.grad_norm.item())
        if after is not None:
            after(model, step)
    if evaluated is not None:
        losses.append(call_with_share(engine, engine.evaluate, evaluated).loss.item())
    names = getattr(blocks, "own_names", {})
    return Outcome(losses, {names.get(name, name): held for name, held in engine.full_weights().items()}, norms)


def call_with_share(engine: Engine, call: Callable[..., Any], batch: Batch) -> Any:
    """Call the engine's method with this replica's share of a batch, and only what the rank needs."""
    inputs, targets, extras = cut_batch(batch, engine.replica, engine.num_replicas)
    return call(inputs if engine.needs_inputs else None, targets if engine.needs_targets else None, **extras)


def run_model(module: Any, inputs: Any, targets: Any, extras: Mapping[str, Any]) -> tuple[Any, Tensor | None]:
    """Run a model; blocks in a row take by name what they ask for. Returns its output and the sum of their losses."""
    if not isinstance(module, nn.Sequential | nn.ModuleList):
        return module(inputs, **extras), None
    riders, losses, given = dict[str, Any](), list[Tensor](), {**extras, "targets": targets}
    for block in module:
        asked = signature(block.forward).parameters
        taken = {name: value for name, value in (given | riders).items() if name in asked}
        taken |= riders if any(one.kind is Parameter.VAR_KEYWORD for one in asked.values()) else {}
        inputs, fresh, auxiliary = split_result(block(inputs, **taken))
        riders |= fresh
        losses += [] if auxiliary is None else [auxiliary]
    return inputs, sum(losses[1:], losses[0]) if losses else None


def cut_batch(batch: Batch, number: int, count: int) -> tuple[Any, Any, dict[str, Any]]:
    """Return one of `count` parts of a batch: its inputs, targets and extras."""
    inputs, targets, *extras = (cut_tree(part, number, count) for part in batch)
    return inputs, targets, extras[0] if extras else {}


def cut_tree(tree: Any, number: int, count: int) -> Any:
    """Return copies of one of `count` parts of every tensor in a tree; those without dimensions are for all parts."""
    return pytree.tree_map_only(Tensor, lambda x: (x.tensor_split(count)[number] if x.dim() else x).clone(), tree)


def num_samples(tree: Any) -> int:
    """Return the number of samples of a tree of tensors."""
    return next(len(leaf) for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.dim())


def copied(blocks: Sequence[Any]) -> list[Any]:
    """Return blocks of which the modules are copies, as every rank needs them."""
    return copy.deepcopy([*blocks]) if any(isinstance(block, nn.Module) for block in blocks) else [*blocks]


def tie(model: nn.Module, tied: Mapping[str, Sequence[str]]) -> None:
    """Let the weights of each name be one."""
    for first, *others in tied.values():
        for other in others:
            owner, _, name = other.rpartition(".")
            setattr(model.get_submodule(owner), name, model.get_parameter(first))


def difference(found: Tensor, expected: Tensor) -> float:
    """max|a-b| / max(1, max|b|), what "equal" is measured by."""
    return float((found - expected).abs().max() / max(1.0, float(expected.abs().max())))


def worst_difference(outcomes: Sequence[Outcome], expected: Outcome) -> float:
    """The largest difference of any rank's losses or weights, or not a number; every weight must be on some rank."""
    held = {name for outcome in outcomes for name in outcome.weights}
    assert set(expected.weights) - expected.idle <= held <= set(expected.weights)
    losses = torch.tensor(expected.losses, dtype=torch.float64)
    found = [difference(torch.tensor(o.losses, dtype=torch.float64), losses) for o in outcomes]
    found += [
        difference(weight, expected.weights[name])
        for o in outcomes
        for name, weight in o.weights.items()
        if name not in expected.idle
    ]
    return float(torch.tensor(found, dtype=torch.float64).max())


def check_equality(
    plan: qs.Plan,
    model: Any,
    loss: Callable[[Any, Any], Any],
    optimizer: Callable[[Any], Any],
    batches: Sequence[Batch],
    *,
    microbatches: int = 1,
    tolerance: float = 1e-12,
    wire: Rules = "mailbox",
    masks: Masks | None = None,
    dtype: torch.dtype | None = torch.float64,
    seed: int = 0,
    clip: float | None = None,
    tied: Mapping[str, Sequence[str]] | None = None,
    before: Change | None = None,
    after: Change | None = None,
    evaluated: Batch | None = None,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    **settings: Any,
) -> list[Outcome]:
    """Train on the ranks of a plan, with these `settings` of the engine, and in one process; require equality."""
    both: dict[str, Any] = {"before": before, "after": after, "evaluated": evaluated, "around": around}
    both |= {"dtype": dtype, "seed": seed, "clip": clip, "tied": tied}
    found = train_ranks(plan, model, loss, optimizer, batches, wire=wire, **both, **settings)
    expected = train_alone(model, loss, optimizer, batches, microbatches=microbatches, masks=masks, **both)
    require_equal(found, expected, tolerance)
    return found


def require_equal(outcomes: Sequence[Outcome], expected: Outcome, tolerance: float = 1e-12) -> None:
    """Losses of all ranks, and weights of whoever holds them, are those of one process."""
    assert worst_difference(outcomes, expected) <= tolerance


def require_same_bits(outcomes: Sequence[Outcome], expected: Outcome | Sequence[Outcome]) -> None:
    """Every weight has the bits that it has in the expected outcome, or wherever it is among several."""
    wanted = [expected] if isinstance(expected, Outcome) else expected
    weights = {name: weight for outcome in wanted for name, weight in outcome.weights.items()}
    for outcome in outcomes:
        for name, weight in outcome.weights.items():
            assert torch.equal(weight, weights[name]), name
