"""Which layers of a module tensor parallelism cuts, and how.

By default, pairs found by name within one parent module:

    attention   qkv (three fused blocks) | q, k, v | q_proj, k_proj, v_proj | query, key, value | wq, wk, wv
                with proj | out_proj | o_proj | out | wo
    MLP         fc1 | up | up_proj | gate_proj | w1 | w3 | gate_up, gate_up_proj (two fused blocks)
                with fc2 | down | down_proj | w2

A pair is cut only where both sides are plain nn.Linear of matching sizes that are used nowhere else, and an attention
only where its parent says how many heads there are, or how wide one is. Everything else is left alone.

A module may say more of its layers, by an attribute `tensor_parallel`, name to rule. What the ranks do not divide
then stays whole:

    class Head(nn.Module):
        tensor_parallel = {"head": "vocabulary"}

Rules win over all that. Columns and rows that rules name in one parent feed each other where there are both; a column
alone gathers its output and a row alone takes the full input, so that what surrounds them need not know. "vocabulary"
cuts an embedding by its ids, and a linear layer by its outputs, which at the end of the model stay cut for a loss that
can do with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from quintsched.errors import MisfitError, UsageError, nearest

from ...job.choices import TensorSplit
from ...job.tensor_rules import Parts, TensorRule, read_rule
from .fused import require_even

RuleData = str | Mapping[str, object]
"""A rule as people write it: "column", or {"cut": "column", "parts": 3} (see `job.tensor_rules`)."""

Rules = Mapping[str, RuleData]
"""Patterns on names to rules; the first that matches counts."""


@dataclass(frozen=True)
class Cut:
    """One layer to be cut: where it hangs, how, its fused blocks (`parts`), and whether its partner is cut too."""

    parent: nn.Module | None
    name: str
    path: str
    layer: nn.Module
    split: TensorSplit
    parts: Parts = 1
    is_paired: bool = False
    is_told: bool = False
    """Whether a rule said what the parts are."""


@dataclass(frozen=True)
class _Family:
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    parts: int = 1
    is_attention: bool = True


_ATTENTION_ROWS = ("proj", "out_proj", "o_proj", "out", "wo")
_MLP_ROWS = ("fc2", "down", "down_proj", "w2")
_FAMILIES = (
    _Family(("qkv",), _ATTENTION_ROWS, parts=3),
    _Family(("q", "k", "v"), _ATTENTION_ROWS),
    _Family(("q_proj", "k_proj", "v_proj"), _ATTENTION_ROWS),
    _Family(("query", "key", "value"), _ATTENTION_ROWS),
    _Family(("wq", "wk", "wv"), _ATTENTION_ROWS),
    _Family(("fc1", "up", "up_proj", "gate_proj", "w1", "w3"), _MLP_ROWS, is_attention=False),
    _Family(("gate_up", "gate_up_proj"), _MLP_ROWS, parts=2, is_attention=False),
)
_HEADS = ("num_heads", "n_heads", "heads", "num_attention_heads")
_KV_HEADS = ("num_kv_heads", "n_kv_heads", "kv_heads", "num_key_value_heads")
HEAD_COUNTS = (*_HEADS, *_KV_HEADS)
"""The attributes in which attention modules keep how many heads they have."""

_OPAQUE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def find_cuts(root: nn.Module, rules: Rules, size: int, path: str = "") -> list[Cut]:
    """List the layers of `root` to be cut over `size` ranks; rules see their names below `path`.

    Raises:
        UsageError: a rule that is none of "column", "row", "vocabulary", "replicate".
        MisfitError: `size` does not divide heads or features, or a rule for a layer that cannot be cut.
    """
    parsed = parse_rules(rules)
    declared = _declared(root, path)
    shared = _shared_layers(root)
    cuts = _root_cut(root, parsed, path)
    for place, parent in _open_modules(path, root, parsed, set()):
        cuts += _parent_cuts(place, parent, {**parsed, **declared}, shared, size)
    kept = []
    for cut in cuts:
        if cut.path in declared and _match(cut.path, parsed) is None and cut_width(cut) % size:
            continue
        _require_cuttable(cut, shared)
        _require_divisible(cut, size)
        kept.append(cut)
    return kept


def cut_width(cut: Cut) -> int:
    """Return how many features or ids are divided; 0 for what is neither a linear layer nor an embedding."""
    match cut.split, cut.layer:
        case TensorSplit.ROW, nn.Linear(in_features=width):
            return int(width)
        case _, nn.Linear(out_features=width) | nn.Embedding(num_embeddings=width):
            return int(width)
    return 0


def require_pairs(root: nn.Module, cuts: Sequence[Cut], path: str) -> None:
    """Raise `MisfitError` where a module cannot work on a slice of the tokens: all but its pairs sees only that."""
    alone = [cut.path for cut in cuts if not cut.is_paired]
    cut = {cut.parent for cut in cuts}
    whole = [name for name, module in root.named_modules(prefix=path) if _attends(module) and module not in cut]
    if alone or whole:
        why = "its partner is not cut" if alone else "it is not cut, and would attend to this rank's tokens only"
        raise MisfitError(f"sequence parallelism slices the tokens around {(alone or whole)[0]!r}, but {why}")


def _attends(module: nn.Module) -> bool:
    """Whether a module is an attention by all that can be seen: it says how many heads its layers are for."""
    has_layers = any(_is_layer(child) for child in module.children())
    return isinstance(module, _OPAQUE) or (has_layers and bool(_head_counts(module, 0, 0)))


def matches(path: str, rules: Rules) -> bool:
    """Whether a rule is for the layer of this name."""
    return any(fnmatchcase(path, pattern) for pattern in rules)


def require_rules_to_match(rules: Rules, blocks: Sequence[nn.Module]) -> None:
    """Raise `UsageError` for a rule that says nothing that there is, or is for no layer of the model."""
    parse_rules(rules)
    names = [
        name
        for number, block in enumerate(blocks if rules else ())
        for name, module in block.named_modules(prefix=str(number))
        if not any(True for _ in module.children())
    ]
    for pattern in rules:
        if not any(fnmatchcase(name, pattern) for name in names):
            inside = any(fnmatchcase(name, f"{pattern}.*") for name in names)
            hint = f"; did you mean {pattern + '.*'!r}?" if inside else nearest(pattern, names)
            raise UsageError(f"tensor-parallel rule {pattern!r} is for no layer of the model{hint}")


def _declared(root: nn.Module, path: str) -> dict[str, TensorRule]:
    """Return what modules say of their layers, by full names."""
    return {
        _join(place, name): _parse_rule(name, rule)
        for place, module in root.named_modules(prefix=path)
        for name, rule in getattr(module, "tensor_parallel", {}).items()
    }


def parse_rules(rules: Rules) -> dict[str, TensorRule]:
    """Return what rules say; raises `UsageError` for one that says nothing that there is."""
    return {pattern: _parse_rule(pattern, rule) for pattern, rule in rules.items()}


def _parse_rule(pattern: str, rule: RuleData) -> TensorRule:
    try:
        return read_rule(rule)
    except ValueError as error:
        raise UsageError(f"tensor-parallel rule {pattern!r}: {error}") from None


def _match(path: str, rules: Mapping[str, TensorRule]) -> TensorRule | None:
    return next((rule for pattern, rule in rules.items() if fnmatchcase(path, pattern)), None)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding)


def _shared_layers(root: nn.Module) -> set[int]:
    """Return the ids of modules that hang in several places, or whose parameters do."""
    places = Counter(id(child) for parent in root.modules() for child in parent._modules.values())
    owners = Counter(id(param) for module in root.modules() for param in module._parameters.values())
    return {
        id(module)
        for module in root.modules()
        if places[id(module)] > 1 or any(owners[id(param)] > 1 for param in module.parameters(recurse=False))
    }


def _root_cut(root: nn.Module, rules: Mapping[str, TensorRule], path: str) -> list[Cut]:
    rule = _match(path, rules) if _is_layer(root) else None
    if rule is None or rule.split is TensorSplit.REPLICATE:
        return []
    return [Cut(None, "", path, root, rule.split, rule.parts or 1, is_told=True)]


def _open_modules(
    path: str, module: nn.Module, rules: Mapping[str, TensorRule], seen: set[int]
) -> Iterator[tuple[str, nn.Module]]:
    """Walk the modules whose children may be replaced, each once; opaque ones call functions on their weights."""
    if id(module) in seen:
        return
    seen.add(id(module))
    if isinstance(module, _OPAQUE):
        _refuse_rules_within(path, module, rules)
        return
    yield path, module
    for name, child in module.named_children():
        yield from _open_modules(_join(path, name), child, rules, seen)


def _refuse_rules_within(path: str, opaque: nn.Module, rules: Mapping[str, TensorRule]) -> None:
    for name, module in opaque.named_modules(prefix=path):
        rule = _match(name, rules) if _is_layer(module) else None
        if rule is not None and rule.split is not TensorSplit.REPLICATE:
            raise MisfitError(
                f"a rule wants to cut {name!r}, but {type(opaque).__name__} {path!r} uses the weights of its layers "
                "without calling them; leave it whole with a rule 'replicate' further up"
            )


def _parent_cuts(
    path: str, parent: nn.Module, rules: Mapping[str, TensorRule], shared: set[int], size: int
) -> list[Cut]:
    layers = {name: child for name, child in parent.named_children() if _is_layer(child)}
    ruled = {name: rule for name in layers if (rule := _match(_join(path, name), rules)) is not None}
    linears = {
        name: layer
        for name, layer in layers.items()
        if isinstance(layer, nn.Linear) and _is_plain(layer) and id(layer) not in shared
    }
    cuts: list[Cut] = []
    for family in _FAMILIES:
        cuts += _family_cuts(path, parent, family, linears, ruled, size)
    done = {cut.name for cut in cuts}
    rest = {name: rule for name, rule in ruled.items() if name not in done and rule.split is not TensorSplit.REPLICATE}
    return cuts + _ruled_cuts(path, parent, layers, rest, size)


def _family_cuts(
    path: str,
    parent: nn.Module,
    family: _Family,
    linears: Mapping[str, nn.Linear],
    ruled: Mapping[str, TensorRule],
    size: int,
) -> list[Cut]:
    """Return the cuts of a pair found by name, or none."""
    here = {name for name, _ in parent.named_children()}
    columns = [name for name in family.columns if name in here]
    row = next((name for name in family.rows if name in here), None)
    complete = columns == list(family.columns) if family.is_attention else bool(columns)
    if row is None or not complete or not linears.keys() >= {row, *columns}:
        return []
    wanted = {**dict.fromkeys(columns, TensorSplit.COLUMN), row: TensorSplit.ROW}
    if any(name in ruled and ruled[name].split is not split for name, split in wanted.items()):
        return []
    width = linears[row].in_features
    if not _widths_match(family, [linears[name].out_features for name in columns], width):
        return []
    if family.is_attention:
        heads = _head_counts(parent, width, linears[columns[-1]].out_features // family.parts)
        if not heads:
            return []
        _require_heads(path, heads, size)
    told = {name: ruled[name].parts for name in columns if name in ruled}
    return [
        Cut(
            parent,
            name,
            _join(path, name),
            linears[name],
            split,
            told.get(name) or (family.parts if split is TensorSplit.COLUMN else 1),
            is_paired=True,
            is_told=told.get(name) is not None,
        )
        for name, split in wanted.items()
    ]


def _widths_match(family: _Family, outputs: list[int], width: int) -> bool:
    """Say whether the columns' outputs feed a row of `width`; keys and values may have fewer heads than queries."""
    first, *others = outputs
    if not family.is_attention:
        return all(output == family.parts * width for output in outputs)
    return first == family.parts * width and len(set(others)) <= 1 and all(width % output == 0 for output in others)


