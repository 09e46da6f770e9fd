"""The verbs of `engine.weights` and `engine.saves`, on the engine itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Concatenate, ParamSpec, TypeVar, cast

from .engine_saves import EngineSaves
from .engine_weights import EngineWeights

Given = ParamSpec("Given")
Found = TypeVar("Found")
Owner = TypeVar("Owner")


def _passed(
    method: Callable[Concatenate[Owner, Given], Found], owner: Callable[[EngineState], Owner]
) -> Callable[Concatenate[EngineState, Given], Found]:
    """Return a method of an engine that is one of its object's; it has the same description."""

    def passed(engine: EngineState, /, *given: Given.args, **named: Given.kwargs) -> Found:
        return method(owner(engine), *given, **named)

    update_wrapper(passed, method)
    return passed


def _weights(engine: EngineState) -> EngineWeights:
    return engine.weights


def _saves(engine: EngineState) -> EngineSaves:
    return engine.saves


def _shown(read: Callable[[EngineWeights], Found]) -> Found:
    return cast(Found, property(lambda engine: read(engine.weights)))


class EngineState:
    """Passes on what users call; each is described where it is done."""

    weights: EngineWeights
    saves: EngineSaves

    stages = _shown(lambda weights: weights.stages)
    optimizers = _shown(lambda weights: weights.optimizers)
    optimizer = _shown(lambda weights: weights.optimizer)
    zero_split = _shown(lambda weights: weights.zero_split)
    masters = _shown(lambda weights: weights.masters)
    gathered = _passed(EngineWeights.gathered, _weights)
    lr_schedulers = _passed(EngineWeights.lr_schedulers, _weights)
    ema = _passed(EngineWeights.ema, _weights)
    full_weights = _passed(EngineWeights.full_weights, _weights)
    set_weights = _passed(EngineWeights.set_weights, _weights)
    state_bytes = _passed(EngineWeights.state_bytes, _weights)

    state_dict = _passed(EngineSaves.state_dict, _saves)
    load_state_dict = _passed(EngineSaves.load_state_dict, _saves)
    state_metadata = _passed(EngineSaves.state_metadata, _saves)
    load_state_files = _passed(EngineSaves.load_state_files, _saves)
    full_state_dict = _passed(EngineSaves.full_state_dict, _saves)
    load_full_state_dict = _passed(EngineSaves.load_full_state_dict, _saves)
    load_pretrained = _passed(EngineSaves.load_pretrained, _saves)
    save_pretrained = _passed(EngineSaves.save_pretrained, _saves)
    save_dcp = _passed(EngineSaves.save_dcp, _saves)
    load_dcp = _passed(EngineSaves.load_dcp, _saves)
