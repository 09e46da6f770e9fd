"""Choice of cuts when blocks are built: of the candidates that names suggest, the first that proves equivalent.

    pair     assumed ─▶ other layouts and sizes ─▶ each layer alone ─▶ whole          the first that equals the block
    tokens   sliced, gathered before columns ─▶ gathered before modules ─▶ whole      where sequences are sliced over tp

Trial inputs are guessed: ids, tokens or images for the first block, then each block's output for the next. If no guess
can be run, the cut that names suggest is taken, and the first step proves it.

Weights that are not cut, and are applied only to features between columns and rows, get partial gradients on each rank.

    x ─▶ column ─▌▐─▶ features ─▶ k_norm.weight, k_norm.bias ─▶ z ─▶ row ─▌▐─▶ y       reached from z alone: partial
     ╰── norm.weight                                                                   reached from x or y: whole

The comparison of numbers shows it, except for gradients that always vanish: a bias common to all keys cancels in the
softmax, so only rounding errors are left, which differ from rank to rank. Those are found in the autograd graph.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from quintsched.errors import MisfitError

from ...comm import Group
from ...comm.host_collectives import share_texts
from ...settings.tensor_parallel_rules import TensorSplit
from ..tensor.adjust_modules_around_pairs import wide_norms
from ..tensor.cut_rules import Choice
from ..tensor.cuttable_layers import Cut, pairs_of
from ..tensor.whole_model_cuts import TensorCuts
from .candidate_cuts import CandidateRules, alone, replicated, ways_of
from .reads_and_draws.random_draws_in_trials import undisturbed
from .trial_inputs import Arrival, Arrivals, guesses
from .twin_runs import Figures, Setting, outputs_of
from .twin_test_bench import Bench, BlockKind, CutGap

_logger = logging.getLogger("quintsched.runtime")


class KindWarnings:
    """Warnings about blocks, which the first rank logs: once for blocks of one class that have them alike."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}

    def add(self, number: int, words: str) -> None:
        """Add a warning about block `number`."""
        self._found.setdefault(words.replace(f"block {number} ", "").replace(f"'{number}.", "'"), words)

    def log(self, world: Group) -> None:
        """Log what all ranks have found (collective)."""
        found = dict[str, str]()
        for text in share_texts(world, json.dumps(self._found)):
            found = json.loads(text) | found
        self._found.clear()
        for words in found.values() if not world.index else ():
            _logger.warning("%s", words)


