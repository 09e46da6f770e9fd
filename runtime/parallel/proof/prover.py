"""Proves that blocks give the same numbers cut as whole, or refuses them: before the first step, each kind once.

    built     block ─▶ blueprint, one per kind          fused layers: the layout that proves is the one that is cut
    step 0    twin, whole ──┐
              twin, cut ────┴─▶ the same outputs and gradients?  ─▶ no: which of its cuts, and the rule to write

Names say which layers look like a pair; only numbers say that they are one: what is between a column and its row may
normalise, sort or mix features. A rank runs one twin at a time, so that it holds one full block besides its own stages.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from quintsched.errors import MisfitError, StallError

from ...blocks.blocks import Parcel, accepted_extras, required_parameters
from ...blocks.dtensor import is_sharded
from ...comm import Group, ReduceOp
from ...comm.control import first_said
from ...job.choices import Proofs, TensorSplit
from ..context.context import ContextParallel
from ..tensor.apply import apply_tensor_parallel
from ..tensor.model_cuts import TensorCuts
from ..tensor.rules import Cut, RuleData, Rules
from .arrivals import Arrival, Arrivals, FirstUnits, guesses
from .draws import undisturbed
from .kinds import is_built_in, kind_of
from .layouts import layouts_of
from .trial import Figures, Setting, differences, run_cut, run_whole, shaken
from .twins import Blueprint

TOLERANCE = 1e-4
"""Of the largest number: far more than the order of additions changes in float32, far less than a wrong cut does."""

_NOISE = 10.0
"""Where rounding alone changes numbers by more, a difference may be so many times that."""

_logger = logging.getLogger("quintsched.runtime")


@dataclass
class _Kind:
    """Blocks that are proved together, by the first of them."""

    number: int
    blueprint: Blueprint
    cuts: Sequence[Cut]
    rules: Rules
    """What is cut otherwise than names have it: by names in this block."""


@dataclass(frozen=True)
class Finding:
    """The worst of what differs between a block cut and whole; `trouble` is an error that cutting or running raised."""

    what: str = ""
    off: float = 0.0
    trouble: str = ""

    def __str__(self) -> str:
        return self.trouble or f"{self.what} is off by {self.off:.1g} of its largest number"


class Prover:
    """Proves the blocks of one rank.

    Args:
        tensor: how blocks are cut over tp.
        groups: the ranks of tp, and those that hold slices of the same sequences.
        sequences: what blocks are given of these.
        slices: into how many units a microbatch is cut.
        which: which blocks: all that are not built in ("foreign"), "all", or "none".
        dtype: of the weights; None: as they are built.
    """

    def __init__(
        self,
        tensor: TensorCuts,
        groups: tuple[Group, Group],
        sequences: ContextParallel,
        slices: int,
        which: Proofs,
        dtype: torch.dtype | None,
    ) -> None:
        self._tensor, self._which, self._dtype = tensor, which, dtype
        self._group, context = groups
        self._setting = Setting(
            tensor=self._group if self._group.size > 1 else None,
            sequences=sequences if context.size > 1 else None,
            context=context if context.size > 1 else None,
            slices=slices,
        )
        self._context = context
        self._kinds: dict[str, _Kind] = {}
        self._is_done = which == "none"

    def layouts(self, number: int, block: nn.Module) -> Rules:
        """Take note of a block that is whole yet, and return rules for its fused layers; all ranks of tp call this."""
        cuts = self._tensor.cuts[number]
        if not self._wants(number, block, cuts):
            return {}
        name = kind_of(block, cuts, str(number))
        if name not in self._kinds:
            try:
                blueprint = Blueprint(block)
            except Exception as error:
                _logger.warning("block %d is not proved, for it cannot be copied: %s", number, error)
                return {}
            kind = self._kinds[name] = _Kind(number, blueprint, cuts, {})
            kind.rules = self._proposals(kind, block)
        kind = self._kinds[name]
        return {_renumbered(path, number): rule for path, rule in kind.rules.items()}

    def _wants(self, number: int, block: nn.Module, cuts: Sequence[Cut]) -> bool:
        setting = self._setting
        does_something = cuts or setting.cuts > 1 or self._tensor.tokens.inside(number)
        is_known = is_built_in(block) and self._which != "all" and not self._tensor.are_ruled(cuts)
        return not self._is_done and bool(does_something) and not is_known and not is_sharded(block)

    def _proposals(self, kind: _Kind, block: nn.Module) -> Rules:
        """Return rules for those fused layers that prove in another layout than the one that names have."""
        chosen: dict[str, RuleData] = {}
        for pair in _pairs(kind.cuts):
            candidates = layouts_of(pair)
            if len(candidates) < 2 or required_parameters(block) != 1:
                continue
            others = _replicated(cut for cut in kind.cuts if cut not in pair)
            for arrival in guesses(block, self._group.device, self._dtype or torch.float32):
                whole = self._whole(kind, arrival, Setting(tensor=self._setting.tensor))
                if whole is None:
                    continue
                proved = (rules for rules in candidates if self._proves(kind, arrival, whole, {**rules, **others}))
                chosen |= next(proved, {})
                break
        return chosen

    def _proves(self, kind: _Kind, arrival: Arrival, whole: Figures, rules: Rules) -> bool:
        return self._find(kind, arrival, Setting(tensor=self._setting.tensor), whole, rules) is None

    def prove(self, units: FirstUnits, outlines: Sequence[nn.Module], parcels: Sequence[Parcel], world: Group) -> None:
        """Run each kind of block, cut beside whole, once; every rank of the run calls this, in its first step.

        Raises `MisfitError` on every rank where a block of some rank gives other numbers.
        """
        is_other = len(units.extras) != self._setting.slices  # an evaluation, which does not slice
        if self._is_done or is_other or self._group.size * self._setting.cuts == 1:
            return
        self._is_done = True
        refusal = ""
        if self._kinds:
            arrivals = Arrivals(units, outlines, parcels, self._context, self._setting.slices, self._dtype)
            found = (
                self._refusal(kind, arrivals.at(kind.number, outlines[kind.number])) for kind in self._kinds.values()
            )
            refusal = next((text for text in found if text), "")
        self._kinds.clear()
        said = first_said(refusal, world)
        if said:
            raise MisfitError(said)

    def _refusal(self, kind: _Kind, arrival: Arrival) -> str:
        """Return why a kind of block cannot be run as it is, in words; empty: it can."""
        setting = replace(self._setting, slices_tokens=self._tensor.tokens.inside(kind.number))
        whole = self._whole(kind, arrival, setting)
        if whole is None or self._find(kind, arrival, setting, whole, kind.rules) is None:
            return ""
        by_cut = Setting(tensor=setting.tensor)
        finding = self._find(kind, arrival, by_cut, whole, kind.rules)
        if finding is not None:
            return self._refused_cut(kind, arrival, whole, finding)
        by_tokens = replace(by_cut, slices_tokens=setting.slices_tokens)
        finding = self._find(kind, arrival, by_tokens, whole, kind.rules)
        if finding is not None:
            return (
                f"{self._title(kind)} is given a slice of the tokens by sequence_parallel, and {finding}: something "
                "outside of its column/row pairs looks at other tokens, such as an attention that is kept whole; run "
                "without sequence_parallel, or let the attention be cut by a rule"
            )
        finding = self._find(kind, arrival, setting, whole, kind.rules)
        return self._refused_slices(kind, finding) if finding is not None else ""

    def _refused_cut(self, kind: _Kind, arrival: Arrival, whole: Figures, finding: Finding) -> str:
        """Name the pair that is at fault, and the rule that helps."""
        setting = Setting(tensor=self._setting.tensor)
        for pair in _pairs(kind.cuts):
            others = _replicated(cut for cut in kind.cuts if cut not in pair)
            fault = self._find(kind, arrival, setting, whole, {**others, **kind.rules})
            if fault is None:
                continue
            names = " and ".join(repr(cut.path) for cut in pair)
            candidates = layouts_of(pair, all_of_them=True)
            found = next((r for r in candidates if self._proves(kind, arrival, whole, {**others, **r})), None)
            rules = found or _replicated(pair)
            advice = "their outputs are laid out otherwise" if found else "keep them whole"
            return f"{self._title(kind)} cut at {names}: {fault}; {advice}: rules={_everywhere(rules)}"
        return f"{self._title(kind)}: {finding}; keep it whole: rules={{'{kind.number}.*': 'replicate'}}"

    def _refused_slices(self, kind: _Kind, finding: Finding) -> str:
        setting = self._setting
        name, what = ("context", f"cp={setting.cuts}") if setting.context is not None else ("past", "slices")
        block = kind.blueprint.bare
        asks = accepted_extras(block)(name)
        why = f"not all of its attentions use `{name}`" if asks else f"its forward does not take `{name}`"
        return (
            f"{self._title(kind)} gives other numbers where sequences are cut into {setting.cuts} ({what}): {finding}; "
            f"{why}, or something else in it looks at other tokens"
        )

    def _title(self, kind: _Kind) -> str:
        tensor = self._setting.tensor
        over = f" over tp={tensor.size}" if tensor is not None else ""
        return f"block {kind.number} ({type(kind.blueprint.bare).__name__}){over}"

    def _whole(self, kind: _Kind, arrival: Arrival, setting: Setting) -> Figures | None:
        """Run a kind's twin whole; None where it cannot be run, on some rank."""
        figures, problem = None, ""
        try:
            twin = kind.blueprint.draw(self._group.device)
            with undisturbed(self._group.device):
                figures = run_whole(twin, arrival)
        except StallError:
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if self._most(float(figures is None), setting):
            if arrival.inputs is not None:
                _logger.warning("%s is not proved, for it does not run whole: %s", self._title(kind), problem)
            return None
        return figures

    def _find(self, kind: _Kind, arrival: Arrival, setting: Setting, whole: Figures, rules: Rules) -> Finding | None:
        """Run a kind's twin cut; return what is off, if anything, on any rank."""
        worst = self._compare(kind, arrival, setting, whole, rules)
        off = self._most(worst.off, setting)
        if off <= TOLERANCE or (off < 1 and off <= _NOISE * self._noise(kind, arrival, whole)):
            return None
        return worst if worst.off > TOLERANCE else replace(worst, off=off)

    def _compare(self, kind: _Kind, arrival: Arrival, setting: Setting, whole: Figures, rules: Rules) -> Finding:
        try:
            block = self._cut(kind, setting, rules)
            with undisturbed(self._group.device):
                cut = run_cut(block, arrival, setting, whole)
            what, off = max(differences(whole, cut, block, arrival, setting), key=lambda one: one[1])
            return Finding(what, off)
        except StallError:
            raise
        except MisfitError as error:
            return Finding(off=float("inf"), trouble=str(error))
        except Exception as error:
            return Finding(off=float("inf"), trouble=f"cut, it raises {type(error).__name__}: {error}")

    def _cut(self, kind: _Kind, setting: Setting, rules: Rules) -> nn.Module:
        twin = kind.blueprint.draw(self._group.device)
        if setting.tensor is None:
            return twin
        return apply_tensor_parallel(
            twin,
            setting.tensor,
            {**rules, **self._tensor.rules},
            path=str(kind.number),
            sequence_parallel=setting.slices_tokens,
        )

    def _noise(self, kind: _Kind, arrival: Arrival, whole: Figures) -> float:
        """Return how much numbers of a whole block change with its weights and inputs in their last bits."""
        block = kind.blueprint.draw(self._group.device)
        changed = shaken(arrival, block)
        with undisturbed(self._group.device):
            again = run_whole(block, changed)
        return max(off for _, off in differences(whole, again, block, arrival, Setting()))

    def _most(self, number: float, setting: Setting) -> float:
        """Return the largest of the numbers of the ranks that run a block together."""
        found = torch.tensor([min(number, 1e30)], dtype=torch.float64, device=self._group.device)
        for group in setting.groups:
            group.all_reduce(found, ReduceOp.MAX).wait()
        return float(found)


def _pairs(cuts: Sequence[Cut]) -> list[list[Cut]]:
    """Return the cuts by the module whose layers they are: columns and rows that feed each other."""
    parents: dict[int, list[Cut]] = {}
    for cut in cuts:
        parents.setdefault(id(cut.parent), []).append(cut)
    return list(parents.values())


def _replicated(cuts: Iterator[Cut] | Sequence[Cut]) -> dict[str, RuleData]:
    return {cut.path: TensorSplit.REPLICATE.value for cut in cuts}


def _renumbered(path: str, number: int) -> str:
    _, dot, rest = path.partition(".")
    return f"{number}{dot}{rest}"


def _everywhere(rules: Mapping[str, RuleData]) -> dict[str, RuleData]:
    """Return rules for the layers of all blocks that are called so."""
    return {(_renumbered(path, 0).replace("0", "*", 1) if "." in path else path): rule for path, rule in rules.items()}
