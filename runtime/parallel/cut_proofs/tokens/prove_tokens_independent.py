"""Soundness of cut sequences: a block keeps tokens of several ranks apart, except through its context
(`taint_tokens_by_rank`).

in training, twice  ─▶ tokens tracked; also in evaluation, without gradients
if x.max() > 60: …  ─▶ once more with the condition negated: other outputs?

With `sequence_parallel`, which slices tokens over tp, pairs take gathered tokens, and return slices of their results.

x, sliced ─▶ norm ─▶ (all) column … row (sliced) ─▶ + x
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ....autograd.slice_kv_cache import Store
from ....blocks.block_builders import TOKENS_DIM, seeded
from ....settings.tensor_parallel_rules import TensorSplit
from ...context.context_parallel import WHOLE_SEQUENCE, SequenceShard
from ...mesh_independent_dropout import KeyedDropout
from ...tensor.cuttable_layers import Cut, pairs_of
from ..block_twins import SEED, Blueprint
from ..marks.operator_rules_for_taint import Joined
from ..taint_features_by_rank import CodePlace, NothingDropped
from ..trial_inputs import Arrival, TrialInput, cut_dimension
from ..twin_runs import AUXILIARY, Setting, TwinTensors, outputs_of
from .taint_tokens_by_rank import MANY, FollowedContext, FollowedPast, Marked, TokenOwners, TokenReads
from .token_labels import TokenLabels, placed


@dataclass(frozen=True)
class TokenGathers:
    """Gathers and scatters of tokens around the pairs of a block under sequence parallelism.

    Attributes:
        cuts_of: finds the cuts of a twin.
        gathers_before: whether tokens are gathered at the input of the module of a pair's columns.
    """

    cuts_of: Callable[[nn.Module], Sequence[Cut]]
    gathers_before: bool

    @contextmanager
    def around(self, twin: nn.Module, owners: TokenOwners, vector: Tensor, told: list[Marked]) -> Iterator[None]:
        """Context with hooks that simulate these for a twin; the whole run appends gathered tokens to `told`, a run on
        a part takes them from it.
        """
        is_part, cuts = bool((vector == 0).any()), self.cuts_of(twin)  # before hooks, with which layers are not cut

        def gather(module: nn.Module, args: Any, kwargs: Any) -> Any:
            name = "" if args else "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
            given: Tensor = kwargs[name] if name else args[0]
            with owners.unfollowed():
                if is_part and not told:
                    raise Joined("calls its pairs another number of times where tokens are sliced")
                owners.show("pair", given)
                if not is_part:
                    told.append(owners.marked(given))
                whole, labels = told.pop(0) if is_part else (given.clone(), told[-1][1])
                common = owners.note_common(given, whole, labels)
            return (args, {**kwargs, name: common}) if name else ((common, *args[1:]), kwargs)

        def scatter(module: nn.Module, args: Any, result: Tensor) -> Tensor:
            with owners.unfollowed():
                here = vector.nonzero()[:, 0]
                mine = result.index_select(TOKENS_DIM, here) if is_part else result
                owners.labels.set_labels(mine, owners.labels.labels_of(result).index_select(TOKENS_DIM, here))
                shape = [-1 if dim == TOKENS_DIM else 1 for dim in range(mine.dim())]
                many = bool((owners.owners_of(result) == MANY).any())
                of = torch.full_like(vector[vector != 0], MANY) if many else vector[vector != 0]
                owners.set_owners(mine, of.reshape(shape).expand(mine.shape))
            return mine

        rows = [cut for cut in cuts if cut.is_paired and cut.split is TensorSplit.ROW]
        with ExitStack() as hooks:
            for module in self._entries(twin, cuts):
                hooks.enter_context(module.register_forward_pre_hook(gather, with_kwargs=True))
            for cut in rows:
                hooks.enter_context(cut.layer.register_forward_hook(scatter))
            yield

    def _entries(self, twin: nn.Module, cuts: Sequence[Cut]) -> list[nn.Module]:
        """Return the modules at whose input tokens are gathered."""
        entries: dict[int, nn.Module] = {}
        for pair in pairs_of(cuts):
            owner = pair[0].owners[0] if pair[0].is_paired else twin
            columns = [cut.layer for cut in pair if cut.is_paired and cut.split is TensorSplit.COLUMN]
            chosen = [owner] if self.gathers_before and columns and owner is not twin else columns
            entries |= {id(module): module for module in chosen}
        return list(entries.values())


_MOST_CONDITIONS = 32
_BY_PLACES = "does to some tokens by their places what it does not do to others, where each rank has others"


def why_tokens_meet(
    blueprint: Blueprint, arrival: Arrival, setting: Setting, device: torch.device, gathered: TokenGathers | None = None
) -> str:
    """Return why a block may compute other numbers for cut sequences, in words; empty: it keeps tokens apart.

    `gathered`: tokens are sliced over tp, and whole within pairs. There is no communication, and the random generators
    are restored.
    """
    try:
        for trains in (True, False):
            follower = _Follower(blueprint, arrival, setting, device, gathered, trains=trains)
            whole = follower.run_block()
            for condition in list(whole.owners.conditions)[:_MOST_CONDITIONS]:
                follower.require_same(whole, condition)
            follower.require_same_of_parts(whole)
    except Joined as why:
        return str(why)
    return ""


@dataclass(frozen=True)
class _TrackedRun:
    """Record of a run: the mode that tracked it, and results of its context."""

    owners: TokenOwners
    told: list[Marked]


class _Follower:
    """Runner of a block in training or evaluation, on whole sequences with a context or past, or on parts in turn."""

    def __init__(
        self,
        blueprint: Blueprint,
        arrival: Arrival,
        setting: Setting,
        device: torch.device,
        gathered: TokenGathers | None,
        *,
        trains: bool,
    ) -> None:
        self._gathered = gathered
        self._blueprint, self._arrival, self._setting = blueprint, arrival, setting
        self._device, self._trains, self._length = device, trains, _length(arrival)

    def run_block(self, flipped: Set[CodePlace] = frozenset()) -> _TrackedRun:
        """Run the block on whole sequences; raises `Joined` if tokens of several ranks meet in an output."""
        owners, told = TokenOwners(flipped), list[Marked]()
        vector = _owners_of(self._length, self._setting).to(self._device)
        twin = self._twin()
        for _ in range(2 if self._trains else 1):
            told.clear()
            with self._mode():
                beside = self._beside(owners, WHOLE_SEQUENCE, vector, told)
                owners.require_apart(self._outputs(twin, owners, vector, told, beside))
        return _TrackedRun(owners, told)

    def _twin(self) -> nn.Module:
        """Return a twin with dropouts and batch norms in evaluation mode, which `merge_replica_buffers` checks."""
        twin = self._blueprint.draw(self._device, trains=self._trains)
        for module in twin.modules():
            if isinstance(module, (_BatchNorm, _DropoutNd, KeyedDropout)):
                module.eval()
        return twin

    @contextmanager
    def _mode(self) -> Iterator[None]:
        mode: AbstractContextManager[object] = nullcontext() if self._trains else torch.no_grad()
        with seeded(SEED, 0, self._device), torch.enable_grad(), mode:
            yield

    def _outputs(
        self, twin: nn.Module, owners: TokenOwners, vector: Tensor, told: list[Marked], beside: Mapping[str, Any]
    ) -> TwinTensors:
        """Run a block on the tokens of these owners, `vector` (tokens,); those of owner 0 are left out."""
        owners.begin_run(TokenLabels(twin))
        arrival = _owned(owners, self._arrival, vector)
        pairs = self._gathered.around(twin, owners, vector, told) if self._gathered is not None else nullcontext()
        with pairs, NothingDropped(), TokenReads(owners), owners:
            outputs = outputs_of(twin, arrival, beside)
        outputs = {name: output.detach() for name, output in outputs.items() if name != AUXILIARY}
        for output in outputs.values():
            owners.show("output", output)
        return outputs

    def _beside(
        self, owners: TokenOwners, shard: SequenceShard, vector: Tensor, told: list[Marked]
    ) -> Mapping[str, Any]:
        if self._gathered is not None:
            return {}
        if self._setting.context is None:
            return {"past": FollowedPast(owners, Store(), 0, 1, self._length)}
        context = FollowedContext(owners, self._length, shard, self._device, told)
        owners.set_owners(context.positions, vector[vector != 0])
        return {"context": context}

    def require_same(self, whole: _TrackedRun, condition: CodePlace) -> None:
        """Raise `Joined` if a block's outputs change when a condition on numbers of tokens is negated."""
        try:
            other = self.run_block(frozenset([condition])).owners.seen
        except Joined:
            raise
        except Exception:  # an unreachable branch, or a check of the block itself
            return
        seen = whole.owners.seen
        same = seen.keys() == other.keys() and all(_is_same(seen[name][0], other[name][0]) for name in seen)
        if not same:
            where = "".join(f" in line {line} of {file.rpartition('/')[2]}" for file, line in condition[:1])
            raise Joined(f"asks for numbers of tokens{where}, and does something else where they are otherwise")

    def require_same_of_parts(self, whole: _TrackedRun) -> None:
        """Raise `Joined` if runs on parts of sequences differ from the run on whole ones, as in code by length."""
        vector, store = _owners_of(self._length, self._setting).to(self._device), Store()
        num_parts, parts = int(vector.max()), list[_TrackedRun]()
        for number in range(num_parts):
            mine, told = vector * (vector == number + 1), list(whole.told)
            owners = TokenOwners(to_draw=whole.owners.drawn)
            beside: Mapping[str, Any] = {
                "past": FollowedPast(owners, store, number, num_parts, self._length // num_parts)
            }
            comes_later = self._setting.context is None and self._gathered is None
            if not comes_later:
                beside = self._beside(owners, SequenceShard(num_parts, number), mine, told)
            with self._mode():
                if number == 0 or not comes_later:
                    twin = self._twin()
                self._outputs(twin, owners, mine, told, beside)
            parts.append(_TrackedRun(owners, told))
        if any(part.owners.is_routed for part in parts):  # a part may have no tokens for some expert
            _require_same_calls(whole.owners.calls, {k: v for part in parts for k, v in part.owners.calls.items()})
        for number, part in enumerate(parts):
            if not part.owners.is_routed:
                _require_same_calls(whole.owners.calls, part.owners.calls)
            self._require_same_tokens(whole.owners.seen, part.owners.seen, vector * (vector == number + 1))

    def _require_same_tokens(self, whole: Mapping[str, Marked], part: Mapping[str, Marked], mine: Tensor) -> None:
        if whole.keys() != part.keys():
            raise Joined("gathers tokens another number of times where it is given a part of them")
        for name, (output, labels) in part.items():
            expected, of = whole[name]
            dim = cut_dimension(expected.shape, output.shape, len(mine) // max(int((mine != 0).sum()), 1))
            if dim is not None:
                chosen = _places(mine, expected.shape[dim])
                expected, of = expected.index_select(dim, chosen), None if of is None else of.index_select(dim, chosen)
            if not _is_same(expected, output):
                raise Joined("gives other numbers where it is given a part of the tokens")
            if labels is not None and of is not None and not torch.equal(labels, of):
                raise Joined(_BY_PLACES)


def _require_same_calls(whole: Mapping[str, str], part: Mapping[str, str]) -> None:
    other = [call for call in (*whole, *part) if (call in whole) != (call in part)]
    if other:
        place = whole.get(other[0], part.get(other[0], ""))
        raise Joined(f"depends on how many tokens it is given: it calls {other[0]}{place} for some lengths alone")


def _places(mine: Tensor, size: int) -> Tensor:
    """Return the indices of local tokens along a dimension of length `size`, with several entries per token."""
    return mine.repeat_interleave(max(size // len(mine), 1)).nonzero()[:, 0]


def _is_same(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.allclose(first, second, 1e-4, 1e-6, equal_nan=True)


def _length(arrival: Arrival) -> int:
    """Return the number of tokens of a sequence."""
    given = [*arrival.activation.parts, *arrival.riders.values()]
    return next(part.tensor.shape[part.tokens] for part in given if part.tokens is not None)


def _owners_of(length: int, setting: Setting) -> Tensor:
    """Return the owner of each token, 1 + its rank or slice: int8 (tokens,)."""
    owners = torch.zeros(length, dtype=torch.int8)
    if setting.context is None:
        return (torch.arange(length) * setting.slices // length + 1).to(torch.int8)
    for rank in range(setting.context.size):
        owners[SequenceShard(setting.context.size, rank).positions(length)] = 1 + rank
    return owners


def _owned(owners: TokenOwners, arrival: Arrival, vector: Tensor) -> Arrival:
    """Return copies of the inputs with owners and labels set; tokens of owner 0 are left out."""
    numbers = count()

    def own(given: TrialInput) -> TrialInput:
        tensor, dim = given.tensor.clone(memory_format=torch.contiguous_format), given.tokens
        if dim is not None:
            each = vector.repeat_interleave(tensor.shape[dim] // len(vector))
            tensor = tensor.index_select(dim, each.nonzero()[:, 0])
            shape = [-1 if other == dim else 1 for other in range(tensor.dim())]
            owners.set_owners(tensor, each[each != 0].reshape(shape).expand(tensor.shape))
        of = placed(given.tensor, f"given {next(numbers)}")
        owners.labels.set_labels(tensor, of if dim is None else of.index_select(dim, each.nonzero()[:, 0]))
        return TrialInput(tensor, dim)

    return arrival.changed(own)
