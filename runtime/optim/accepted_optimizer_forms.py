"""Optimizer arguments in all accepted forms, normalized to one: named parameters → optimizers.

    AdamW, partial(AdamW, lr=3e-4)             a class, or any callable that takes parameters
    lambda params: AdamW(params, lr=3e-4)      a function; if its parameter is called "named…": (name, parameter) pairs
    lambda named: [Muon(…), AdamW(…)]          a function that returns several
    {"*.mlp.*": Muon, "*": AdamW}              several: each gets the names that match its pattern first
    AdamW(model.parameters(), lr=3e-4)         an instance over the blocks' parameters: rebuilt over this rank's

A function is called with all parameters of the model, as in one process, as stand-ins without memory; other ranks'
parameters are dropped from its result.

An optimizer rebuilt over other parameters has the same class, groups and options.

    groups   [{params: [a, b], lr: 0.1}, {params: [c], lr: 0.2}]        c is not on this rank
         ──▶ [{params: [A, B], lr: 0.1}, {params: [],  lr: 0.2}]

Its other attributes are copied. An optimizer that created tensors when it was built (`holds_tensors`) is built
again, from its options.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, NoReturn

from torch import nn
from torch.optim import Optimizer

from quintsched.check_call_arguments import shown
from quintsched.errors import MisfitError, UsageError

from ..agreement.engine_settings_between_ranks import optimizer_section
from ..blocks.block_builders import Blocks
from ..user_objects.library_or_user import arguments_of
from .tensors_each_optimizer_needs import tensors_in

NamedParameters = Sequence[tuple[str, nn.Parameter]]
"""Parameters by their names in the whole model."""

OptimizerFn = Callable[[Any], Any]
"""Parameters → optimizer or several; if its first argument's name begins with "named", it gets (name, parameter)."""

OptimizerGiven = OptimizerFn | Optimizer | Mapping[str, OptimizerFn]

Builder = Callable[[NamedParameters], list[Optimizer]]


def builder_of(given: OptimizerGiven, blocks: Blocks, tied: Mapping[str, Sequence[str]]) -> Builder:
    """Return a function that builds the given optimizers; raises `UsageError` for an invalid argument.

    `blocks` are the model's before sharding: the parameters that an instance was built over, and that functions must
    group as they do those that are stepped. `tied` are the names of tied weights.
    """
    if isinstance(given, Optimizer):
        return _over_other(given, blocks)
    if isinstance(given, Mapping):
        return _as_over_own(_by_pattern(given), blocks, tied)
    if not callable(given) or isinstance(given, nn.Module):
        raise UsageError(
            f"the optimizer is {shown(given)}; it must be a function of parameters, such as "
            "optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4)"
        )
    return _as_over_own(_called(given), blocks, tied)


def _as_over_own(builder: Builder, blocks: Blocks, tied: Mapping[str, Sequence[str]]) -> Builder:
    """Return the builder, with a check that it groups others as it does the blocks' own parameters; none is kept.

    Blocks that functions build have no parameters yet that the builder could tell apart.
    """
    modules = nn.ModuleList([block for block in blocks if isinstance(block, nn.Module)])
    others = {other for names in tied.values() for other in names[1:]}
    own = [(name, p) for name, p in modules.named_parameters() if p.requires_grad and name not in others]
    if len(modules) < len(blocks) or any(parameter.is_meta for _, parameter in own):
        return builder
    wanted, names = _Groups.of(builder(own), own), {name for name, _ in own}

    def build(named: NamedParameters) -> list[Optimizer]:
        made = builder(named)
        if {name for name, _ in named} == names:
            found = _Groups.of(made, named)
            if found != wanted and found == _Groups.of(builder(named), named):  # else it draws its options
                wanted.require_same(found)
        return made

    return build


