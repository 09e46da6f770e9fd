"""Proofs repeated in later steps: blocks with pairs or cut sequences are checked again for new shapes or host state.

    shapes      units of other lengths or numbers of samples ─▶ other calls on the meta device?     ─▶ checked again
    attributes  self.hot = True, config.t = 3, a global       ─▶ detected before the next step      ─▶ checked again

A step of known shapes, before which no host state was set, costs no check.

Twins run on this rank alone, cut for each rank of tp in turn: in later steps ranks may have units of different shapes.

whole ──────────────────────────────┐
cut for rank 0 ─┐ in one process,   ├─▶ the same outputs and gradients?
cut for rank 1 ─┴ collectives too ──┘
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quintsched.errors import MisfitError, StallError

from ...blocks.block_builders import Parcel, accepted_extras
from ...blocks.shape_inference import trace_shapes
from ...blocks.trees import TreeSpec
from ...comm import EchoGroup, SelfGroup
from ...comm.local.rank_threads_in_turns import EnteredModes, run_in_turns
from ...user_objects.control_flow_state import SteeringState
from ...user_objects.find_impure_code import asking_elsewhere, unrecorded
from ...user_objects.library_or_user import is_of_framework
from ..mesh_independent_dropout import CutSite
from ..tensor.cut_rules import Choice
from ..tensor.sequence_parallel import SequenceParallel
from .block_kinds import content_of
from .prove_features_independent import state_of_host
from .reads_and_draws.random_draws_in_trials import unusual_parts
from .trial_inputs import Arrival, Arrivals, FirstUnits, specs_of
from .twin_runs import Figures, Setting
from .twin_test_bench import Bench, BlockKind, CutGap


class BenchHere(Bench):
    """A bench without communication: it runs the parts of all ranks of tp in this process, one after the other."""

    def unsound_again(self, kind: BlockKind, arrival: Arrival, *, is_asked: bool) -> CutGap | None:
        """Return why a kind's pairs may be unsound for its present state and these inputs; None: they are sound."""
        finding = self.unlike(kind, arrival, Setting(tensor=self.group), kind.choice)
        return finding or self.unsound(kind, arrival, kind.choice, is_asked=is_asked)

    def has_pairs(self, kind: BlockKind) -> bool:
        """Whether a kind's blocks are cut in column/row pairs."""
        return not kind.is_parted and bool(self._pairs(kind, kind.choice))

    def cut_outline(self, kind: BlockKind, outline: nn.Module, *, slices: bool) -> list[nn.Module]:
        """Return a meta-device block as cut for a rank, between modules that scatter and gather tokens if `slices`."""
        group = EchoGroup(self.group.size, self.group.device)
        block = self._cut(kind, outline, group, kind.choice, slices=slices)
        return SequenceParallel([slices], group).around(0, block)

    def why_tokens_meet(self, kind: BlockKind, arrival: Arrival, setting: Setting) -> str:
        """Return why tokens of several ranks or slices may interact in a kind: "it …"; over tp, numerically too."""
        found = super().why_tokens_meet(kind, arrival, setting)
        for trains in (True, False) if setting.slices_tokens and not found else ():
            sliced = Setting(tensor=self.group, slices_tokens=True, trains=trains)
            found = found or str(self.unlike(kind, arrival, sliced, kind.choice) or "")
        return found

    def unusual_draws(self, kind: BlockKind, arrival: Arrival, setting: Setting) -> dict[CutSite, int | None]:
        """Return the sites where a kind draws along unusual dimensions (see `unusual_parts`).

        Raises `MisfitError` if calls of one site differ.
        """
        group, sliced = self.group, setting.slices_tokens
        try:
            whole = self.note_draws(kind, arrival, Setting(), kind.choice)
            if not whole:
                return {}
            of_one = self.note_draws(kind, arrival.of_sample(), Setting(), kind.choice)
            cut = run_in_turns(
                group.size,
                group.device,
                lambda mine: Bench(mine, self.rules).note_draws(kind, arrival, Setting(mine, sliced), kind.choice),
            )[group.index]
        except Exception:  # the proof reports it
            return {}
        rows = arrival.activation.parts[0].tensor.shape[:2].numel()
        found = unusual_parts(whole, of_one, cut, group.size, rows)
        return {site: dim for site, dim in found.items() if sliced or site[1]}

    def find(
        self, kind: BlockKind, arrival: Arrival, setting: Setting, whole: Figures, choice: Choice
    ) -> CutGap | None:
        """Run a kind's twin cut for each rank in turn; return the largest difference, None if within the tolerance."""
        group = self.group
        try:
            return run_in_turns(
                group.size,
                group.device,
                lambda mine: Bench(mine, self.rules).find(kind, arrival, replace(setting, tensor=mine), whole, choice),
            )[0]
        except StallError as error:
            return CutGap(off=float("inf"), trouble=f"ranks of tp do other things: {error}")

    def most(self, numbers: Sequence[float], setting: Setting) -> list[float]:
        """Return the numbers unchanged: no other ranks take part."""
        return list(numbers)


