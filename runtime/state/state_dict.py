"""The state of a rank as a flat mapping from names to tensors: what checkpoints hold.

model.3.attn.qkv.weight              this rank's shard, by its name in the whole model
optimizer.3.attn.qkv.weight.exp_avg  what the optimizer keeps for it

Where replicas shard what they step (ZeRO), both are this rank's segment, of one dimension; weights of which it has
none are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quintsched.errors import MisfitError

from ..blocks.dtensor import full_of, local_of
from ..comm import Group
from ..optim.gathered import Stepper
from ..parallel.tensor.apply import gather_full
from ..stage.build import Stage
from .master_weights import Masters

Stages = Mapping[int, Stage]
Steppers = Mapping[tuple[int, ...], Stepper]


def _weights(stages: Stages, masters: Masters) -> dict[str, Tensor]:
    """Return weights, as their masters where there are any, and buffers; of DTensors what lies on this rank."""
    held = (named for stage in stages.values() for named in stage.state_dict(keep_vars=True).items())
    kept = ((name, masters.of(tensor) if isinstance(tensor, nn.Parameter) else tensor) for name, tensor in held)
    return {name.removeprefix("blocks."): local_of(tensor) for name, tensor in kept if tensor is not None}


def _optimizer_state(
    stages: Stages, steppers: Steppers, masters: Masters
) -> Iterator[tuple[str, Tensor, dict[str, object]]]:
    for step, stepper in steppers.items():
        for stage in step:
            for name, parameter in stages[stage].named_weights().items():
                master = masters.of(parameter)
                if master is not None:
                    yield name, master, stepper.state_of(master)


def state_of(stages: Stages, steppers: Steppers, masters: Masters) -> dict[str, Tensor]:
    """Return weights (float32 masters where there are any), buffers and optimizer state; numbers become tensors."""
    state = {f"model.{name}": tensor.detach() for name, tensor in _weights(stages, masters).items()}
    for name, _, kept in _optimizer_state(stages, steppers, masters):
        for key, value in kept.items():
            if value is not None:
                state[f"optimizer.{name}.{key}"] = torch.as_tensor(value)
    return state


def require_loadable(stages: Stages, steppers: Steppers, masters: Masters, state: Mapping[str, Tensor]) -> None:
    """Raise `MisfitError` for names, shapes or types that are not this rank's; of optimizers, for unknown weights."""
    weights = _weights(stages, masters)
    given = {name.removeprefix("model.") for name in state if name.startswith("model.")}
    if given != set(weights):
        odd = sorted(given ^ set(weights))
        raise MisfitError(f"the state is of another model, mesh or stage: {odd[0]!r} is only on one side")
    for name, weight in weights.items():
        found = state[f"model.{name}"]
        if found.shape != weight.shape or found.dtype != weight.dtype:
            raise MisfitError(f"{name} is {found.dtype} {tuple(found.shape)}, not {weight.dtype} {tuple(weight.shape)}")
    kept = {f"optimizer.{name}" for name, _, _ in _optimizer_state(stages, steppers, masters)}
    for name in state:
        parts = name.split(".") if name.startswith("optimizer.") else []
        if parts and not any(".".join(parts[:end]) in kept for end in range(2, len(parts))):
            raise MisfitError(f"the state is of another optimizer, model or stage: {name!r} is of no weight here")


def load_state(stages: Stages, steppers: Steppers, masters: Masters, state: Mapping[str, Tensor]) -> None:
    """Take over a state in place; raises `MisfitError` as `require_loadable` does, before anything is changed."""
    require_loadable(stages, steppers, masters, state)
    for name, weight in _weights(stages, masters).items():
        weight.detach().copy_(state[f"model.{name}"])
    masters.publish(list(stages))
    for name, parameter, kept in _optimizer_state(stages, steppers, masters):
        prefix = f"optimizer.{name}."
        brought = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
        kept.clear()
        kept.update({key: tensor.to(_home(key, tensor, parameter), copy=True) for key, tensor in brought.items()})


def _home(key: str, tensor: Tensor, parameter: Tensor) -> torch.device:
    """Return where an optimizer keeps what a file brought: beside the parameter, but the step count where it was."""
    return tensor.device if key == "step" else parameter.device


def full_weights(stages: Stages, group: Group) -> dict[str, Tensor]:
    """Return full weights gathered from their shards; every member of the group, or of a DTensor, calls this."""
    return {
        name.removeprefix("blocks."): (
            full_of(tensor) if isinstance(tensor, DTensor) else gather_full(tensor, group).detach().clone()
        )
        for stage in stages.values()
        for name, tensor in stage.state_dict(keep_vars=True).items()
    }
