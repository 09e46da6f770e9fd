"""Column/row pairs found by the names of layers, and the attributes of modules that store their sizes.

    attention   qkv | query_key_value | Wqkv | c_attn | qkv_proj (fused) | q, k, v | q_proj, k_proj, v_proj | …
                with proj | out_proj | o_proj | out | wo | dense | c_proj | …
    MLP         fc1 | up | up_proj | gate_proj | w1 | w3 | c_fc | wi | … | gate_up, gate_up_proj (two fused blocks)
                with fc2 | down | down_proj | w2 | c_proj | wo | …

Names may be dotted paths into children of a module, as in BERT: attention.self.query with attention.output.dense. In an
nn.Sequential a linear layer makes a pair with the next one, whatever their names are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from torch import nn

from ...settings.tensor_parallel_rules import FusedParts, TensorRule, TensorSplit
from .cuttable_layers import Cut, NamedLayer, is_adapted, is_layer, is_linear, is_plain, layers_at, sizes_of
from .parameter_shards import divides, require_even


@dataclass(frozen=True)
class Family:
    """Naming convention of a pair: names of column layers, and of the row layers behind them."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    parts: int = 1
    """Number of blocks that are fused in a column layer."""
    by_heads: bool = False
    """Whether a fused column is interleaved by heads: q, k, v of each head are adjacent."""
    is_attention: bool = True


_ROWS = ("proj", "out_proj", "o_proj", "out", "wo", "dense", "c_proj", "o", "out_lin", "to_out", "to_out.0", "Wo")
_MLP_ROWS = ("fc2", "down", "down_proj", "w2", "fc_out", "lin2", "linear2", "proj", "c_proj", "wo")
FAMILIES = (
    Family(("qkv",), _ROWS, parts=3),
    Family(("query_key_value",), _ROWS, parts=3, by_heads=True),
    Family(("Wqkv",), _ROWS, parts=3),
    Family(("c_attn",), _ROWS, parts=3),
    Family(("qkv_proj",), _ROWS, parts=3),
    Family(("to_qkv",), _ROWS, parts=3),
    Family(("in_proj",), ("out_proj",), parts=3),
    Family(("q", "k", "v"), _ROWS),
    Family(("q_proj", "k_proj", "v_proj"), _ROWS),
    Family(("query", "key", "value"), _ROWS),
    Family(("wq", "wk", "wv"), _ROWS),
    Family(("Wq", "Wk", "Wv"), _ROWS),
    Family(("q_lin", "k_lin", "v_lin"), _ROWS),
    Family(("to_q", "to_k", "to_v"), _ROWS),
    Family(("query_proj", "key_proj", "value_proj"), _ROWS),
    Family(("self.query", "self.key", "self.value"), ("output.dense",)),
    Family(("self.query_proj", "self.key_proj", "self.value_proj"), ("output.dense",)),
    Family(("attention.query", "attention.key", "attention.value"), ("output.dense",)),
    Family(("fc1", "up", "up_proj", "gate_proj", "w1", "w3"), _MLP_ROWS, is_attention=False),
    Family(("fc1_g", "fc1_x"), ("fc2",), is_attention=False),
    Family(("fc_1", "fc_2"), ("proj",), is_attention=False),
    Family(("c_fc",), ("c_proj",), is_attention=False),
    Family(("fc", "up_fc"), ("proj", "c_proj"), is_attention=False),
    Family(("fc_in",), ("fc_out",), is_attention=False),
    Family(("wi",), ("wo",), is_attention=False),
    Family(("wi_0", "wi_1"), ("wo",), is_attention=False),
    Family(("lin1",), ("lin2",), is_attention=False),
    Family(("linear1",), ("linear2",), is_attention=False),
    Family(("dense_h_to_4h",), ("dense_4h_to_h",), is_attention=False),
    Family(("intermediate.dense",), ("output.dense",), is_attention=False),
    Family(("intermediate",), ("output",), is_attention=False),
    Family(("ffn",), ("ffn_output",), is_attention=False),
    Family(("gate_up", "gate_up_proj"), _MLP_ROWS, parts=2, is_attention=False),
    Family(("w12",), ("w3",), parts=2, is_attention=False),
    Family(("weights_in",), ("weights_out",), parts=2, is_attention=False),
    Family(("Wi",), ("Wo",), parts=2, is_attention=False),
)
_HEADS = ("num_heads", "n_heads", "n_head", "heads", "num_attention_heads", "nhead", "num_head", "num_query_heads")
_KV_HEADS = (
    "num_kv_heads",
    "n_kv_heads",
    "n_kv_head",
    "kv_heads",
    "num_key_value_heads",
    "num_query_groups",
    "n_query_groups",
)
HEAD_COUNTS = (*_HEADS, *_KV_HEADS)
"""Attributes in which attention modules store their number of heads."""

