"""The one reference: a plain loop in one process, beside the engine on every rank of a plan, on the same batches.

    model, loss, batches ─┬▶ train_alone   ─▶ Outcome                 nothing of the engine's
                          └▶ train_ranks   ─▶ an Outcome per rank     ─▶ require_equal(ranks, alone)

A batch is `(inputs, targets)`, or `(inputs, targets, extras)` with what blocks take by name; each is a tree of tensors
whose first dimension counts samples. A model is a module, or a sequence of blocks as the engine takes it: builders,
or modules, of which each run trains a copy.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import quintsched as qs
from quintsched.runtime import Engine, split
from quintsched.runtime.blocks.block_builders import build_model, split_result
from quintsched.runtime.comm import Rules, Transport, run_local
from quintsched.runtime.parallel.mesh_independent_dropout import Masks, MaskUnit, key_dropouts

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
    figures: list[tuple[float, float]] = field(default_factory=list)
    """Per step the weight of its loss, and its metric, if there is one."""


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return AdamW that decays weights."""
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def squares(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    """Return the sum of squared differences, and the number of samples."""
    return (output - target).square().sum(), float(len(output))


def random_batch(seed: int, *shape: int) -> Batch:
    """Return random inputs and targets of a shape, float64."""
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).unbind()


@dataclass(frozen=True)
class Step:
    """A step on the batches of several replicas, each of a shape of its own, some without samples; or an evaluation."""

    replicas: Sequence[Batch]
    learns: bool = True


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD without state, for tests that do not care."""
    return torch.optim.SGD(parameters, lr=0.1)


def train_alone(
    model: Any,
    loss: Callable[[Any, Any], Any],
    optimizer: Callable[[Any], Any],
    batches: Sequence[Batch | Step],
    *,
    seed: int = 0,
    dtype: torch.dtype | None = torch.float64,
    tied: Mapping[str, Sequence[str]] | None = None,
    masks: Masks | None = None,
    evaluated: Batch | None = None,
    low: bool = False,
    **more: Any,
) -> Outcome:
    """Train a copy in one process; of ours are initial weights, and the masks of dropouts where `masks` is given.

    The loss of the batch `evaluated` comes last. Of weights that are `low` in precision the optimizer steps
    copies in float32.
    """
    is_whole = isinstance(model, nn.Module)
    model = copy.deepcopy(model) if is_whole else build_model(copied(model), seed, dtype)
    for number, block in enumerate(model.children() if masks else ()):
        key_dropouts(block, number, masks)  # type: ignore[arg-type]
    tie(model, tied or {})
    held = dict(model.named_parameters())
    masters = {name: nn.Parameter(p.detach().float(), p.requires_grad) for name, p in held.items()} if low else {}
    stepper = optimizer([*(masters or held).values()])
    steps = [*batches, *([] if evaluated is None else [Step([evaluated], learns=False)])]
    found = train_model(model, stepper, loss, steps, masters=masters, masks=masks, **more)
    return found if is_whole else replace(found, idle=frozenset())


def train_model(
    model: nn.Module,
    stepper: torch.optim.Optimizer,
    loss: Callable[[Any, Any], Any],
    batches: Sequence[Batch | Step],
    *,
    clip: float | None = None,
    masters: Mapping[str, nn.Parameter] | None = None,
    before: Change | None = None,
    after: Change | None = None,
    **how: Any,
) -> Outcome:
    """Train a model in place, in one process: the loop that everything is compared with; `how` is that of `run_step`.

    Gradients are divided by the weight of the whole batch. Of weights that have `masters` the optimizer has to step
    these.
    """
    masters, losses, norms, figures, trained = masters or {}, list[float](), list[float](), [], set[str]()
    number = 0  # of training steps

    def run(step: Step) -> Tensor:
        total, weight, measured = run_step(model, loss, step, number, masters, **how)
        losses.append(float(total / weight))
        figures.extend([] if measured is None else [(float(weight), float(measured / weight))])
        return weight

    for batch in batches:
        step = batch if isinstance(batch, Step) else Step([batch])
        if not step.learns:
            model.eval()
            run(step)
            model.train()
            continue
        if before is not None:
            before(model, number)
        stepper.zero_grad()
        weight = run(step)
        for name, p in model.named_parameters():
            if (gradient := masters.get(name, p).grad) is not None:
                gradient /= weight.to(gradient.dtype)
                trained.add(name)
        if clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_([*masters.values()] or model.parameters(), clip)))
        stepper.step()
        for name, master in masters.items():
            model.get_parameter(name).data.copy_(master)
        if after is not None:
            after(model, number)
        number += 1
    weights = {name: tensor.detach().clone() for name, tensor in {**model.state_dict(), **masters}.items()}
    return Outcome(losses, weights, norms, frozenset(weights.keys() - trained), figures)


def run_step(
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    step: Step,
    number: int,
    masters: Mapping[str, nn.Parameter],
    *,
    microbatches: int = 1,
    masks: Masks | None = None,
    metric: Callable[[Any, Any], Any] | None = None,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> tuple[Tensor, Tensor, Any]:
    """Run the microbatches of a step, and their backwards where it learns; return the sums of loss, weight and metric.

    A loss is (sum, weight), or a mean over its microbatch. Gradients of weights that have masters are those of these.
    """
    total, weight, first, measured = *torch.zeros(2, dtype=torch.float64), 0, 0.0 if metric else None
    for inputs, targets, extras in parts_of(step, microbatches):
        samples = num_samples(inputs)
        with around(), masks.draw_for(MaskUnit(number, range(first, first + samples))) if masks else nullcontext():
            found, auxiliary = run_model(model, inputs, targets, extras)
            value = loss(found, targets)
            own, its_weight = value if isinstance(value, tuple) else (value, 1.0)
            own = own if auxiliary is None else own + auxiliary
            if step.learns:
                own.backward()
        total, weight, first = total + own.detach(), weight + its_weight, first + samples
        measured = measured + metric(found, targets) if metric else None
        for p, master in ((p, masters[name]) for name, p in model.named_parameters() if name in masters):
            if p.grad is not None:
                given, p.grad = p.grad.to(master.dtype), None
                master.grad = given if master.grad is None else master.grad + given
    return total, weight, measured


def train_ranks(
    plan: qs.Plan,
    model: Any,
    loss: Callable[[Any, Any], Any] | None,
    optimizer: Any,
    batches: Sequence[Batch | Step],
    *,
    wire: Rules = "mailbox",
    before: Change | None = None,
    after: Change | None = None,
    evaluated: Batch | None = None,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    cut: Callable[[nn.Module], Any] | None = None,
    masters: bool = False,
    **settings: Any,
) -> list[Outcome]:
    """Train with the engine on every rank of the plan, in this process; a module is split, by `cut` if given.

    With `masters`, outcomes have what the optimizer steps of weights that are low in precision.
    """

    def run(transport: Transport) -> Outcome:
        own = copied(model) if not isinstance(model, nn.Module) else copy.deepcopy(model)
        with around():
            told = (before, after, evaluated, cut, masters)
            return train_rank(transport, plan, own, loss, optimizer, batches, *told, **settings)

    return run_local(plan.mesh.size, run, timeout_s=60, rules=wire)


def train_rank(
    transport: Transport,
    plan: qs.Plan,
    model: Any,
    loss: Callable[[Any, Any], Any] | None,
    optimizer: Any,
    batches: Sequence[Batch | Step],
    before: Change | None = None,
    after: Change | None = None,
    evaluated: Batch | None = None,
    cut: Callable[[nn.Module], Any] | None = None,
    masters: bool = False,
    parts: int = 1,
    **settings: Any,
) -> Outcome:
    """Train with the engine on one rank, on its share of each batch in `parts`; without a loss, by the model's own."""
    cut = cut or (lambda model: split(model, example=batches[0][0]))
    blocks = cut(model) if isinstance(model, nn.Module) else model
    engine = Engine(plan, blocks, loss or blocks.loss_fn, optimizer, transport=transport, **settings)
    losses, norms, figures = [], [], list[tuple[float, float]]()
    for step, batch in enumerate(batches):
        if before is not None:
            before(model, step)
        result = step_in_parts(engine, batch, parts)
        losses.append(result.loss.item())
        figures.extend((result.weight.item(), float(measured)) for measured in result.metrics.values())
        if result.grad_norm is not None:
            norms.append(result.grad_norm.item())
        if after is not None:
            after(model, step)
    if evaluated is not None:
        losses.append(call_with_share(engine, engine.evaluate, evaluated).loss.item())
    names = getattr(blocks, "own_names", {})
    state = engine.full_state_dict(all_blocks=True).items() if masters else ()
    held = {name[6:]: weight for name, weight in state if name.startswith("model.")} or engine.full_weights()
    weights = {names.get(name, name): weight for name, weight in held.items()}
    return Outcome(losses, weights, norms, figures=figures)


