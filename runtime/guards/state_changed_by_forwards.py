"""State that forwards change: it counts microbatches, and each replica has its own; logged once where that matters.

    self.calls += 1     self.average.lerp_(x.mean(0), 0.1)     u, v of a spectral norm     Layer.calls += 1

One process has it after all forwards of a step, in the order of the microbatches: `require_order` refuses plans of
another order. Each of several replicas has it after its own. Caches that are filled once do not count as such state,
nor do the statistics of norms and the loads of experts, which replicas combine.

Code of blocks may begin to change state later, by a flag that the loop sets, or where the meta device cannot run:

    self.amax = max(self.amax, float(x.abs().max()))     self.stats.calls += 1     seen[0] += 1, around the function

All that a `Snapshot` of the blocks finds is compared before and after each step and evaluation: attributes of
objects, modules and classes, closure variables, globals, entries of containers, generators; tensors by identity and
version counter. In steps 0, 1, 2, 4, 8, … also: the state after the first forward, as a second may undo it; digests
of small tensors, which may be written past their version; frozen weights, as of a teacher that starts as a copy;
large arrays; all holders, if there are very many; and blocks without any code of users. A dict may grow: it is a cache.

Models in eval mode, as `from_pretrained` returns them: one warning about layers that act otherwise in training.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils.hooks import RemovableHandle

from quintsched.errors import MisfitError
from quintsched.ir.instruction_set import Fwd
from quintsched.plan import Plan

from ..blocks.block_builders import MutatedState, Parcel
from ..parallel.mesh_independent_dropout import KeyedDropout
from ..user_objects.changed_value_marks import Holder, Marks, Thing, mark_of, tensors_of
from ..user_objects.changes_since_split import sources_of
from ..user_objects.library_or_user import is_ours, methods_of, names_of
from ..user_objects.object_contents import OF_TORCH, Entries, HolderPlaces, Trained, is_of_torch
from ..user_objects.snapshot import Snapshot
from .custom_backwards import Code, HooksAndModules

_logger = logging.getLogger("quintsched.runtime")

_MOST_NAMED = 3

_MOST_EACH, _MOST_WALKS = 2000, 16
"""Limits: holders that are compared in every step, and new walks of the blocks outside due steps."""

_STATISTICS = frozenset({"running_mean", "running_var"})
_NO_STATE = (FunctionType, ModuleType)
_NO_KEYS = OF_TORCH | KeyedDropout.__annotations__.keys() | {"_flat_weights", "_flat_weight_refs"}
"""Attributes that torch and this package set; the last two are of its recurrent layers, and hold weights."""

_Numbers = tuple[float, float]
"""Sum and sum of squares of a weight, to detect changes."""


def state_named(blocks: Sequence[nn.Module], parcels: Sequence[Parcel]) -> list[str]:
    """Return the names of the state that blocks were found to change."""
    return [*dict.fromkeys(name for name, _, _ in _own_state(blocks, parcels))]


def state_of_microbatches(blocks: Sequence[nn.Module], parcels: Sequence[Parcel]) -> list[str]:
    """Return the names of that state, without what norms keep; `norms_line` speaks of these."""
    return [*dict.fromkeys(name for name, is_norm, _ in _own_state(blocks, parcels) if not is_norm)]


def state_of_replicas(blocks: Sequence[nn.Module], parcels: Sequence[Parcel], *, buffers: bool) -> list[str]:
    """Return the names of those that replicas do not combine; `buffers`: buffers too."""
    found = _own_state(blocks, parcels)
    return [
        *dict.fromkeys(
            name for name, is_norm, state in found if not (state.is_new or is_norm) and (state.is_attribute or buffers)
        )
    ]


def counters_made(blocks: Sequence[nn.Module], parcels: Sequence[Parcel]) -> list[str]:
    """Return the names of counters that forwards have created: each replica has one, and all count alike."""
    return [name for name, _, state in _own_state(blocks, parcels) if state.is_new and state.counts]


def _own_state(blocks: Sequence[nn.Module], parcels: Sequence[Parcel]) -> Iterator[tuple[str, bool, MutatedState]]:
    """Yield state of users' modules in blocks, classes and globals that forwards change: its name, whether it is of a
    norm whose statistics replicas combine, and the state.
    """
    for number, (block, parcel) in enumerate(zip(blocks, parcels, strict=True)):
        for state in parcel.state:
            if state.is_named:
                yield state.name, False, state
            if state.owner.startswith((".", " (")):
                module = block.get_submodule(state.owner.partition(" (")[0].removeprefix("."))
                is_users = not is_ours(type(module)) or sources_of([module])  # parts of split models hold the model's
                if is_users and state.key not in _made_by_hooks(module):
                    is_norm = isinstance(module, _NormBase) and not _reads_statistics(block)
                    yield _said(number, block, state.said), is_norm, state


def _reads_statistics(block: nn.Module) -> bool:
    """Return whether user code in a block names the running statistics of norms, and so may read them in training."""
    functions = (function for module in block.modules() for function in methods_of(type(module)))
    return any(not _STATISTICS.isdisjoint(names_of(function.__code__)) for function in functions)


def _said(number: int | str, block: nn.Module, name: str) -> str:
    """Return the name of a place in messages, by its name in a snapshot of a block."""
    if not name.startswith((".", " (")):
        return name
    path, _, rest = name.partition(" (")
    return f"block {number} ({type(block).__name__}){path}{rest.partition(')')[2]}"


def replicas_line(found: Sequence[str], replicas: int) -> str | None:
    """Return a warning about state of replicas, by names; None where there is none, or one replica."""
    if not found or replicas == 1:
        return None
    return (
        f"{_listed(found)}: changed by forwards, of which each of {replicas} replicas runs its own: it is not what one "
        "process has after all of them, nor what depends on it"
    )


def norms_line(blocks: Sequence[nn.Module], microbatches: int, replicas: int, *, synced: bool) -> str | None:
    """Return a warning about batch norms, whose losses depend on how a batch is cut; None where it is not cut."""
    numbers = [n for n, block in enumerate(blocks) if any(isinstance(module, _BatchNorm) for module in block.modules())]
    parts = microbatches * (1 if synced else replicas)
    if not numbers or parts == 1:
        return None
    names = _listed([f"block {number} ({type(blocks[number]).__name__})" for number in numbers])
    of_all = "" if synced or replicas == 1 else "; parallel.buffers: sync takes a microbatch of all replicas as one"
    return (
        f"{names}: batch norm takes its statistics from one microbatch of {parts} in a step: losses are those of one "
        f"process whose microbatches have that size, and change with the mesh{of_all}"
    )


def out_of_order(plan: Plan) -> dict[int, tuple[int, ...]]:
    """Return the stages whose forwards take the microbatches in another order than their numbers', with this order."""
    orders, columns = dict[int, list[int]](), plan.columns.apart.columns
    forwards = columns.rows_where(Fwd)
    for stage, unit in zip(columns.stage[forwards].tolist(), columns.unit[forwards].tolist(), strict=True):
        orders.setdefault(stage, []).append(unit // plan.schedule.slices)
    return {stage: tuple(order) for stage, order in orders.items() if order != sorted(order)}


def require_order(plan: Plan | None, found: Sequence[str]) -> None:
    """Raise `MisfitError` for state of microbatches, by names, in a training plan that runs them in another order."""
    for stage, order in out_of_order(plan).items() if plan and found and plan.mode == "train" else ():
        raise MisfitError(
            f"{_listed(found)}: changed by forwards, one after the other, and the plan runs those of stage {stage} for "
            f"microbatches {', '.join(map(str, order))}: one process would have changed it in the order of their "
            "numbers; take a plan with this order, or blocks that keep no such state"
        )


def changed_line(found: Sequence[str], microbatches: int) -> str | None:
    """Return a warning about state of microbatches, by names; None if there is none, or only one microbatch."""
    if not found or microbatches < 2:
        return None
    return (
        f"{_listed(found)}: changed by forwards, of which a step has {microbatches}: it "
        "counts microbatches, not steps, and sees one at a time: let the training loop change what goes by steps"
    )


def _listed(found: Sequence[str]) -> str:
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return f"{', '.join(found[:_MOST_NAMED])}{more}"


class LateState:
    """State that code of some blocks begins to change in later steps, by its name in messages.

    Args:
        blocks: by number.
        are_whole: whether frozen weights are resident between steps, as they are without ZeRO-3.
        may_hook: whether blocks may have a temporary forward hook.

    Attributes:
        known, known_apart: names already logged as state of microbatches, and of replicas.
        is_empty: whether only frozen weights may change: blocks are torch's own throughout.
        is_plain: whether all code is of known libraries: then only due steps are compared.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], *, are_whole: bool, may_hook: bool = False) -> None:
        self.known, self.known_apart = list[str](), list[str]()
        self._are_whole, self._frozen_in = are_whole, blocks if are_whole else {}
        self._blocks = {number: block for number, block in blocks.items() if not is_of_torch(block)}
        self.is_empty = not self._blocks
        self.is_plain = self.is_empty or all(Code(block).is_plain for block in self._blocks.values())
        self._frozen, self._is_first = dict[str, _Numbers](), True
        self._holders: list[Holder] = []
        self._before: list[Marks] = []
        self._met = set[int]()
        self._walks, self._is_due = 0, False
        self._shape: HooksAndModules | None = None
        self._weights: list[tuple[str, nn.Parameter]] = []
        self._versions: list[int] = []
        self._written: list[str] | None = []
        self._last = [*self._blocks.values()][-1:] if may_hook else []
        self._handles: list[RemovableHandle] = []
        self._between: list[Marks] = []

    def begin_step(self, *, is_due: bool) -> None:
        """Record all state before a step, or an evaluation; if it is due, the costly part too."""
        self._is_due = is_due
        self._frozen = dict(self._frozen_now()) if is_due else {}
        if self.is_empty:
            return
        self._before, met = self._now()
        is_as_before = self._shape is not None and self._shape.is_same() and met <= self._met
        if (is_due or self._walks < _MOST_WALKS) and not is_as_before:  # the loop has added state
            self._walks, self._shape = self._walks + 1, HooksAndModules(self._blocks.values())
            self._holders = [*_holders_in(self._blocks)]
            self._weights = [
                (_said(number, block, f" ().{name}"), weight)
                for number, block in (self._blocks if self._are_whole else {}).items()
                for name, weight in block.named_parameters()
            ]
            self._before, self._met = self._now()
        self._versions, self._written = [weight._version for _, weight in self._weights], None
        self._look_between()
        if is_due:
            self._handles = [block.register_forward_hook(self._look_between) for block in self._last]

    def _look_between(self, *_: object) -> None:
        """Record the state after the first forward: later ones may undo its changes."""
        self._between = self._now()[0] if self._handles else []
        while self._handles:
            self._handles.pop().remove()

    def look(self) -> None:
        """Find the weights written to since the beginning, before an optimizer writes to them; once per step."""
        if self._written is not None:
            return
        now = [weight._version for _, weight in self._weights]
        self._written = [
            name for (name, _), was, its in zip(self._weights, self._versions, now, strict=True) if was != its
        ]

    def tell(
        self,
        microbatches: int,
        replicas: int,
        share: Callable[[bytes], Sequence[bytes]] | None = None,
        plan: Plan | None = None,
        *,
        speaks: bool = True,
    ) -> None:
        """Log state that a step or an evaluation has changed and that was not logged before; `plan` is for training.

        `share` exchanges with the replicas the values that each has created: unequal ones are state of replicas, equal
        ones a cache. Without `speaks`, only that is done. Raises what `require_order` raises.
        """
        frozen = dict(self._frozen_now()) if self._frozen else {}
        moved = [name for name, numbers in frozen.items() if self._frozen.get(name, numbers) != numbers]
        self.look()
        moved += [] if self._is_first else self._written or []
        if self._is_first:  # `weights_unchanged` reports these
            self.known, self.known_apart = self.known + moved, self.known_apart + moved
        made = dict[str, str]()
        for now in filter(None, (self._between, self._now()[0])):
            for holder, was, found in zip(self._holders, self._before, now, strict=True):
                names, new = holder.moved(was, found) if was != found else ([], {})
                made |= new if self._is_first else {}
                moved += [*names, *(new if (holder.is_module if self._is_first else not holder.is_container) else ())]
        self._is_first, self._before = False, []
        apart = [name for name in moved if name not in made] + (_unlike(made, share) if share is not None else [])
        of_steps = [*dict.fromkeys(name for name in moved if name not in self.known)]
        of_replicas = [*dict.fromkeys(name for name in apart if name not in self.known_apart)]
        self.known, self.known_apart = self.known + of_steps, self.known_apart + of_replicas
        lines = changed_line(of_steps, microbatches), replicas_line(of_replicas, replicas)
        for line in filter(None, lines if speaks else ()):
            _logger.warning("%s", line)
        require_order(plan, of_steps)

    def _now(self) -> tuple[list[Marks], set[int]]:
        """Return the marks of each holder, and the ids of other objects that may hold state."""
        if not self._is_due and len(self._holders) > _MOST_EACH:
            return [{} for _ in self._holders], self._met
        found = [holder.marks(is_due=self._is_due) for holder in self._holders]
        return found, {id(mark.thing) for marks in found for mark in marks.values() if type(mark) is Thing}

    def _frozen_now(self) -> Iterator[tuple[str, _Numbers]]:
        for number, block in self._frozen_in.items():
            for name, weight in block.named_parameters():
                if not weight.requires_grad and type(weight) is nn.Parameter and not weight.is_complex():
                    numbers = weight.detach().double().nan_to_num()
                    yield (
                        f"block {number} ({type(block).__name__}).{name}",
                        (float(numbers.sum()), float(numbers.square().sum())),
                    )


def _unlike(made: Mapping[str, str], share: Callable[[bytes], Sequence[bytes]]) -> list[str]:
    """Return the names of created values that differ between replicas."""
    told = [json.loads(text) for text in share(json.dumps(made).encode())]
    return [name for name, words in made.items() if any(its.get(name) != words for its in told)]


def _holders_in(blocks: Mapping[str, nn.Module]) -> Iterator[Holder]:
    """Yield the holders that user code in blocks may change, each once; no weights, norms or own objects."""
    seen, of_modules = set[int](), dict[int, tuple[dict[str, Any], set[str]]]()
    for number, block in blocks.items():
        snapshot = Snapshot({"": block}, numbers=False)
        modules = [thing for thing in snapshot.values() if isinstance(thing, nn.Module)]
        norms, made = _reads_statistics(block), {id(vars(module)): _made_by_hooks(module) for module in modules}
        seen |= {id(held) for module in modules for held in _not_looked_at(module, norms=norms)}
        weights = {id(weight) for weight in block.parameters()}
        found, held = list[Holder](), set[int]()
        for name, space in snapshot.spaces():
            token = id(space.holder)
            if isinstance(space, Entries) and space.names is not None:
                of_modules.setdefault(token, (space.holder, set()))[1].update(space.names)
                held.update(tensor for value in space.read_values().values() for tensor in tensors_of(mark_of(value)))
            elif token not in seen and not isinstance(space, Trained) and not _lists_weights(space, weights):
                seen.add(token)
                skipped = _NO_KEYS | made.get(token, set())
                found.append(Holder(space, partial(_said, number, block), name, token in made, skipped))
        yield from found
        held.update(tensor for one in found for mark in one.marks(is_due=False).values() for tensor in tensors_of(mark))
        seen |= held | weights
        seen |= {id(vars(module).get(name)) for module in modules for name in made[id(vars(module))]}
        loose = {name: tensor for name, tensor in snapshot.tensors() if id(tensor) not in seen}
        yield Holder(Entries(loose, "{}"), partial(_said, number, block), "", is_module=False)
    for holder, names in of_modules.values():
        own = frozenset(name for name in names if not isinstance(holder.get(name), (*_NO_STATE, type)))
        yield Holder(Entries(holder, "{}", own), str, "", is_module=False)


def _lists_weights(space: HolderPlaces, weights: set[int]) -> bool:
    """Return whether the places are entries of a container that holds weights alone, which optimizers change."""
    held = [id(value) for value in space.read_values().values()] if space.form == "[{}]" else []
    return bool(held) and weights.issuperset(held)


def _made_by_hooks(module: nn.Module) -> set[str]:
    """Return the weights that hooks of `torch.nn.utils` compute before each forward: of norms, or pruned ones."""
    hooks = [hook for hook in module._forward_pre_hooks.values() if type(hook).__module__.startswith("torch.nn.utils.")]
    return {str(getattr(hook, "name", getattr(hook, "_tensor_name", ""))) for hook in hooks}


def _not_looked_at(module: nn.Module, *, norms: bool) -> Iterator[Any]:
    own = vars(module)
    yield from (own[key] for key in _NO_KEYS & own.keys() if key != "_buffers")
    is_made_here = is_ours(type(module)) and not isinstance(module, KeyedDropout)  # which replaces a user's layer
    if is_made_here:
        yield own
    if is_made_here or (isinstance(module, _NormBase) and not norms):
        yield own["_buffers"]
        yield from own["_buffers"].values()


def eval_mode_warning(blocks: Iterable[nn.Module]) -> str | None:
    """Return a warning if all blocks are in eval mode, and so train without dropout or batch statistics; else None."""
    modules = [module for block in blocks for module in block.modules()]
    if not modules or any(module.training for module in modules):
        return None
    found = [f"{type(m).__name__}, {name}={rate:g}" for m in modules for name, rate in _drop_rates(m)][:1]
    norms = (m for m in modules if isinstance(m, _NormBase) and m.running_mean is not None)
    found += [f"running statistics of {type(m).__name__}" for m in norms][:1]
    if not found:
        return None
    return (
        "the model is in eval mode, as from_pretrained gives it, and trains so: without dropout, its batch norms with "
        f"the statistics that they have ({'; '.join(found)}); call model.train() before it is split to train with them"
    )


def _drop_rates(module: nn.Module) -> Iterable[tuple[str, float]]:
    """Yield the dropout rates of a module: a dropout's `p`, and attributes named so (`attention_dropout`)."""
    for name, value in vars(module).items():
        is_rate = "drop" in name or (name == "p" and "drop" in type(module).__name__.lower())
        if is_rate and isinstance(value, float) and 0 < value <= 1:
            yield name, value
