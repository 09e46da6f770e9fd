"""Trace shared by the segments of a traced model: its fx graphs, traced again when the host state it reads changes.

attributes, closures, globals    numbers      the graph gets the new ones
                                 all else     if it changes the control flow, or a size: refused, split the model again
buffers, tensors in attributes                the model's own, as they are at each call
modes around a segment                        one trace for each (no_grad, autocast, …)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

from quintsched.errors import MisfitError

from ..comm.torch_modes import Modes
from ..user_objects.changes_since_split import SPLIT_AGAIN, Followed, label_of
from .thread_safe_fx_tracer import IN_PLACE_FUNCTIONS, Traced, Untraceable, skeleton, trace
from .weightless_model import ends_of

_MOST_CROSSING = 8
"""Most values that may cross a cut between modules that the model itself calls; within one of its parts, one."""

_ARITHMETIC = frozenset({"add", "sub", "mul", "truediv", "div", "pow", "iadd", "isub", "imul", "itruediv", "ipow"})

_Key = tuple[tuple[bool, ...], Modes]
"""Training flags of the modules whose code is traced and of those it calls, and the modes around the model."""


class TraceSource:
    """The fx graph of each segment of a model.

    Args:
        model: the model; it is not kept alive.

    Attributes:
        targets: for each segment, the names of the modules, weights and other tensors that its graph uses.
        constants: tensors that the forward makes independently of its inputs.
        segments: the model's segments.
        evaluates: see `SharedOrigin`.

    Raises `Untraceable` where its forward cannot be traced, or has no place to cut.
    """

    def __init__(self, model: nn.Module) -> None:
        self._name, self._spare = type(model).__name__, skeleton(model)
        self.constants: dict[str, Tensor] = {}
        self.segments: Collection[Any] = ()
        self.evaluates: bool | None = None
        names = [name for name, _ in model.named_modules()]
        with torch.enable_grad():
            traces = {training: trace(model, dict.fromkeys(names, training)) for training in (True, False)}
            modes = Modes.now()
        one, other = (self._cut(model, traced) for traced in traces.values())
        if len(one) != len(other):
            raise Untraceable("its forward has other steps while it trains than while it does not")
        if len(one) < 2:
            raise Untraceable("between its modules with weights is no place where at most 8 tensors cross")
        both = zip(one, other, strict=True)
        self.targets = [tuple(dict.fromkeys((*_targets(a), *_targets(b)))) for a, b in both]
        self._require_own_state(model, [*one, *other])
        entered = set().union(*(traced.entered for traced in traces.values()))
        rows = {name[:length] for targets in self.targets for name in targets for length in ends_of(name)}
        self._followed = Followed(model, sorted(entered), rows - entered)
        flags = len(self._followed.flags())
        self._graphs: dict[_Key, list[fx.Graph]] = {((True,) * flags, modes): one, ((False,) * flags, modes): other}
        self._seen = {n: (t, t._version) for n, t in self._tensors(model).items() if not t.is_inference()}

    def __deepcopy__(self, memo: dict[int, Any]) -> TraceSource:
        return self

    def graph(self, number: int, training: bool) -> fx.Graph:
        """Return the graph of a segment, for the modes around it now, and the model's present training flags."""
        training = training if self.evaluates is None else not self.evaluates
        flags = tuple(flag and training for flag in self._followed.flags().values())
        if torch.compiler.is_compiling():
            return next(graphs for (its, _), graphs in self._graphs.items() if its == flags)[number]
        key = (flags, Modes.now())
        if key not in self._graphs:
            self._graphs[key] = self._again(key)
        return self._graphs[key][number]

    def tensors_read(self) -> list[Tensor]:
        """Return the tensors in containers and objects that code between layers reads."""
        return self._followed.tensors()

    def follow_model(self) -> None:
        """Update the graphs to the model's present host state; raises `MisfitError` where their operations change."""
        model = self._followed.model()
        if model is None:
            return
        self._followed.require_same_structure()
        self._follow_tensors(model)
        changed = self._followed.changed()
        if changed is None:
            return
        self._followed.copy_attributes(self._spare)
        says = f"{changed} is no longer what it was when the {self._name} was split"
        try:
            graphs = {key: self._again(key) for key in self._graphs}
        except MisfitError as error:
            raise MisfitError(f"{says}: {error}") from error
        for key, now in graphs.items():
            if not all(map(_same_but_numbers, self._graphs[key], now)):
                raise MisfitError(f"{says}, and steers what its forward does; {SPLIT_AGAIN}")
        self._graphs = graphs
        self._followed.record_state()
        for segment in self.segments:
            segment.changes += 1

    def _cut(self, model: nn.Module, traced: Traced) -> list[fx.Graph]:
        """Return the pieces of a trace, and store its constants."""
        known = self.constants
        if not all(torch.equal(known[name], t) for name, t in traced.constants.items() if name in known):
            raise Untraceable("its forward makes other constants while it trains than while it does not")
        self.constants = {**known, **traced.constants}
        return _pieces(traced.graph, _cuts(traced.graph, model))

    def _again(self, key: _Key) -> list[fx.Graph]:
        """Return the graph of each segment, traced again from the model's present state."""
        try:
            with key[1].entered():
                traced = trace(self._spare, dict(zip(self._followed.flags(), key[0], strict=True)))
        except Untraceable as error:
            raise MisfitError(f"the forward cannot be traced any more: {error}") from error
        graphs = _pieces(traced.graph, _cuts(traced.graph, self._spare))
        used = [set(_targets(graph)) for graph in graphs]
        if len(used) != len(self.targets) or not all(map(set.issubset, used, map(set, self.targets))):
            raise MisfitError(f"the forward takes another way than when the model was split; {SPLIT_AGAIN}")
        if [_inputs_of(graph) for graph in graphs[1:]] != [
            _inputs_of(g) for g in next(iter(self._graphs.values()))[1:]
        ]:
            raise MisfitError(f"other values pass between its blocks than when the model was split; {SPLIT_AGAIN}")
        if traced.constants.keys() - self.constants.keys():
            raise MisfitError("the forward makes tensors that it did not make when the model was split")
        for name, constant in traced.constants.items():
            if not torch.equal(self.constants[name], constant):
                self.constants[name] = constant
                self._put(name, constant)
        return graphs

    def _require_own_state(self, model: nn.Module, graphs: list[fx.Graph]) -> None:
        """Raise `Untraceable` for a tensor changed in place that several segments use; and for any changed weight."""
        for graph in graphs:
            for name in _changed_targets(graph):
                if isinstance(_attribute(model, name), nn.Parameter):
                    raise Untraceable(
                        f"its forward changes the weight {name!r}; change it in the forward of the module that has it, "
                        "or in the training loop"
                    )
                if sum(name in targets for targets in self.targets) > 1:
                    raise Untraceable(
                        f"its forward changes {label_of(name)} in place, and uses it in several blocks; use it in one "
                        "module"
                    )

    def _tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the model's tensors that the graphs use, except weights."""
        names = {name for targets in self.targets for name in targets} - self.constants.keys()
        found = {name: _attribute(model, name) for name in sorted(names)}
        return {n: t for n, t in found.items() if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)}

    def _follow_tensors(self, model: nn.Module) -> None:
        """Update the segments' tensors where the model's were replaced, or changed while segments hold copies."""
        for name, now in self._tensors(model).items():
            seen, version = self._seen.get(name, (None, 0))
            if seen is now and version == now._version:
                continue
            self._seen[name] = now, now._version  # held, so that its id is not reused
            self._put(name, now)

    def _put(self, name: str, now: Tensor) -> None:
        """Replace a tensor in segments; where they hold a copy of another dtype or device, copy its numbers."""
        for segment in self.segments:
            owner, key = _owner(segment, name)
            mine = None if owner is None else owner._buffers.get(key)
            if owner is None or mine is None or mine is now:
                continue
            if mine.shape != now.shape:
                raise MisfitError(f"{name!r} has another shape than when the {self._name} was split")
            if (mine.device, mine.dtype) == (now.device, now.dtype):
                owner._buffers[key] = now
            else:
                mine.copy_(now)


