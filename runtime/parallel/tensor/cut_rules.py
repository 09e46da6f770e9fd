"""Rules of tensor parallelism: the layers of a module to cut, and the kind of each cut.

By default, pairs found by name in one module (see `known_layer_name_pairs`), where both sides are plain nn.Linear, or
Conv1D of transformers, of matching sizes, and used nowhere else. All other layers are replicated.

A module may declare rules for its layers in an attribute `tensor_parallel`, name to rule. Layers that the number of
ranks does not divide then stay whole:

    class Head(nn.Module):
        tensor_parallel = {"head": "vocabulary"}

It names weights that work on the features between a column and a row, such as norms of heads, in `tensor_partial`. They
stay whole, and where the pair is cut, their gradients are partial sums on the ranks.

User rules take precedence. If rules name both columns and rows in one parent, these form a pair. A column alone gathers
its output and a row alone takes the full input, so that surrounding code is unaffected. "vocabulary" cuts an embedding
by ids, and a linear layer by outputs; at the end of the model these stay sharded for a loss that supports it.

Where names alone do not decide, a proof has chosen how a block is cut (`Choice`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn
from torch.jit import ScriptModule

from quintsched.errors import MisfitError, UsageError, nearest

from ...settings.tensor_parallel_rules import TensorRule, TensorSplit, read_rule
from .cuttable_layers import (
    REGISTERED,
    Cut,
    cut_width,
    is_adapted,
    is_layer,
    is_linear,
    is_plain,
    join,
    own_forward,
    sizes_of,
)
from .known_layer_name_pairs import (
    FAMILIES,
    families_in,
    has_fewer_kv_heads,
    head_counts,
    heads_of,
    pair_cuts,
    require_heads,
)
from .parameter_shards import require_even

RuleData = str | Mapping[str, object]
"""A rule as users write it: "column", or {"cut": "column", "parts": 3} (see `settings.tensor_parallel_rules`)."""

CutRules = Mapping[str, RuleData]
"""fnmatch patterns on names to rules; the first match applies."""


_OWN = "quintsched.runtime.models."
_OPAQUE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def find_cuts(root: nn.Module, rules: CutRules, size: int, path: str = "", *, strict: bool = True) -> list[Cut]:
    """List the layers of `root` to be cut over `size` ranks; rules match their names below `path`.

    `strict`: the cuts are not proved (see `families.pair_cuts`).

    Raises:
        UsageError: a rule that is none of "column", "row", "vocabulary", "replicate".
        MisfitError: `size` does not divide heads or features, or a rule is for a layer that cannot be cut.
    """
    require_followed(path, root)
    parsed = parse_rules(rules)
    declared = _declared(root, path)
    shared = _shared_layers(root)
    cuts = _root_cut(root, parsed, path)
    of_all = {**parsed, **declared}
    scopes = list(_open_modules(path, root, parsed, set()))
    for place, scope in scopes:
        cuts += _family_cuts(place, scope, of_all, shared, {id(cut.layer) for cut in cuts}, size, strict=strict)
    done = {id(cut.layer) for cut in cuts}
    for place, parent in scopes:
        cuts += _ruled_cuts(place, parent, of_all, done, size)
    kept = []
    for cut in cuts:
        if cut.path in declared and _match(cut.path, parsed) is None and cut_width(cut) % size:
            continue
        _require_cuttable(cut, shared, strict=strict)
        _require_divisible(cut, size)
        kept.append(cut)
    return kept


def require_pairs(root: nn.Module, cuts: Sequence[Cut], path: str) -> None:
    """Raise `MisfitError` if a module cannot work on a slice of the tokens, as its layers outside of pairs have to."""
    alone = [cut.path for cut in cuts if not cut.is_paired]
    cut = {module for cut in cuts for module in (cut.parent, cut.scope, *cut.owners)}
    whole = [name for name, module in root.named_modules(prefix=path) if _attends(module) and module not in cut]
    if alone or whole:
        why = "its partner is not cut" if alone else "it is not cut, and would attend to this rank's tokens only"
        raise MisfitError(f"sequence parallelism slices the tokens around {(alone or whole)[0]!r}, but {why}")


def can_be_sliced(root: nn.Module, cuts: Sequence[Cut], path: str) -> bool:
    """Whether a module can work on a slice of the tokens, judged without running it."""
    try:
        require_pairs(root, cuts, path)
    except MisfitError:
        return False
    return True


def is_built_in(block: nn.Module) -> bool:
    """Whether a block is one of our own models, whose cuts are proved by this project's tests."""
    return type(block).__module__.startswith(_OWN)


def declared_partial(block: nn.Module, cuts: Sequence[Cut]) -> frozenset[str]:
    """Return the names of weights that owners of pairs among `cuts` declare in `tensor_partial`."""
    owners = {owner for cut in cuts if cut.is_paired for owner in cut.owners}
    if not owners:
        return frozenset()
    inside = {
        join(path, name)
        for path, module in block.named_modules()
        if module in owners
        for name in getattr(module, "tensor_partial", ())
    }
    return frozenset(name for name, _ in block.named_parameters() if name in inside)


