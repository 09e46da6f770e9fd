"""Layout of operators on stages, and how each is cut: the finest description of a strategy.

    stage 0: embedding, norm, qkv …        1 GPU
    stage 1: score, softmax …              2 GPUs: tp 2          recomputed: score, softmax, dropout, context

Stages may end anywhere, even inside a layer. Ranks are numbered stage after stage, so that neighbours share a node.
"""

from __future__ import annotations

from dataclasses import dataclass

from quintsched.errors import MisfitError, UsageError
from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.descriptions.strategy_validity import stage_layers
from quintsched.strategies.profiles.profile import Profile


@dataclass(frozen=True)
class Placed:
    """One operator on its stage."""

    name: str
    tp: int = 1
    dp: int = 1
    cut: int = 0
    recompute: bool = False


@dataclass(frozen=True)
class StageOperators:
    """Operators of a stage, in order, and its number of GPUs."""

    operators: tuple[Placed, ...]
    gpus: int = 1


@dataclass(frozen=True)
class OperatorLayout:
    """Stages of the model, and the batch."""

    stages: tuple[StageOperators, ...]
    batch: int
    """Samples of a step."""
    microbatch: int = 1
    """Samples of a microbatch, over all GPUs of a stage."""
    gpus_per_node: int = 8

    @property
    def microbatches(self) -> int:
        """Number of microbatches per step."""
        return self.batch // self.microbatch

    def first_gpu(self, stage: int) -> int:
        """Return the index of a stage's first GPU."""
        return sum(earlier.gpus for earlier in self.stages[:stage])

    def crosses(self, left: int, right: int) -> bool:
        """Return whether two stages, the left one first, are on different nodes."""
        last = self.first_gpu(right) + self.stages[right].gpus - 1
        return self.first_gpu(left) // self.gpus_per_node != last // self.gpus_per_node


def even_layout(profile: Profile, strategy: Strategy, layers: int, gpus_per_node: int) -> OperatorLayout:
    """Return the layout of a valid strategy: layers as even as possible over stages, all cut alike.

    Raises `MisfitError` for a strategy that a profile of operators cannot express.
    """
    _check(strategy)
    counts = strategy.stages or stage_layers(layers, strategy.pp)
    stages = []
    for number, count in enumerate(counts):
        again = _recomputed(profile, strategy, number, count)
        names = [(name, name in again[layer]) for layer in range(count) for name in profile.layer]
        head = [(name, False) for name in profile.first] if number == 0 else []
        tail = [(name, False) for name in profile.last] if number == strategy.pp - 1 else []
        operators = tuple(
            Placed(name, strategy.tp, strategy.dp, recompute=again) for name, again in (*head, *names, *tail)
        )
        stages.append(StageOperators(operators, strategy.tp * strategy.dp))
    return OperatorLayout(tuple(stages), strategy.batch, strategy.microbatch * strategy.dp, gpus_per_node)


def _check(strategy: Strategy) -> None:
    for axis in ("cp", "ep"):
        if getattr(strategy, axis) > 1:
            raise MisfitError(f"a profile of operators has no {axis}; leave out --profile, or {axis}")
    for name, least in (("chunks", 1), ("zero", 0)):
        if (getattr(strategy, name) or 0) > least:
            raise MisfitError(f"a profile of operators has no {name}; leave out --profile, or {name}")
    if strategy.schedule not in (None, "1f1b"):
        raise MisfitError(f"a profile of operators is composed for 1f1b, not {strategy.schedule}; leave out --profile")
    if strategy.sequence_parallel:
        raise MisfitError("a profile of operators has no sequence parallelism; leave out --profile, or that")


def _recomputed(profile: Profile, strategy: Strategy, stage: int, layers: int) -> list[frozenset[str]]:
    """Return, for each layer of a stage, the names of the operators that are recomputed."""
    everything, nothing = frozenset(profile.layer), frozenset[str]()
    chosen = strategy.recompute
    if chosen == "none":
        return [nothing] * layers
    if chosen == "full":
        return [everything] * layers
    if chosen == "selective":
        kinds = {operator.name: operator.kind for operator in profile.operators}
        core = frozenset(name for name in profile.layer if kinds[name] == "attention")
        if not core:
            raise UsageError("the profile does not say which operators are attention: no selective recomputation")
        return [core] * layers
    count = chosen[stage] if isinstance(chosen, tuple) else int(chosen)
    return [everything if layer < count else nothing for layer in range(layers)]