def _ruled_cuts(
    path: str, parent: nn.Module, layers: Mapping[str, nn.Module], rest: Mapping[str, TensorRule], size: int
) -> list[Cut]:
    """Return the cuts that rules ask for beyond the pairs found by name."""
    splits = {name: rule.split for name, rule in rest.items()}
    widths = [
        layer.in_features
        for name, layer in layers.items()
        if splits.get(name) is TensorSplit.ROW and isinstance(layer, nn.Linear)
    ]
    is_paired = bool(widths) and TensorSplit.COLUMN in splits.values()
    if is_paired:
        _require_heads(path, _head_counts(parent, 0, 0), size)
    cuts = []
    for name, rule in rest.items():
        layer, full_path, parts = layers[name], _join(path, name), rule.parts
        pairs = is_paired and rule.split is not TensorSplit.VOCABULARY
        if parts is None and pairs and rule.split is TensorSplit.COLUMN and isinstance(layer, nn.Linear):
            parts = _fused_parts(full_path, parent, layer.out_features, widths)
        cuts.append(Cut(parent, name, full_path, layer, rule.split, parts or 1, pairs, rule.parts is not None))
    return cuts


def _fused_parts(path: str, parent: nn.Module, output: int, widths: list[int]) -> int:
    """Return of how many blocks, each as wide as a row's input, a column's output consists."""
    has_fewer_heads = any(hasattr(parent, name) for name in _KV_HEADS)
    if output in widths or (has_fewer_heads and any(width % output == 0 for width in widths)):
        return 1
    for width in widths:
        if output % width == 0:
            return output // width
    raise MisfitError(
        f"{path!r} has {output} outputs, but the row layers beside it take {widths}; replicate one or both sides, or "
        f'write of which fused blocks they are: {{"cut": "column", "parts": …}}'
    )