@dataclass(frozen=True)
class Called:
    """Trace of a block's calls: operators and arguments as strings and ints, and sizes derived from input shapes."""

    words: tuple[str | int, ...]
    sizes: tuple[int, ...]

    def is_like(self, known: Called) -> bool:
        """Whether it equals a known trace, up to ints that scale with the input sizes (a multiple, plus or minus 1)."""
        sizes = [(was, now) for was, now in zip(known.sizes, self.sizes, strict=False) if was and was != now]
        return len(self.words) == len(known.words) and all(
            now == was or (type(was) is type(now) is int and _is_of_sizes(was, now, sizes))
            for was, now in zip(known.words, self.words, strict=True)
        )


def _is_of_sizes(was: int, now: int, sizes: Sequence[tuple[int, int]]) -> bool:
    """Whether two ints are the same multiple of an old and a new size, both plus the same offset of 0, 1 or -1."""
    return any(
        was > off and (was - off) % size == 0 and now - off == (was - off) // size * by_now
        for size, by_now in sizes
        for off in (0, 1, -1)
    )


@dataclass
class FollowedKind:
    """A kind of block that is checked in later steps, with its known call traces and its trial inputs.

    `setting` has the groups over which it is cut, and whether tokens are sliced.
    """

    kind: BlockKind
    is_asked: bool
    arrival: Arrival
    setting: Setting
    in_pairs: bool
    known: list[Called] = field(default_factory=list)

    @property
    def cuts_tokens(self) -> bool:
        """Whether sequences are cut or tokens sliced."""
        return self.setting.cuts > 1 or self.setting.slices_tokens


