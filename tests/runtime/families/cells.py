"""One family on one mesh: trained by the engine and in one process, from the same weights, and judged.

    drawn model ─┬─▶ split ─▶ Engine on every rank (threads of this process) ─▶ losses, weights ─┐
                 └─▶ its own forward, microbatch by microbatch, in one process ──────────────────┴─▶ verdict

SGD steps all weights. In float64 losses of all steps and weights after them have to be equal to what 1e-9 of a
gradient makes of these; what models compute in float32 whatever their weights are is done in float64 then, or else its
rounding would be what is compared. bf16 is judged by how far its masters are from the weights of float64: at most 1.5
times as far as those of one process in bf16.
"""

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import quintsched as qs
from quintsched.runtime import split

from ...helpers import training
from .catalogue import Batch, Family, drawn, loss_of

MICROBATCHES, STEPS, RATE = 4, 2, 0.05
TOLERANCE, BF16_FACTOR = 1e-9 * RATE, 1.5

Result = Literal["equal", "refused", "wrong", "crash", "hang"]
BAD: tuple[Result, ...] = ("wrong", "crash", "hang")
sgd = partial(torch.optim.SGD, lr=RATE)


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


def judge(family: Family, mesh: Mesh) -> Verdict:
    """Train the family on the mesh, and say what became of it."""
    steps: list[int] = []
    batches = [(batch.inputs, batch.targets) for batch in batches_of(family)]
    model = copy.deepcopy(model_of(family)).float() if mesh.bf16 else model_of(family)
    told: dict[str, Any] = {"bucket_mb": 0.05, "sequence_parallel": mesh.sequence_parallel, "masters": mesh.bf16}
    told |= {"dtype": torch.bfloat16, "around": nullcontext} if mesh.bf16 else {"around": Doubles}
    told |= {"after": lambda model, step: steps.append(step), "cut": split, "wire": "nccl"}
    try:
        ranks = training.train_ranks(mesh.plan, model, loss_of, sgd, batches, **told)
    except qs.StallError as error:
        return Verdict("hang", _line(error))
    except qs.QuintschedError as error:
        return Verdict("crash" if steps else "refused", _line(error))
    except Exception as error:
        return Verdict("crash", f"{type(error).__name__}: {_line(error)}")
    aliases = _aliases(model)
    ranks = [
        replace(rank, weights={aliases.get(name, name): w for name, w in rank.weights.items() if w.numel()})
        for rank in ranks
    ]
    if missing := train_alone(family).weights.keys() - {name for rank in ranks for name in rank.weights}:
        return Verdict("wrong", f"no rank has {sorted(missing)[0]!r}")
    if mesh.bf16:
        return _judge_bf16(family, ranks)
    worst = training.worst_difference(ranks, train_alone(family))
    return Verdict("equal" if worst <= TOLERANCE else "wrong", f"{worst:.1e}")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]


def _judge_bf16(family: Family, ranks: Sequence[training.Outcome]) -> Verdict:
    exact, alone = train_alone(family), train_alone(family, bf16=True)
    mine = {name: weight for rank in ranks for name, weight in rank.weights.items()}
    trained = [name for name, _ in model_of(family).named_parameters()]
    factor = _distance(mine, exact, trained) / _distance(alone.weights, exact, trained)
    losses = [abs(loss - right) for rank in ranks for loss, right in zip(rank.losses, exact.losses, strict=True)]
    bound = max(abs(loss - right) for loss, right in zip(alone.losses, exact.losses, strict=True))
    far = max(losses) > BF16_FACTOR * max(bound, 2**-9 * max(map(abs, exact.losses)))
    return Verdict("equal" if factor <= BF16_FACTOR and not far else "wrong", f"{factor:.2f} times one process's error")


def _distance(found: Mapping[str, Tensor], exact: training.Outcome, names: Sequence[str]) -> float:
    squares = [(found[name].double() - exact.weights[name]).square().sum() for name in names]
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


def _aliases(model: nn.Module) -> dict[str, str]:
    """Return every name of what a model saves with the first of them."""
    firsts: dict[int, str] = {}
    found = model.state_dict(keep_vars=True)
    return {name: firsts.setdefault(id(tensor), name) for name, tensor in found.items()}


@cache
def train_alone(family: Family, *, bf16: bool = False) -> training.Outcome:
    """Train in one process with nothing of ours; `bf16` works on float32 masters, as SGD does then."""
    model = _in_bf16(family) if bf16 else model_of(family)
    steps = [_called(batch, model) for batch in batches_of(family)]
    how: dict[str, Any] = {"microbatches": MICROBATCHES, "low": bf16, "around": nullcontext if bf16 else Doubles}
    found = training.train_alone(model, loss_of, sgd, steps, **how)
    kept = {*_aliases(model).values()}
    weights = {name: weight for name, weight in found.weights.items() if name in kept and weight.numel()}
    return replace(found, weights=weights, idle=frozenset())


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
