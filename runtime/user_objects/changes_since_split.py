"""Changes, since a model was split, of host state that its code reads.

    split ──▶ Followed(model, ["", "layers"])     the attributes, closures and globals that these modules' code names
    step  ──▶ followed.changed()                  "model (Mixer).tau": its value has changed; None: nothing has

A model that was garbage-collected counts as unchanged.
"""

from __future__ import annotations

import copy
import dis
import weakref
from collections.abc import Iterable, Iterator, Sequence, Set
from operator import is_
from types import CodeType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quintsched.errors import MisfitError

from .host_state import HostState
from .host_value_equality import numbers_of
from .library_or_user import codes_in, is_of_library, is_ours, methods_of
from .object_contents import HOOKS, OF_TORCH, hooks_on
from .outer_state_reads import require_known


class SharedOrigin(Protocol):
    """Origin that the blocks of a split model share, as their `_origin`."""

    evaluates: bool | None
    """Whether blocks are in evaluation mode, as an engine sets it before running them; None: by their own flags."""

    def follow_model(self) -> None:
        """Update the blocks to the present state of the model; raise `MisfitError` where that is impossible."""

    def tensors_read(self) -> list[Tensor]:
        """Return the tensors in containers and objects that code between layers reads."""
        return []


def sources_of(blocks: Iterable[nn.Module]) -> list[SharedOrigin]:
    """Return the distinct origins of blocks."""
    found: list[Any] = [getattr(block, "_origin", None) for block in blocks]
    return list({id(source): source for source in found if hasattr(source, "follow_model")}.values())


