"""Prediction of a strategy from a profile.

operators ──▶ stages composed of them                ──▶ Prediction
steps     ──▶ hardware with their measured rates ──▶ `predict_one_strategy` ──▶ Prediction
"""

from __future__ import annotations

from quintsched.errors import UsageError
from quintsched.strategies.descriptions.hardware import Hardware
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.descriptions.strategy_validity import check, resolved
from quintsched.strategies.prediction.predict_one_strategy import Prediction, predict
from quintsched.strategies.prediction.profiled.measured_hardware import measured_hardware
from quintsched.strategies.profiles.operator_layout import even_layout
from quintsched.strategies.profiles.profile import Profile
from quintsched.strategies.profiles.resize_profile import resized
from quintsched.strategies.profiles.step_from_profile import Composed, compose


def predict_from_profile(model: Model, hardware: Hardware, strategy: Strategy, profile: Profile) -> Prediction:
    """Return the time and memory of a strategy from a profile.

    Raises `MisfitError` if a profile of operators cannot express the strategy, `UsageError` for an empty profile.
    """
    if profile.operators:
        check(model, None, strategy)
        return _composed(model, hardware, resolved(strategy), profile)
    return predict(model, measured_hardware(hardware, profile), strategy)


def _composed(model: Model, hardware: Hardware, strategy: Strategy, profile: Profile) -> Prediction:
    if strategy.offload is not None:
        raise UsageError("a profile of operators has no copies to host memory; leave out offload")
    profile = resized(profile, model, strategy.seq)
    found = compose(profile, even_layout(profile, strategy, model.layers, hardware.gpus_per_node))
    memory = tuple(stage.peak for stage in found.memory)
    return Prediction(
        model=model,
        hardware=hardware,
        strategy=strategy,
        step_s=found.step_s,
        fits=max(memory) <= hardware.memory_gb * 1e9 - hardware.reserved_gb * 1e9,
        memory_bytes=max(memory),
        memory_bytes_per_rank=memory,
        breakdown_s=found.breakdown_s(),
        breakdown_bytes=_bytes(found),
    )


def _bytes(found: Composed) -> dict[str, float]:
    """Return the memory of the stage that holds most, by kind."""
    fullest = max(found.memory, key=lambda stage: stage.peak)
    if fullest.optimizer >= fullest.peak:
        return {"state": fullest.optimizer, "waiting": 0.0, "backward": 0.0}
    return {"state": fullest.state, "waiting": fullest.waiting, "backward": fullest.backward}
