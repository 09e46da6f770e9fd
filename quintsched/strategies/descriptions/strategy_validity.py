"""Validity of a strategy for a model and hardware: one clear error for the first violation.

    mesh       dp · tp · pp · cp · ep = gpus
    batch      dp · ep replicas x microbatches of the given samples, in a number that the schedule takes
    model      tp divides heads and widths, ep the experts, cp the sequence, pp · chunks stages have the layers
    hardware   has a figure for the precision

Cases that frameworks accept are accepted: uneven stages, vocabularies that tp does not divide (they are padded), fewer
key-value heads than tp ranks (they are replicated), tp across nodes, sequence parallelism and ZeRO without anything to
shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quintsched.errors import UsageError
from quintsched.schedules import Schedule, find_schedule
from quintsched.strategies.descriptions.hardware import Hardware
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.strategy import Strategy, modules_of


def check(model: Model, hardware: Hardware | None, strategy: Strategy) -> None:
    """Raise `UsageError` for an invalid strategy; with hardware None, its checks are left out."""
    for fault in (
        *_mesh_faults(strategy),
        *_batch_faults(strategy),
        *_width_faults(model, strategy),
        *_expert_faults(model, strategy),
        *_sequence_faults(model, strategy),
    ):
        raise UsageError(fault)
    schedule = _shaped(strategy)
    for fault in (*_stage_faults(model, schedule, strategy), *_hardware_faults(hardware, strategy)):
        raise UsageError(fault)


def resolved(strategy: Strategy) -> Strategy:
    """Return a strategy with its schedule and chunks filled in; raises `UsageError` for an unknown schedule."""
    name = strategy.schedule
    if name is None:
        name = "interleaved-1f1b" if (strategy.chunks or 1) > 1 and strategy.pp > 1 else "1f1b"
    schedule = find_schedule(name)
    chunks = schedule.min_chunks if strategy.chunks is None else strategy.chunks
    if strategy.schedule is None and strategy.pp == 1:
        chunks = 1  # one rank has all layers, however they are cut
    return strategy.model_copy(update={"schedule": schedule.name, "chunks": chunks})


def predictable(name: str) -> Schedule:
    """Return a schedule; raises `UsageError` for one that predictions do not know."""
    schedule = find_schedule(name)
    if schedule.mode != "train":
        raise UsageError(f"schedule {schedule.name!r} does not train; take another (`quintsched schedules` lists them)")
    if schedule.routes is not None or schedule.searches:
        own = "an order that it searches under costs" if schedule.searches else "routes of its own"
        raise UsageError(
            f"schedule {schedule.name!r} has {own}, which predictions do not know; compile it, and time the plan with "
            "`quintsched simulate`"
        )
    return schedule


def num_stages(strategy: Strategy) -> int:
    """Return the number of stages of a resolved strategy."""
    return strategy.pp * (strategy.chunks or 1)


def stage_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Return the layers of each stage, as even as possible, with the remainder on the first stages.

    Where the embedding and the head make the number divide, each counts as a layer: 126 layers are 0, 1, …, 1, 0 in 128
    stages (Llama 3, arXiv:2407.21783, section 3.3.2; Megatron-LM's `--account-for-embedding-in-pipeline-split`).
    """
    least, over = divmod(layers + 2 if has_light_ends(layers, stages) else layers, stages)
    found = [least + (stage < over) for stage in range(stages)]
    if has_light_ends(layers, stages):
        found[0], found[-1] = least - 1, least - 1
    return tuple(found)


def has_light_ends(layers: Any, stages: Any) -> Any:
    """Return whether the first and the last stage have one layer less than all others; numbers or arrays."""
    return (layers % stages != 0) & ((layers + 2) % stages == 0)


def _mesh_faults(strategy: Strategy) -> Iterator[str]:
    sizes = {name: getattr(strategy, name) for name in ("dp", "tp", "pp", "cp", "ep")}
    product = strategy.dp * strategy.tp * strategy.pp * strategy.cp * strategy.ep
    if product != strategy.gpus:
        mesh = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "one rank"
        yield f"gpus={strategy.gpus}, but the mesh {mesh} has {product}; let the axes' product be the GPUs"


