"""An optimizer made again over other parameters: the same class, the same groups and options.

    groups   [{params: [a, b], lr: 0.1}, {params: [c], lr: 0.2}]        c is not ours
         ──▶ [{params: [A, B], lr: 0.1}, {params: [],  lr: 0.2}]

What an optimizer has beside its groups is copied. One that made tensors when it was built (`holds_tensors`) is built
again, from its options.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from quintsched.errors import UsageError

from ..examine.optimizers import tensors_in
from ..objects.user_code import arguments_of

Instead = Mapping[int, Sequence[nn.Parameter]]
"""What takes the place of each parameter, by its id: none, one, or several that are copies of each other."""


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return what an optimizer steps, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def remade(optimizer: Optimizer, instead: Instead) -> Optimizer:
    """Return an optimizer like this one, which has made no step, over other parameters; raises `UsageError`."""
    if holds_tensors(optimizer):
        return _built_again(optimizer, instead)
    kind = type(optimizer)
    made: Optimizer = kind.__new__(kind)
    memo: dict[int, Any] = {id(optimizer): made}
    memo |= {key: others[0] for key, others in instead.items() if others}
    for nested in nested_in(optimizer):
        inner = memo[id(nested)] = remade(nested, instead)
        memo |= {id(mine): other for mine, other in zip(nested.param_groups, inner.param_groups, strict=True)}
    groups = [memo.get(id(group)) or _group(group, instead, memo) for group in optimizer.param_groups]
    memo[id(optimizer.param_groups)] = groups
    kept = {name: value for name, value in vars(optimizer).items() if name not in ("param_groups", "state")}
    made.__dict__.update({name: copy.deepcopy(value, memo) for name, value in kept.items()})
    made.param_groups = groups
    made.state = defaultdict(dict)
    return made


def rebound(optimizer: Optimizer, instead: Instead) -> Optimizer:
    """Return the optimizer itself, its groups with other parameters; one like it where it holds them elsewhere, too."""
    if holds_tensors(optimizer) or nested_in(optimizer) or _holds(optimizer, instead):
        return remade(optimizer, instead)
    for group in optimizer.param_groups:
        group.update(_group(group, instead, {}))
    return optimizer


def _holds(optimizer: Optimizer, parameters: Instead) -> bool:
    beside = {name: value for name, value in vars(optimizer).items() if name != "param_groups"}
    return any(id(tensor) in parameters for tensor in tensors_in(beside))


def holds_tensors(optimizer: Optimizer) -> bool:
    """Whether an optimizer has tensors of several numbers beside its parameters, which it made as it was built."""
    known = set(map(id, parameters_of(optimizer)))
    return any(tensor.numel() > 1 and id(tensor) not in known for tensor in tensors_in(vars(optimizer)))


def nested_in(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that one steps for its own step."""
    return [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]


def _group(group: Mapping[str, Any], instead: Instead, memo: dict[int, Any]) -> dict[str, Any]:
    found = [instead.get(id(parameter), ()) for parameter in group["params"]]
    made = {key: copy.deepcopy(value, memo) for key, value in group.items() if key not in ("params", "param_names")}
    made["params"] = [parameter for others in found for parameter in others]
    if "param_names" in group:
        made["param_names"] = [
            name for name, others in zip(group["param_names"], found, strict=True) for _ in range(len(others))
        ]
    return made


def _built_again(optimizer: Optimizer, instead: Instead) -> Optimizer:
    kind = type(optimizer)
    groups = [_group(group, instead, {}) for group in optimizer.param_groups]
    for group in groups:
        names = group.pop("param_names", None)
        if names is not None:
            group["params"] = list(zip(names, group["params"], strict=True))
    try:
        taken = arguments_of(kind)
        made: Optimizer = kind(groups, **{key: value for key, value in optimizer.defaults.items() if key in taken})
    except Exception as error:
        raise UsageError(
            f"a {kind.__name__} cannot be built again from its groups and options ({error}); give the engine what "
            f"builds it: optimizer=lambda params: {kind.__name__}(params, …)"
        ) from error
    hooks = {name: value for name, value in vars(optimizer).items() if name.endswith("_hooks")}
    made.__dict__.update(copy.deepcopy(hooks, {id(optimizer): made}))
    return made
