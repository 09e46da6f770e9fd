"""One family on one mesh: trained by the engine and in one process, from the same weights, and judged.

    drawn model ─┬─▶ split ─▶ Engine on every rank (threads of this process) ─▶ losses, gradients, weights ─┐
                 └─▶ its own forward, microbatch by microbatch, in one process ──────────────────────────────┴─▶ verdict

In float64 losses of all steps, gradients of the last and weights after it have to be equal to 1e-9; what models compute
in float32 whatever their weights are is done in float64 then, or else its rounding would be what is compared. bf16 is
judged by how far its gradients are from those of float64: at most 1.5 times as far as those of one process in bf16.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import quintsched as qs
from quintsched.errors import QuintschedError, StallError
from quintsched.runtime import Engine, Transport, run_local, split

from ...helpers import training
from .catalogue import Batch, Family, drawn, loss_of

MICROBATCHES, STEPS = 4, 2
TOLERANCE, BF16_FACTOR = 1e-9, 1.5
TIMEOUT_S = 60.0

Result = Literal["equal", "refused", "wrong", "crash", "hang"]
BAD: tuple[Result, ...] = ("wrong", "crash", "hang")


@dataclass(frozen=True)
class Mesh:
    """A column of the matrix: how the four microbatches of a step are run."""

    mesh: str
    schedule: str = "1f1b"
    zero: int = 0
    sequence_parallel: bool = False
    bf16: bool = False

    @property
    def plan(self) -> qs.Plan:
        """The plan; replicas share the microbatches."""
        replicas = qs.Mesh.parse(self.mesh).axis_size("dp")
        return qs.compile(self.schedule, mesh=self.mesh, microbatches=MICROBATCHES // replicas, zero=self.zero)

    def takes(self, family: Family) -> bool:
        """Whether the family has this cell: sequences are cut where attention is causal."""
        return family.causal or "cp" not in self.mesh


MESHES: Mapping[str, Mesh] = {
    "pp2 zb-h1": Mesh("pp=2", "zb-h1"),
    "pp4 1f1b": Mesh("pp=4"),
    "tp2": Mesh("tp=2"),
    "sp": Mesh("tp=2", sequence_parallel=True),
    "cp2": Mesh("cp=2"),
    "dp2 ZeRO-1": Mesh("dp=2", zero=1),
    "dp2 ZeRO-3": Mesh("dp=2", zero=3),
    "bf16 dp2·pp2": Mesh("dp=2,pp=2", bf16=True),
}


@dataclass(frozen=True)
class Verdict:
    """Result of a cell, with the reason."""

    result: Result
    why: str = ""


@dataclass(frozen=True)
class Trained:
    """Results of training: tensors by the model's own names."""

    losses: list[float]
    gradients: dict[str, Tensor]
    """Of the last step; none where ranks hold shards of them."""
    weights: dict[str, Tensor]


def judge(family: Family, mesh: Mesh) -> Verdict:
    """Train the family on the mesh, and say what became of it."""
    steps: list[int] = []
    try:
        ranks = _train_on(family, mesh, steps.append)
    except StallError as error:
        return Verdict("hang", _line(error))
    except QuintschedError as error:
        return Verdict("crash" if steps else "refused", _line(error))
    except Exception as error:
        return Verdict("crash", f"{type(error).__name__}: {_line(error)}")
    return _judge_bf16(family, ranks) if mesh.bf16 else _judge_float64(train_alone(family), ranks)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]


def _judge_float64(alone: Trained, ranks: Sequence[Trained]) -> Verdict:
    missing = alone.weights.keys() - {name for rank in ranks for name in rank.weights}
    if missing:
        return Verdict("wrong", f"no rank has {sorted(missing)[0]!r}")
    losses = [zip(rank.losses, alone.losses, strict=True) for rank in ranks]
    found = [
        (f"loss of step {step}", abs(one - other) / max(1.0, abs(other)))
        for pairs in losses
        for step, (one, other) in enumerate(pairs)
    ]
    for kind in ("gradients", "weights"):
        whole: dict[str, Tensor] = getattr(alone, kind)
        own = [(name, tensor) for rank in ranks for name, tensor in getattr(rank, kind).items() if name in whole]
        found += [(f"{kind} of {name}", _error(tensor, whole[name])) for name, tensor in own]
    place, worst = max(found, key=lambda item: item[1] if item[1] == item[1] else float("inf"))
    return Verdict("equal" if worst <= TOLERANCE else "wrong", f"{worst:.1e} ({place})")


