"""Test bench: runs twins of a block whole and cut, and compares them on all ranks that run together."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from quintsched.errors import MisfitError, StallError

from ...blocks.block_builders import TOKENS_DIM, seeded
from ...comm import EchoGroup, Group
from ...comm.host_collectives import reduce_numbers
from ..expert.moe import mixtures
from ..mesh_independent_dropout import Masks, key_dropouts
from ..tensor.apply_tensor_parallel import apply_tensor_parallel
from ..tensor.cut_rules import Choice, CutRules, find_cuts
from ..tensor.cuttable_layers import Cut
from ..tensor.parameter_shards import shard_of
from .block_twins import SEED, Blueprint
from .candidate_cuts import CandidateRules, alone, everywhere, replicated
from .prove_features_independent import DRAWS, draws_of_python, why_joined
from .reads_and_draws.random_draws_in_trials import NotedMasks, Shapes, note_draws, undisturbed
from .taint_features_by_rank import WeightReads
from .tokens.prove_tokens_independent import TokenGathers, why_tokens_meet
from .trial_inputs import Arrival, TrialInput
from .twin_runs import OF_WEIGHT, Deviation, Figures, Setting, differences, outputs_of, run_cut, run_whole, shaken

_logger = logging.getLogger("quintsched.runtime")

CUT_TOLERANCE = 1e-4
"""Relative to the largest number: well above float32 rounding by order of summation, well below a wrong cut's error."""

SCALES = (0.1, 10.0, 100.0)
"""Factors of further trial inputs, for the proof that tokens of cut sequences do not interact."""

_NOT_FINITE = 1e30
"""Stands for a difference that is not a finite number."""

_NOISE = 10.0
"""Multiple of the rounding noise that a difference may reach, where the noise exceeds the tolerance."""


@dataclass
class BlockKind:
    """Kind: blocks of equal structure, which are proved together by a twin of the first."""

    number: int
    blueprint: Blueprint
    cuts: Sequence[Cut]
    choice: Choice = field(default_factory=Choice)
    blocks: list[nn.Module] = field(default_factory=list)
    """The blocks of this rank, after they are cut."""
    proved: set[str] = field(default_factory=set)
    """Paths of layers whose pairs are proved."""
    is_parted: bool = False
    """Whether its pairs were parted, as they were not equivalent in the first step."""
    reads: dict[str, str] = field(default_factory=dict)
    """Paths of layers whose weights the block's forward passes to functions itself, to the words for it: kept whole."""
    hooked: CandidateRules = field(default_factory=dict)
    """Rules that keep layers of a twin whole which have hooks on their weights in the block."""
    trouble: str = ""
    """Reason why the last whole run of its twin failed; empty: it ran."""
    draws: bool = False
    """Whether it draws from Python's or numpy's generator, so that ranks that run together may diverge."""

    def why_kept(self, pair: Sequence[Cut]) -> str:
        """Return why a pair is kept whole, in words; empty: it need not be."""
        return next((f"it {self.reads[cut.path]}" for cut in pair if cut.path in self.reads), "")

    def refusal_to_cut(self, pair: Sequence[Cut], size: int) -> str:
        """Return the refusal to cut a pair whose weights are read, with the rules to write."""
        names = " and ".join(repr(cut.path) for cut in pair)
        return (
            f"{self.name} over tp={size} cannot be cut at {names}, for {self.why_kept(pair)}, where a rank has a shard "
            f"of them; keep them whole: rules={everywhere(replicated(pair))}"
        )

    @property
    def name(self) -> str:
        """Name of the block in messages."""
        return f"block {self.number} ({type(self.blueprint.bare).__name__})"


@dataclass(frozen=True)
class CutGap:
    """Largest difference between a block cut and whole; `trouble` is an error that cutting or running raised."""

    what: str = ""
    off: float = 0.0
    trouble: str = ""
    weights: frozenset[str] = frozenset()
    """Weights whose gradients differ, if nothing else does and none of them is cut: partial sums."""

    def __str__(self) -> str:
        if self.off >= _NOT_FINITE and not self.trouble:
            return f"{self.what} is of another shape, or not finite at other places"
        return self.trouble or f"{self.what} is off by {self.off:.1g} of its largest number"


