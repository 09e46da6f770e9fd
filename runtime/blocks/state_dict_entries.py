"""Contents of a module's state dict: parameters, buffers, and extra entries beside them.

    "l.weight"          a parameter, or a persistent buffer                 one tensor of the model
    "_extra_state"      result of get_extra_state                          plain data, restored by set_extra_state
    "calls"             added by an overridden _save_to_state_dict or hook  plain data, restored by load_state_dict

Extra entries belong to the rank that has the block, and are not sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from quintsched.errors import MisfitError

from .plain_values_as_tensors import TEXT, NotPlainError, pack, unpack

MODULE_KEYS = "engine.module."
"""Prefix of the checkpoint names of extra state-dict entries."""

_EXTRA = "_extra_state"


def saved_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers in a module's state dict, by their names there: the tensors, not copies."""
    try:
        state = module.state_dict(keep_vars=True)
    except Exception:  # extra entries may need data, which a meta-device outline lacks
        return _own(module)
    known = {id(tensor) for tensor in _own(module).values()}
    return {name: tensor for name, tensor in state.items() if id(tensor) in known}


def _own(module: nn.Module) -> dict[str, Tensor]:
    buffers = dict(module.named_buffers(remove_duplicate=False))
    passing = {
        f"{path}.{name}".lstrip(".")
        for path, one in module.named_modules(remove_duplicate=False)
        for name in one._non_persistent_buffers_set
    }
    saved = {name: buffer for name, buffer in buffers.items() if name not in passing}
    return {**dict(module.named_parameters(remove_duplicate=False)), **saved}


def saved_beside(module: nn.Module) -> dict[str, Any]:
    """Return the extra entries of a module's state dict: those that are no parameters or buffers."""
    if not any(map(_gives_more, module.modules())):
        return {}
    state = module.state_dict(keep_vars=True)
    own = {id(tensor) for tensor in _own(module).values()}
    return {name: value for name, value in state.items() if id(value) not in own}


def _gives_more(module: nn.Module) -> bool:
    kind = type(module)
    return (
        kind.get_extra_state is not nn.Module.get_extra_state
        or kind._save_to_state_dict is not nn.Module._save_to_state_dict
        or kind.state_dict is not nn.Module.state_dict
        or bool(module._state_dict_hooks)
    )


def pack_beside(module: nn.Module, of_name: Callable[[str], str]) -> dict[str, Tensor]:
    """Return a module's extra state-dict entries packed as tensors; `of_name` maps its names to the model's."""
    found: dict[str, Tensor] = {}
    for name, value in saved_beside(module).items():
        called = of_name(name)
        try:
            plain = value.detach() if isinstance(value, Tensor) else value
            found |= pack(f"{MODULE_KEYS}{called}", plain)
        except NotPlainError as error:
            raise MisfitError(
                f"{called!r} of the state_dict cannot be saved exactly: {error}; modules give numbers, strings, "
                "tensors, and lists and dicts of these"
            ) from None
    return found


@torch.no_grad()
def load_beside(module: nn.Module, of_name: Callable[[str], str], state: Mapping[str, Tensor]) -> None:
    """Restore the extra entries that `pack_beside` packed; raises `MisfitError` if the state lacks one."""
    for name, mine in saved_beside(module).items():
        called = f"{MODULE_KEYS}{of_name(name)}"
        if f"{called}{TEXT}" not in state:
            raise MisfitError(f"the state is of another model: it has no {name!r} of {of_name(name)}")
        device = mine.device if isinstance(mine, Tensor) else None
        value = unpack(called, state, device)
        owner, path = _owner(module, name) or (module, "")
        if name.endswith(_EXTRA):
            owner.set_extra_state(value)
        else:
            tensors = saved_tensors(owner)
            owner.load_state_dict({**tensors, name.removeprefix(path): value}, strict=False)


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str] | None:
    """Return the submodule that loads the entry of a name, and its name prefix; None if none does."""
    found = [
        (one, f"{path}." if path else "")
        for path, one in module.named_modules()
        if name.startswith(f"{path}." if path else "") and (name.endswith(_EXTRA) or _takes_more(one))
    ]
    return max(found, key=lambda pair: len(pair[1]), default=None)


def _takes_more(module: nn.Module) -> bool:
    kind = type(module)
    return (
        kind._load_from_state_dict is not nn.Module._load_from_state_dict
        or kind.load_state_dict is not nn.Module.load_state_dict
        or bool(module._load_state_dict_pre_hooks)
    )


def spread_buffers(module: nn.Module) -> None:
    """Replace a module's expanded persistent buffers (stride 0) by contiguous copies, so that they can be written."""
    made: dict[int, Tensor] = {}
    for one in module.modules():
        for name, buffer in list(one._buffers.items()):
            if buffer is not None and name not in one._non_persistent_buffers_set and _is_expanded(buffer):
                spread = made.setdefault(id(buffer), buffer.clone(memory_format=torch.contiguous_format))
                one._buffers[name] = spread


def _is_expanded(tensor: Tensor) -> bool:
    return any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def require_saved(blocks: Sequence[nn.Module]) -> None:
    """Raise `MisfitError` for blocks whose state dict cannot be saved and restored completely."""
    for number, block in enumerate(blocks):
        where = f"block {number} ({type(block).__name__})"
        require_sized(block, where)
        if (refusal := _refusal_of(number, block, where)) is not None:
            raise MisfitError(refusal)


def require_sized(module: nn.Module, where: str) -> None:
    """Raise `MisfitError` for uninitialised lazy parameters or buffers; `where` names the module in the message."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise MisfitError(
                f"{where}: {name!r} has no shape before the first forward (a lazy module), so that nothing can be cut, "
                "sent or saved; give its sizes (nn.Linear in place of nn.LazyLinear), or run it once before"
            )


def _refusal_of(number: int, block: nn.Module, where: str) -> str | None:
    if not any(map(_gives_more, block.modules())):
        return None
    try:
        state = block.state_dict(keep_vars=True)
    except Exception as error:
        is_outline = any(parameter.is_meta for parameter in block.parameters())
        return None if is_outline else f"{where}: its state_dict raises {type(error).__name__}: {error}"
    lacking = [name for name, tensor in _own(block).items() if not any(tensor is value for value in state.values())]
    if lacking:
        return (
            f"{where}: its state_dict does not have the parameter or buffer {lacking[0]!r} itself, so that checkpoints "
            "would lack it; let _save_to_state_dict and hooks add to what there is, and leave that as it is"
        )
    pack_beside(block, lambda name: f"{number}.{name}")
    for name in saved_beside(block):
        owner = _owner(block, name)
        if owner is None:
            return (
                f"{where}: its state_dict has {name!r}, which is no parameter or buffer, and no module takes it back; "
                "write _load_from_state_dict too, or use get_extra_state and set_extra_state"
            )
        if name.endswith(_EXTRA) and type(owner[0]).set_extra_state is nn.Module.set_extra_state:
            kind = type(owner[0]).__name__
            return f"block {number}: {kind} has get_extra_state without set_extra_state; write that too"
    return None