class LaterSteps:
    """Checker, from step to step, of pairs in a rank's blocks, and of tokens of cut sequences.

    Args:
        bench: runs and compares twins.
        outlines: all blocks, on the meta device.
        dtype: of the weights; None: as they are built.
        tokens: map of the blocks in which tokens are sliced over tp.
    """

    def __init__(
        self, bench: BenchHere, outlines: Sequence[nn.Module], dtype: torch.dtype | None, tokens: SequenceParallel
    ) -> None:
        self._bench, self._outlines, self._dtype, self._tokens = bench, outlines, dtype, tokens
        self.followed: list[FollowedKind] = []
        self._lengths = set[str]()
        self._state = self._of_pairs = SteeringState({})
        self.names = self._state.names
        self._noted = ""
        self._calls: dict[tuple[int, str], Called | None] = {}

    def follow_kinds(self, kinds: Sequence[FollowedKind], units: FirstUnits) -> None:
        """Check these kinds from now on; the shapes of `units` are proved for cut sequences."""
        self.followed, self._lengths = list(kinds), {_shapes_of(units)}
        self._watch()

    def _watch(self) -> None:
        pairs = [one for one in self.followed if one.in_pairs]
        self._state = self._of_pairs = _steering(self.followed)
        self.names = self._state.names
        if len(pairs) < len(self.followed):
            self._of_pairs = _steering(pairs)

    def why_unsound(self, units: FirstUnits, parcels: Sequence[Parcel]) -> str:
        """Return a refusal of a block that may not be cut for units of these shapes, in words; empty: all may be.

        Of units without samples, which only experts over ep need, there is nothing to compare.
        """
        if not units.spec.samples.shape[0]:
            return ""
        return self._unsound_pairs(units, parcels) or self._unsound_lengths(units, parcels)

    def _unsound_pairs(self, units: FirstUnits, parcels: Sequence[Parcel]) -> str:
        arrivals: Arrivals | None = None
        for followed in (one for one in self.followed if one.in_pairs):
            number = followed.kind.number
            called = self.called(followed.kind, number, *specs_of(number, units.spec, units.extra_specs, parcels))
            if called is not None and any(map(called.is_like, followed.known)):
                continue
            if arrivals is None:
                alone = SelfGroup(0, self._bench.group.device)
                arrivals = Arrivals(units, self._outlines, parcels, alone, 1, self._dtype, samples=None)
            why = self._why_no_pair(followed, arrivals.block_arrival(number, self._outlines[number]))
            if why:
                return self._bench.refusal(followed.kind, f"given {units.spec}, {why}")
            if called is not None:
                followed.known.append(called)
        return ""

    def _why_no_pair(self, followed: FollowedKind, arrival: Arrival) -> str:
        found = self._bench.unsound_again(followed.kind, arrival, is_asked=followed.is_asked)
        return "" if found is None else str(found)

    def _unsound_lengths(self, units: FirstUnits, parcels: Sequence[Parcel]) -> str:
        shapes, of_tokens = _shapes_of(units), [one for one in self.followed if one.cuts_tokens]
        if not of_tokens or shapes in self._lengths:
            return ""
        cuts, device = of_tokens[0].setting.cuts, self._bench.group.device
        inputs, targets, extras = (list(each) * cuts for each in (units.inputs, units.targets, units.extras))
        joined = FirstUnits(units.spec, units.extra_specs, inputs, targets, extras)
        samples, alone = units.spec.samples.shape[0], SelfGroup(0, device)
        arrivals = Arrivals(joined, self._outlines, parcels, alone, cuts, self._dtype, samples=samples)
        for followed in of_tokens:
            number = followed.kind.number
            why = self._bench.why_tokens_meet(
                followed.kind, arrivals.block_arrival(number, self._outlines[number]), followed.setting
            )
            if why:
                return self._bench.refusal_of_tokens(followed.kind, followed.setting, f"given {units.spec}, {why}")
        self._lengths.add(shapes)
        return ""

    @property
    def look(self) -> Callable[[], None] | None:
        """Callback after a forward that checks host state, which may be reset by the end of the step; None: no need."""
        return self._look if self._of_pairs.of_users else None

    def _look(self) -> None:
        if not self._noted:
            names = (slot.name for slot in self._of_pairs.moved(self._of_pairs.of_users))
            self._noted = next((name for name in names if not name.endswith(".training")), "")

    def why_changed(self) -> str:
        """Return a refusal if host state that pairs depend on was changed during a step, in words; else empty.

        Hooks are ignored, as the first step adds and removes some, and so is `training`, which evaluations change.
        """
        name = self._noted
        if not name:
            moved = (place.name for place in self._of_pairs.moved(hooks=False))
            name = next((name for name in moved if not name.endswith(".training")), "")
        if not name:
            return ""
        pairs = [followed.kind for followed in self.followed if followed.in_pairs]
        kind = next((kind for kind in pairs if name.startswith(f"block {kind.number} ")), pairs[0])
        why = f"{name!r} was changed while a step ran, by which it may be none: pass it as an extra, or"
        return self._bench.refusal(kind, why).replace(" or;", " or")

    def require_sound_state(self) -> None:
        """Raise `MisfitError` if host state was changed so that blocks may not be cut any more."""
        changed = self._state.changed()
        if changed is None:
            return
        self.followed = [again for followed in self.followed for again in self._as_they_are(followed, changed)]
        for followed in self.followed:
            kind, why = followed.kind, ""
            if followed.in_pairs and (why := self._why_no_pair(followed, followed.arrival)):
                raise MisfitError(self._bench.refusal(kind, f"{changed!r} was set, and now {why}"))
            if followed.cuts_tokens:
                why = self._bench.why_tokens_meet(kind, followed.arrival, followed.setting)
            if why:
                why = f"{changed!r} was set, and now {why}"
                raise MisfitError(self._bench.refusal_of_tokens(kind, followed.setting, why))
        self._lengths.clear()
        self._calls.clear()
        self._watch()

    def _as_they_are(self, followed: FollowedKind, changed: str) -> list[FollowedKind]:
        """Split a kind by the present contents of its blocks, and return one entry for each group of equal blocks."""
        kind, alike = followed.kind, dict[object, list[nn.Module]]()
        for block in kind.blocks:
            alike.setdefault(content_of(block), []).append(block)
        try:
            kinds = [replace(kind, blueprint=kind.blueprint.renewed(some[0]), blocks=some) for some in alike.values()]
        except Exception as error:
            raise MisfitError(
                f"{kind.name}: {changed!r} was set, and whether it may be cut as it is now cannot be proved: {error}; "
                "build the engine again"
            ) from error
        return [replace(followed, kind=kind, known=[]) for kind in kinds]

    def called(self, kind: BlockKind, number: int, given: TreeSpec, beside: Mapping[str, TreeSpec]) -> Called | None:
        """Return the trace of a block's calls for inputs of these shapes, in training and evaluation, whole and cut.

        None: tracing needs data.
        """
        block = self._outlines[number]
        accepts = accepted_extras(block)
        beside = {name: spec for name, spec in beside.items() if accepts(name)}
        key = number, repr((given, beside))
        if key not in self._calls:
            ways: list[Callable[[], Sequence[nn.Module]]] = [lambda: [copy.deepcopy(block)]]
            if self._bench.has_pairs(kind):
                slices = self._tokens.inside(number)
                ways.append(lambda: self._bench.cut_outline(kind, copy.deepcopy(block), slices=slices))
            self._calls[key] = self._find_called(ways, given, beside)
        return self._calls[key]

    def _find_called(
        self, ways: Sequence[Callable[[], Sequence[nn.Module]]], given: TreeSpec, beside: Mapping[str, TreeSpec]
    ) -> Called | None:
        calls = _RecordOperators()
        try:
            for make, trains in product(ways, (True, False)):
                blocks = [block.train(trains) for block in make()]
                with asking_elsewhere() as asked, calls:
                    trace_shapes(blocks, given, beside, self._dtype)
                calls.found += asked
        except Exception:
            return None
        words = *(f"{name} {spec.tree}" for name, spec in beside.items()), *calls.found
        shapes = [tensor.shape for tensor in given.tensors]
        return Called(
            words, tuple(prod(shape[i:j]) for shape in shapes for i, j in combinations(range(len(shape) + 1), 2))
        )