class Followed:
    """Host state that some modules of a model read, recorded by `record_state`.

    Args:
        model: the model; it is not kept alive.
        names: of the modules whose code is followed.
        rows: names of other modules, which contain those that this code calls.
    """

    def __init__(self, model: nn.Module, names: Iterable[str], rows: Iterable[str] = ()) -> None:
        self._model = weakref.ref(model, self._let_go)
        self._names = tuple(names)
        self._state: HostState | None = None
        self._tensors: list[tuple[Tensor, int, str | None]] = []
        self._lengths: dict[str, int] = {}
        self._keys: dict[str, tuple[dict[str, Any], Set[str]]] = {}
        self._structure = Structure(model, (*self._names, *rows))
        self._trained: list[tuple[str, Any, bool]] = []
        near = {name: model.get_submodule(name) for name in self._names}
        near |= {f"{n}.{key}".lstrip("."): child for n, m in [*near.items()] for key, child in m.named_children()}
        self._spaces = {name: vars(module) for name, module in near.items()}
        self.record_state()

    def model(self) -> nn.Module | None:
        """Return the model; None where it is gone."""
        return self._model()

    def tensors(self) -> list[Tensor]:
        """Return the tensors that its code reads in containers and objects."""
        return [tensor for tensor, *_ in self._tensors]

    def record_state(self) -> None:
        """Record the present state."""
        model = self._model()
        if model is None:
            return
        modules = {name: model.get_submodule(name) for name in self._names}
        labels = {label_of(name): module for name, module in modules.items()}
        others = {label_of(name): module for name, module in model.named_modules() if name not in modules}
        self._state = HostState(labels, {}, inner=False, beside=others)
        if (unseen := self._state.unseen) is not None and not is_of_library(type(model)):
            require_known(type(model).__name__, unseen, line_in(unseen.partition(" (")[0], modules.values()))
        every = {**labels, **others}
        spaces = {name: vars(module) for name, module in every.items()}
        spaces |= {f"{name}, its buffers": module._buffers for name, module in every.items()}
        if not is_of_library(type(model)) and "requires_grad" in self._state.names:
            self._trained = [(name, weakref.ref(p), p.requires_grad) for name, p in model.named_parameters()]
        self._keys = {name: (own, own.keys() & self._state.names) for name, own in spaces.items()}
        self._lengths = {name: len(own) for name, own in spaces.items()}
        own = {id(tensor) for module in modules.values() for tensor in tensors_in(module).values()}
        outside = {*self._state.modules()}.difference(model.modules())
        numbers = [t for module in outside for t in (*module.parameters(), *module.buffers())]
        held = [t for t in (*self._state.tensors(), *numbers) if id(t) not in own and not t.is_inference()]
        self._tensors = [(tensor, tensor._version, numbers_of(tensor)) for tensor in held]
        self._state.let_go()

    def flags(self) -> dict[str, bool]:
        """Return the training flags of these modules and their children, by name."""
        return {name: own["training"] for name, own in self._spaces.items()}

    def changed(self) -> str | None:
        """Return the name of a place that has changed since `record_state`; None where none has."""
        if self._state is None:
            return None
        if any(t._version != version or numbers_of(t) != numbers for t, version, numbers in self._tensors):
            return "a tensor that the model holds in a container"
        for name, (own, keys) in self._keys.items():
            if len(own) != self._lengths[name]:
                self._lengths[name] = len(own)
                if other := (own.keys() & self._state.names) ^ keys:
                    return f"{name.partition(',')[0]}.{min(other)}"
        return self._state.changed()

    def require_same_structure(self) -> None:
        """Raise `MisfitError` for a change that blocks cannot follow: another module, weight, hook or forward.

        The requires_grad of weights counts where code reads it: a rank does not hold most of them.
        """
        now = ((name, weight(), was) for name, weight, was in self._trained)
        flags = (f"{label_of(name)}.requires_grad" for name, p, was in now if p is not None and p.requires_grad != was)
        if (name := next(flags, None) or self._structure.changed()) is not None:
            raise MisfitError(f"{name} is no longer what it was when the model was split; {SPLIT_AGAIN}")

    def copy_attributes(self, root: nn.Module) -> None:
        """Copy attributes of the model to a copy of it, with modules of the same names.

        Tensors that the model has gained or lost are added, on the meta device, or deleted.
        """
        model = self._model()
        if model is None or self._state is None:
            return
        modules, weights = dict(root.named_modules()), dict(root.named_parameters())
        theirs = dict(model.named_modules())
        memo: dict[int, Any] = {id(module): modules[name] for name, module in theirs.items() if name in modules}
        memo |= {id(weight): weights[name] for name, weight in model.named_parameters() if name in weights}
        names = self._state.names - OF_TORCH
        for name, module in modules.items():
            its = theirs.get(name, module)
            if module is not its:
                named = vars(its).keys() - OF_TORCH if self._state.enumerates else vars(its).keys() & names
                found = {key: vars(its)[key] for key in named}
                plain = {key: value for key, value in found.items() if not isinstance(value, Tensor)}
                module.__dict__.update(copy.deepcopy(plain, memo))
                self._copy_tensors(module, its)

    def _copy_tensors(self, module: Any, its: Any) -> None:
        assert self._state is not None
        for own, theirs in ((vars(module), vars(its)), (module._buffers, its._buffers)):
            for key in (own.keys() - theirs.keys()) & self._state.names:
                del own[key]
            for key in theirs.keys() & (self._state.names - OF_TORCH):
                now: Any = theirs[key]
                if isinstance(now, Tensor) and not isinstance(own.get(key), Tensor):
                    own[key] = now.to("meta")
                elif now is None:
                    own[key] = None

    def _let_go(self, _: Any) -> None:
        self._state, self._tensors, self._keys = None, [], {}
        self._spaces = {name: {"training": flag} for name, flag in self.flags().items()}


SPLIT_AGAIN = "split the model again: Engine(plan, split(model), …)"