def _attends(module: nn.Module) -> bool:
    """Whether a module seems to be an attention: it has layers, and an attribute for the number of heads."""
    has_layers = any(is_layer(child) for child in module.children())
    return isinstance(module, _OPAQUE) or (has_layers and bool(head_counts([module], 0, 0)))


def matches(path: str, rules: CutRules) -> bool:
    """Whether a rule matches the layer of this name."""
    return any(fnmatchcase(path, pattern) for pattern in rules)


def require_rules_to_match(rules: CutRules, blocks: Sequence[nn.Module]) -> None:
    """Raise `UsageError` for an invalid rule, or one that matches no layer of the model."""
    parse_rules(rules)
    names = [
        name
        for number, block in enumerate(blocks if rules else ())
        for name, module in block.named_modules(prefix=str(number))
        if not any(True for _ in module.children()) or is_adapted(module)
    ]
    for pattern in rules:
        if not any(fnmatchcase(name, pattern) for name in names):
            inside = any(fnmatchcase(name, f"{pattern}.*") for name in names)
            hint = f"; did you mean {pattern + '.*'!r}?" if inside else nearest(pattern, names)
            raise UsageError(f"tensor-parallel rule {pattern!r} is for no layer of the model{hint}")


def require_followed(path: str, root: nn.Module) -> None:
    """Raise `MisfitError` for modules of torch.jit, whose code and state cannot be followed."""
    for name, module in root.named_modules(prefix=path):
        if isinstance(module, ScriptModule):
            raise MisfitError(
                f"{name!r} is a module of torch.jit, whose code and state cannot be followed; leave out "
                "torch.jit.script or trace, and give the module itself"
            )


def _declared(root: nn.Module, path: str) -> dict[str, TensorRule]:
    """Return the rules that modules declare for their layers (`tensor_parallel`), by full names."""
    return {
        join(place, name): _parse_rule(name, rule)
        for place, module in root.named_modules(prefix=path)
        for name, rule in getattr(module, "tensor_parallel", {}).items()
    }


def parse_rules(rules: CutRules) -> dict[str, TensorRule]:
    """Parse rules; raises `UsageError` for an invalid one."""
    return {pattern: _parse_rule(pattern, rule) for pattern, rule in rules.items()}


def _parse_rule(pattern: str, rule: RuleData) -> TensorRule:
    try:
        return read_rule(rule)
    except ValueError as error:
        raise UsageError(f"tensor-parallel rule {pattern!r}: {error}") from None


def _match(path: str, rules: Mapping[str, TensorRule]) -> TensorRule | None:
    adapted = path.partition(".base_layer")[0].partition(".lora_")[0]
    found = (rule for pattern, rule in rules.items() if fnmatchcase(path, pattern) or fnmatchcase(adapted, pattern))
    return next(found, None)


def _shared_layers(root: nn.Module) -> set[int]:
    """Return the ids of modules that are registered in several places, or whose parameters are."""
    places = Counter(id(child) for parent in root.modules() for child in parent._modules.values())
    owners = Counter(id(param) for module in root.modules() for param in module._parameters.values())
    return {
        id(module)
        for module in root.modules()
        if places[id(module)] > 1 or any(owners[id(param)] > 1 for param in module.parameters(recurse=False))
    }


def _root_cut(root: nn.Module, rules: Mapping[str, TensorRule], path: str) -> list[Cut]:
    rule = _match(path, rules) if is_layer(root) else None
    if rule is None or rule.split is TensorSplit.REPLICATE:
        return []
    return [Cut(None, "", path, root, rule.split, rule.parts or 1, is_told=True)]


