"""Facts about a model's blocks that a first step has found: inputs, outputs, mutations, random draws; consequences.

each rank    its own blocks ──▶ all ranks ──▶ equal blocks in one row ──▶ `ModelFacts.explain`
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

from torch import nn

from quintsched.ir.mesh import REPLICA_AXES
from quintsched.plan import Plan

from ..blocks.block_builders import TARGETS, Parcel, accepted_extras, on_meta, takes_targets
from ..comm import Group
from ..comm.host_collectives import share_texts
from ..interpreter.handler_table_and_loop import PreparedStep
from ..interpreter.step_losses.agree_on_loss_units import RunLosses
from ..losses.loss_reductions import Over
from ..parallel.mesh_independent_dropout import KeyedDropout
from ..stage.rank_stages import RankModel
from ..step_setup.block_examination_results import BlockLoss
from ..step_setup.unit_samples import UnitShape

NO_FACT = "nothing"
OTHER_DRAWS = "other random numbers"


@dataclass(frozen=True)
class BlockFacts:
    """Facts about one block, in words.

    Attributes:
        block: its number in the model.
        kind: its class.
        takes: shapes and dtypes of its inputs, of one microbatch, and names of extras.
        gives: shapes and dtypes of its outputs, riders included.
        changes: mutations of its forward: input tensors, buffers, attributes.
        draws: random numbers.
        loss: reduction of its own loss: a sum, or a mean over samples, tokens, …
        cut: its layers that are split over tp.
    """

    block: int
    kind: str
    takes: str
    gives: str
    changes: str = NO_FACT
    draws: str = NO_FACT
    loss: str = "none"
    cut: str = NO_FACT


@dataclass(frozen=True)
class ModelFacts:
    """Facts about all blocks, the loss and the metrics, and their consequences for this plan."""

    blocks: tuple[BlockFacts, ...]
    losses: Mapping[str, str]
    follows: tuple[str, ...]

    def to_data(self) -> dict[str, Any]:
        """Return the facts as JSON data."""
        return asdict(self)

    def explain(self) -> str:
        """Return the facts as lines of text; consecutive equal blocks are merged."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterable[str]:
        for _, alike in groupby(self.blocks, lambda facts: replace(facts, block=0)):
            first, *others = alike
            numbers = f"blocks {first.block}-{others[-1].block}" if others else f"block {first.block}"
            yield f"{numbers}: {first.kind}"
            rows = {name: said for name, said in asdict(first).items() if name not in ("block", "kind")}
            yield from (f"  {name:<8} {said}" for name, said in rows.items())
        yield from (f"{name}: {rule}" for name, rule in self.losses.items())
        yield from (f"so {one}" for one in self.follows)


def find_facts(
    step: PreparedStep, changed: Mapping[int, Sequence[str]], model: RankModel, losses: RunLosses, world: Group
) -> ModelFacts:
    """Return the facts that a first step has found, the same on all ranks (collective).

    Args:
        step: the step.
        changed: names of the buffers that each block of this rank has changed, by its number.
        model, losses: the stages and losses that ran it.
        world: all ranks.
    """
    draws = {n: f.draws.have_drawn_otherwise for n, f in step.interpreter.state.compute.forwards.items()}
    mine = {
        int(number): (changed[int(number)], _draws(block, is_other=draws.get(stage, False)))
        for stage, held in model.stages.items()
        for number, block in held.blocks.items()
    }
    weighed = {
        "loss": losses.loss.rule,
        **{f"metric {n}": metric.examined.rule for n, metric in losses.metrics.items()},
    }
    rules = {name: (rule.over, str(rule)) for name, rule in weighed.items() if rule is not None}
    found: dict[int, tuple[list[str], str]] = {}
    over: dict[str, tuple[str, str]] = {}
    for of_blocks, of_losses in map(json.loads, share_texts(world, json.dumps([[*mine.items()], rules]))):
        found |= {number: facts for number, facts in of_blocks if number not in found or facts[1] != NO_FACT}
        over |= of_losses
    shape = next(filter(None, step.units.shapes))
    blocks = tuple(_facts_of(model, shape, losses.blocks.losses, number, *found[number]) for number in sorted(found))
    kind = Over(over["loss"][0]) if "loss" in over else None
    known = KnownFacts(blocks, kind, model.plan, shape.needs_data)
    words = {name: said for name, (_, said) in over.items()}
    return ModelFacts(blocks, words, tuple([sentence for sentence, holds in FOLLOWS if holds(known)]))


