"""Splitting of models whose forward can be traced, between the modules that it calls: timm's, and many users' own.

    forward, traced:    stem ─▶ + pos_embed ─▶ blocks.0 ─▶ blocks.1 ─▶ norm ─▶ mean ─▶ head
    segments:          └──────── 0 ────────┘  └── 1 ──┘   └── 2 ──┘   └──────── 3 ────────┘

Modules that hold a row of modules, such as `nn.Sequential`, are traced into; others are leaf modules of the trace. A
cut is made before a module with matrices, where the fewest values cross. Weights that several segments use are
tied. Code between modules is traced for training and for evaluation; see `retraced_fx_graphs` for the state it reads.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list

from quintsched.errors import MisfitError

from ..blocks.block_builders import Carry
from ..blocks.state_dict_entries import saved_tensors
from ..comm.torch_modes import Modes, recordable
from .layer_and_segment_blocks import block_class, take
from .retraced_fx_graphs import TraceSource


class TracedSegment(nn.Module):
    """A part of a traced forward: its graph, and the modules and weights it uses, under the model's names.

    Args:
        model: whose modules and weights it takes.
        source: the trace shared with the other segments.
        number: of the segment; the first is passed the model's inputs, others the result of the segment before.
        targets: the names of the modules, weights and other tensors that its graph uses.
        constants: tensors that the forward makes independently of its inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        source: TraceSource,
        number: int,
        targets: Sequence[str],
        constants: Mapping[str, Tensor],
    ) -> None:
        super().__init__()
        self._origin, self.number, self.changes = source, number, 0
        take(self, targets, model, constants)

    def forward(self, given: Any) -> Any:
        """Run the graph on the result of the segment before, or on the model's inputs."""
        return self._run(given, {})

    def _run(self, given: Any, extras: Mapping[str, Any]) -> Any:
        graph = self._origin.graph(self.number, self.training)
        names = [node.name for node in graph.nodes if node.op == "placeholder"]
        steps = _NodesUnderModes(self, graph=graph)
        steps.extra_traceback = False
        with steps:
            result = steps.run(*(_in_order(given, names) if self.number else _by_names(given, extras, names)))
        result = recordable(_plain(result))
        return Carry(result) if isinstance(result, tuple) else result


def _plain(tree: Any) -> Any:
    """Return a tree with plain containers in place of fx's immutable ones."""
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()} if type(tree) is immutable_dict else tree
    if type(tree) in (immutable_list, tuple):
        entries = map(_plain, tree)
        return tuple(entries) if type(tree) is tuple else list(entries)
    return tree


class _NodesUnderModes(fx.Interpreter):
    """Runs nodes under the modes that they were traced under; consecutive nodes of the same modes enter them once."""

    def __enter__(self) -> None:
        self._modes: Modes | None = None
        self._entered = ExitStack()

    def __exit__(self, *error: object) -> None:
        self._entered.close()

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        if n.meta.get("modes") != self._modes:
            self._entered.close()
            self._modes = n.meta.get("modes")
            if self._modes is not None:
                self._entered.enter_context(self._modes.entered())
        return super().run_node(n)


def _by_names(given: Any, extras: Mapping[str, Any], names: Sequence[str]) -> Sequence[Any]:
    """Return the values of a model's inputs: from a batch by name, or in order; extras by their names."""
    beside = {name: value for name, value in extras.items() if value is not None}
    if beside and not isinstance(given, Mapping):
        given = {next((name for name in names if name not in beside), names[0]): given}
    given = {**given, **beside} if beside else given
    if isinstance(given, Tensor) and len(names) > 1:
        raise MisfitError(
            f"the model takes {', '.join(names)}; it was given one tensor: engine.step(inputs, targets, "
            f"{', '.join(f'{name}=…' for name in names[1:])})"
        )
    if isinstance(given, Mapping):
        missing, unknown = set(names) - given.keys(), given.keys() - set(names)
        if len(names) == 1 and missing and len(unknown) > 1:  # the model takes a dict
            return [given]
        if missing or unknown:
            raise MisfitError(f"the model takes {', '.join(names)}; it was given {', '.join(map(str, given))}")
        return [given[name] for name in names]
    return _in_order(given, names)


def _in_order(given: Any, names: Sequence[str]) -> Sequence[Any]:
    return [given] if len(names) == 1 else list(given)


def segments(model: nn.Module) -> list[TracedSegment]:
    """Return the model cut wherever possible; raises `Untraceable` where it cannot be traced, or has no place to cut.

    The segments share the model's weights and modules.
    """
    source = TraceSource(model)
    made = [TracedSegment(model, source, k, targets, source.constants) for k, targets in enumerate(source.targets)]
    _keep_unused(model, made)
    inputs = [node.name for node in source.graph(0, model.training).nodes if node.op == "placeholder"]
    if len(inputs) > 1:
        made[0].__class__ = block_class(TracedSegment, object, tuple(inputs))
    source.segments = weakref.WeakSet(made)
    return made


def _keep_unused(model: nn.Module, made: Sequence[TracedSegment]) -> None:
    """Register in the last segment the weights and saved buffers that no graph uses, to be saved with the others."""
    used = {id(tensor) for segment in made for tensor in saved_tensors(segment).values()}
    unused = {name: tensor for name, tensor in saved_tensors(model).items() if id(tensor) not in used}
    first = {id(tensor): name for name, tensor in reversed(unused.items())}
    take(made[-1], reversed(first.values()), model)