class Structure:
    """Structure of modules of a model: classes, submodules, weights, hooks, and forwards set on instances.

    Args:
        model: the model; it is not kept alive.
        names: of its modules.
        forwards: names of modules of which only class and forward count.
    """

    def __init__(self, model: nn.Module, names: Iterable[str], forwards: Iterable[str] = ()) -> None:
        self._model, self._whole = weakref.ref(model), frozenset(names)
        self._names = (*sorted(self._whole), *sorted({*forwards} - self._whole))
        self._before = list(self._now(model))

    def changed(self) -> str | None:
        """Return the first change, in words; None where there is none, or the model is gone."""
        model = self._model()
        if model is None:
            return None
        for (name, before), (_, now) in zip(self._before, self._now(model), strict=True):
            if len(before) != len(now) or not all(map(is_, before.values(), now.values())):
                found = [k for k in {**before, **now} if before.get(k) is not now.get(k) and not _is_kind(now.get(k))]
                if found or len(before) != len(now):
                    return f"{name}{found[0] if found else ''}"
        return None

    def _now(self, model: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
        for name in self._names:
            module = model
            for part in filter(None, name.split(".")):
                child = module._modules.get(part)
                module = nn.Module() if child is None else child
            own = vars(module)
            found = {", its class,": type(module), ".forward": own.get("forward")}
            if name not in self._whole:
                yield label_of(name), found
                continue
            found |= {f".{key}": value for kind in ("_modules", "_parameters") for key, value in own[kind].items()}
            hooks = [hook for kind in HOOKS for hook in own[kind].values()]
            yield label_of(name), found | {f", its hook {k}," if k else ", its hook,": h for k, h in enumerate(hooks)}


def _is_kind(found: Any) -> bool:
    """Whether it is a class that an engine substitutes for another, such as `KeyedDropout`, `ColumnParallelLinear`."""
    return isinstance(found, type) and is_ours(found)


class Copies(SharedOrigin):
    """Modules in blocks that are copies, since blocks share weights: they follow attributes of the model's own modules.

    The model's own weight uses the storage of a copy that this rank trains, so that writes of a loop reach both.

    Args:
        model: the model; it is not kept alive.
        blocks: its blocks, each with the prefix of its modules' names in the model.
        is_row: whether its blocks are its modules, so that it may have no others.
    """

    evaluates: bool | None = None

    def __init__(self, model: nn.Module, blocks: Iterable[tuple[nn.Module, str]], *, is_row: bool = False) -> None:
        own = dict(model.named_modules(remove_duplicate=False))
        copied: list[str] = []
        self._pairs: list[tuple[nn.Module, Any, dict[str, Any]]] = []
        self._weights: list[tuple[tuple[int, int], nn.Module, str, Any, str]] = []
        self._tied: list[_Tied] = []
        homes: dict[int, int] = {}
        for number, (block, prefix) in enumerate(blocks):
            for path, weight in block.named_parameters(remove_duplicate=False):
                owner, _, key = path.rpartition(".")
                its = own.get(f"{prefix}{owner}".rstrip("."))
                home = homes.setdefault(id(weight if its is None else its._parameters.get(key, weight)), number)
                if its is not None and its._parameters.get(key, weight) is not weight:
                    place = block.get_submodule(owner), key, weakref.ref(its), f"{prefix}{path}"
                    self._weights.append(((home, number), *place))
            for path, module in block.named_modules():
                name = f"{prefix}{path}".rstrip(".")
                if (its := own.get(name)) is None or its is module or not isinstance(module, type(its)):
                    continue
                copied.append(name)
                if vars(module) is not vars(its):
                    self._pairs.append((module, weakref.ref(its), dict(vars(its))))
        self._structure = Structure(model, [""] if is_row else [], copied)

    def bind(self, stages: Iterable[nn.Module], cuts: Sequence[range]) -> None:
        """Bind the model's own weights to the copies that this rank trains, in its stages."""
        here = {parameter for stage in stages for parameter in stage.parameters()}
        for homes, module, key, reference, name in self._weights:
            its, weight = reference(), module._parameters[key]
            own = None if its is None else its._parameters.get(key)
            is_apart = len({next(cut.start for cut in cuts if home in cut) for home in homes}) > 1
            if weight is not None and own is not None and not own.is_meta and is_apart:
                self._tied.append(_Tied(weight if weight in here else None, own, reference, key, name, own in here))

    def follow_model(self) -> None:
        """Copy attributes that were set on the model's own modules; raise `MisfitError` for another structure."""
        for tied in self._tied:
            tied.follow_changes()
        if (name := self._structure.changed()) is not None:
            raise MisfitError(f"{name} is no longer what it was when the model was split; {SPLIT_AGAIN}")
        for module, reference, noted in self._pairs:
            its = reference()
            for key, now in () if its is None else vars(its).items():
                if key not in ("_parameters", "_buffers", "_modules") and now is not noted.get(key, self):
                    noted[key] = module.__dict__[key] = now


class _Tied:
    """Weight of the model that several stages hold, in the storage of the copy that this rank trains.

    Args:
        weight: the copy; None: other ranks train it.
        own: the model's own, which is the attribute `key` of a `module`.
        name: its name in the model.
        is_trained: whether this rank trains the model's own itself, which then has its own storage.
    """

    def __init__(self, weight: Tensor | None, own: Tensor, module: Any, key: str, name: str, is_trained: bool) -> None:
        self._weight, self._module, self._key, self._name = weight, module, key, name
        self._is_trained, self._own = is_trained, weakref.ref(own)
        self._share(own)

    def follow_changes(self) -> None:
        """Copy changes made by the loop; raise `MisfitError`, on all ranks, for changes that cannot be followed."""
        its, own = self._module(), self._own()
        if its is None:
            return
        if own is None or its._parameters.get(self._key) is not own:
            raise MisfitError(f"model.{self._name} is another weight than when the model was split; {SPLIT_AGAIN}")
        if not all(map(is_ours, hooks_on(own))):
            raise MisfitError(
                f"model.{self._name} has a hook, and is a weight of several stages, of which each has a part of its "
                "gradient; put the hook on what uses the weight, or have these blocks on one stage"
            )
        if self._weight is None:
            return
        if self._weight.requires_grad != own.requires_grad:
            self._weight.requires_grad_(own.requires_grad)
        if self._is_trained or own.data_ptr() != self._place:
            with torch.no_grad():
                self._weight.copy_(own)
        self._share(own)

    def _share(self, own: Tensor) -> None:
        if self._weight is not None and not self._is_trained and own.data_ptr() != self._weight.data_ptr():
            own.data = self._weight.data
        self._place = own.data_ptr()


def label_of(name: str) -> str:
    """Return the name of a model's module in messages."""
    return f"model.{name}" if name else "model"


def tensors_in(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own tensors that are no weights: buffers, and plain attributes."""
    plain = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
    return plain | {name: buffer for name, buffer in module._buffers.items() if buffer is not None}


def line_in(name: str, modules: Iterable[nn.Module]) -> str:
    """Return where the code of modules names the attribute of a place "model (Mixer).steps[0]", as " (file:line)"."""
    attribute = name.rpartition(".")[2].partition("[")[0]
    return next(filter(None, (line_of(type(module), attribute) for module in modules)), "")


def line_of(kind: type, attribute: str) -> str:
    """Return where the code of a class names an attribute, as " (file:line)": a place that sets it, if there is one."""
    found = [(is_set, place) for name, is_set, place in _attributes(kind) if name == attribute]
    return next((f" ({place})" for _, place in sorted(found, reverse=True)), "")


def _attributes(kind: type) -> Iterator[tuple[str, bool, str]]:
    """Yield the attributes in methods of a class other than __init__: name, whether it is set, and file:line."""
    for function in methods_of(kind):
        if function.__name__ != "__init__":
            yield from _named(function.__code__)


def _named(function: CodeType) -> Iterator[tuple[str, bool, str]]:
    for code in codes_in(function):
        for step in dis.get_instructions(code):
            line = (step.positions and step.positions.lineno) or code.co_firstlineno
            if step.opname.endswith("_ATTR"):
                yield str(step.argval), step.opname.startswith("STORE"), f"{code.co_filename}:{line}"
