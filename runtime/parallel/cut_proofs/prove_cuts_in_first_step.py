"""Numerical proof, before the first step, that cut blocks are equivalent to whole ones; once for each kind of block.

    built     block ─▶ blueprint, one per kind ─▶ a cut that proves equivalent on guessed inputs (`choose_cuts`)
    step 0    twin, whole ──┐
              twin, cut ────┴─▶ the same outputs and gradients?  ─▶ no: pairs are parted; or, if a rule demands them or
                                                                    sliced sequences are at fault, a refusal

Names of layers suggest a pair; only numbers prove it: modules between a column and its row may normalise, sort or mix
features. A rank runs one twin at a time, so that it holds at most one full block besides its own stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import nn

from quintsched.errors import MisfitError

from ...blocks.block_builders import Parcel, accepted_extras
from ...blocks.dtensor import is_sharded
from ...blocks.without_side_effects import attributes_untouched
from ...comm import Group
from ...comm.host_collectives import first_said
from ...settings.allowed_setting_values import Proofs
from ...settings.tensor_parallel_rules import TensorSplit
from ..context.context_parallel import ContextParallel
from ..mesh_independent_dropout import Masks
from ..tensor.adjust_modules_around_pairs import part_pairs
from ..tensor.cut_rules import Choice, is_built_in
from ..tensor.cuttable_layers import Cut, has_hooked_weights, join, pairs_of
from ..tensor.parameter_shards import CutLayers
from ..tensor.whole_model_cuts import TensorCuts
from .block_kinds import Content, choice_for, kind_of, kinds_apart
from .block_twins import Blueprint
from .candidate_cuts import CandidateRules, alone, everywhere, paired_ways, replicated
from .choose_cuts import Chooser, share
from .proofs_in_later_steps import BenchHere, Called, FollowedKind, LaterSteps
from .trial_inputs import TRIAL_SAMPLES, Arrival, Arrivals, FirstUnits, specs_of
from .twin_runs import Figures, Setting
from .twin_test_bench import Bench, BlockKind, CutGap


class Prover:
    """Prover of the blocks of one rank; `later` checks their pairs again in later steps.

    Args:
        tensor: cuts over tp by names and rules.
        outlines: all blocks, on the meta device.
        groups: the ranks of tp, and those that hold slices of the same sequences.
        sequences: context parallelism over the latter.
        slices: number of units that a microbatch is cut into.
        which: blocks to prove: all that are not built in ("foreign"), "all", or "none".
        dtype: of the weights; None: as they are built.
    """

    def __init__(
        self,
        tensor: TensorCuts,
        outlines: Sequence[nn.Module],
        groups: tuple[Group, Group],
        sequences: ContextParallel,
        slices: int,
        which: Proofs,
        dtype: torch.dtype | None,
    ) -> None:
        self._tensor, self._which, self._dtype = tensor, which, dtype
        group, context = groups
        self._setting = Setting(
            tensor=group if group.size > 1 else None,
            sequences=sequences if context.size > 1 else None,
            context=context if context.size > 1 else None,
            slices=slices,
        )
        self._group, self._context = group, context
        self._bench = Bench(group, tensor.rules)
        self._chooser = Chooser(self._bench, tensor, outlines, dtype)
        self._warnings = self._chooser.warnings
        self._kinds: list[BlockKind] = []
        self._contents: dict[Content, int] = {}
        self._places: dict[int, tuple[int, ...]] = {}
        self._numbers: dict[int, BlockKind] = {}
        self._here = BenchHere(group, tensor.rules)
        self.later = LaterSteps(self._here, outlines, dtype, self._tensor.tokens)
        self._is_done = which == "none"
        self._cut = CutLayers()

    def choose(self, number: int, block: nn.Module, builder: Callable[[], nn.Module] | None = None) -> Choice:
        """Register a block that is still whole, and return the choice of its cuts (collective over tp).

        `builder` builds the block again if it cannot be copied.
        """
        cuts = self._tensor.cuts[number]
        if not self._wants(number, block, cuts):
            return Choice()
        content, self._places[number] = kind_of(block, cuts, str(number))
        known = self._agreed(self._contents.get(content, -1))
        if known is None:
            try:
                blueprint = Blueprint(block, builder, [cut.path.partition(".")[2] for cut in cuts])
            except Exception as error:
                return self._unproved(number, block, cuts, error)
            hooked = (join(str(number), n) for n, module in block.named_modules() if has_hooked_weights(module))
            whole: CandidateRules = dict.fromkeys(hooked, TensorSplit.REPLICATE.value)
            kind = BlockKind(number, blueprint, cuts, hooked=whole)
            known = self._contents[content] = len(self._kinds)
            self._kinds.append(kind)
            if self._setting.tensor is not None:
                with attributes_untouched(blueprint.bare):  # objects that deep copies share with it
                    kind.choice = self._chooser.choose(kind)
        kind = self._numbers[number] = self._kinds[known]
        return choice_for(kind.choice, number)

    def _agreed(self, known: int) -> int | None:
        """Return a block's kind if all ranks that run it together have found the same; None: it is a new kind."""
        most, least = self._bench.most([known, -known], self._setting)
        return known if most == -least and known >= 0 else None

    def _unproved(self, number: int, block: nn.Module, cuts: Sequence[Cut], error: Exception) -> Choice:
        """Return the choice for a block that cannot be copied: no cut; raises `MisfitError` if a rule demands one."""
        title = f"block {number} ({type(block).__name__})"
        if self._tensor.are_ruled(cuts):
            raise MisfitError(
                f"{title} is to be cut over tp by a rule, which cannot be proved, for it cannot be copied: {error}; "
                "give the engine a function that builds it"
            ) from error
        if self._setting.cuts > 1:
            self._warnings.add(number, f"{title} is not proved, since it cannot be copied: {error}")
        if cuts:
            self._warnings.add(number, f"{title} is kept whole over tp, since it cannot be copied: {error}")
        return Choice(replicated(cuts), slices=False)

    def record_block(self, number: int, block: nn.Module) -> None:
        """Record a block after it has been cut."""
        self._cut.add_block(block, str(number))
        if number in self._numbers:
            self._numbers[number].blocks.append(block)

    def share(self, world: Group) -> dict[int, Choice]:
        """All-gather the choices of all ranks, by number of the block (collective)."""
        self._warnings.log(world)
        kinds = self._numbers.items() if self._setting.tensor is not None else ()
        return share({number: choice_for(kind.choice, number) for number, kind in kinds}, world)

    def _wants(self, number: int, block: nn.Module, cuts: Sequence[Cut]) -> bool:
        setting = self._setting
        does_something = cuts or setting.cuts > 1 or self._tensor.tokens.inside(number)
        is_known = is_built_in(block) and self._which != "all" and not self._tensor.are_ruled(cuts)
        return not self._is_done and bool(does_something) and not is_known and not is_sharded(block)

    def prove(
        self,
        units: FirstUnits,
        outlines: Sequence[nn.Module],
        parcels: Sequence[Parcel],
        world: Group,
        masks: Masks,
    ) -> None:
        """Run each kind of block once, cut and whole, and compare (collective over all ranks, in the first step).

        Dimensions along which dropout draws for a part of a tensor are recorded in `masks`.

        Raises `MisfitError` on every rank if a block of some rank is not equivalent.
        """
        is_other = len(units.extras) != self._setting.slices  # an evaluation, which does not slice
        if self._is_done or is_other or self._group.size * self._setting.cuts == 1:
            return
        self._is_done = True
        with ExitStack() as shared:  # objects that deep copies share with blocks
            for kind in self._kinds:
                shared.enter_context(attributes_untouched(kind.blueprint.bare))
            try:
                refusal = self._why_refused(units, outlines, parcels, masks) if self._kinds else ""
            except MisfitError as error:
                refusal = str(error)
        self._kinds.clear()
        self._contents.clear()
        self._numbers.clear()
        self._warnings.log(world)
        if said := first_said(refusal, world):
            raise MisfitError(said)

    def _why_refused(
        self, units: FirstUnits, outlines: Sequence[nn.Module], parcels: Sequence[Parcel], masks: Masks
    ) -> str:
        """Prove all kinds, and register them for checks in later steps; return a refusal in words, or ""."""
        self._part_places(units.first, parcels)
        proved = self._given(units, outlines, parcels)
        refusal = next((text for kind, arrival, _ in proved if (text := self._refusal(kind, arrival))), "")
        followed = [self._followed(*kind_and_given) for kind_and_given in proved]
        refusal = refusal or next(filter(None, (self._note_draws(one, masks) for one in followed)), "")
        self.later.follow_kinds([one for one in followed if one.in_pairs or one.cuts_tokens], units.first)
        return refusal or self.later.why_unsound(units.first, parcels)

    def _part_places(self, units: FirstUnits, parcels: Sequence[Parcel]) -> None:
        """Split off from a kind the blocks that call other functions, as their place (layer index) differs."""
        for kind in list(self._kinds):
            numbers = [number for number, its in self._numbers.items() if its is kind]
            if len({self._places[number] for number in numbers}) < 2:
                continue
            given = {n: specs_of(n, units.spec, units.extra_specs, parcels) for n in numbers}
            apart = kinds_apart(kind, {n: self.later.called(kind, n, *given[n]) for n in numbers}, self._tensor.cuts)
            self._numbers |= apart
            self._kinds += apart.values()

    def follow_units(self, units: FirstUnits, parcels: Sequence[Parcel]) -> None:
        """Check pairs again before units of new shapes, without communication: other ranks may have other shapes.

        Raises `MisfitError` if a pair in a block of this rank is not sound for these.
        """
        if why := self.later.why_unsound(units, parcels):
            raise MisfitError(why)

    def require_sound_state(self) -> None:
        """Raise `MisfitError` if host state set since the last step makes the cut of a block unsound."""
        if self._cut.layers:
            self._cut.require_as_cut(self.later.names)
        if self.later.followed:
            self.later.require_sound_state()

    def _given(
        self, units: FirstUnits, outlines: Sequence[nn.Module], parcels: Sequence[Parcel]
    ) -> list[tuple[BlockKind, Arrival, list[Called]]]:
        """Return each kind with its trial inputs, and the functions that it calls on them.

        Inputs have a few samples, or all of the unit's if the kind calls other functions for as many.
        """
        given = (units, outlines, parcels, self._context, self._setting.slices, self._dtype)
        few = every = Arrivals(*given)
        if (samples := units.spec.samples.shape[0]) > TRIAL_SAMPLES:
            every = Arrivals(*given, samples=samples)
        proved = []
        for kind in self._kinds:
            called = [self.later.called(kind, kind.number, *some.specs_at(kind.number)) for some in (few, every)]
            arrivals = few if called[0] and called[1] and called[1].is_like(called[0]) else every
            arrival = arrivals.block_arrival(kind.number, outlines[kind.number])
            proved.append((kind, arrival, [found for found in called[1:] if found is not None]))
        return proved

    def _followed(self, kind: BlockKind, arrival: Arrival, called: list[Called]) -> FollowedKind:
        setting = replace(self._setting, slices_tokens=self._tensor.tokens.inside(kind.number))
        is_paired = self._group.size > 1 and not kind.is_parted and self._tensor.has_pairs(kind.number, kind.choice)
        return FollowedKind(kind, self._tensor.are_ruled(kind.cuts), arrival, setting, is_paired, called)

    def _note_draws(self, followed: FollowedKind, masks: Masks) -> str:
        """Record in `masks` the dimensions of a kind's sharded draws; return why they cannot be keyed, or ""."""
        kind = followed.kind
        if not (followed.in_pairs or followed.setting.slices_tokens):
            return ""
        try:
            found = self._here.unusual_draws(kind, followed.arrival, followed.setting)
        except MisfitError as error:
            return f"{self._title(kind)}: {error}"
        numbers = [number for number, its in self._numbers.items() if its is kind]
        for (site, between), dim in found.items():
            sites = ((f"{number}{site.removeprefix(str(kind.number))}", between) for number in numbers)
            masks.cut_dims |= dict.fromkeys(sites, dim)
        return ""

    def _refusal(self, kind: BlockKind, arrival: Arrival) -> str:
        """Return why a kind of block is refused as it is cut, in words; empty: it is proved, or warned of."""
        slices_tokens = self._tensor.tokens.inside(kind.number)
        setting = replace(self._setting, slices_tokens=slices_tokens)
        changed = self._bench.changed_buffer(kind, arrival) if setting.slices > 1 else None
        if changed is not None:
            return (
                f"{kind.name} changes its buffer {changed!r} in each forward, of which slices make "
                f"{setting.slices} where there was one; run it with a schedule that does not slice"
            )
        whole = self._bench.whole(kind, arrival, setting)
        if self._bench.draws_unlike(kind):
            return (
                f"{self._title(kind)} draws from Python's or numpy's generator, which ranks of tp have in unlike "
                "states: seed both alike on all ranks, random.seed(…) and numpy.random.seed(…), or draw by torch"
            )
        if whole is None:
            self._warnings.add(kind.number, f"{kind.name} is not proved, since {kind.trouble}")
            self._part_unproved(kind)
            return ""
        read = self._read(kind, arrival)
        if read:
            return kind.refusal_to_cut(read, self._group.size)
        is_asked, unsound = self._tensor.are_ruled(kind.cuts), None
        if self._bench.find(kind, arrival, setting, whole, kind.choice) is None:
            unsound = self._bench.unsound(kind, arrival, kind.choice, is_asked=is_asked)
            if unsound is None:
                return self._refused_tokens(kind, arrival, setting)
        by_cut = Setting(tensor=setting.tensor)
        finding = unsound or self._bench.find(kind, arrival, by_cut, whole, kind.choice)
        if finding is not None:
            if not is_asked and not slices_tokens and self._is_parted(kind, arrival, setting, whole, finding):
                return self._refused_tokens(kind, arrival, setting)
            return self._refused_cut(kind, arrival, whole, finding)
        by_tokens = replace(by_cut, slices_tokens=slices_tokens)
        finding = self._bench.find(kind, arrival, by_tokens, whole, kind.choice)
        if finding is not None:
            return (
                f"{self._title(kind)} is given a slice of the tokens by sequence_parallel, and {finding}: something "
                "outside of its column/row pairs looks at other tokens, such as an attention that is kept whole; run "
                "without sequence_parallel, or let the attention be cut by a rule"
            )
        finding = self._bench.find(kind, arrival, setting, whole, kind.choice)
        return self._refused_slices(kind, finding) if finding is not None else ""

    def _read(self, kind: BlockKind, arrival: Arrival) -> Sequence[Cut]:
        """Return the first pair that is cut though the block's forward reads its weights directly; empty if none."""
        self._bench.note_reads(kind, arrival)
        cut = {path.path for path in self._bench.cuts(kind, kind.choice)}
        pairs = (pair for pair in pairs_of(kind.cuts) if kind.why_kept(pair))
        return next((pair for pair in pairs if any(layer.path in cut for layer in pair)), [])

    def _part_unproved(self, kind: BlockKind) -> None:
        """Part the pairs of blocks that cannot be proved, unless a rule demands them or tokens are sliced."""
        is_asked, is_sliced = self._tensor.are_ruled(kind.cuts), self._tensor.tokens.inside(kind.number)
        if is_asked or is_sliced or not self._tensor.has_pairs(kind.number, kind.choice):
            return
        if _part(kind):
            self._warnings.add(kind.number, f"{self._title(kind)}: layers are cut one by one: it is not proved")

    def _is_parted(self, kind: BlockKind, arrival: Arrival, setting: Setting, whole: Figures, finding: CutGap) -> bool:
        """Part the pairs of a kind's blocks if that makes them equivalent; return whether it does."""
        paired = (cut for pair in pairs_of(kind.cuts) if not kind.why_kept(pair) for cut in pair if cut.is_paired)
        choice = Choice({**kind.choice.rules, **alone(paired)})
        if self._bench.find(kind, arrival, setting, whole, choice) is not None or not _part(kind):
            return False
        advice = self._advice(kind, arrival, whole)
        helps = advice is not None and advice[2] and advice[2] != alone(advice[0])
        how = f"; as a pair with rules={everywhere(advice[2])}" if advice and helps else ""
        self._warnings.add(
            kind.number, f"{self._title(kind)}: layers are cut one by one, since in pairs, {finding}{how}"
        )
        return True

    def _advice(
        self, kind: BlockKind, arrival: Arrival, whole: Figures
    ) -> tuple[Sequence[Cut], CutGap, CandidateRules] | None:
        """Return the pair at fault, its finding, and rules by which it is equivalent (or {}); None if no pair is."""
        setting = Setting(tensor=self._setting.tensor)
        for pair in pairs_of(kind.cuts):
            others = replicated(cut for cut in kind.cuts if cut not in pair)
            choice = Choice({**others, **kind.choice.rules})
            fault = self._bench.find(kind, arrival, setting, whole, choice)
            if fault is None:
                fault = self._bench.unsound(kind, arrival, choice, is_asked=True)
                if fault is None:
                    continue
                return pair, fault, alone(pair)
            ways = paired_ways(pair, all_of_them=True) if pair[0].is_paired else []
            tried = (
                way
                for way in ways
                if self._bench.find(kind, arrival, setting, whole, Choice({**others, **way})) is None
            )
            return pair, fault, next(tried, {})
        return None

    def _refused_cut(self, kind: BlockKind, arrival: Arrival, whole: Figures, finding: CutGap) -> str:
        """Return the refusal of a cut, with the pair at fault and the rules that help."""
        found = self._advice(kind, arrival, whole)
        if found is None:
            return f"{self._title(kind)}: {finding}; keep it whole: rules={{'{kind.number}.*': 'replicate'}}"
        pair, fault, way = found
        names = " and ".join(repr(cut.path) for cut in pair)
        advice = "their outputs are laid out otherwise" if way else "keep them whole"
        advice = "let each take and give full tensors" if way == alone(pair) else advice
        rules = everywhere(way or replicated(pair))
        return f"{self._title(kind)} cut at {names}: {fault}; {advice}: rules={rules}"

    def _refused_tokens(self, kind: BlockKind, arrival: Arrival, setting: Setting) -> str:
        """Return why sequences must not be cut for a kind, as other inputs may differ; empty: they may be."""
        finding = (
            self._bench.unsound_tokens(kind, arrival, setting) if setting.cuts > 1 or setting.slices_tokens else None
        )
        return "" if finding is None else self._bench.refusal_of_tokens(kind, setting, finding)

    def _refused_slices(self, kind: BlockKind, finding: CutGap) -> str:
        setting = self._setting
        name, what = ("context", f"cp={setting.cuts}") if setting.context is not None else ("past", "slices")
        block = kind.blueprint.bare
        asks = accepted_extras(block)(name)
        why = f"not all of its attentions use `{name}`" if asks else f"its forward does not take `{name}`"
        return (
            f"{self._title(kind)} gives other numbers where sequences are cut into {setting.cuts} ({what}): {finding}; "
            f"{why}, or something else in it looks at other tokens"
        )

    def _title(self, kind: BlockKind) -> str:
        return kind.name if self._group.size == 1 else f"{kind.name} over tp={self._group.size}"


def _part(kind: BlockKind) -> bool:
    """Part the pairs of a kind's blocks: each layer takes and returns full tensors; return whether that is possible.

    It is not if gradients of weights within pairs are summed over the ranks: each rank would have the whole gradient.
    """
    kind.is_parted = not kind.choice.partial and {part_pairs(block) for block in kind.blocks} == {True}
    return kind.is_parted
