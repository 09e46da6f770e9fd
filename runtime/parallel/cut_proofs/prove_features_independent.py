"""Soundness of a pair for all inputs: the code between its columns and rows keeps the ranks' features apart.

    in training, twice ─▶ features tracked (`taint_features_by_rank`), host state compared (`SteeringState`)
    in evaluation      ─▶ the same, without gradients; both in the dtypes of a real run
    if mask.all(): …   ─▶ once more with the condition negated

Code that depends on more, such as numbers in tensors or draws of Python's generator, may differ in the next step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from ...autograd.autograd_engine_call import run_backward
from ...blocks.block_builders import seeded
from ...comm import EchoGroup, Group
from ...user_objects.control_flow_state import SteeringState
from ...user_objects.find_impure_code import asking_elsewhere
from ..tensor.cuttable_layers import Cut
from .block_twins import SEED, Blueprint
from .marks.operator_rules_for_taint import Joined
from .reads_and_draws.compare_whole_and_cut_calls import CutCalls, OtherCalls, WholeCalls, apart_in
from .taint_features_by_rank import CodePlace, FeatureOwners, HostReads, NothingDropped, WeightReads
from .trial_inputs import Arrival, TrialInput
from .twin_runs import outputs_of

_MAY = ", by which it may do something else"
DRAWS = f"draws from Python's or numpy's generator{_MAY}"

_MOST_BRANCHES = 32


def why_joined(
    blueprint: Blueprint,
    cuts_of: Callable[[nn.Module], Sequence[Cut]],
    cut: Callable[[nn.Module, Group], nn.Module],
    arrival: Arrival,
    group: EchoGroup,
    *,
    trusts: bool,
) -> str:
    """Return why a block's pairs may be unsound in some step, in words; empty: each rank can compute its features.

    `cuts_of` finds the pairs of a copy, `cut` cuts one over `group`; for `trusts` see `FeatureOwners`. There is no
    communication, and the random generators are restored.
    """
    given, device = _typed(arrival, blueprint.short_type), group.device

    def follow(trains: bool, flipped: Set[CodePlace]) -> FeatureOwners:
        try:
            return follow_once(trains, flipped)
        except OtherCalls:  # parts of split models record their layers' arguments in a first run
            return follow_once(trains, flipped)

    def follow_once(trains: bool, flipped: Set[CodePlace]) -> FeatureOwners:
        owners = FeatureOwners(trusts=trusts, flipped=flipped)
        twin = blueprint.draw(device, as_built=True, trains=trains)
        calls = WholeCalls(owners, trusts=trusts)
        mode: AbstractContextManager[object] = nullcontext() if trains else torch.no_grad()
        with seeded(SEED, 0, device), torch.enable_grad(), mode:
            cuts = cuts_of(twin)
            apart = apart_in(twin, cuts)
            with owners.through_pairs(cuts, group.size), calls.around(twin, apart):
                blueprint.put_hooks(twin)
                _follow(owners, calls, twin, cuts, given, times=2 if trains else 1)
        with seeded(SEED, 0, device), torch.enable_grad(), mode:
            twin = cut(blueprint.draw(device, as_built=True, trains=trains), group)
            again = CutCalls(calls, trusts=trusts)
            with again.around(twin, apart):
                blueprint.put_hooks(twin)
                with again, NothingDropped():
                    outputs_of(twin, given)
                again.require_all()
        return owners

    try:
        for trains in (True, False):
            _follow_branches(partial(follow, trains), list(follow(trains, frozenset()).conditions))
    except Joined as why:
        return str(why)
    return ""


def _follow_branches(follow: Callable[[Set[CodePlace]], FeatureOwners], conditions: Sequence[CodePlace]) -> None:
    """Track a block with conditions on numbers negated, one by one, and with conditions that appear on the way."""
    tried: set[frozenset[CodePlace]] = set()
    open_ones = [frozenset([condition]) for condition in conditions]
    while open_ones:
        flipped = open_ones.pop()
        if flipped in tried:
            continue
        tried.add(flipped)
        if len(tried) > _MOST_BRANCHES:
            raise Joined("asks for numbers in so many places that what it may do is not known")
        try:
            found = follow(flipped).conditions
        except Joined:
            raise
        except Exception:  # an unreachable branch, or a check of the block itself
            continue
        open_ones += [flipped | {other} for other in found if other not in flipped and other not in conditions]


def _follow(
    owners: FeatureOwners, calls: WholeCalls, twin: nn.Module, cuts: Sequence[Cut], arrival: Arrival, times: int
) -> None:
    drawn = draws_of_python()
    reads = WeightReads({cut.path: cut.layer for cut in cuts})
    states, asked = [state_of_host({"block": twin})], list[str]()
    for time in range(times):
        asking, recorded = asking_elsewhere(straight=True), calls if not time else nullcontext()
        with asking as found, NothingDropped(), reads.watching(), HostReads(owners), owners, recorded:
            outputs = outputs_of(twin, arrival)
        owners.require_none(outputs)
        ends = [output for output in outputs.values() if output.requires_grad]
        asked += [*found, *(_go_back(twin, ends) if ends else ())]
        states.append(state_of_host({"block": twin}))
    changed = states[0 if owners.reads else -2].changed()
    for why in [*reads.found.values(), *(f"asks {what}{_MAY}" for what in asked)]:
        raise Joined(why)
    if states[0].unseen is not None:
        raise Joined(f"goes by {states[0].unseen!r}, of which nobody can tell whether it has changed{_MAY}")
    if draws_of_python() != drawn:
        raise Joined(DRAWS)
    if changed is not None:
        raise Joined(
            f"changes {changed!r} in its forward or backward, by which it may do something else in a later step"
        )


def _go_back(block: nn.Module, ends: Sequence[Tensor]) -> list[str]:
    """Run a backward, and return what it asks; raises `Joined` if it writes tensors that the block's code may read."""
    before = SteeringState({"block": block}).tensors()
    copies = [tensor.clone() for tensor in before]
    with asking_elsewhere(straight=True) as asked, NothingDropped():  # of parts that are run again
        run_backward(ends, [torch.randn_like(end) for end in ends])  # different in each run
    after = SteeringState({"block": block}).tensors()
    pairs = zip(after, copies, strict=False)
    if list(map(id, after)) != list(map(id, before)) or any(bool(((a != b) & (a == a)).any()) for a, b in pairs):
        raise Joined(f"writes tensors in its backward{_MAY}")
    return asked


def state_of_host(blocks: Mapping[str, nn.Module], around: Callable[[], object] | None = None) -> SteeringState:
    """Return a snapshot of the host state that the code of blocks depends on, and of what `around` returns."""
    state = SteeringState(blocks, around=around)
    state.let_go()
    return state


def draws_of_python() -> tuple[object, ...]:
    """Return the states of Python's and numpy's generators, for comparison."""
    return (random.getstate(), *(np.asarray(part).tobytes() for part in np.random.get_state()))


def _typed(arrival: Arrival, short: torch.dtype | None) -> Arrival:
    """Return the inputs with float32 tensors, the dtype of proofs, cast back to a short dtype."""

    def cast(given: TrialInput) -> TrialInput:
        return replace(given, tensor=given.tensor.to(short)) if given.tensor.dtype is torch.float32 else given

    return arrival if short is None else arrival.changed(cast)
