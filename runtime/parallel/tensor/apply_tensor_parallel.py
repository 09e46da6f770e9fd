"""Tensor parallelism: `apply_tensor_parallel` cuts a module over the ranks of a group.

    x ─▶ column ─▶ activation or attention ─▶ row ─▶ all-reduce ─▶ y
         └────── each rank has its shard ──────┘

A column layer followed by a row layer needs one all-reduce forward and one backward (Megatron-LM, Shoeybi et al. 2019,
section 3). Outside of such a pair all ranks hold the same tensors and the same gradients.

Every sharded parameter records how it was cut (`shard_of`), also after a copy, a cast, a move off the meta device or
the loading of a state dict. Every other parameter is replicated, which is checked when a module is cut and in the first
backward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set

import torch.distributed as dist
from torch import nn

from quintsched.check_call_arguments import MAPPING, TEXT, instance, takes
from quintsched.errors import MisfitError

from ...comm import Group, as_group
from ...settings.tensor_parallel_rules import TensorSplit
from ..expert.moe import TensorBoundary, mixtures
from ..mesh_independent_dropout import KeyedDropout
from .adjust_modules_around_pairs import divide_sizes, gather_tokens_before, gather_wide_norms, join_pair
from .column_matmul import InputCommunication
from .column_row_layers import ColumnParallelLinear, Exit, RowParallelLinear, VocabParallelEmbedding
from .cut_rules import CutRules, find_cuts, require_pairs
from .cuttable_layers import REGISTERED, Cut, cut_weights, is_linear, join, pairs_of
from .parameter_shards import TpShard, gather_full, require_same, shard_of, take_shard, watch_gradient

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "TpShard",
    "VocabParallelEmbedding",
    "apply_tensor_parallel",
    "gather_full",
    "shard_of",
    "take_shard",
]

LayerCommunication = tuple[InputCommunication, Exit]


@takes("apply_tensor_parallel(module, group, rules)", module=instance("a module", nn.Module), rules=MAPPING, path=TEXT)
def apply_tensor_parallel(
    module: nn.Module,
    group: Group | dist.ProcessGroup,
    rules: CutRules | None = None,
    *,
    path: str = "",
    sequence_parallel: bool = False,
    cut_logits: bool = False,
    strict: bool = True,
    partial: Collection[str] = (),
    gathers_before: bool = False,
) -> nn.Module:
    """Cut the linear layers of `module` over `group` in place, and return it (or the layer that replaces it).

    By default the column/row pairs of attention blocks and MLPs are found by name (see `known_layer_name_pairs`); all
    else stays replicated, which is correct, but not sharded. An attention module's number of heads (`num_heads`, …)
    becomes that of this rank; a module that stores it elsewhere must derive it from the width of its projections.

    Args:
        module: the full module, with the same parameters on all ranks; may be on the meta device.
        group: all its members must call this.
        rules: fnmatch pattern on the dotted name of a submodule to "column", "row", "vocabulary" or "replicate", or
            {"cut": "column", "parts": 3} for fused blocks; the first that matches wins over the defaults.
        path: the module's name in the model; rules match names below it.
        sequence_parallel: outside of its pairs, the module takes and returns this rank's slice of the tokens (samples,
            tokens, …); gradients of its other parameters are then partial sums (see `sequence_parallel`).
        cut_logits: a linear layer cut by "vocabulary" returns this rank's shard of logits (see `vocab_loss`), else all.
        strict: the cuts are not proved, so only plain pairs are cut (see `families.pair_cuts`).
        partial: names of parameters that are not cut, and whose gradients are partial sums on the ranks.
        gathers_before: sliced tokens are all-gathered at the input of the module that has the columns.

    Raises:
        UsageError: an invalid rule.
        MisfitError: heads or sizes that the group's size does not divide, a rule for a layer that cannot be cut, or
            parameters that differ between the ranks.
    """
    group = as_group(group)
    cuts = find_cuts(module, rules or {}, group.size, path, strict=strict)
    if group.size == 1:
        return module
    if sequence_parallel:
        require_pairs(module, cuts, path)
    require_same(dict(module.named_parameters()), group)
    bounded = _mixtures_cut(module, cuts)
    gather_wide_norms(cuts, group)
    ways = _ways(module, cuts, bounded, sequence_parallel)
    made = {id(cut): _cut_layer(cut, group, ways[id(cut.layer)], cut_logits) for cut in cuts}
    for cut in cuts:
        if cut.parent is None:
            return made[id(cut)]
        setattr(cut.parent, cut.name, made[id(cut)])
    divide_sizes(cuts, group.size)
    _join_pairs(module, cuts, made, group)
    for layer in mixtures(module).values():
        layer.set_boundary(TensorBoundary(group, cut=layer in bounded, sliced=sequence_parallel))
    if sequence_parallel:
        _slice_tokens(module, cuts, made, group, gathers_before=gathers_before)
    else:
        _watch_replicated(module, cuts, group, partial, path)
    return module


def _slice_tokens(
    module: nn.Module, cuts: Sequence[Cut], made: Mapping[int, nn.Module], group: Group, *, gathers_before: bool
) -> None:
    """Set dropouts to draw for slices of the tokens; if `gathers_before`, gather tokens before the columns' module."""
    for dropout in module.modules():
        if isinstance(dropout, KeyedDropout):
            dropout.sequence = group
    for pair in pairs_of(cuts) if gathers_before else ():
        if pair[0].is_paired and pair[0].owners[0] is not module:
            gather_tokens_before(pair[0].owners[0], [made[id(cut)] for cut in pair], group)