def _error(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    return training.difference(found, expected) if found.numel() else 0.0


def _judge_bf16(family: Family, ranks: Sequence[Trained]) -> Verdict:
    exact, alone = train_alone(family, sgd=True), train_alone(family, bf16=True)
    mine = {name: gradient for rank in ranks for name, gradient in rank.gradients.items()}
    if missing := alone.gradients.keys() - mine.keys():
        return Verdict("wrong", f"no gradient of {sorted(missing)[0]!r}")
    factor = _distance(mine, exact.gradients) / _distance(alone.gradients, exact.gradients)
    losses = [abs(loss - right) for rank in ranks for loss, right in zip(rank.losses, exact.losses, strict=True)]
    bound = max(abs(loss - right) for loss, right in zip(alone.losses, exact.losses, strict=True))
    far = max(losses) > BF16_FACTOR * max(bound, 2**-9 * max(map(abs, exact.losses)))
    return Verdict("equal" if factor <= BF16_FACTOR and not far else "wrong", f"{factor:.2f} times one process's error")


def _distance(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    squares = [(found[name].double() - exact[name]).square().sum() for name in exact]
    return float(torch.stack(squares).sum().sqrt())


class Doubles(TorchFunctionMode):
    """Keeps in float64 what is in float64, where code turns it to float32."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        is_double = bool(args) and isinstance(args[0], Tensor) and args[0].dtype == torch.float64
        if is_double and func is Tensor.float:
            return args[0]
        if is_double and (torch.float32 in given.values() or any(arg is torch.float32 for arg in args)):
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            given = {name: torch.float64 if arg is torch.float32 else arg for name, arg in given.items()}
        return func(*args, **given)


@cache
def model_of(family: Family) -> nn.Module:
    """The family's model, drawn once; who trains it takes a copy."""
    return drawn(family.build)


@cache
def batches_of(family: Family) -> list[Batch]:
    """The batches of all steps."""
    random = torch.Generator().manual_seed(1)
    return [family.batch(random) for _ in range(STEPS)]


def _optimizer(is_sgd: bool) -> Callable[[Any], torch.optim.Optimizer]:
    """Return AdamW, or SGD: what that does to weights is no larger where gradients are rounded."""
    return partial(torch.optim.SGD, lr=0.05) if is_sgd else partial(torch.optim.AdamW, lr=1e-2, eps=1e-6)


def _train_on(family: Family, mesh: Mesh, stepped: Callable[[int], None]) -> list[Trained]:
    plan, model, dtype = mesh.plan, model_of(family), torch.bfloat16 if mesh.bf16 else None
    aliases = _aliases(model)

    def run(transport: Transport) -> Trained:
        with nullcontext() if mesh.bf16 else Doubles():
            return train(transport)

    def train(transport: Transport) -> Trained:
        mine = copy.deepcopy(model)
        parts = split(mine.float() if mesh.bf16 else mine)
        how = {"dtype": dtype, "sequence_parallel": mesh.sequence_parallel, "bucket_mb": 0.05, "transport": transport}
        losses, noted = [], dict[Tensor, Tensor]()
        engine = Engine(plan, parts, loss_of, training.noting(_optimizer(mesh.bf16), noted), **how)
        for step, batch in enumerate(batches_of(family)):
            result = training.call_with_share(engine, engine.step, (batch.inputs, batch.targets))
            losses.append(float(result.loss))
            stepped(step)
        weights = engine.full_weights()
        training.write_in_place_of_weights(noted)
        state = engine.full_state_dict(all_blocks=True).items()  # of bf16, the masters in float32
        gradients = {} if mesh.zero else {key[6:]: tensor for key, tensor in state if key.startswith("model.")}
        names = {name: aliases.get(own, own) for name, own in parts.own_names.items()}
        own = ({names.get(name, name): t for name, t in found.items()} for found in (gradients, weights))
        return Trained(losses, *own)

    return run_local(plan.mesh.size, run, timeout_s=TIMEOUT_S, rules="nccl")


def _aliases(model: nn.Module) -> dict[str, str]:
    """Return every name of what a model saves with the first of them."""
    firsts: dict[int, str] = {}
    found = model.state_dict(keep_vars=True)
    return {name: firsts.setdefault(id(tensor), name) for name, tensor in found.items()}


@cache
def train_alone(family: Family, *, bf16: bool = False, sgd: bool = False) -> Trained:
    """Train in one process with nothing of ours; `bf16` works on float32 masters, as SGD does then."""
    model, noted, held = _in_bf16(family) if bf16 else model_of(family), dict[Tensor, Tensor](), list[nn.Parameter]()
    names = [name for name, _ in model.named_parameters()]

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        held.extend(parameters)
        return training.noting(_optimizer(bf16 or sgd), noted)(p for p in held if p.requires_grad)

    steps = [_called(batch, model) for batch in batches_of(family)]
    around = nullcontext if bf16 else Doubles
    how: dict[str, Any] = {"microbatches": MICROBATCHES, "low": bf16, "around": around}
    found = training.train_alone(model, loss_of, optimizer, steps, **how)
    kept = {*names, *_aliases(model).values()}
    weights = {name: weight for name, weight in found.weights.items() if name in kept}
    gradients = {name: noted[p] for name, p in zip(names, held, strict=True) if p in noted}
    return Trained(found.losses, gradients, weights)


def _in_bf16(family: Family) -> nn.Module:
    """Return the model with its weights in bf16; its buffers stay float32 where it runs like that."""
    model = copy.deepcopy(model_of(family)).float()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    try:
        steps = [_called(batches_of(family)[0], model)]
        training.train_alone(model, loss_of, training.sgd, steps, microbatches=MICROBATCHES, low=True)
    except RuntimeError:
        return copy.deepcopy(model_of(family)).bfloat16()
    return model


def _called(batch: Batch, model: nn.Module) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return inputs, targets and what the model takes by name beside them, in the type of its weights."""
    dtype = next(model.parameters()).dtype
    named = batch.inputs if isinstance(batch.inputs, dict) else {"": batch.inputs}
    cast = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in named.items()}
    first, *others = cast
    return cast[first], batch.targets, {name: cast[name] for name in others}