class Bench:
    """Runner and comparator of twins, over the ranks of tp and cp.

    Args:
        group: the ranks of tp.
        rules: those of the user.
    """

    def __init__(self, group: Group, rules: CutRules) -> None:
        self.group, self.rules = group, rules

    def whole(self, kind: BlockKind, arrival: Arrival, setting: Setting) -> Figures | None:
        """Run a kind's twin whole; None if it fails on some rank: `kind.trouble` has the reason (collective)."""
        figures, kind.trouble = None, ""
        try:
            twin = self._drawn(kind, setting)
            with seeded(SEED, 0, self.group.device), undisturbed(self.group.device):
                drawn = draws_of_python()
                figures = run_whole(twin, arrival)
                if draws_of_python() != drawn:
                    kind.trouble, kind.draws = "it draws from Python's or numpy's generator", True
        except StallError:
            raise
        except Exception as error:
            kind.trouble = f"it does not run whole: {type(error).__name__}: {error}"
        if self.most([float(bool(kind.trouble))], setting)[0]:
            kind.trouble = kind.trouble or "another rank raised an error"
            return None
        return figures

    def changed_buffer(self, kind: BlockKind, arrival: Arrival) -> str | None:
        """Return the name of a buffer that a forward in training mode changes, if there is one; no count of experts."""
        try:
            twin = kind.blueprint.draw(self.group.device, trains=True)
            counts = {id(layer.expert_tokens) for layer in mixtures(twin).values()}
            before = {name: buffer.clone() for name, buffer in twin.named_buffers() if id(buffer) not in counts}
            with undisturbed(self.group.device):
                run_whole(twin, arrival)
        except Exception:  # the whole run reports it
            return None
        after = dict(twin.named_buffers())
        return next((n for n, b in before.items() if n in after and not torch.equal(b, after[n])), None)

    def note_reads(self, kind: BlockKind, arrival: Arrival) -> None:
        """Record the layers whose weights a kind's forward passes to functions itself, on any rank (collective)."""
        found: dict[str, str] = {}
        for trains in (True, False):
            reads = WeightReads({})
            try:
                twin = kind.blueprint.draw(self.group.device, trains=trains)
                layers = {cut.path: twin.get_submodule(cut.path.partition(".")[2]) for cut in kind.cuts}
                reads = WeightReads(layers)
                device = self.group.device
                with seeded(SEED, 0, device), undisturbed(device), torch.set_grad_enabled(trains), reads.watching():
                    outputs_of(twin, arrival)
            except Exception:  # the whole run reports it
                pass
            found = {**reads.found, **found}
        paths = sorted(cut.path for cut in kind.cuts)
        most = self.most([float(path in found) for path in paths], Setting(tensor=self.group)) if paths else []
        read = (path for path, is_read in zip(paths, most, strict=True) if is_read)
        kind.reads |= {path: found.get(path, "gives weights to functions, as another rank found,") for path in read}

    def find(
        self, kind: BlockKind, arrival: Arrival, setting: Setting, whole: Figures, choice: Choice
    ) -> CutGap | None:
        """Run a kind's twin cut, and return the largest difference on any rank; None if within the tolerance."""
        setting = replace(setting, partial=choice.partial)
        found, trouble = self._differences(kind, arrival, setting, whole, choice)
        failed, most, least = self.most([float(bool(trouble)), float(len(found)), -float(len(found))], setting)
        if failed:
            return CutGap(off=float("inf"), trouble=trouble or "another rank raised an error")
        if most != -least:
            return CutGap(off=float("inf"), trouble="ranks have other outputs and gradients to compare")
        offs = self.most([difference.off for difference, _ in found], setting)
        worst = max(range(len(offs)), key=offs.__getitem__)
        limit = CUT_TOLERANCE
        if CUT_TOLERANCE < offs[worst] < 1:
            limit = max(CUT_TOLERANCE, _NOISE * self.most([self._noise(kind, arrival, setting, whole)], setting)[0])
        wrong = [number for number, off in enumerate(offs) if off > limit]
        if not wrong:
            return None
        only_weights = all(found[n][0].what == OF_WEIGHT and found[n][1] for n in wrong)
        weights = frozenset(found[n][0].name for n in wrong) if only_weights else frozenset[str]()
        return CutGap(str(found[worst][0]), offs[worst], weights=weights)

    def _differences(
        self, kind: BlockKind, arrival: Arrival, setting: Setting, whole: Figures, choice: Choice
    ) -> tuple[list[tuple[Deviation, bool]], str]:
        """Return the differences, each with whether it belongs to an uncut weight; and an error in words, or ""."""
        try:
            block = self.twin(kind, setting, choice)
            with undisturbed(self.group.device):
                cut = run_cut(block, arrival, setting, whole)
            is_whole = {name: shard_of(parameter) is None for name, parameter in block.named_parameters()}
            found = differences(whole, cut, block, arrival, setting)
            return [(difference, is_whole.get(difference.name, False)) for difference in found], ""
        except StallError:
            raise
        except MisfitError as error:
            return [], str(error)
        except Exception as error:
            wants = "; write sizes that follow the tensor, such as chunk(3, -1) and view(B, T, -1, head_size)"
            of_sizes = type(error) in (RuntimeError, ValueError, IndexError)
            return [], f"it raises {type(error).__name__}: {error}{wants * of_sizes}"

    def unsound(self, kind: BlockKind, arrival: Arrival, choice: Choice, *, is_asked: bool) -> CutGap | None:
        """Return why a kind's pairs may not be equivalent for other numbers, dtypes or modes, on any rank (collective).

        `is_asked`: a rule demands them. None: they are sound, which is recorded in `kind.proved`.
        """
        pairs = self._pairs(kind, choice)
        if not pairs or self.group.size == 1:
            return None
        setting, why = Setting(tensor=self.group), self.why(kind, arrival, choice, is_asked=is_asked)
        if self.most([float(bool(why))], setting)[0]:
            return CutGap(off=float("inf"), trouble=why or "another rank found that it is none")
        unlike = self.unlike(kind, arrival, replace(setting, trains=True), choice)
        kind.proved |= {cut.path for cut in pairs if unlike is None}
        return unlike

    def unlike(self, kind: BlockKind, arrival: Arrival, setting: Setting, choice: Choice) -> CutGap | None:
        """Return the difference in a setting, if any; for a kind that draws randomly, only draws that are refused."""
        whole = self.whole(kind, arrival, setting)
        if whole is None:
            return None
        if self.most([float(self._draws(kind, arrival, setting, whole))], setting)[0]:
            return self._unlike_draws(kind, arrival, setting, choice) if setting.trains else None
        finding = self.find(kind, arrival, setting, whole, choice)
        where = ("as it is given", "in training")[setting.trains]
        return finding and CutGap(off=finding.off, trouble=f"{finding}, {where}")

    def _draws(self, kind: BlockKind, arrival: Arrival, setting: Setting, whole: Figures) -> bool:
        """Whether a kind's outputs depend on random draws, or are not finite."""
        if not setting.trains or not whole.is_finite:
            return not whole.is_finite
        with undisturbed(self.group.device, SEED + 1):
            other = outputs_of(self._drawn(kind, setting), arrival)
        return not all(torch.equal(other[name], output) for name, output in whole.outputs.items())

    def _unlike_draws(self, kind: BlockKind, arrival: Arrival, setting: Setting, choice: Choice) -> CutGap | None:
        """Return a finding if a kind draws for a shard of a tensor in a way that is refused, on any rank."""
        trouble = ""
        with suppress(Exception):  # other runs report other errors
            try:
                self.note_draws(kind, arrival, setting, choice)
            except MisfitError as error:
                trouble = str(error)
        is_refused = self.most([float(bool(trouble))], setting)[0]
        return CutGap(off=float("inf"), trouble=trouble or "another rank draws for a part") if is_refused else None

    def note_draws(self, kind: BlockKind, arrival: Arrival, setting: Setting, choice: Choice) -> Shapes:
        """Run a kind's cut twin in training mode, and return the shapes that its dropouts draw; see `note_draws`."""
        masks, sliced = NotedMasks(self.group.device), setting.tensor if setting.slices_tokens else None
        twin = self.twin(kind, replace(setting, trains=True), choice, masks)
        return note_draws(twin, kind.number, arrival, masks, sliced)

    def unsound_tokens(self, kind: BlockKind, arrival: Arrival, setting: Setting) -> CutGap | None:
        """Return why sequences may not be cut for a kind, for any inputs, on any rank (collective); None: they may."""
        why = self.why_tokens_meet(kind, arrival, setting)
        if self.most([float(bool(why))], setting)[0]:
            return CutGap(off=float("inf"), trouble=why or "another rank found that tokens of several ranks meet")
        cut = kind.choice if setting.cuts == 1 else Choice()
        setting = replace(setting, tensor=None, slices_tokens=False) if setting.cuts > 1 else setting
        others = [(arrival.scaled(scale), f"{scale:g} times as large") for scale in SCALES]
        others.append((arrival.scaled(max(SCALES), late=True), f"{max(SCALES):g} times as large in late tokens"))
        for other, words in others:
            whole = self.whole(kind, other, setting)
            finite = whole is not None and whole.is_finite
            finding = self.find(kind, other, setting, whole, cut) if whole is not None and finite else None
            if finding is not None:
                return CutGap(off=finding.off, trouble=f"{finding}, where it is given numbers {words}")
        return None

    def why_tokens_meet(self, kind: BlockKind, arrival: Arrival, setting: Setting) -> str:
        """Return why tokens of several ranks or slices may interact in a kind, found by this rank alone: "it …"."""
        try:
            found = why_tokens_meet(kind.blueprint, arrival, setting, self.group.device) if setting.cuts > 1 else ""
            if setting.slices_tokens and not found:
                found = self._why_slices_meet(kind, arrival)
        except Exception as error:
            why = f"its tokens cannot be followed: {type(error).__name__}: {error}"
            _logger.warning("%s is proved at the numbers that were tried alone, for %s", kind.name, why)
            found = ""
        return found and f"it {found}"

    def _why_slices_meet(self, kind: BlockKind, arrival: Arrival) -> str:
        """Return why tokens sliced over the ranks of tp may interact in a kind, outside of its pairs."""
        whole = arrival.changed(lambda given: TrialInput(given.tensor))
        sliced = replace(whole, activation=whole.activation.changed(lambda given: TrialInput(given.tensor, TOKENS_DIM)))
        gathered = TokenGathers(partial(self._cuts, kind, choice=kind.choice), kind.choice.gathers_before)
        setting = Setting(slices=self.group.size)
        return why_tokens_meet(kind.blueprint, sliced, setting, self.group.device, gathered)

    def refusal_of_tokens(self, kind: BlockKind, setting: Setting, why: object) -> str:
        """Return the refusal of a kind whose sequences may not be cut, with advice."""
        title = kind.name if self.group.size == 1 else f"{kind.name} over tp={self.group.size}"
        helps = "take `context`, and look at all tokens by context.whole(tensor); or run without cp"
        helps = helps if setting.context is not None else "run it with a schedule that does not slice"
        what = f"over cp={setting.cuts}" if setting.context is not None else f"into {setting.cuts} slices"
        if setting.cuts == 1:
            what, helps = "over tp, by sequence_parallel", "run without sequence_parallel"
        return f"{title} may give other numbers where sequences are cut {what}: {why}; {helps}"

    def _pairs(self, kind: BlockKind, choice: Choice) -> list[Cut]:
        return [cut for cut in self.cuts(kind, choice) if cut.is_paired]

    def cuts(self, kind: BlockKind, choice: Choice) -> list[Cut]:
        """Return the cuts of a kind by a choice."""
        return self._cuts(kind, kind.blueprint.bare, choice) if self.group.size > 1 else []

    def _cuts(self, kind: BlockKind, twin: nn.Module, choice: Choice) -> list[Cut]:
        return find_cuts(
            twin, {**kind.hooked, **choice.rules, **self.rules}, self.group.size, str(kind.number), strict=False
        )

    def why(self, kind: BlockKind, arrival: Arrival, choice: Choice, *, is_asked: bool) -> str:
        """Return why a kind's pairs may be unsound, found by this rank alone, in words that begin with "it"."""
        cuts_of, cut = partial(self._cuts, kind, choice=choice), partial(self._cut, kind, choice=choice)
        group = EchoGroup(self.group.size, self.group.device)
        try:
            found = why_joined(kind.blueprint, cuts_of, cut, arrival, group, trusts=is_asked)
        except Exception as error:
            found = f"raises {type(error).__name__} where its features are followed: {error}"
        kind.draws |= found == DRAWS
        return found and f"it {found}"

    def draws_unlike(self, kind: BlockKind) -> bool:
        """Whether a kind draws from Python's or numpy's generator, whose states differ between ranks of tp."""
        text = repr(draws_of_python()).encode()
        state = float(int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "big"))
        draws, most, least = self.most([float(kind.draws), state, -state], Setting(tensor=self.group))
        return bool(draws) and most != -least

    def refusal(self, kind: BlockKind, why: str) -> str:
        """Return the refusal of a kind whose pairs are unsound, with the rules to write."""
        pairs = self._pairs(kind, kind.choice)
        names = " and ".join(repr(cut.path) for cut in pairs)
        return (
            f"{kind.name} over tp={self.group.size} is cut in pairs, {names}, but {why}; let each take and give full "
            f"tensors: rules={everywhere(alone(pairs))}"
        )

    def _drawn(self, kind: BlockKind, setting: Setting, *, has_hooks: bool = True) -> nn.Module:
        """Return a kind's twin with its dropout modules in evaluation mode."""
        twin = kind.blueprint.draw(self.group.device, trains=setting.trains)
        for module in twin.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.eval()
        if has_hooks:
            kind.blueprint.put_hooks(twin)
        return twin

    def twin(self, kind: BlockKind, setting: Setting, choice: Choice, masks: Masks | None = None) -> nn.Module:
        """Return a kind's twin, cut by a setting and a choice; its dropouts draw by `masks`, if given."""
        twin = self._drawn(kind, setting, has_hooks=setting.tensor is None)
        if masks is not None:
            key_dropouts(twin, kind.number, masks)
        if setting.tensor is None:
            return twin
        twin = self._cut(kind, twin, setting.tensor, choice, slices=setting.slices_tokens)
        kind.blueprint.put_hooks(twin)
        return twin

    def _cut(
        self, kind: BlockKind, twin: nn.Module, group: Group, choice: Choice, *, slices: bool = False
    ) -> nn.Module:
        return apply_tensor_parallel(
            twin,
            group,
            {**kind.hooked, **choice.rules, **self.rules},
            path=str(kind.number),
            sequence_parallel=slices,
            strict=False,
            partial=[name for name, _ in twin.named_parameters()],
            gathers_before=choice.gathers_before,
        )

    def _noise(self, kind: BlockKind, arrival: Arrival, setting: Setting, whole: Figures) -> float:
        """Return the rounding noise: the change of a whole block's results if weights and inputs change by rounding."""
        block = self._drawn(kind, setting)
        changed = shaken(arrival, block)
        with undisturbed(self.group.device):
            again = run_whole(block, changed)
        return max(difference.off for difference in differences(whole, again, block, arrival, Setting()))

    def most(self, numbers: Sequence[float], setting: Setting) -> list[float]:
        """Return the maximum of each number over the ranks that run a block together (collective)."""
        found = [min(number, _NOT_FINITE) for number in numbers]
        for group in setting.groups:
            found = reduce_numbers(group, found)
        return found
