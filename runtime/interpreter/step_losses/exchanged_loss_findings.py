"""Findings about the loss and the metrics that ranks exchange, and the decision that all ranks draw from them.

findings of rank 0, 1, … ──▶ RankFindings ──▶ agreed_rule: one rule for all, or why there is none
                                           └▶ why_unlinear: the backward of a block that does not fit the rule
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from ...losses.loss_reductions import LossWeight, Over
from ...losses.recheck_reduction_on_batches import why_rests_misfit
from ...losses.weighted_losses import NO_WEIGHT, NOT_STATED, SUMS

_UNLIKE_FIRST = (
    "blocks have losses of their own beside it, which were weighed before it was called first; give a first step whose "
    "microbatches are alike, since these are"
)
_UNLINEAR = (
    "{}: the gradients there are those of a microbatch, times what its loss weighs, and not of the batch; clip "
    "in the optimizer, Engine(…, clip=…), return an auxiliary loss beside the output, (output, loss)"
)
_SAY_WHICH = '; where targets mask none, one is the other: say that it is over samples, loss_over="samples"'
MEANT = (
    ', or say that the loss of each microbatch is meant: Engine(…, loss_over="microbatch"), in a job '
    "train.loss_over: microbatch"
)


class RankFindings(NamedTuple):
    """Findings of all ranks, each field by rank; a text is "" where a rank has found nothing.

    Attributes:
        rule: the rule of the loss, as JSON.
        refusal: why the loss has no rule that makes its mean that of the batch.
        of_metrics: the same of a metric.
        of_any: a refusal that holds even for a single microbatch.
        since: state that losses of blocks may read, and that has changed.
        unlinear: a block whose backward is not linear in its gradients.
        adds_constant: whether that backward is affine: linear but for a constant.
        is_of_each: whether that backward gives each sample the gradient that it has in a microbatch of its own.
        has_odd_sizes: whether some unit has samples, but not the usual number of them.
        is_blind: whether the loss has had no gradient in some microbatch, so that its rule could not be found there.
        of_each: number of elements per sample that the loss is a mean over; None: not known.
        rests: output tensors that belong to no sample and that the loss reads.
        is_watched: whether a function is compared in further steps: it is not known to keep its reduction.
        has_supposed: whether losses of blocks were weighted before the rule of the loss was known.
    """

    rule: Sequence[str]
    refusal: Sequence[str]
    of_metrics: Sequence[str]
    of_any: Sequence[str]
    since: Sequence[str]
    unlinear: Sequence[str]
    adds_constant: Sequence[bool]
    is_of_each: Sequence[bool]
    has_odd_sizes: Sequence[bool]
    is_blind: Sequence[bool]
    of_each: Sequence[float | None]
    rests: Sequence[dict[str, list[str]]]
    is_watched: Sequence[bool]
    has_supposed: Sequence[bool]

    @classmethod
    def from_texts(cls, texts: Sequence[str]) -> RankFindings:
        """Parse the JSON texts of all ranks."""
        return cls(*zip(*map(itemgetter(*cls._fields), map(json.loads, texts)), strict=True))


def agreed_rule(findings: RankFindings, supposed: Over, step: int) -> tuple[LossWeight | None, str]:
    """Return the rule of the loss that all ranks adopt, None if there is none; and why the loss is refused, or "".

    Args:
        findings: those of all ranks.
        supposed: what losses of blocks were taken to be sums or means over, while the loss had no rule yet.
        step: number of the step, for messages.
    """
    found = {rule: rank for rank, rule in reversed([*enumerate(merge_observed_flags(findings.rule))]) if rule}
    of_each = {each: rank for rank, each in enumerate(findings.of_each) if each is not None}
    refusal, rule = next(filter(None, findings.refusal), ""), None
    if len(found) > 1 and not refusal:
        refusal = "; ".join(
            f"rank {rank} has found {rule_in_words(text)}" for text, rank in sorted(found.items(), key=itemgetter(1))
        )
        refusal += _SAY_WHICH if {rule_of(text).over for text in found} == {Over.SAMPLES, Over.TOKENS} else ""
    if len(of_each) > 1 and not refusal:
        numbers = " and ".join(f"{number:g} on rank {rank}" for number, rank in of_each.items())
        refusal = f"in step {step} it is over unlike numbers of things for a sample: {numbers}"
    refusal = refusal or why_rests_misfit(findings.rests, are_all=True)
    if found and not refusal:
        rule = rule_of(next(iter(found)))
        if any(findings.has_supposed) and (rule.over in SUMS) != (supposed in SUMS):
            refusal = f"{_UNLIKE_FIRST} of unlike size, and it is {rule}"
        if any(findings.is_blind) and rule != LossWeight(Over.SAMPLES):
            refusal = "some microbatches of a step have a gradient, and others have none"
    words = NOT_STATED if Over.STATED in [rule_of(text).over for text in found] else NO_WEIGHT
    return rule, refusal and words.format(refusal) + MEANT


def why_unlinear(findings: RankFindings, rule: LossWeight | None, *, weighs_by_samples: bool) -> str:
    """Return why the backward of a block does not fit the rule of the loss, in words; "": all fit.

    A constant that it adds is right where all microbatches weigh the same: they have equally many samples, and these
    are their weights. A backward that gives each sample the gradient of a microbatch of its own is right for sums.
    """
    if rule == LossWeight(Over.MICROBATCH):
        return ""
    weigh_same, is_sum = weighs_by_samples and not any(findings.has_odd_sizes), rule == LossWeight(Over.SUM)
    by_rank = zip(findings.unlinear, findings.adds_constant, findings.is_of_each, strict=True)
    wrong = [words for words, adds, of_each in by_rank if not ((adds and weigh_same) or (of_each and is_sum))]
    return (why := next(filter(None, wrong), "")) and _UNLINEAR.format(why) + MEANT


def merge_observed_flags(rules: Sequence[str]) -> list[str]:
    """Return the rules of ranks; those that are equal but for flags of what a rank observed have the flags of all."""
    flags = ("is_clamped", "is_guarded")
    read = [json.loads(text) if text else {} for text in rules]
    bare = [{name: value for name, value in one.items() if name not in flags} for one in read]
    found = []
    for mine in bare:
        alike = [one for one, its in zip(read, bare, strict=True) if its == mine]
        found.append(json.dumps(mine | {name: any(map(itemgetter(name), alike)) for name in flags}) if mine else "")
    return found


def rule_of(text: str) -> LossWeight:
    """Return the loss rule that a rank has found, of its JSON."""
    data = json.loads(text)
    data.pop("of_each")
    return LossWeight(**{**data, "over": Over(data["over"])})


def rule_in_words(text: str) -> str:
    """Return the loss rule that a rank has found, in words."""
    of_each = json.loads(text)["of_each"]
    return f"{rule_of(text)}" + "".join(f", {each:g} for each sample" for each in of_each if each is not None)


def why_uneven(of_each: Sequence[str]) -> str:
    """Return why samples have different weights on different ranks, in words; "": they have the same."""
    found = {text: rank for rank, text in reversed([*enumerate(of_each)]) if any(json.loads(text))}
    weights = " and ".join(f"{text} on rank {rank}" for text, rank in found.items())
    return f"a sample weighs {weights}" if len(found) > 1 else ""
