"""Models whose forward can be traced, cut between the modules that it calls: timm's, and most of one's own.

    forward, traced:    stem ─▶ + pos_embed ─▶ blocks.0 ─▶ blocks.1 ─▶ norm ─▶ mean ─▶ head
    segments:          └──────── 0 ────────┘  └── 1 ──┘   └── 2 ──┘   └──────── 3 ────────┘

Modules are opened as long as they hold a row of modules, `nn.Sequential` first of all; those that are not are called
whole. A cut is made before a module with matrices, where the fewest values cross. Weights that several segments use are
tied. Code that asks for `self.training` between modules is traced both ways.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from quintsched.errors import MisfitError

from ..blocks.blocks import Carry
from ..blocks.module_state import saved_tensors
from .tracing import Untraceable, trace

_MOST_CROSSING = 8
"""So many values may cross a cut between what a model itself calls; one, where it is within a part of it."""


class Segment(nn.Module):
    """A part of a traced forward: its steps, and the modules and weights that these use, under the model's names.

    Args:
        model: whose modules and weights it takes.
        graphs: its steps, while it trains and while it does not.
        constants: tensors that the forward makes without looking at its inputs.
        is_first: whether it is given the model's inputs; else what the segment before has left.
    """

    def __init__(
        self, model: nn.Module, graphs: Mapping[bool, fx.Graph], constants: Mapping[str, Tensor], *, is_first: bool
    ) -> None:
        super().__init__()
        self.is_first = is_first
        self.graphs = dict(graphs)
        for target in dict.fromkeys(name for graph in graphs.values() for name in _targets(graph)):
            _hang(self, target, model, constants)

    def forward(self, given: Any) -> Any:
        """Run the steps on what the segment before has left, or on the model's inputs."""
        graph = self.graphs[self.training]
        names = [node.name for node in graph.nodes if node.op == "placeholder"]
        steps = fx.Interpreter(self, graph=graph)
        steps.extra_traceback = False
        result = steps.run(*(_by_names(given, names) if self.is_first else _in_order(given, names)))
        return Carry(result) if isinstance(result, tuple) else result


def _by_names(given: Any, names: Sequence[str]) -> Sequence[Any]:
    """Return the values of a tree for a segment's parameters: one for one, by name, or in order."""
    if isinstance(given, Mapping):
        missing, unknown = set(names) - given.keys(), given.keys() - set(names)
        if missing or unknown:
            raise MisfitError(f"the model takes {', '.join(names)}; it was given {', '.join(map(str, given))}")
        return [given[name] for name in names]
    return _in_order(given, names)


def _in_order(given: Any, names: Sequence[str]) -> Sequence[Any]:
    return [given] if len(names) == 1 else list(given)


def segments(model: nn.Module) -> list[Segment] | None:
    """Return the model cut wherever it can be; None where its forward cannot be traced, or has no place to cut.

    The segments share the model's weights and modules.
    """
    try:
        found = {training: trace(model, training) for training in (True, False)}
    except Untraceable:
        return None
    if not _alike(found[True].constants, found[False].constants):
        return None
    pieces = {training: _pieces(traced.graph, _cuts(traced.graph, model)) for training, traced in found.items()}
    if len({len(cut) for cut in pieces.values()}) != 1 or len(pieces[True]) < 2:
        return None
    constants = found[True].constants | found[False].constants
    both = zip(pieces[True], pieces[False], strict=True)
    made = [
        Segment(model, {True: one, False: other}, constants, is_first=not number)
        for number, (one, other) in enumerate(both)
    ]
    _keep_unused(model, made)
    return made


def _keep_unused(model: nn.Module, made: Sequence[Segment]) -> None:
    """Let the last segment have the weights and saved buffers that no step uses: they are saved with the others."""
    used = {id(tensor) for segment in made for tensor in saved_tensors(segment).values()}
    for name, tensor in saved_tensors(model).items():
        if id(tensor) not in used:
            used.add(id(tensor))
            _hang(made[-1], name, model, {})


def _alike(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two traces have met the same constants: drawn ones differ, and are no constants."""
    return all(torch.equal(one[name], other[name]) for name in one.keys() & other.keys())


def _cuts(graph: fx.Graph, model: nn.Module) -> list[int]:
    """Return the places of the steps that segments begin with, but for the first."""
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
    """Whether the model calls a module itself, or one in a row of its own."""
    owners = str(node.target).split(".")[:-1]
    rows = [model.get_submodule(".".join(owners[: k + 1])) for k in range(len(owners))]
    return all(isinstance(row, nn.Sequential | nn.ModuleList) for row in rows)


def _crossing(nodes: Sequence[fx.Node], place: int) -> list[fx.Node]:
    """Return the steps before `place` whose results are used from there on; weights are not results."""
    later = set(nodes[place:])
    return [node for node in nodes[:place] if node.op != "get_attr" and not later.isdisjoint(node.users)]


def _pieces(graph: fx.Graph, cuts: Sequence[int]) -> list[fx.Graph]:
    """Return the graph of each segment: what crosses into it as parameters, what crosses out of it as its result."""
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


def _targets(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")]


def _hang(root: nn.Module, target: str, model: nn.Module, constants: Mapping[str, Tensor]) -> None:
    """Let `root` have a module, a weight or a buffer of the model's under its name, in empty modules."""
    *owners, name = target.split(".")
    owner, source = root, model
    for part in owners:
        source = source.get_submodule(part)
        if not hasattr(owner, part):
            owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    found = constants[target] if target in constants else getattr(source, name)
    if isinstance(found, nn.Module):
        owner.add_module(name, found)
    elif isinstance(found, nn.Parameter):
        owner.register_parameter(name, found)
    else:
        is_saved = target not in constants and name not in source._non_persistent_buffers_set
        owner.register_buffer(name, found, persistent=is_saved)
