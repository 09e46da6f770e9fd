"""State of a rank as a flat mapping from names to tensors: the contents of checkpoints.

model.3.attn.qkv.weight              this rank's shard, by its name in the whole model
optimizer.3.attn.qkv.weight.exp_avg  its optimizer state (`optim.optimizer_state`)
engine.optimizer.…                   other optimizer state, in groups and attributes (`optim.optimizer_extra_state`)
engine.module.3.attn.…               extra state of modules: get_extra_state (`blocks.state_dict_entries`)

engine.states                        the names of all optimizer state, as JSON

Where replicas shard optimizer state (ZeRO), both are this rank's segment, one-dimensional; weights without a segment
here are left out. Each tensor has contiguous memory of its own, as file formats need.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from quintsched.errors import InputError, MisfitError
from quintsched.files.strictjson import parse_strict

from ..blocks.plain_values_as_tensors import is_text
from ..blocks.state_dict_entries import MODULE_KEYS, load_beside, pack_beside
from ..comm import Group
from ..comm.host_collectives import share_texts
from ..optim.optimizer_extra_state import OPTIMIZER_KEYS
from ..optim.step_on_gathered_matrices import Stepper
from ..stage.build_stages import Stage
from .master_weights import Masters

OPTIMIZER = "optimizer."
"""Prefix of the names of optimizer state of weights."""

Stages = Mapping[int, Stage]
Steppers = Mapping[tuple[int, ...], Stepper]

Value = TypeVar("Value")

STATES = "engine.states"
"""Name of the list of optimizer state names in a state, so that a missing entry is detected on loading."""

MARK = "@"
"""Prefix of the part of a name that has the stages an optimizer steps."""


def of_model(name: str) -> str:
    """Return the name of a stage's tensor in the whole model."""
    return name.removeprefix("blocks.")


def list_states(names: Iterable[str]) -> dict[str, Tensor]:
    """Return the "engine.states" entry: the list of the names that are optimizer state; empty where none is."""
    kept = sorted(name for name in names if name.startswith(OPTIMIZER))
    return {STATES: torch.frombuffer(bytearray(json.dumps(kept).encode()), dtype=torch.uint8)} if kept else {}


def require_states(listed: Tensor | None, names: Collection[str], where: str) -> None:
    """Raise `MisfitError` where a state lacks optimizer state that was there when it was saved.

    Weights without a gradient have no state, and are not listed; states of earlier versions have no list.
    """
    try:
        kept = [] if listed is None else parse_strict(listed.cpu().numpy().tobytes())
    except (InputError, TypeError) as error:
        raise MisfitError(f"{where}: {STATES!r} is not what was saved: {error}") from None
    lacking = [name for name in kept if name not in names] if isinstance(kept, list) else [STATES]
    if lacking:
        more = f" and {len(lacking) - 1} more of what optimizers kept" if len(lacking) > 1 else ""
        raise MisfitError(
            f"{where} lacks {lacking[0]!r}{more}, without which the optimizer would begin anew; for the weights alone, "
            "give full tensors to engine.set_weights"
        )


def named_masters(stages: Stages, masters: Masters) -> dict[str, nn.Parameter]:
    """Return the tensors that this rank steps, by the names of weights."""
    named = ((name, masters.master_of(p)) for stage in stages.values() for name, p in stage.named_weights().items())
    return {name: master for name, master in named if master is not None}


class BesideTensors:
    """State of one rank's modules and optimizers beside the tensors of weights."""

    def __init__(self, stages: Stages, steppers: Steppers, masters: Masters) -> None:
        self._stages, self._steppers, self._masters = stages, steppers, masters

    def read_tensors(self) -> dict[str, Tensor]:
        """Return it as tensors; entries that differ between a rank's optimizers are named by the stages of each."""
        found: dict[str, Tensor] = {}
        for stage in self._stages.values():
            found |= pack_beside(stage, of_model)
        named = named_masters(self._stages, self._masters)
        each = {_mark(step): stepper.read_beside(named) for step, stepper in self._steppers.items()}
        joined = {name: tensor for one in each.values() for name, tensor in one.items()}
        if all(same(tensor, joined[name]) for one in each.values() for name, tensor in one.items()):
            return {**found, **joined}
        marked = {
            f"{OPTIMIZER_KEYS}{mark}{n.removeprefix(OPTIMIZER_KEYS)}": t
            for mark, one in each.items()
            for n, t in one.items()
        }
        return {**found, **marked}

    def require(self, names: Iterable[str]) -> None:
        """Raise `MisfitError` where names belong to other optimizers, or lack extra state of modules."""
        given = dict.fromkeys(names)
        for stage in self._stages.values():
            mine = {name for name in pack_beside(stage, of_model) if is_text(name)}
            blocks = tuple(f"{MODULE_KEYS}{number}." for number in stage.blocks)
            odd = sorted(mine ^ {name for name in given if name.startswith(blocks) and is_text(name)})
            if odd:
                raise MisfitError(f"the state is of another model: {odd[0]!r} is only on one side")
        for step, stepper in self._steppers.items():
            stepper.require_beside(_of_step(given, step))

    def load_modules(self, state: Mapping[str, Tensor]) -> None:
        """Load extra state of modules; this may write to weights, which are therefore loaded after it."""
        for stage in self._stages.values():
            load_beside(stage, of_model, state)

    def load_optimizers(self, state: Mapping[str, Tensor]) -> None:
        """Load the optimizers' other state, after the per-parameter state."""
        named = named_masters(self._stages, self._masters)
        for step, stepper in self._steppers.items():
            stepper.load_beside(_of_step(state, step), named)


def _mark(step: tuple[int, ...]) -> str:
    return f"{MARK}{'+'.join(map(str, step))}."


def _of_step(state: Mapping[str, Value], step: tuple[int, ...]) -> Mapping[str, Value]:
    """Return the entries of the optimizer of some stages."""
    marks = f"{OPTIMIZER_KEYS}{MARK}"
    if not any(name.startswith(marks) for name in state):
        return state
    mine = f"{OPTIMIZER_KEYS}{_mark(step)}"
    return {OPTIMIZER_KEYS + name.removeprefix(mine): state[name] for name in state if name.startswith(mine)}


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are bitwise equal."""
    if one is other:
        return True
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(_bits(one), _bits(other))


def require_alike(beside: Mapping[str, Tensor], world: Group) -> None:
    """Raise `MisfitError`, on all ranks, where state that has to fit any mesh differs between ranks (collective)."""
    known: dict[str, str] = {}
    for said in share_texts(world, json.dumps({name: _digest(tensor) for name, tensor in beside.items()})):
        for name, digest in json.loads(said).items():
            if known.setdefault(name, digest) != digest or name.startswith(f"{OPTIMIZER_KEYS}{MARK}"):
                raise MisfitError(
                    f"{name!r} is not the same on all ranks, so that no state for any mesh can have it; save what "
                    "engine.state_dict() gives of each rank (checkpoint.format: native)"
                )


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(
        f"{tensor.dtype} {tuple(tensor.shape)}".encode() + _bits(tensor).numpy().tobytes()
    ).hexdigest()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