def _facts_of(
    model: RankModel, shape: UnitShape, losses: Sequence[BlockLoss], number: int, changed: Sequence[str], draws: str
) -> BlockFacts:
    outline, parcel = on_meta(model.outlines[number]), shape.parcels[number]
    loss = next((one.over for one in losses if one.number == number), ())
    return BlockFacts(
        number,
        type(outline).__name__,
        _taken(number, outline, shape),
        str(parcel),
        ", ".join(_changes(parcel, changed)) or NO_FACT,
        draws,
        (str(loss[0]) if loss else "as the loss") if parcel.has_loss else "none",
        _cut(model, number),
    )


def _taken(number: int, outline: nn.Module, shape: UnitShape) -> str:
    before = shape.parcels[number - 1] if number else None
    given, riders = (before.output, before.names) if before else (shape.spec.inputs, ())
    accepts = accepted_extras(outline)
    named = [name for name in (*riders, *(name for name, _ in shape.spec.extras)) if accepts(name)]
    return ", ".join([str(given), *named, *[TARGETS] * takes_targets(outline)])


def _changes(parcel: Parcel, buffers: Sequence[str]) -> Iterable[str]:
    for change in parcel.changes:
        yield f"what it is given ({change.what}, by block {change.block})"
    yield from (f"buffer {name}" for name in buffers)
    yield from (f"attribute {state.name}" for state in parcel.state if state.is_attribute or state.is_named)


def _draws(block: nn.Module, *, is_other: bool) -> str:
    drops = any(isinstance(module, KeyedDropout) and module.p > 0 for module in block.modules())
    return ", ".join(["dropout"] * drops + [OTHER_DRAWS] * is_other) or NO_FACT


def _cut(model: RankModel, number: int) -> str:
    """Return the split layers: pairs as "column → row", others with how they are split."""
    said = dict[object, str]()
    for cut in model.tensor.cuts[number]:
        name, pair = cut.path.partition(".")[2], id(cut.pair) if cut.is_paired else cut.path
        said[pair] = (
            f"{said[pair]} → {name}" if pair in said else name if cut.is_paired else f"{name} ({cut.split.value})"
        )
    return ", ".join(said.values()) or NO_FACT


class KnownFacts(NamedTuple):
    """Facts that decide which sentences of `FOLLOWS` hold; `needs_data`: tracing shapes takes real data."""

    blocks: Sequence[BlockFacts]
    over: Over | None
    plan: Plan
    needs_data: bool


FOLLOWS: tuple[tuple[str, Callable[[KnownFacts], bool]], ...] = (
    (
        "losses of microbatches and replicas are added up, and nothing is divided",
        lambda known: known.over is Over.SUM,
    ),
    (
        "each microbatch weighs in the loss of the batch by what that is a mean over",
        lambda known: known.over not in (None, Over.SUM, Over.STATED, Over.MICROBATCH),
    ),
    (
        "losses and weights of microbatches are added up, and divided at the end",
        lambda known: known.over is Over.STATED,
    ),
    (
        "each microbatch counts as much as any, and is a batch of its own",
        lambda known: known.over is Over.MICROBATCH,
    ),
    (
        "steps with random numbers are run by their instructions, not from CUDA graphs",
        lambda known: any(facts.draws != NO_FACT for facts in known.blocks),
    ),
    (
        "blocks that draw other than by dropout are not compiled",
        lambda known: any(OTHER_DRAWS in facts.draws for facts in known.blocks),
    ),
    (
        "buffers that forwards change are made the same on all replicas, as `buffers` says",
        lambda known: (
            any("buffer" in facts.changes for facts in known.blocks) and known.plan.mesh.has_ranks(*REPLICA_AXES)
        ),
    ),
    (
        "blocks that change what they are given get copies of it",
        lambda known: any("given" in facts.changes for facts in known.blocks),
    ),
    (
        "shapes are found with data: a unit runs through the stages before steps of new shapes",
        lambda known: known.needs_data,
    ),
    (
        "ranks of tp meet behind each pair, and at each layer that is cut alone",
        lambda known: any(facts.cut != NO_FACT for facts in known.blocks),
    ),
)
"""Sentences on consequences for a run, each with the condition under which it holds."""