class _Groups(NamedTuple):
    """Groups that a function made: the place of each parameter by name (optimizer, group), and all options."""

    places: dict[str, tuple[int, int]]
    options: str

    @classmethod
    def of(cls, made: Sequence[Optimizer], named: NamedParameters) -> _Groups:
        """Return the groups of optimizers; a parameter that is none of the `named` has no name, and no place."""
        names = {id(parameter): name for name, parameter in named}
        places = {
            names.get(id(parameter), ""): (number, place)
            for number, optimizer in enumerate(made)
            for place, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        return cls(places, optimizer_section(made).text)

    def require_same(self, found: _Groups) -> None:
        """Raise `MisfitError` where other parameters of the same names are in other groups, or these have others."""
        if "" in self.places.keys() | found.places.keys():
            return
        name = next((n for n in [*self.places, *found.places] if self.places.get(n) != found.places.get(n)), None)
        what = "gives the groups other options" if name is None else f"puts {name} into another group"
        raise MisfitError(
            f"the optimizer's function {what} over the parameters that a rank steps than over the blocks' own, which "
            "differ from them in identity, class, values or dtype; group parameters by name, optimizer=lambda named: "
            "…, or by an attribute that is set on them"
        )


def _called(function: OptimizerFn) -> Builder:
    """Return a builder that calls a function with parameters, or pairs."""
    try:
        first = next(iter(arguments_of(function)), "")
    except ValueError:  # a builtin without a signature
        first = ""

    def build(named: NamedParameters) -> list[Optimizer]:
        found = function(list(named) if first.startswith("named") else [parameter for _, parameter in named])
        made = list(found) if isinstance(found, list | tuple) else [found]
        for optimizer in made:
            if not isinstance(optimizer, Optimizer):
                raise UsageError(
                    f"the optimizer function returned a {type(optimizer).__name__}; it must return a "
                    "torch.optim.Optimizer, or a list of them"
                )
        return made

    return build


def _by_pattern(given: Mapping[str, OptimizerFn]) -> Builder:
    """Return a builder that passes each function the parameters that match its pattern first."""
    called: dict[str, Builder] = {}
    for pattern, function in given.items():
        if not isinstance(pattern, str) or not callable(function) or isinstance(function, Optimizer):
            raise UsageError(
                f"optimizer[{pattern!r}] is {function!r}; it must be a function of parameters, by a pattern on "
                'their names: optimizer={"*.mlp.*": Muon, "*": AdamW}'
            )
        called[pattern] = _called(function)

    def build(named: NamedParameters) -> list[Optimizer]:
        shares: dict[str, list[tuple[str, nn.Parameter]]] = {pattern: [] for pattern in called}
        for name, parameter in named:
            pattern = next((pattern for pattern in shares if fnmatchcase(name, pattern)), None)
            if pattern is None:
                raise UsageError(
                    f'no pattern of the optimizers matches {name!r}; add a last one for all others: {{…, "*": AdamW}}'
                )
            shares[pattern].append((name, parameter))
        for pattern, share in shares.items():
            if not share:
                raise UsageError(f"the optimizer's pattern {pattern!r} is the first to match no weight; leave it out")
        return [optimizer for pattern, share in shares.items() for optimizer in called[pattern](share)]

    return build


def _taken(kind: type[Optimizer]) -> type[Optimizer]:
    """Return the class for an instance that was rebuilt: any use of it raises, with advice."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise UsageError(
            f"this {kind.__name__} is not what trains: the engine has made its own from it, over what each rank steps; "
            "take those of engine.optimizers.values(), and schedulers from engine.lr_schedulers(lambda optimizer: …)"
        )

    doors = [name for name in dir(Optimizer) if name[0] != "_" and callable(getattr(Optimizer, name))]
    told: dict[str, Any] = dict.fromkeys(doors, refuse)
    told |= {"param_groups": property(refuse, refuse), "state": property(refuse, refuse), "_quintsched_kind": kind}
    told |= {"__repr__": object.__repr__, "zero_grad": lambda *_, **__: None}  # a no-op, as the engine clears gradients
    return type(kind.__name__, (kind,), told)


def _over_other(taken: Optimizer, blocks: Blocks) -> Builder:
    """Return a builder that rebuilds an instance over other parameters of the same names, and disables the instance."""
    given: Optimizer = object.__new__(getattr(taken, "_quintsched_kind", type(taken)))
    given.__dict__.update(taken.__dict__)
    kind = type(given).__name__
    write = f"optimizer=lambda params: {kind}(params, …)"
    if not all(isinstance(block, nn.Module) for block in blocks):
        raise UsageError(
            f"the optimizer is an instance of {kind}, but blocks that functions build have no parameters yet; "
            f"write {write}"
        )
    if hasattr(given.step, "_wrapped_by_lr_sched"):
        raise UsageError(
            f"a learning-rate scheduler is attached to the {kind} that was given, and the engine steps others; "
            f"write {write} and engine.lr_schedulers(lambda optimizer: …)"
        )
    names: dict[nn.Parameter, list[str]] = {}
    for number, block in enumerate(blocks):
        for name, parameter in block.named_parameters() if isinstance(block, nn.Module) else ():
            names.setdefault(parameter, []).append(f"{number}.{name}")
    for parameter in parameters_of(given):
        if parameter not in names:
            raise UsageError(
                f"the {kind} that was given has a parameter {tuple(parameter.shape)} that no block has; build "
                f"it over the blocks' parameters, or write {write}"
            )
        kept = given.state.get(parameter, {}).items()
        if any(key != "step" and hasattr(value, "any") and value.any() for key, value in kept):
            raise UsageError(
                f"the {kind} that was given has made steps already, whose state the engine would not have; "
                "give a fresh one, and load_full_state_dict"
            )

    def build(named: NamedParameters) -> list[Optimizer]:
        ours = dict(named)
        taken.__class__ = _taken(type(given))
        return [remade(given, {id(p): [ours[n] for n in names[p] if n in ours][:1] for p in parameters_of(given)})]

    return build


Instead = Mapping[int, Sequence[nn.Parameter]]
"""Replacements of each parameter, by its id: none, one, or several that are copies of each other."""


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters that an optimizer steps, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def remade(optimizer: Optimizer, instead: Instead) -> Optimizer:
    """Return an optimizer like this one, without any step made, over other parameters; raises `UsageError`."""
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
    """Return the optimizer itself, with parameters replaced in its groups; a rebuilt one where it holds others."""
    if holds_tensors(optimizer) or nested_in(optimizer) or _holds(optimizer, instead):
        return remade(optimizer, instead)
    for group in optimizer.param_groups:
        group.update(_group(group, instead, {}))
    return optimizer


def _holds(optimizer: Optimizer, parameters: Instead) -> bool:
    beside = {name: value for name, value in vars(optimizer).items() if name != "param_groups"}
    return any(id(tensor) in parameters for tensor in tensors_in(beside))


def holds_tensors(optimizer: Optimizer) -> bool:
    """Whether an optimizer has tensors of several numbers, other than parameters, created when it was built."""
    known = set(map(id, parameters_of(optimizer)))
    return any(tensor.numel() > 1 and id(tensor) not in known for tensor in tensors_in(vars(optimizer)))


def nested_in(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that an optimizer wraps, and steps in its own step."""
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
    carried = {
        name: value for name, value in vars(optimizer).items() if name.endswith("_hooks") or name[:6] == "needs_"
    }
    made.__dict__.update(copy.deepcopy(carried, {id(optimizer): made}))
    return made