def _batch_faults(strategy: Strategy) -> Iterator[str]:
    share = strategy.replicas * strategy.microbatch
    if strategy.batch % share:
        nearest = max(strategy.batch // share, 1) * share
        yield (
            f"batch={strategy.batch} does not divide over dp·ep={strategy.replicas} replicas into microbatches of "
            f"{strategy.microbatch}; the nearest batch that does is {nearest}"
        )


def _width_faults(model: Model, strategy: Strategy) -> Iterator[str]:
    tp = strategy.tp
    widths = {"heads": model.heads}
    if model.delta is not None:
        widths["heads of keys of the delta net"] = model.delta.key_heads
    if not all(model.has_experts):
        widths["features of the feed-forward network (ffn)"] = model.ffn_width
    if model.experts is not None:
        widths["features of an expert (ffn)"] = model.experts.ffn
    for what, width in widths.items():
        if width % tp:
            yield f"tp={tp} does not divide the {width} {what} of {model.name}; choose tp from {_divisors(width)}"
    kv_heads = model.num_kv_heads
    if kv_heads % tp and tp % kv_heads:
        yield (
            f"tp={tp} neither divides the {kv_heads} heads of keys and values (kv_heads) of {model.name} nor is a "
            f"multiple; choose tp from {_divisors(kv_heads)}, or a multiple of {kv_heads}"
        )


def _expert_faults(model: Model, strategy: Strategy) -> Iterator[str]:
    if strategy.ep == 1:
        return
    if model.experts is None:
        yield f"ep={strategy.ep}, but {model.name} has no experts; put the ranks into dp"
    elif model.experts.count % strategy.ep:
        yield (
            f"ep={strategy.ep} does not divide the {model.experts.count} experts of {model.name}; "
            f"choose ep from {_divisors(model.experts.count)}"
        )


def _sequence_faults(model: Model, strategy: Strategy) -> Iterator[str]:
    if model.images is not None and strategy.seq != model.images.tokens:
        yield f"seq={strategy.seq}, but {model.name} cuts an image into {model.images.tokens} tokens; give seq so"
    if strategy.cp > 1 and model.delta is not None:
        yield f"cp={strategy.cp}, but a delta net is described for whole sequences only; put the ranks into dp"
    if strategy.seq % strategy.cp:
        yield f"cp={strategy.cp} does not divide the {strategy.seq} tokens of a sample (seq)"
    elif strategy.sequence_parallel and strategy.seq // strategy.cp % strategy.tp:
        yield (
            f"sequence_parallel: tp={strategy.tp} does not divide the {strategy.seq // strategy.cp} tokens of a "
            "sample on a rank (seq / cp); leave it out"
        )


def _shaped(strategy: Strategy) -> Schedule:
    """Return the schedule; raises `UsageError` for sizes that it does not take."""
    full = resolved(strategy)
    schedule = predictable(str(full.schedule))
    schedule.shape(full.pp, full.microbatches, full.chunks)
    return schedule


def _stage_faults(model: Model, schedule: Schedule, strategy: Strategy) -> Iterator[str]:
    full = resolved(strategy)
    stages = num_stages(full)
    if stages > model.layers and not has_light_ends(model.layers, stages):
        yield (
            f"pp={full.pp} x chunks={full.chunks} are {stages} stages, more than the {model.layers} layers of "
            f"{model.name}; take fewer"
        )
    layers = strategy.stages
    if layers is not None:
        yield from _layer_faults(model, stages, layers)
    layers = layers or (-(-model.layers // stages),) * stages
    yield from _recompute_faults(schedule, stages, layers, strategy)


def _layer_faults(model: Model, stages: int, layers: tuple[int, ...]) -> Iterator[str]:
    listed = ",".join(map(str, layers))
    if len(layers) != stages:
        yield f"stages={listed} are {len(layers)}, but pp x chunks makes {stages}"
    if min(layers, default=0) < 0:
        yield f"stages={listed}: a stage has {min(layers)} layers; give 0 or more"
    if sum(layers) != model.layers:
        yield f"stages={listed} have {sum(layers)} layers together, but {model.name} has {model.layers}"


def _recompute_faults(schedule: Schedule, stages: int, layers: tuple[int, ...], strategy: Strategy) -> Iterator[str]:
    asked = strategy.recompute
    if strategy.offload and not (asked in ("none", 0) or modules_of(asked)):
        yield (
            f"offload={strategy.offload:g} with recompute={asked}: stages that recompute layers keep nothing to "
            "offload; leave out one of them"
        )
    if isinstance(asked, int) and asked > max(layers):
        yield f"recompute={asked}, but no stage has more than {max(layers)} layers; write full for all of them"
    if isinstance(asked, tuple):
        if len(asked) != stages:
            yield f"recompute has numbers for {len(asked)} stages, but {schedule.name} has {stages} here"
        for stage, (number, most) in enumerate(zip(asked, layers, strict=False)):
            if not 0 <= number <= most:
                yield f"recompute={number} of stage {stage}, which has {most} layers; give 0 to {most}"


def _hardware_faults(hardware: Hardware | None, strategy: Strategy) -> Iterator[str]:
    if hardware is not None and strategy.offload and hardware.runs_at_once:
        yield "offload: host memory is a CPU's own memory, so that nothing is saved; leave it out"
    if hardware is not None and strategy.dtype not in hardware.tflops:
        known = ", ".join(hardware.tflops)
        yield f"hardware {hardware.name} has no figure for dtype {strategy.dtype} in tflops; it has {known}"


def _divisors(total: int) -> str:
    return ", ".join(str(size) for size in range(1, min(total, 1024) + 1) if total % size == 0)