def _owner(root: nn.Module, name: str) -> tuple[nn.Module | None, str]:
    *owners, key = name.split(".")
    module: nn.Module | None = root
    for part in owners:
        module = None if module is None else module._modules.get(part)
    return module, key


def _attribute(model: nn.Module, name: str) -> Any:
    owner, key = _owner(model, name)
    return getattr(owner, key, None)


def _cuts(graph: fx.Graph, model: nn.Module) -> list[int]:
    """Return the indices of the nodes that segments begin with, except the first."""
    nodes = list(graph.nodes)
    crossing = [len(_crossing(nodes, place)) for place in range(len(nodes))]
    heavy = [k for k, node in enumerate(nodes) if node.op == "call_module" and _is_heavy(model, node)]
    cuts = []
    for before, here in pairwise(heavy):
        most = _MOST_CROSSING if _is_outside(model, nodes[here]) else 1
        fewest = min(crossing[before + 1 : here + 1])
        if 0 < fewest <= most:
            cuts.append(max(k for k in range(before + 1, here + 1) if crossing[k] == fewest))
    return cuts


def _is_heavy(model: nn.Module, node: fx.Node) -> bool:
    return any(p.dim() > 1 for p in model.get_submodule(str(node.target)).parameters())


def _is_outside(model: nn.Module, node: fx.Node) -> bool:
    """Whether a module is called by the model itself, or is in a list of the model's own."""
    owners = str(node.target).split(".")[:-1]
    rows = [model.get_submodule(".".join(owners[: k + 1])) for k in range(len(owners))]
    return all(isinstance(row, nn.Sequential | nn.ModuleList) for row in rows)