def run_engines(
    plan: qs.Plan,
    blocks: Callable[[], Any],
    body: Callable[[Engine], Any],
    loss: Any,
    optimizer: Any = sgd,
    **more: Any,
) -> list[Any]:
    """Call with an engine on each rank, whose blocks are built there; `more` are its settings."""

    def start(transport: Transport) -> Any:
        return body(Engine(plan, blocks(), loss, optimizer, transport=transport, **more))

    return run_local(plan.mesh.size, start, timeout_s=60)


def step_in_parts(engine: Engine, batch: Batch | Step, parts: int) -> Any:
    """Make a step of several calls, each with this replica's share of a part of the batch; a `Step` is one call."""
    if isinstance(batch, Step):
        return call_with_share(engine, engine.step if batch.learns else engine.evaluate, batch)
    calls = [partial(engine.step, last=part == parts - 1) for part in range(parts)]
    results = [call_with_share(engine, call, cut_batch(batch, part, parts)) for part, call in enumerate(calls)]
    return results[-1].with_earlier(results[:-1])


def call_with_share(engine: Engine, call: Callable[..., Any], batch: Batch | Step) -> Any:
    """Call the engine's method with this replica's share of a batch, and only what the rank needs."""
    whole = (batch, engine.replica, engine.num_replicas)
    mine = (batch.replicas[engine.replica], 0, 1) if isinstance(batch, Step) else whole
    inputs, targets, extras = cut_batch(*mine)
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