def _join_pairs(module: nn.Module, cuts: Sequence[Cut], made: Mapping[int, nn.Module], group: Group) -> None:
    """Connect the layers of each pair by a `ColumnRowPair`, outer modules before inner ones."""
    scopes = {cut.pair for cut in cuts if cut.is_paired}
    for scope in (child for child in module.modules() if child in scopes):
        inside = [cut for cut in cuts if cut.is_paired and cut.pair is scope]
        join_pair(scope, [made[id(cut)] for cut in inside], group)


def _mixtures_cut(module: nn.Module, cuts: Sequence[Cut]) -> set[nn.Module]:
    """Return the mixtures whose experts are cut in all weights: these communicate once, at the mixture's boundary."""
    cut = {id(weight) for cut in cuts if cut.is_paired for weight in cut_weights(cut)}
    return {m for m in mixtures(module).values() if all(id(weight) in cut for weight in m.experts.parameters())}


def _ways(
    module: nn.Module, cuts: Sequence[Cut], bounded: Set[nn.Module], sequence_parallel: bool
) -> dict[int, LayerCommunication]:
    """Return the entry and exit of each layer that is cut, by its id; experts take whole tokens."""
    alone: LayerCommunication = ("copy", "sum")
    sliced: LayerCommunication = ("gather", "scatter") if sequence_parallel else alone
    ways = {id(cut.layer): sliced if cut.is_paired else alone for cut in cuts}
    for mixture in mixtures(module).values():
        of_experts: LayerCommunication = ("none", "none") if mixture in bounded else alone
        ways |= {id(layer): of_experts for layer in mixture.experts.modules()}
    return ways


def require_like_experts(module: nn.Module, cuts: Sequence[Cut], path: str) -> None:
    """Raise `MisfitError` for a mixture whose experts are cut differently: their results are summed in one way."""
    for name, mixture in mixtures(module).items():
        found = {}
        for number, expert in mixture.experts.items():
            names = {id(layer): inner for inner, layer in expert.named_modules()}
            found[number] = {(names[id(cut.layer)], cut.split) for cut in cuts if id(cut.layer) in names}
        odd = next((number for number, how in found.items() if how != found["0"]), None)
        if odd is not None:
            where = f"{path}.{name}" if name else path
            raise MisfitError(f"rules cut experts 0 and {odd} of {where!r} differently over tp; cut all of them alike")


def _cut_layer(cut: Cut, group: Group, way: LayerCommunication, cut_logits: bool) -> nn.Module:
    entry, leaving = way
    match cut.split, cut.layer:
        case TensorSplit.COLUMN | TensorSplit.VOCABULARY, linear if is_linear(linear):
            gathers = not cut_logits if cut.split is TensorSplit.VOCABULARY else not cut.is_paired
            return ColumnParallelLinear.from_linear(linear, group, parts=cut.parts, gather_output=gathers, entry=entry)
        case TensorSplit.ROW, linear if is_linear(linear):
            return RowParallelLinear.from_linear(linear, group, input_is_parallel=cut.is_paired, exit=leaving)
        case TensorSplit.VOCABULARY, nn.Embedding() as embedding:
            return VocabParallelEmbedding.from_embedding(embedding, group)
        case TensorSplit.COLUMN, layer if type(layer) in REGISTERED:
            return REGISTERED[type(layer)](layer, group)
    raise MisfitError(f"{cut.path!r} is a {type(cut.layer).__name__}, which cannot be cut as {cut.split.value}")


def _watch_replicated(module: nn.Module, cuts: list[Cut], group: Group, partial: Collection[str], root: str) -> None:
    """Watch the gradients of replicated parameters that may be applied between column and row, to a sharded tensor."""
    known = {id(parameter) for name, parameter in module.named_parameters() if name in partial}
    for path, parent in module.named_modules():
        around = [cut.path for cut in cuts if cut.is_paired and parent in (cut.parent, cut.pair)]
        rules = {f"*{p.removeprefix(root)}" if root else p: TensorSplit.REPLICATE.value for p in around}
        for name, parameter in parent.named_parameters() if around else ():
            if shard_of(parameter) is None and parameter.requires_grad and id(parameter) not in known:
                known.add(id(parameter))
                watch_gradient(parameter, join(path, name), group, rules)