def _crossing(nodes: Sequence[fx.Node], place: int) -> list[fx.Node]:
    """Return the nodes before `place` whose results are used from there on; weights are not counted."""
    later = set(nodes[place:])
    return [node for node in nodes[:place] if node.op != "get_attr" and not later.isdisjoint(node.users)]


def _pieces(graph: fx.Graph, cuts: Sequence[int]) -> list[fx.Graph]:
    """Return the graph of each segment: values that cross into it are placeholders, those that cross out its result."""
    nodes = list(graph.nodes)
    pieces = []
    for start, stop in zip([0, *cuts], [*cuts, len(nodes)], strict=True):
        piece, made = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in _crossing(nodes, start):
            made[node] = piece.placeholder(node.name)
        for node in nodes[start:stop]:
            for used in node.all_input_nodes:
                if used not in made and used.op == "get_attr":
                    made[used] = piece.node_copy(used)
            if node.op != "get_attr":
                made[node] = piece.node_copy(node, made.__getitem__)
        if stop < len(nodes):
            left = tuple(made[node] for node in _crossing(nodes, stop))
            piece.output(left if len(left) > 1 else left[0])
        pieces.append(piece)
    return pieces


def _inputs_of(graph: fx.Graph) -> int:
    return sum(node.op == "placeholder" for node in graph.nodes)


def _targets(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")]


def _changed_targets(graph: fx.Graph) -> Iterator[str]:
    """Yield the names of the weights and buffers that nodes change in place."""
    for node in graph.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        is_call = node.op in ("call_method", "call_function") and not name.endswith("__")
        if is_call and (name.endswith("_") or name == "setitem" or node.target in IN_PLACE_FUNCTIONS):
            yield from _base(node.args[0])
        yield from _base(node.kwargs.get("out"))


def _base(node: Any) -> Iterator[str]:
    """Yield the name of the tensor that a node's result may be a view of."""
    while isinstance(node, fx.Node) and node.op in ("call_method", "call_function") and node.args:
        node = node.args[0]
    if isinstance(node, fx.Node) and node.op == "get_attr":
        yield str(node.target)


def _same_but_numbers(one: fx.Graph, other: fx.Graph) -> bool:
    """Whether two graphs are equal, apart from floats, and integers that are used in arithmetic only."""
    return list(map(_form, one.nodes)) == list(map(_form, other.nodes))


def _form(node: fx.Node) -> tuple[Any, ...]:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    numbers: Any = float | int if name in _ARITHMETIC else float
    leaves, form = tree_flatten((node.args, node.kwargs))
    said = [_form_of(leaf, numbers) for leaf in leaves]
    return node.op, node.target, node.name, node.meta.get("modes"), form, said


def _form_of(leaf: Any, numbers: Any) -> tuple[Any, Any]:
    if isinstance(leaf, fx.Node):
        return fx.Node, leaf.name
    return (float, None) if isinstance(leaf, numbers) and type(leaf) is not bool else (type(leaf), leaf)