def parts_of(step: Step, microbatches: int) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Yield the microbatches of one process in a step: each replica's that has samples."""
    for batch in step.replicas:
        parts = (cut_batch(batch, number, microbatches) for number in range(microbatches))
        yield from (part for part in parts if num_samples(part[0]))


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
    numbers = partial(torch.tensor, dtype=torch.float64)
    pairs = [(numbers(o.losses), numbers(expected.losses)) for o in outcomes]
    pairs += [(numbers(o.figures), numbers(expected.figures)) for o in outcomes if expected.figures]
    pairs += [(o.weights[name], expected.weights[name]) for o in outcomes for name in o.weights.keys() - expected.idle]
    return float(numbers([difference(*pair) for pair in pairs]).max())


OF_BOTH = ("dtype", "seed", "clip", "tied", "before", "after", "evaluated", "around")
"""Settings of an engine, and of a plain loop."""


def check_equality(
    plan: qs.Plan,
    model: Any,
    loss: Callable[[Any, Any], Any],
    optimizer: Callable[[Any], Any],
    batches: Sequence[Batch | Step],
    *,
    microbatches: int = 1,
    tolerance: float = 1e-12,
    masks: Masks | None = None,
    **settings: Any,
) -> list[Outcome]:
    """Train on the ranks of a plan, with these settings, and in one process, with those that it has too."""
    settings = {"dtype": torch.float64, **settings}
    both = {name: settings[name] for name in OF_BOTH if name in settings}
    found = train_ranks(plan, model, loss, optimizer, batches, **settings)
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