class Chooser:
    """Chooser of cuts for the blocks of one rank.

    Args:
        bench: runs and compares twins.
        tensor: cuts over tp by names and rules.
        outlines: all blocks, on the meta device.
        dtype: of the weights; None: as they are built.
    """

    def __init__(
        self, bench: Bench, tensor: TensorCuts, outlines: Sequence[nn.Module], dtype: torch.dtype | None
    ) -> None:
        self._bench, self._tensor, self._outlines, self._dtype = bench, tensor, outlines, dtype
        self._features = WeightsOnFeatures(bench.group, tensor.rules)
        self._setting = Setting(tensor=bench.group)
        self._guessed: Arrivals | None = None
        self._has_guessed = False
        self.warnings = KindWarnings()

    def choose(self, kind: BlockKind) -> Choice:
        """Return the choice of cuts for a kind of block (collective over tp)."""
        pairs = pairs_of(kind.cuts)
        slices = self._tensor.tokens.inside(kind.number)
        for arrival in self._arrivals(kind):
            self._bench.note_reads(kind, arrival)
            whole = self._bench.whole(kind, arrival, self._setting)
            if whole is not None:
                return self._choose(kind, pairs, arrival, whole, slices=slices)
            if kind.draws and not self._tensor.are_ruled(kind.cuts):
                return self._one_by_one(kind, pairs)
        return Choice(_joined([self._kept(kind, pair) or {} for pair in pairs]), slices=slices)

    def _arrivals(self, kind: BlockKind) -> list[Arrival]:
        """Return guessed trial inputs of a kind, before any batch is known."""
        device, dtype = self._bench.group.device, self._dtype or torch.float32
        if not self._has_guessed:
            self._has_guessed = True
            self._guessed = Arrivals.guess(self._outlines, self._bench.group, self._dtype)
        if self._guessed is not None:
            return [self._guessed.block_arrival(kind.number, self._outlines[kind.number])]
        return guesses(kind.blueprint.bare, device, dtype)

    def _choose(
        self, kind: BlockKind, pairs: Sequence[Sequence[Cut]], arrival: Arrival, whole: Figures, *, slices: bool
    ) -> Choice:
        found, partial = list[CandidateRules](), frozenset[str]()
        for pair in pairs:
            way, summed = self._kept(kind, pair), frozenset[str]()
            if way is None:
                way, summed = self._way_of(kind, pair, pairs, arrival, whole)
            found, partial = [*found, way], partial | summed
        choice, is_asked = Choice(_joined(found), partial), self._tensor.are_ruled(kind.cuts)
        if not is_asked and self._settled(kind, choice, self._setting, arrival, whole) is None:
            choice = self._together(kind, pairs, arrival, whole)
        choice = self._with_vanishing(kind, choice, arrival, whole)
        if slices and self._tensor.has_pairs(kind.number, choice):
            choice = self._sliced(kind, choice, arrival, whole)
        else:
            choice = replace(choice, slices=False)
        firsts = {pair[0].path for pair in pairs}
        return replace(choice, proved=frozenset(firsts & kind.proved))

    def _kept(self, kind: BlockKind, pair: Sequence[Cut]) -> CandidateRules | None:
        """Return rules that keep a pair whole if its weights are read, else None; raises if a rule cuts it."""
        why = kind.why_kept(pair)
        if not why:
            return None
        if self._tensor.are_ruled(pair):
            raise MisfitError(kind.refusal_to_cut(pair, self._bench.group.size))
        if not self._bench.group.index:
            self._warn(kind, pair, f"kept whole over tp, since {why}")
        return replicated(pair)

    def _warn(self, kind: BlockKind, pair: Sequence[Cut], words: str) -> None:
        self.warnings.add(kind.number, f"{kind.name}: {' and '.join(repr(cut.path) for cut in pair)} are {words}")

    def _way_of(
        self, kind: BlockKind, pair: Sequence[Cut], pairs: Sequence[Sequence[Cut]], arrival: Arrival, whole: Figures
    ) -> tuple[CandidateRules, frozenset[str]]:
        """Return the first equivalent way to cut a pair, with all others whole; and weights with partial gradients."""
        others = replicated(cut for other in pairs if other is not pair for cut in other)
        is_asked = self._tensor.are_ruled(pair)
        first: CutGap | None = None
        ways = ways_of(pair, is_asked=is_asked)
        for way in ways if is_asked else ways[:-1]:
            settled = self._settled(kind, Choice({**others, **way}), self._setting, arrival, whole)
            if settled is None:
                first = first or self._bench.find(kind, arrival, self._setting, whole, Choice({**others, **way}))
                continue
            finding = self._bench.unsound(kind, arrival, settled, is_asked=is_asked)
            if finding is None:
                self._say(kind, pair, way, first)
                return way, settled.partial
            first = first or finding
        if is_asked:
            return {}, frozenset()  # the first step refuses it, with the reason
        self._say(kind, pair, ways[-1], first)
        return ways[-1], frozenset()

    def _say(self, kind: BlockKind, pair: Sequence[Cut], way: CandidateRules, first: CutGap | None) -> None:
        what = {str(way == alone(pair)): "cut one by one", str(way == replicated(pair)): "kept whole"}.get("True")
        if what is None or first is None or self._bench.group.index:
            return
        self._warn(kind, pair, f"{what} over tp, since as a pair, {first}")

    def _together(self, kind: BlockKind, pairs: Sequence[Sequence[Cut]], arrival: Arrival, whole: Figures) -> Choice:
        """Return the choice where pairs prove separately, but not together: one by one if that proves, else whole."""
        choice = self._one_by_one(kind, pairs)
        is_sound = self._bench.find(kind, arrival, self._setting, whole, choice) is None
        return choice if is_sound else Choice(_joined(map(replicated, pairs)))

    def _settled(
        self, kind: BlockKind, choice: Choice, setting: Setting, arrival: Arrival, whole: Figures
    ) -> Choice | None:
        """Return a choice, completed by weights with partial gradients, if it proves equivalent; else None."""
        finding = self._bench.find(kind, arrival, setting, whole, choice)
        if finding is None:
            return choice
        if not finding.weights:
            return None
        choice = replace(choice, partial=choice.partial | finding.weights)
        return choice if self._bench.find(kind, arrival, setting, whole, choice) is None else None

    def _with_vanishing(self, kind: BlockKind, choice: Choice, arrival: Arrival, whole: Figures) -> Choice:
        """Return a choice completed by weights whose partial gradients vanish except for rounding errors."""
        partial = choice.partial | self._features.names_in(kind, arrival, choice)
        if partial == choice.partial:
            return choice
        summed = replace(choice, partial=partial)
        finding = self._bench.find(kind, arrival, self._setting, whole, summed)
        finding = finding or self._bench.unsound(kind, arrival, summed, is_asked=self._tensor.are_ruled(kind.cuts))
        return choice if finding else summed

    def _sliced(self, kind: BlockKind, choice: Choice, arrival: Arrival, whole: Figures) -> Choice:
        """Return a choice completed for sliced tokens: the place of their all-gather, or `slices=False`."""
        setting = replace(self._setting, slices_tokens=True)
        for gathers_before in (False, True):
            sliced = replace(choice, gathers_before=gathers_before)
            finding = self._bench.find(kind, arrival, setting, whole, sliced)
            if finding is None:
                return sliced
        if not self._bench.group.index:
            words = f"{kind.name} is given whole tokens under sequence_parallel, since with slices, {finding}"
            self.warnings.add(kind.number, words)
        return replace(choice, slices=False)

    def _one_by_one(self, kind: BlockKind, pairs: Sequence[Sequence[Cut]]) -> Choice:
        """Return the choice by which each layer takes and returns full tensors."""
        return Choice(_joined(replicated(p) if kind.why_kept(p) else alone(p) for p in pairs), slices=False)