def _steering(followed: Sequence[FollowedKind]) -> SteeringState:
    """Return a snapshot of the host state that the blocks of some kinds depend on."""
    blocks = {
        f"block {one.kind.number}" if not place else f"block {place} like {one.kind.number}": block
        for one in followed
        for place, block in enumerate(one.kind.blocks)
    }
    return state_of_host(blocks, _modes if blocks else None)


def _modes() -> tuple[object, ...]:
    """Return the classes of active torch modes of users, and the code of their saved-tensor hooks."""
    entered = EnteredModes.here()
    kinds = map(type, (*entered.functions, *entered.operators))
    users = (thing for thing in (*kinds, *entered.hooks) if not is_of_framework(thing))
    return tuple(getattr(thing, "__code__", thing) for thing in users)


class _RecordOperators(TorchDispatchMode):
    """Dispatch mode that records operators with all arguments: ints as they are, tensors by rank and dtype."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str | int] = []

    @unrecorded
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.found += [str(func), *map(_word, tree_leaves((args, kwargs)))]
        return func(*args, **(kwargs or {}))


def _shapes_of(units: FirstUnits) -> str:
    return f"{units.spec} {units.extra_specs}"


def _word(leaf: object) -> str | int:
    if isinstance(leaf, Tensor):
        return f"{leaf.dim()} {leaf.dtype}"
    return leaf if type(leaf) is int else repr(leaf)
