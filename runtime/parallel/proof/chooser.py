"""Chooses how blocks are cut, when they are built: of the ways that names suggest, the first that proves.

    pair     assumed ─▶ other layouts and sizes ─▶ each layer alone ─▶ whole          the first that equals the block
    tokens   sliced, gathered before columns ─▶ gathered before modules ─▶ whole      where sequences are sliced over tp

What blocks will be given is guessed: ids, tokens or images for the first, and from there on what each leaves. Where no
guess can be run, what names suggest is cut, and the first step proves it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from quintsched.errors import MisfitError

from ...comm import Group, ReduceOp
from ..tensor.choice import Choice
from ..tensor.cuts import Cut, pairs_of
from ..tensor.model_cuts import TensorCuts
from ..tensor.rules import RuleData
from .arrivals import Arrival, Arrivals, guesses
from .bench import Bench, Finding, Kind
from .trial import Figures, Setting
from .ways import Way, alone, replicated, ways_of
from .weights_on_features import WeightsOnFeatures

_PLACES = 1 << 16
"""More than there are ways to cut a pair: a code is a way's place, and a bit for each scale."""


_logger = logging.getLogger("quintsched.runtime")


class Chooser:
    """Chooses for the blocks of one rank.

    Args:
        bench: where blocks are run.
        tensor: how names and rules have blocks cut over tp.
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
        self._codes: dict[int, list[int]] = {}

    def choose(self, kind: Kind) -> Choice:
        """Return how a kind of block is cut; all ranks of tp call this."""
        pairs = pairs_of(kind.cuts)
        slices = self._tensor.tokens.inside(kind.number)
        for arrival in self._arrivals(kind):
            self._bench.note_reads(kind, arrival)
            whole = self._bench.whole(kind, arrival, self._setting)
            if whole is not None:
                return self._choose(kind, pairs, arrival, whole, slices=slices)
            if kind.draws and not self._tensor.are_ruled(kind.cuts):
                return self._note(kind, pairs, *self._one_by_one(kind, pairs))
        found = [self._kept(kind, pair) for pair in pairs]
        rules = {path: rule for way in found if way for path, rule in way[1].items()}
        return self._note(kind, pairs, [way[0] if way else 0 for way in found], Choice(rules, slices=slices))

    def _arrivals(self, kind: Kind) -> list[Arrival]:
        """Return what a block may be given, before any batch is known."""
        device, dtype = self._bench.group.device, self._dtype or torch.float32
        if not self._has_guessed:
            self._has_guessed = True
            self._guessed = Arrivals.guess(self._outlines, self._bench.group, self._dtype)
        if self._guessed is not None:
            return [self._guessed.at(kind.number, self._outlines[kind.number])]
        return guesses(kind.blueprint.bare, device, dtype)

    def _choose(
        self, kind: Kind, pairs: Sequence[Sequence[Cut]], arrival: Arrival, whole: Figures, *, slices: bool
    ) -> Choice:
        found = [self._kept(kind, pair) or self._way_of(kind, pair, pairs, arrival, whole) for pair in pairs]
        places = [place for place, _, _ in found]
        rules = {path: rule for _, way, _ in found for path, rule in way.items()}
        choice = Choice(rules, frozenset().union(*(partial for _, _, partial in found)))
        is_asked = self._tensor.are_ruled(kind.cuts)
        if not is_asked and self._settled(kind, choice, self._setting, arrival, whole) is None:
            places, choice = self._together(kind, pairs, arrival, whole)
        choice = self._with_vanishing(kind, choice, arrival, whole)
        if slices and self._tensor.has_pairs(kind.number, choice):
            choice = self._sliced(kind, choice, arrival, whole)
        else:
            choice = replace(choice, slices=False)
        return self._note(kind, pairs, places, choice)

    def _kept(self, kind: Kind, pair: Sequence[Cut]) -> tuple[int, Way, frozenset[str]] | None:
        """Return the way that leaves a pair whole whose weights are read; raises `MisfitError` where a rule cuts it."""
        why = kind.why_kept(pair)
        if not why:
            return None
        if self._tensor.are_ruled(pair):
            raise MisfitError(kind.refusal_to_cut(pair, self._bench.group.size))
        if not self._bench.group.index:
            names = " and ".join(repr(cut.path) for cut in pair)
            _logger.warning("%s: %s are kept whole over tp, for %s", kind.name, names, why)
        return len(ways_of(pair, is_asked=False)) - 1, replicated(pair), frozenset()

    def _way_of(
        self, kind: Kind, pair: Sequence[Cut], pairs: Sequence[Sequence[Cut]], arrival: Arrival, whole: Figures
    ) -> tuple[int, Way, frozenset[str]]:
        """Return the first way that proves, all other pairs whole, by its place among them, as rules."""
        others = replicated(cut for other in pairs if other is not pair for cut in other)
        is_asked = self._tensor.are_ruled(pair)
        first: Finding | None = None
        for place, way in enumerate(ways := ways_of(pair, is_asked=is_asked)):
            if place == len(ways) - 1 and not is_asked:
                break
            settled = self._settled(kind, Choice({**others, **way}), self._setting, arrival, whole)
            if settled is None:
                first = first or self._bench.find(kind, arrival, self._setting, whole, Choice({**others, **way}))
                continue
            finding = self._bench.unsound(kind, arrival, settled, is_asked=is_asked)
            if finding is None:
                self._say(kind, pair, way, first)
                return place, way, settled.partial
            first = first or finding
        if is_asked:
            return 0, {}, frozenset()  # the first step says what is wrong with it
        self._say(kind, pair, ways[-1], first)
        return len(ways) - 1, ways[-1], frozenset()

    def _say(self, kind: Kind, pair: Sequence[Cut], way: Mapping[str, RuleData], first: Finding | None) -> None:
        what = {str(way == alone(pair)): "cut one by one", str(way == replicated(pair)): "kept whole"}.get("True")
        if what is None or first is None or self._bench.group.index:
            return
        names = " and ".join(repr(cut.path) for cut in pair)
        _logger.warning("%s: %s are %s over tp, for as a pair, %s", kind.name, names, what, first)

    def _together(
        self, kind: Kind, pairs: Sequence[Sequence[Cut]], arrival: Arrival, whole: Figures
    ) -> tuple[list[int], Choice]:
        """Return what proves where pairs that prove one by one do not prove together."""
        parted, choice = self._one_by_one(kind, pairs)
        if self._bench.find(kind, arrival, self._setting, whole, choice) is None:
            return parted, choice
        last = [len(ways_of(pair, is_asked=False)) - 1 for pair in pairs]
        return last, Choice(replicated(cut for pair in pairs for cut in pair))

    def _settled(self, kind: Kind, choice: Choice, setting: Setting, arrival: Arrival, whole: Figures) -> Choice | None:
        """Return a choice that proves, with those weights whose gradients are partial sums; None: it does not."""
        finding = self._bench.find(kind, arrival, setting, whole, choice)
        if finding is None:
            return choice
        if not finding.weights:
            return None
        choice = replace(choice, partial=choice.partial | finding.weights)
        return choice if self._bench.find(kind, arrival, setting, whole, choice) is None else None

    def _with_vanishing(self, kind: Kind, choice: Choice, arrival: Arrival, whole: Figures) -> Choice:
        """Return a choice with those weights, too, whose gradients are partial sums that vanish but for rounding."""
        partial = choice.partial | self._features.names_in(kind, arrival, choice)
        if partial == choice.partial:
            return choice
        summed = replace(choice, partial=partial)
        finding = self._bench.find(kind, arrival, self._setting, whole, summed)
        finding = finding or self._bench.unsound(kind, arrival, summed, is_asked=self._tensor.are_ruled(kind.cuts))
        return choice if finding else summed

    def _sliced(self, kind: Kind, choice: Choice, arrival: Arrival, whole: Figures) -> Choice:
        """Return a choice with what is to be done where tokens are sliced."""
        setting = replace(self._setting, slices_tokens=True)
        for gathers_before in (False, True):
            sliced = replace(choice, gathers_before=gathers_before)
            finding = self._bench.find(kind, arrival, setting, whole, sliced)
            if finding is None:
                return sliced
        if not self._bench.group.index:
            _logger.warning("%s is given whole tokens under sequence_parallel, for with slices, %s", kind.name, finding)
        return replace(choice, slices=False)

    def _note(self, kind: Kind, pairs: Sequence[Sequence[Cut]], places: list[int], choice: Choice) -> Choice:
        codes = [place + _PLACES * (pair[0].path in kind.proved) for place, pair in zip(places, pairs, strict=True)]
        self._codes[kind.number] = [1 + int(choice.slices), *codes]
        return choice

    def _one_by_one(self, kind: Kind, pairs: Sequence[Sequence[Cut]]) -> tuple[list[int], Choice]:
        """Return the choice by which each layer takes and gives full tensors, with the places of these ways."""
        last = [len(ways_of(pair, is_asked=False)) - 1 for pair in pairs]
        kept = [bool(kind.why_kept(pair)) for pair in pairs]
        places = [place if is_kept else max(place - 1, 0) for place, is_kept in zip(last, kept, strict=True)]
        rules = [replicated(pair) if is_kept else alone(pair) for pair, is_kept in zip(pairs, kept, strict=True)]
        return places, Choice({path: rule for of_pair in rules for path, rule in of_pair.items()}, slices=False)

    def share(self, kinds: Mapping[int, int], world: Group) -> dict[int, Choice]:
        """Return how all blocks of the model are cut, chosen on whatever rank (collective).

        `kinds` are the blocks here, to the first of their kind.
        """
        pairs = [pairs_of(cuts) for cuts in self._tensor.cuts]
        longest = 1 + max(map(len, pairs), default=0)
        mine = torch.zeros(len(pairs), longest, dtype=torch.int64)
        for number, first in kinds.items():
            code = self._codes[first]
            mine[number, : len(code)] = torch.tensor(code)
        every = mine.to(world.device)
        world.all_reduce(every, ReduceOp.MAX).wait()
        held = [number in kinds for number in range(len(pairs))]
        if not torch.equal(every.cpu()[held], mine[held]):
            raise MisfitError("the ranks that hold a block do not agree on how to cut it; do they run the same code?")
        return {
            number: self._decoded(number, pairs[number], code) for number, code in enumerate(every.tolist()) if code[0]
        }

    def _decoded(self, number: int, pairs: Sequence[Sequence[Cut]], code: Sequence[int]) -> Choice:
        rules: Way = {}
        proved = set[str]()
        for pair, packed in zip(pairs, code[1:], strict=False):
            is_proved, place = divmod(packed, _PLACES)
            rules |= ways_of(pair, is_asked=self._tensor.are_ruled(pair))[place]
            proved |= {pair[0].path} if is_proved else set()
        return Choice(rules, slices=code[0] == 2, proved=frozenset(proved))
