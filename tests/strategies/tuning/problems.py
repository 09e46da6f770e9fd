"""Small random problems, and their strategies one by one, found without the search: every mesh, every tuple."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import quintsched as qs
from quintsched.schedules.kit.registry import find_schedule
from quintsched.strategies.descriptions.hardware import Curve, MeasuredRates
from quintsched.strategies.descriptions.model import Experts
from quintsched.strategies.prediction.strategy_columns import Table
from quintsched.strategies.prediction.vectorized_prediction import evaluate
from quintsched.strategies.tuning.axis_choices import Choices


def _curve(rate: float) -> Curve:
    return Curve(sizes=(1e3, 1e6, 1e9), rates=(rate / 10, rate / 2, rate))


CPU = MeasuredRates(
    matmul={"bf16": _curve(1e11)},
    memory=_curve(1e10),
    link=_curve(2e9),
    link_work=_curve(3e9),
    all_reduce={2: _curve(1e9), 8: _curve(3e8)},
    all_reduce_work={2: _curve(2e9), 8: _curve(1e9)},
    kernel_s=1e-5,
    cores=2,
    sharing={1: 1.0, 8: 0.8},
)
"""A machine whose ranks share cores."""


@dataclass(frozen=True)
class Problem:
    model: qs.Model
    hardware: qs.Hardware
    gpus: int
    batch: int
    seq: int
    choices: Choices


def problem(seed: int) -> Problem:
    draw = random.Random(seed)
    heads = draw.choice([2, 4, 6, 8])
    model = qs.Model(
        layers=draw.randint(1, 6),
        hidden=heads * draw.choice([64, 128, 256]),
        heads=heads,
        kv_heads=draw.choice([None, heads // 2]),
        vocab=draw.choice([1000, 50000]),
        activation=draw.choice(["gelu", "swiglu"]),
        attention=draw.choice(["flash", "unfused"]),
        experts=draw.choice([None, None, Experts(count=4, top_k=2, ffn=512)]),
    )
    hardware = qs.Hardware(
        tflops={"bf16": draw.choice([100.0, 300.0])},
        memory_gb=draw.choice([0.4, 0.8, 1.5, 3.0, 8.0]),
        memory_gbps=draw.choice([600.0, 2000.0]),
        gpus_per_node=draw.choice([1, 2, 4, 8]),
        link_gbps=draw.choice([16.0, 300.0]),
        network_gbps=draw.choice([1.0, 25.0]),
        reserved_gb=0.1,
        measured=draw.choice([*[MeasuredRates()] * 4, CPU]),
    )
    recomputes = [("none", "selective", "full", "per-stage"), ("none", "full"), ("per-stage",), ("selective", 1, 2)]
    choices = Choices(
        recompute=draw.choice(recomputes),
        zero=draw.choice([(0, 1, 2, 3), (0, 1), (1,)]),
        overlap=draw.choice([(False, True), (False,), (True,)]),
        sequence_parallel=draw.choice([(False, True), (True,), (False,)]),
        zero_every=draw.choice([(1,), (1, 2)]),
    ).of_model(model)
    return Problem(model, hardware, draw.choice([1, 2, 4, 6, 8]), draw.choice([4, 8, 12]), 512, choices)


@dataclass(frozen=True)
class Group:
    """Strategies of which a ranking names the best only: one, or all tuples of per-stage recomputation."""

    members: tuple[qs.Strategy, ...]
    named: tuple[bool, ...] = (False,)
    """Tuples that another word of the choices names; if one of those is best, the group is not ranked."""


def groups(given: Problem) -> list[Group]:
    """Return every strategy of a problem."""
    return [group for mesh in _meshes(given) for group in _of_mesh(given, *mesh)]


def _meshes(given: Problem) -> Iterator[tuple[int, int, int, int, int]]:
    sizes = range(1, given.gpus + 1)
    model = given.model
    keys = model.kv_heads or model.heads
    for dp, tp, pp, cp, ep in itertools.product(sizes, repeat=5):
        if dp * tp * pp * cp * ep != given.gpus or pp > model.layers or given.batch % (dp * ep):
            continue
        widths = [model.heads, *([model.experts.ffn] if model.experts else [4 * model.hidden])]
        if any(width % tp for width in widths) or (keys % tp and tp % keys) or given.seq % cp:
            continue
        if ep > 1 and (model.experts is None or model.experts.count % ep):
            continue
        yield dp, tp, pp, cp, ep


def _of_mesh(given: Problem, dp: int, tp: int, pp: int, cp: int, ep: int) -> Iterator[Group]:
    local = given.batch // (dp * ep)
    for schedule, chunks in _schedules(given, pp):
        for microbatch in (size for size in range(1, local + 1) if local % size == 0):
            if pp > 1 and not _takes(schedule, pp, local // microbatch, chunks):
                continue
            common = {
                "gpus": given.gpus,
                "batch": given.batch,
                "seq": given.seq,
                "dp": dp,
                "tp": tp,
                "pp": pp,
                "cp": cp,
                "ep": ep,
                "microbatch": microbatch,
                "schedule": schedule,
                "chunks": chunks,
                "ep_overlap": given.choices.ep_overlap[0],
            }
            zeros = [
                (zero, every)
                for zero in given.choices.zero
                for every in given.choices.zero_every
                if zero > 1 or every == 1
            ]
            zeros = zeros if dp * cp * ep > 1 else zeros[:1]
            spread = given.choices.sequence_parallel if tp > 1 else given.choices.sequence_parallel[:1]
            if given.seq // cp % tp:
                spread = tuple(one for one in spread if not one)
            overlaps = given.choices.overlap if dp * cp * ep > 1 else given.choices.overlap[:1]
            for (zero, every), overlap, sequence_parallel in itertools.product(zeros, overlaps, spread):
                switches = {
                    "zero": zero,
                    "zero_every": every,
                    "overlap": overlap,
                    "sequence_parallel": sequence_parallel,
                }
                for tuples, named in _recomputes(given, schedule, pp, chunks):
                    yield Group(tuple(qs.Strategy(**common, **switches, recompute=one) for one in tuples), named)


def _schedules(given: Problem, pp: int) -> Iterator[tuple[str, int]]:
    if pp == 1:
        yield given.choices.schedule[0], 1
        return
    for name in given.choices.schedule:
        found = find_schedule(name)
        takes = list(range(found.min_chunks, min(found.max_chunks, given.model.layers + 2) + 1))
        even = [v for v in takes if given.model.layers // (pp * v) and given.model.layers % (pp * v) == 0]
        even += [v for v in takes if (given.model.layers + 2) % (pp * v) == 0 and v not in even]
        doubles = [
            v for v in (found.min_chunks * 2**k for k in range(8)) if v in takes and pp * v <= given.model.layers
        ]
        yield from ((name, v) for v in even or doubles)


def _recomputes(given: Problem, schedule: str, pp: int, chunks: int) -> Iterator[tuple[list[object], tuple[bool, ...]]]:
    stages = pp * chunks
    least, larger = divmod(given.model.layers, stages)
    layers = [least + (stage < larger) for stage in range(stages)]
    if stages > 2 and larger == stages - 2:  # embedding and head count as a layer
        layers = [least, *[least + 1] * larger, least]
    for one in given.choices.recompute:
        if one == "per-stage" and find_schedule(schedule).bidirectional:
            continue  # a stage and its twin recompute alike
        if one == "per-stage":
            tuples, named = zip(*_tuples(given, find_schedule(schedule).placed(pp, chunks), layers), strict=True)
            yield list(tuples), named
        elif isinstance(one, str) or one <= max(layers):
            yield [one], (False,)


def _tuples(given: Problem, ranks: tuple[int, ...], layers: list[int]) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Yield tuples by stage, of one number a rank, least first; and whether another word names them."""
    most = [max(size for size, at in zip(layers, ranks, strict=True) if at == rank) for rank in range(max(ranks) + 1)]
    for numbers in sorted(itertools.product(*(range(size + 1) for size in most)), key=sum):
        named = ("none" in given.choices.recompute and not any(numbers)) or (
            "full" in given.choices.recompute and list(numbers) == most
        )
        yield tuple(min(numbers[rank], size) for rank, size in zip(ranks, layers, strict=True)), named


def _takes(schedule: str, pp: int, microbatches: int, chunks: int) -> bool:
    try:
        find_schedule(schedule).shape(pp, microbatches, chunks)
    except qs.UsageError:
        return False
    return True


def brute_force(given: Problem, top: int) -> list[tuple[float, float, qs.Strategy]]:
    """Return the best `top` groups' best strategies that fit, as (time, memory, strategy)."""
    found = groups(given)
    flat = [strategy for group in found for strategy in group.members]
    outcome = evaluate(given.model, given.hardware, Table.from_strategies(flat), simulate=True)
    ranked, start = [], 0
    for group in found:
        rows = range(start, start + len(group.members))
        start += len(group.members)
        fitting = [(outcome.step_s[row], row) for row in rows if outcome.fits[row]]
        if fitting:
            time, row = min(fitting)
            if not group.named[row - rows.start]:
                ranked.append((float(time), float(outcome.memory_bytes[row]), flat[row]))
    return sorted(ranked, key=lambda one: one[:2])[:top]