def share(chosen: Mapping[int, Choice], world: Group) -> dict[int, Choice]:
    """All-gather the choices of all ranks, by number of the block (collective)."""
    found = dict[str, list[Any]]()
    mine = {number: [choice.rules, choice.slices, sorted(choice.proved)] for number, choice in chosen.items()}
    for text in share_texts(world, json.dumps(mine)):
        for number, words in json.loads(text).items():
            if found.setdefault(number, words) != words:
                raise MisfitError("ranks that hold a block do not agree on how to cut it; do they run the same code?")
    return {
        int(number): Choice(rules, slices=slices, proved=frozenset(proved))
        for number, (rules, slices, proved) in found.items()
    }


def _joined(ways: Iterable[CandidateRules]) -> CandidateRules:
    """Merge the rules of several pairs."""
    return {path: rule for way in ways for path, rule in way.items()}


class WeightsOnFeatures(Bench):
    """Finder of uncut weights that are applied only to features between columns and rows (see the module)."""

    def names_in(self, kind: BlockKind, arrival: Arrival, choice: Choice) -> frozenset[str]:
        """Return the names of a kind's weights that are applied to features only, on all ranks (collective)."""
        setting, found = Setting(tensor=self.group, trains=True), frozenset[str]()
        try:
            twin = self._drawn(kind, setting)
            with undisturbed(self.group.device):
                found = _met_by_features(twin, self._cuts(kind, twin, choice), arrival)
        except Exception:  # other runs report it
            pass
        names = [name for name, _ in kind.blueprint.bare.named_parameters()]
        missing = self.most([float(name not in found) for name in names], setting)
        return frozenset(name for name, is_missing in zip(names, missing, strict=True) if not is_missing)


def _met_by_features(twin: nn.Module, cuts: Sequence[Cut], arrival: Arrival) -> frozenset[str]:
    """Return the names of weights that the forward of a whole twin applies to features only; `cuts` are its own."""
    paired = [cut for cut in cuts if cut.is_paired]
    cut_weights = {id(parameter) for cut in paired for parameter in cut.layer.parameters()}
    scopes = {id(cut.pair): cut.pair for cut in paired if cut.pair is not None}.values()
    if all(id(parameter) in cut_weights for scope in scopes for parameter in scope.parameters()):
        return frozenset()
    features, others = list[Tensor](), list[Tensor]()
    for cut in paired:
        _part(cut.layer, others if cut.split is TensorSplit.COLUMN else features)
    for norm, _ in wide_norms(cuts):
        _part(norm, features)
    with torch.enable_grad():
        others += outputs_of(twin, arrival).values()
    met = _reached(features) - _reached(others) - cut_weights
    return frozenset(name for name, parameter in twin.named_parameters() if id(parameter) in met)


def _part(layer: nn.Module, given: list[Tensor]) -> None:
    """Register hooks that record a layer's input tensors, and detach its outputs from the autograd graph."""

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        given.extend(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))

    def end(module: nn.Module, args: Any, result: Any) -> Any:
        return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, result)

    layer.register_forward_pre_hook(note, with_kwargs=True)
    layer.register_forward_hook(end)


def _reached(tensors: Iterable[Tensor]) -> set[int]:
    """Return the ids of the leaf tensors in the autograd graphs of tensors."""
    found = {id(tensor) for tensor in tensors if tensor.grad_fn is None}
    open_ones, seen = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None], set[Any]()
    while open_ones:
        node = open_ones.pop()
        if node in seen:
            continue
        seen.add(node)
        found.add(id(getattr(node, "variable", None)))
        open_ones += [before for before, _ in node.next_functions if before is not None]
    return found
