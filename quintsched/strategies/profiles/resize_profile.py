"""Conversion of a profile of operators to another model of the same kind: times and sizes scaled by the work.

    hidden ×2     products and their weights ×4, passes ×2, attention by its heads
    seq    ×2     products and passes ×2, attention ×4
    vocab  ×2     the embedding's and the head's weights ×2

Collectives inside operators are scaled by their own curves. Rates of products and passes change with their sizes, so
scaling is accurate only for similar sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from quintsched.errors import MisfitError
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.profiles.operator_rates import Rates
from quintsched.strategies.profiles.profile import Measures, Operator, Profile


@dataclass(frozen=True)
class Ratios:
    """Sizes of the new model relative to the measured one."""

    hidden: float
    heads: float
    vocab: float
    seq: float


def resized(profile: Profile, model: Model, seq: int) -> Profile:
    """Return the profile of `model` at a sequence length.

    Raises `MisfitError` if the profile does not contain its model's sizes, and others are requested.
    """
    measured = {operator.seq for operator in profile.operators}
    wanted = Measures(hidden=model.hidden, heads=model.heads, vocab=max(model.vocab, 1))
    if profile.measures is None:
        if measured != {seq}:
            raise MisfitError(f"{profile.name} was measured at seq {_listed(measured)}, not {seq}")
        return profile
    if profile.measures == wanted and measured == {seq}:
        return profile
    near = min(measured, key=lambda length: abs(length - seq))
    had = profile.measures
    ratios = Ratios(wanted.hidden / had.hidden, wanted.heads / had.heads, wanted.vocab / had.vocab, seq / near)
    ends = {*profile.first, *profile.last}
    rates, chosen = Rates(profile), (operator for operator in profile.operators if operator.seq == near)
    operators = tuple(_resized(rates, operator, ratios, seq, operator.name in ends) for operator in chosen)
    return profile.model_copy(update={"operators": operators, "measures": wanted})


def _resized(rates: Rates, operator: Operator, by: Ratios, seq: int, at_an_end: bool) -> Operator:
    tokens = by.hidden * by.seq
    weights, flops = _weights(operator, by, at_an_end), _weights(operator, by, at_an_end) * by.seq
    took = {
        "product": flops,
        "attention": by.heads * by.seq**2,
        "pass": weights if at_an_end and operator.weights else tokens,
    }.get(operator.kind, flops)
    held = by.heads * by.seq**2 if operator.scores else tokens
    if at_an_end and operator.flops:
        held = by.vocab * by.seq
    changed = {
        "seq": seq,
        "forward_s": rates.rescaled_s(operator, "forward", took, tokens, operator.tp),
        "backward_s": rates.rescaled_s(operator, "backward", took, tokens, operator.tp),
        "flops": operator.flops * flops,
        "weights": operator.weights * weights,
        "output": operator.output * held,
        "kept": operator.kept * held,
        "passed": operator.passed * tokens,
        "whole": operator.whole * tokens,
        "aside": operator.aside * tokens,
        "input": operator.input * tokens,
        "all_reduce_forward": operator.all_reduce_forward * tokens,
        "all_reduce_backward": operator.all_reduce_backward * tokens,
    }
    return operator.model_copy(update=changed)


def _weights(operator: Operator, by: Ratios, at_an_end: bool) -> float:
    return by.hidden * by.vocab if at_an_end else by.hidden**2


def _listed(values: set[int]) -> str:
    return ", ".join(map(str, sorted(values)))