def _open_modules(
    path: str, module: nn.Module, rules: Mapping[str, TensorRule], seen: set[int]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose children may be replaced, each once. Opaque ones, which use the weights of their layers
    without calling these, are skipped.
    """
    if id(module) in seen:
        return
    seen.add(id(module))
    if isinstance(module, _OPAQUE):
        _refuse_rules_within(path, module, rules)
        return
    yield path, module
    for name, child in module.named_children():
        yield from _open_modules(join(path, name), child, rules, seen)


def _refuse_rules_within(path: str, opaque: nn.Module, rules: Mapping[str, TensorRule]) -> None:
    for name, module in opaque.named_modules(prefix=path):
        rule = _match(name, rules) if is_layer(module) else None
        if rule is not None and rule.split is not TensorSplit.REPLICATE:
            raise MisfitError(
                f"a rule wants to cut {name!r}, but {type(opaque).__name__} {path!r} uses the weights of its layers "
                "without calling them; leave it whole with a rule 'replicate' further up"
            )


def _family_cuts(
    path: str,
    scope: nn.Module,
    rules: Mapping[str, TensorRule],
    shared: set[int],
    done: set[int],
    size: int,
    *,
    strict: bool,
) -> list[Cut]:
    """Return the cuts of the pairs found by name in one module."""
    cuts: list[Cut] = []
    if not scope._modules:
        return cuts
    for family in (*FAMILIES, *(() if strict else families_in(scope))):
        taken = done | shared | {id(cut.layer) for cut in cuts}
        cuts += pair_cuts(path, scope, family, lambda name: _match(name, rules), taken, size, strict=strict)
    return cuts


def _ruled_cuts(path: str, parent: nn.Module, rules: Mapping[str, TensorRule], done: set[int], size: int) -> list[Cut]:
    """Return the cuts that rules require beyond the pairs found by name."""
    layers = {name: child for name, child in parent.named_children() if is_layer(child) and id(child) not in done}
    names = {name: join(path, name) for name in layers if not any(part.startswith("lora_") for part in path.split("."))}
    ruled = {name: rule for name, full in names.items() if (rule := _match(full, rules)) is not None}
    rest = {name: rule for name, rule in ruled.items() if rule.split is not TensorSplit.REPLICATE}
    splits = {name: rule.split for name, rule in rest.items() if not rule.alone}
    rows = [name for name, split in splits.items() if split is TensorSplit.ROW and is_linear(layers[name])]
    widths = [sizes_of(layers[name])[0] for name in rows]
    is_paired = bool(widths) and TensorSplit.COLUMN in splits.values()
    sizes = next((rule.sizes for rule in rest.values() if rule.sizes is not None), None)
    if is_paired and sizes is None:
        require_heads(path, head_counts([parent], 0, 0), size)
    sizes = heads_of([parent]) if sizes is None else sizes
    cuts = []
    for name, rule in rest.items():
        layer, full_path, parts = layers[name], join(path, name), rule.parts
        pairs = is_paired and not rule.alone and rule.split is not TensorSplit.VOCABULARY
        pairs = pairs and type(layer) not in REGISTERED
        if parts is None and pairs and rule.split is TensorSplit.COLUMN and is_linear(layer):
            parts = _fused_parts(full_path, parent, sizes_of(layer)[1], widths)
        told, owners = rule.parts is not None, (parent,)
        cut = Cut(parent, name, full_path, layer, rule.split, parts or 1, pairs, told, parent, owners, sizes)
        cuts.append(cut)
    return cuts


def _fused_parts(path: str, parent: nn.Module, output: int, widths: list[int]) -> int:
    """Return the number of fused blocks in a column's output, each as wide as a row's input."""
    if output in widths or (has_fewer_kv_heads(parent) and any(width % output == 0 for width in widths)):
        return 1
    for width in widths:
        if output % width == 0:
            return output // width
    raise MisfitError(
        f"{path!r} has {output} outputs, but the row layers beside it take {widths}; replicate one or both sides, or "
        f'write of which fused blocks they are: {{"cut": "column", "parts": …}}'
    )


def _require_cuttable(cut: Cut, shared: set[int], *, strict: bool) -> None:
    is_ids = cut.split is TensorSplit.VOCABULARY
    can = (is_linear(cut.layer) and not is_ids) or (is_ids and isinstance(cut.layer, nn.Linear | nn.Embedding))
    can = can or (cut.split is TensorSplit.COLUMN and type(cut.layer) in REGISTERED)
    if not can or not is_plain(cut.layer, strict=strict):
        why = own_forward(cut.layer)
        wanted = "Linear or Embedding" if cut.split is TensorSplit.VOCABULARY else "Linear"
        raise MisfitError(
            f"{cut.path!r} cannot be cut as {cut.split.value!r}: it must be a plain {wanted} without hooks, also "
            f"on its weights, and without a forward of its own, and is {type(cut.layer).__name__}"
            f"{why and f', of which {why}'}; keep it whole, by a rule before others: {{{cut.path!r}: 'replicate'}}"
        )
    if id(cut.layer) in shared:
        raise MisfitError(f"{cut.path!r} cannot be cut: it, or its weight, is used in several places; replicate it")


def _require_divisible(cut: Cut, size: int) -> None:
    what = {
        TensorSplit.COLUMN: f"output features of {cut.path!r}",
        TensorSplit.ROW: f"input features of {cut.path!r}",
        TensorSplit.VOCABULARY: f"ids of {cut.path!r} (or pad the vocabulary)",
    }
    require_even(cut_width(cut), size, what[cut.split], cut.parts)


@dataclass(frozen=True)
class Choice:
    """Choice of cuts over tp for one block.

    Attributes:
        rules: in addition to the user's, by names in the whole model.
        partial: names, in the block, of weights that are not cut and whose gradients are partial sums on the ranks.
        slices: whether the block takes a slice of the tokens, where tokens are sliced.
        gathers_before: whether tokens are then all-gathered at the input of the module of a pair's columns.
        proved: names in the whole model of the first columns of proved pairs.
    """

    rules: CutRules = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
    slices: bool = True
    gathers_before: bool = False
    proved: frozenset[str] = frozenset()
