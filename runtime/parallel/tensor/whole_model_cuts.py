"""Tensor-parallel cuts of a whole model on one rank, settled on outlines before any block is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...blocks.block_builders import Parcel
from ...blocks.dtensor import is_sharded
from ...blocks.trees import TensorSpec, TreeSpec
from ...comm import Group
from ...comm.autograd_collectives import gather_from_group
from ...settings.tensor_parallel_rules import TensorSplit
from .apply_tensor_parallel import apply_tensor_parallel, require_like_experts
from .cut_rules import (
    Choice,
    CutRules,
    can_be_sliced,
    declared_partial,
    find_cuts,
    is_built_in,
    matches,
    require_followed,
    require_rules_to_match,
)
from .cuttable_layers import (
    Cut,
    cut_weights,
    has_hooked_weights,
    is_layer,
    is_linear,
    is_plain,
    join,
    own_forward,
    sizes_of,
)
from .sequence_parallel import SequenceParallel, partial_weights, run_on_slices


class TensorCuts:
    """Cuts over tp of the blocks of a model.

    Args:
        outlines: the blocks before any cut (see `blocks.outlines`).
        group: the ranks of tp.
        rules: patterns on names in the whole model, as `apply_tensor_parallel` takes them.
        sequence_parallel: whether tokens are sliced between pairs.
        cut_logits: whether loss and metrics support logits that are cut over the vocabulary.
        proved: whether blocks that are not built in are proved, so that more than plain pairs can be cut.

    Attributes:
        cuts: the layers to cut, for each block.
        report: a line for the log: weights that are cut, and layers that stay whole; None without tp.
        cuts_logits: whether the last block's output is cut over the vocabulary.

    Raises `UsageError` for an invalid rule, or one that matches no layer; `MisfitError` for modules of torch.jit.
    """

    def __init__(
        self,
        outlines: Sequence[nn.Module],
        group: Group,
        rules: CutRules,
        *,
        sequence_parallel: bool,
        cut_logits: bool,
        proved: bool,
    ) -> None:
        self._group, self.rules, self._is_proved = group, rules, proved
        self._outlines, self._slicing = outlines, group if sequence_parallel else None
        require_followed("", nn.ModuleList(outlines))
        require_rules_to_match(rules, outlines)
        self.cuts = cuts = [self._cuts_of(number, block, Choice()) for number, block in enumerate(outlines)]
        for number, block in enumerate(outlines):
            require_like_experts(block, cuts[number], str(number))
        self.report = self._report({}) if group.size > 1 else None
        self._choices: dict[int, Choice] = {}
        self.tokens = SequenceParallel(list(map(self._can_be_sliced, range(len(cuts)))), self._slicing)
        heads = [cut for cut in cuts[-1] if cut.split is TensorSplit.VOCABULARY and isinstance(cut.layer, nn.Linear)]
        self.cuts_logits = bool(heads) and cut_logits
        self._last = len(cuts) - 1

    def _cuts_of(self, number: int, outline: nn.Module, choice: Choice) -> list[Cut]:
        """Return the layers of a block to cut; none if PyTorch has sharded it already."""
        if self._group.size == 1 or is_sharded(outline):
            return []
        rules = {**choice.rules, **self.rules}
        return find_cuts(outline, rules, self._group.size, str(number), strict=self._is_strict(outline))

    def _is_strict(self, block: nn.Module) -> bool:
        return is_built_in(block) or not self._is_proved

    def _can_be_sliced(self, number: int) -> bool:
        """Whether a block has pairs; where no rule names them, also whether the rest of it can work on a slice."""
        block, cuts = self._outlines[number], self.cuts[number]
        is_free = not self._is_strict(block) and not self.are_ruled(cuts)
        return any(cut.is_paired for cut in cuts) and (not is_free or can_be_sliced(block, cuts, str(number)))

    def has_pairs(self, number: int, choice: Choice) -> bool:
        """Whether a block, cut by a choice, has column/row pairs."""
        return any(cut.is_paired for cut in self._cuts_of(number, self._outlines[number], choice))

    def settle_choices(self, choices: Mapping[int, Choice]) -> None:
        """Apply the choices that proofs on any rank have made for blocks: update cuts, report and token slicing."""
        for number, choice in choices.items():
            self.cuts[number] = self._cuts_of(number, self._outlines[number], choice)
        if choices and self._group.size > 1:
            self.report = self._report(choices)
            slices = [choices[n].slices if n in choices else self._can_be_sliced(n) for n in range(len(self.cuts))]
            self.tokens = SequenceParallel(slices, self._slicing)

    def _report(self, choices: Mapping[int, Choice]) -> str:
        """Return the report: number of weights cut, and names of layers whose matrices stay whole, grouped by name."""
        total, divided, whole = 0, 0, dict[str, list[int]]()
        for number, (block, of_block) in enumerate(zip(self._outlines, self.cuts, strict=True)):
            shards = {id(p): p for cut in of_block for p in cut_weights(cut)}
            weights = dict(block.named_parameters())
            total, divided = total + len(weights), divided + sum(id(p) in shards for p in weights.values())
            for name in dict.fromkeys(
                n.rpartition(".")[0] for n, p in weights.items() if p.dim() > 1 and id(p) not in shards
            ):
                whole.setdefault(name, []).append(number)
        why = (
            _kept(self._outlines, "hooks on their weights", lambda m: is_layer(m) and has_hooked_weights(m)),
            _kept(self._outlines, "forwards of their own", lambda m: is_linear(m) and bool(own_forward(m))),
            f"{self._unpaired(whole, choices)}{_proved(choices)}{_one_by_one(self.cuts)}",
        )
        listed = _listed(whole) or "only norms and biases"
        return f"tp={self._group.size} cuts {divided} of {total} weights; whole: {listed}{''.join(why)}"

    def _unpaired(self, whole: Mapping[str, Sequence[int]], choices: Mapping[int, Choice]) -> str:
        """Return the part of the report on linear layers that are whole since they are in no pair, with a rule."""
        places: dict[str, list[int]] = {}
        for name, numbers in whole.items():
            for number in numbers:
                layer = self._outlines[number].get_submodule(name)
                known = {**choices.get(number, Choice()).rules, **self.rules}
                is_free = (
                    is_linear(layer) and is_plain(layer, strict=False) and not matches(join(str(number), name), known)
                )
                if is_free and not sizes_of(layer)[1] % self._group.size:
                    places.setdefault(name, []).append(number)
        name, numbers = next(iter(places.items()), ("", []))
        rules = dict.fromkeys([f"*.{name}"] if name else map(str, numbers[:_MOST_NAMED]), TensorSplit.COLUMN.value)
        return f"; in no pair (a rule would cut them: rules={rules}): {_listed(places)}" if places else ""

    def are_ruled(self, cuts: Sequence[Cut]) -> bool:
        """Whether a user's rule matches one of these layers."""
        return any(matches(cut.path, self.rules) for cut in cuts)

    def apply(self, number: int, block: nn.Module, choice: Choice) -> nn.Module:
        """Cut block `number` by a choice, unless PyTorch has sharded it (collective over tp)."""
        if is_sharded(block):
            return block
        declared = declared_partial(self._outlines[number], self.cuts[number])
        self._choices[number] = choice = replace(choice, partial=choice.partial | declared)
        return apply_tensor_parallel(
            block,
            self._group,
            {**choice.rules, **self.rules},
            path=str(number),
            sequence_parallel=self.tokens.inside(number) and choice.slices,
            cut_logits=self.cuts_logits and number == self._last,
            strict=self._is_strict(block),
            partial=choice.partial,
            gathers_before=choice.gathers_before,
        )

    def partial(self, blocks: Mapping[int, nn.Module]) -> frozenset[nn.Parameter]:
        """Return the weights of cut blocks whose gradients are partial sums on the ranks of tp."""
        inside = [partial_weights(block) for number, block in blocks.items() if self._is_inside(number)]
        chosen = [
            parameter
            for number, block in blocks.items()
            for name, parameter in block.named_parameters()
            if number in self._choices and name in self._choices[number].partial
        ]
        return frozenset(chosen).union(*inside)

    def _is_inside(self, number: int) -> bool:
        return self.tokens.inside(number) and (number not in self._choices or self._choices[number].slices)

    def travelling(self, parcels: Sequence[Parcel]) -> list[Parcel]:
        """Return the specs that a rank sends and stores, from those of whole tokens and logits; raises `MisfitError`
        as `SequenceParallel.travelling` does.
        """
        *others, last = self.tokens.travelling(parcels)
        if self.cuts_logits and last.output.tree.is_tensor:  # a loss on a separate stage receives them cut
            (logits,) = last.output.tensors
            *sizes, ids = logits.shape
            last = replace(last, output=TreeSpec.plain(TensorSpec((*sizes, ids // self._group.size), logits.dtype)))
        return [*others, last]

    def run_whole(self, number: int, block: nn.Module, given: Any, taken: Mapping[str, Any]) -> Any:
        """Run a block of this rank on whole tokens, and return whole tokens and logits."""
        result = run_on_slices(block, self.tokens.group_of(number), given, taken)
        if not self.cuts_logits or number != self._last or not isinstance(result, Tensor):
            return result
        return gather_from_group(result, self._group, -1)

    def bind(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Bind a loss or metric to the group over which its logits are cut; return it unchanged if they are whole."""
        return partial(function, vocabulary=self._group) if self.cuts_logits else function


_MOST_NAMED = 8
"""Number of layers that a part of the report names."""


def _kept(outlines: Sequence[nn.Module], why: str, is_kept: Callable[[nn.Module], bool]) -> str:
    """Return the part of the report on layers that are whole for a reason (`why`)."""
    places: dict[str, list[int]] = {}
    for number, block in enumerate(outlines):
        for name, module in block.named_modules():
            if is_kept(module):
                places.setdefault(name, []).append(number)
    return f"; whole for {why}: {_listed(places)}" if places else ""


def _listed(places: Mapping[str, Sequence[int]]) -> str:
    names = [f"{_numbers(numbers)}.{name}" if name else _numbers(numbers) for name, numbers in places.items()]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def _one_by_one(cuts: Sequence[Sequence[Cut]]) -> str:
    """Return the part of the report on layers of pairs that are cut one by one: each takes and returns full tensors."""
    places: dict[str, list[int]] = {}
    for number, of_block in enumerate(cuts):
        for cut in of_block:
            if cut.family and not cut.is_paired:
                places.setdefault(cut.path.partition(".")[2], []).append(number)
    return f"; one by one: {_listed(places)}" if places else ""


def _proved(choices: Mapping[int, Choice]) -> str:
    """Return the part of the report on proved pairs, named by their first columns."""
    places: dict[str, list[int]] = {}
    for number, choice in sorted(choices.items()):
        for path in sorted(choice.proved):
            places.setdefault(path.partition(".")[2], []).append(number)
    return f"; pairs proved for all inputs: {_listed(places)}" if places else ""


def _numbers(numbers: Sequence[int]) -> str:
    """Format ascending numbers as ranges: "1-4,6"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)