_CONFIGS = ("config", "cfg", "args", "options")
"""Attributes in which modules store the configuration that they were built from."""


def pair_cuts(
    path: str,
    scope: nn.Module,
    family: Family,
    rule_of: Callable[[str], TensorRule | None],
    shared: set[int],
    size: int,
    *,
    strict: bool,
) -> list[Cut]:
    """Return the cuts of one pair found by name, or none.

    Args:
        path: the name of `scope`.
        scope: the module in which the names are looked up.
        family: the names.
        rule_of: maps the name of a layer to its rule, or None.
        shared: ids of layers that are used in several places.
        size: number of ranks of tp.
        strict: the pair is not proved, so only plain cases are cut, and heads that do not divide are an error.
            Otherwise such layers are cut one by one (each takes and returns full tensors).
    """
    found = _places(path, scope, family)
    places = {place: split for split, group in found.items() for of_name in group for place in of_name}
    if not places or any(not is_plain(p.layer, strict=strict) or id(p.layer) in shared for p in places):
        return []
    told = {place: rule for place in places if (rule := rule_of(place.path)) is not None}
    columns, row = [of_name[0] for of_name in found[TensorSplit.COLUMN]], found[TensorSplit.ROW][0][0]
    outputs, width = [sizes_of(place.layer)[1] for place in columns], sizes_of(row.layer)[0]
    parts = _assumed_parts(family, outputs, width, strict=strict)
    if parts is None or any(rule.split is not places[place] for place, rule in told.items()):
        return []
    owners = tuple(dict.fromkeys([*(owner_of(scope, place, path) for place in (*columns, row)), scope]))
    is_alone = any(rule.alone for rule in told.values())
    if family.is_attention and not is_alone:
        heads = head_counts(owners, width, outputs[-1] // family.parts, parts)
        if strict and not heads:
            return []
        if strict or told:
            require_heads(path, heads, size)
        is_alone = any(count % size for count in heads.values())
    if not strict and not told:
        if any(sizes_of(p.layer)[split is TensorSplit.COLUMN] % size for p, split in places.items()):
            return []
        is_alone = is_alone or not all(divides(output, size, parts) for output in outputs)
    return _cuts_at(places, told, scope, owners, family, parts, is_alone=is_alone)


def _cuts_at(
    places: Mapping[NamedLayer, TensorSplit],
    told: Mapping[NamedLayer, TensorRule],
    scope: nn.Module,
    owners: tuple[nn.Module, ...],
    family: Family,
    parts: FusedParts,
    *,
    is_alone: bool,
) -> list[Cut]:
    """Return the cuts of a pair's layers; with `is_alone` each layer takes and returns full tensors."""
    sizes = next((rule.sizes for rule in told.values() if rule.sizes is not None), None)
    divided_ones = heads_of(owners, family.is_attention) if sizes is None else sizes
    return [
        Cut(
            place.parent,
            place.name,
            place.path,
            place.layer,
            split,
            _parts_at(told.get(place), parts, split) if not is_alone else 1,
            is_paired=not is_alone,
            is_told=place in told and told[place].parts is not None,
            scope=scope,
            owners=owners,
            divides=() if is_alone else divided_ones,
            family=family.columns[0],
        )
        for place, split in places.items()
    ]


def families_in(scope: nn.Module) -> Iterator[Family]:
    """Yield the pairs of an nn.Sequential: each linear layer with the next one, unless other layers are between."""
    column = ""
    for name, child in scope.named_children() if type(scope) is nn.Sequential else ():
        if not (is_linear(child) or is_adapted(child)):
            column = "" if any(map(is_layer, child.modules())) else column
        elif column:
            yield Family((column,), (name,), is_attention=False)
            column = ""
        else:
            column = name


def _places(path: str, scope: nn.Module, family: Family) -> dict[TensorSplit, list[list[NamedLayer]]]:
    """Return the layers of a family's names, each with its LoRA adapters; empty unless the pair is complete."""
    columns = [layers_at(scope, path, name, TensorSplit.COLUMN) for name in family.columns]
    row = next((found for name in family.rows if (found := layers_at(scope, path, name, TensorSplit.ROW))), [])
    is_complete = all(columns) if family.is_attention else any(columns)
    if not row or not is_complete:
        return {}
    return {TensorSplit.COLUMN: [found for found in columns if found], TensorSplit.ROW: [row]}


def owner_of(scope: nn.Module, place: NamedLayer, path: str) -> nn.Module:
    """Return the module within a scope that calls a layer: its parent, or the parent of the LoRA module around it."""
    inner = place.path.removeprefix(f"{path}.") if path else place.path
    owner, _, _ = inner.removesuffix(".base_layer").rpartition(".")
    return scope.get_submodule(owner)


def _parts_at(rule: TensorRule | None, assumed: FusedParts, split: TensorSplit) -> FusedParts:
    if split is not TensorSplit.COLUMN:
        return 1
    return rule.parts if rule is not None and rule.parts is not None else assumed


def _assumed_parts(family: Family, outputs: Sequence[int], width: int, *, strict: bool) -> FusedParts | None:
    """Return the fused blocks of a family's columns, inferred from their output sizes and the row's input `width`.

    None if the sizes do not fit. Keys and values may have fewer heads than queries (GQA).
    """
    first, *others = outputs
    if first == family.parts * width:
        fits = all(width % other == 0 for other in others) and len(set(others)) <= 1
        fits = fits if family.is_attention else all(other == first for other in others)
        return (1 if family.by_heads else family.parts) if fits else None
    if strict or family.parts != 3 or others:
        return None
    return 1 if family.by_heads and first > width else grouped_parts(first, width)


def grouped_parts(total: int, width: int) -> FusedParts | None:
    """Return the proportions of fused [queries; keys; values] (GQA) of `total` outputs, with queries of `width`."""
    if not width < total < 3 * width or (total - width) % 2:
        return None
    rest = (total - width) // 2
    unit = gcd(width, rest)
    return (width // unit, rest // unit, rest // unit)


def head_counts(owners: Sequence[nn.Module], width: int, kv_width: int, parts: FusedParts = 1) -> dict[str, int]:
    """Return the numbers of heads of modules: from their attributes, or from `head_dim` and the widths."""
    stated: dict[str, int] = {}
    head_dim = None
    for owner in owners:
        counts = {name: getattr(owner, name, None) for name in HEAD_COUNTS}
        stated |= {n: c for n, c in counts.items() if isinstance(c, int) and not isinstance(c, bool) and c > 0}
        head_dim = head_dim or getattr(owner, "head_dim", None)
    if head_dim is None and stated and width:
        head_dim = width // next(iter(stated.values()))
    if isinstance(head_dim, int) and head_dim > 0 and width:
        stated |= {"heads": width // head_dim}
        if isinstance(parts, int):
            stated |= {"key/value heads": max(kv_width // head_dim, 1)}
    return stated


def require_heads(path: str, heads: Mapping[str, int], size: int) -> None:
    """Raise `MisfitError` unless `size` divides all numbers of heads."""
    for kind, count in heads.items():
        what = "heads" if kind in _HEADS else "key/value heads"
        require_even(count, size, f"{what} of {path!r}")


def has_fewer_kv_heads(parent: nn.Module) -> bool:
    """Whether a module has an attribute for the number of key/value heads (GQA)."""
    return any(hasattr(parent, name) for name in _KV_HEADS)


def heads_of(owners: Sequence[nn.Module], is_attention: bool = True) -> tuple[str, ...]:
    """Return the attributes of modules that store a number of heads; none if it is no attention."""
    names = [name for owner in owners for name in HEAD_COUNTS if isinstance(getattr(owner, name, None), int)]
    return tuple(dict.fromkeys(names)) if is_attention else ()


def configured_heads_of(owners: Sequence[nn.Module]) -> tuple[str, ...]:
    """Return the attributes that store a number of heads in modules' configurations: "config.num_heads"."""
    return tuple(
        dict.fromkeys(
            f"{name}.{count}"
            for owner in owners
            for name in _CONFIGS
            if (config := getattr(owner, name, None)) is not None and not isinstance(config, nn.Module)
            for count in HEAD_COUNTS
            if isinstance(getattr(config, count, None), int)
        )
    )


def widths_of(owners: Sequence[nn.Module], widths: set[int]) -> tuple[str, ...]:
    """Return the attributes of modules whose value is one of `widths`, or a list of these."""
    return tuple(dict.fromkeys(name for owner in owners for name in _widths_in(owner, widths)))


def _widths_in(owner: nn.Module, widths: set[int]) -> Iterator[str]:
    for name, value in vars(owner).items():
        if name.startswith("_") or name in HEAD_COUNTS:
            continue
        several = isinstance(value, tuple | list) and value and all(type(v) is int and v in widths for v in value)
        if several or (type(value) is int and value in widths):
            yield name


def divided(value: object, size: int) -> object:
    """Divide a size, or each of several, by the number of ranks."""
    if isinstance(value, tuple | list):
        return type(value)(number // size for number in value)
    assert isinstance(value, int)
    return value // size