def _head_counts(parent: nn.Module, width: int, kv_width: int) -> dict[str, int]:
    """Return the counts of heads that `parent` states: by its attributes, or by `head_dim` and the widths."""
    counts = {name: getattr(parent, name, None) for name in (*_HEADS, *_KV_HEADS)}
    stated = {name: count for name, count in counts.items() if isinstance(count, int) and count > 0}
    head_dim = getattr(parent, "head_dim", None)
    if head_dim is None and stated and width:
        head_dim = width // next(iter(stated.values()))
    if isinstance(head_dim, int) and head_dim > 0 and width:
        stated |= {"heads": width // head_dim, "key/value heads": kv_width // head_dim}
    return stated


def _require_heads(path: str, heads: Mapping[str, int], size: int) -> None:
    for kind, count in heads.items():
        what = "heads" if kind in _HEADS else "key/value heads"
        require_even(count, size, f"{what} of {path!r}")


def _is_plain(layer: nn.Module) -> bool:
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return type(layer) in (nn.Linear, nn.Embedding) and not any(hooks)


def _require_cuttable(cut: Cut, shared: set[int]) -> None:
    can = isinstance(cut.layer, nn.Linear) or cut.split is TensorSplit.VOCABULARY
    if not can or not _is_plain(cut.layer):
        wanted = "Linear or Embedding" if cut.split is TensorSplit.VOCABULARY else "Linear"
        raise MisfitError(
            f"{cut.path!r} cannot be cut as {cut.split.value!r}: it must be a plain {wanted} without hooks, "
            f"and is {type(cut.layer).__name__}"
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
