"""Costs files of plans, drawn: of computations, messages and activations, per stage, microbatch, slice and link."""

from random import Random
from typing import Any

import quintsched as qs

UNITS = ("forward", "backward_input", "backward_weight", "recompute", "exchange", "exchange_backward", "message")
HELD = ("activation", "activation_after_input", "activation_checkpointed", "keys")
BANDWIDTHS = (0.25, 0.5, 1, 2, 4)


def costs_file(plan: qs.Plan, random: Random, least: float = 0.0) -> dict[str, Any]:
    """Draw what a costs file for a plan may say; its times are quarters from `least` to 3."""
    spec, ranks = plan.schedule, len(plan.programs)
    lengths = {"stages": len(plan.stage_to_pp), "microbatches": spec.microbatches, "slices": spec.slices}

    def quarter(least: float = least) -> float:
        return random.randint(int(4 * least), 12) / 4

    def maybe() -> bool:
        return random.random() < 0.5

    def several(what: str, least: float = 0.25) -> list[float]:
        return [quarter(least) for _ in range(lengths[what])]

    def cost(name: str) -> Any:
        found: Any = several("stages", least) if maybe() else quarter()
        if maybe():
            return found
        factors = ("microbatches",) if name == "keys" else ("microbatches", "slices")
        return {"stages": found, **{factor: several(factor) for factor in factors if maybe()}}

    def wire() -> dict[str, float]:
        return ({"latency": quarter()} if maybe() else {}) | (
            {"bandwidth": random.choice(BANDWIDTHS)} if maybe() else {}
        )

    file: dict[str, Any] = {name: cost(name) for name in (*UNITS, *HELD) if maybe()}
    file |= {what: several(what) for what in ("microbatches", "slices") if maybe()}
    if maybe():
        return file | {"p2p": quarter()}
    file["p2p"] = wire()
    if maybe():
        both = random.choice([("within",), ("across",), ("within", "across")])
        file["p2p"] |= {"nodes": [random.randint(0, 2) for _ in range(ranks)], **{name: wire() for name in both}}
    pairs = [(s, d) for s in range(ranks) for d in range(ranks) if s != d]
    if pairs and maybe():
        named = random.sample(pairs, random.randint(0, len(pairs)))
        file["p2p"]["links"] = [{"source": s, "destination": d, **wire()} for s, d in named]
    return file
