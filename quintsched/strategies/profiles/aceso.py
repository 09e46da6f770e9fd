"""Aceso's profiles (Liu et al., EuroSys '24; microsoft/SuperScaler) and its configurations of GPT models.

    gpt_13B_mbs1_tp2_algo0.csv           op_name, forward-compute, backward-compute (µs), sizes (MiB)
    prim_gpt_13B_all_reduce_2gpus.csv    data_size(MB), time(ms): MiB of one rank's tensor
    p2p_intra_node.csv, p2p_inter_node.csv       sizes (MiB), then GiB/s

Its profiler runs each operator separately, back to back; its backwards compute gradients of inputs only; and an
operator's time includes its collectives. `algo` 0 cuts the qkv and first feed-forward matrices by columns, the others
by rows; 1 the other way round. Tensors that operators save for their backwards are not in the files: `GPT` has them.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from quintsched.errors import InputError, UsageError, suggest
from quintsched.files.atomic import read_whole
from quintsched.files.strictjson import describe_faults
from quintsched.strategies.descriptions.hardware import Curve
from quintsched.strategies.profiles.operator_layout import OperatorLayout, Placed, StageOperators
from quintsched.strategies.profiles.profile import Measures, Operator, Profile, WorkKind

MOST_ACESO_BYTES = 2**26
MIB = float(2**20)
FAILED = 1e7
"""Microseconds or MiB that the profiler writes for an operator that ran out of memory."""
FAILED_COLLECTIVE = 1e6
"""Milliseconds that it writes for a failed collective."""
FP16_BYTES = 2.0
"""Bytes of an fp16 element."""
ACCUMULATION = 3.0
"""Bytes moved by adding a gradient to the sum, per byte of weights: two reads and one write."""
EMBEDDING_PASSES = 4.0
"""Memory passes of the embedding's backward: it fills a gradient of all tokens with zeros and adds it to the sum."""
OPERATORS = re.compile(r"gpt_(?P<size>\w+?)_mbs(?P<microbatch>\d+)_tp(?P<tp>\d+)_algo(?P<cut>\d+)")
COLLECTIVE = re.compile(
    r"prim_gpt_(?P<size>\w+?)_(?P<kind>all_gather|all_reduce|reduce_scatter|all_to_all)_(?P<n>\d+)gpus"
)
WITHIN, ACROSS = "p2p_intra_node", "p2p_inter_node"
MESSAGES_PREFIX = "p2p_"
"""Prefix of files whose header is data too."""

T = TypeVar("T")
Table = list[list[Any]]
"""Rows of cells, without the header."""


@dataclass(frozen=True)
class Form:
    """Properties of a GPT's operator that the files do not contain."""

    kind: WorkKind
    wide: float = 1.0
    """Width of a product's output, in units of the hidden size."""
    deep: float = 1.0
    """Width of a product's input, likewise."""
    column: bool = True
    """Whether a product's matrix is cut by columns."""
    cut: bool = False
    """Whether an operator other than a product works on a tensor that is sharded over tp."""
    output_freed: bool = False
    scores: bool = False
    in_place: bool = False
    carries: bool = False
    """Whether the residual is passed along beside it."""
    values: bool = False
    """Whether attention's values are passed along beside it."""


GPT = {
    "encoder-embedding": Form("pass"),
    "enc-1st-layernorm": Form("pass", carries=True),
    "enc-attention-qkv": Form("product", wide=3.0, carries=True),
    "enc-attention-score": Form("attention", cut=True, scores=True, output_freed=True, carries=True, values=True),
    "enc-attention-softmax": Form("attention", cut=True, scores=True, in_place=True, carries=True, values=True),
    "enc-attention-dropout": Form("attention", cut=True, scores=True, carries=True, values=True),
    "enc-attention-context": Form("attention", cut=True, carries=True),
    "enc-attention-dense": Form("product", column=False, output_freed=True, carries=True),
    "enc-post-attention-dropout": Form("pass"),
    "enc-2nd-layernorm": Form("pass", carries=True),
    "enc-MLP-GEMM-1": Form("product", wide=4.0, carries=True),
    "enc-MLP-gelu": Form("pass", cut=True, carries=True),
    "enc-MLP-GEMM-2": Form("product", deep=4.0, column=False, output_freed=True, carries=True),
    "enc-post-MLP-dropout": Form("pass"),
    "final-layernorm": Form("pass"),
    "gpt-post-process": Form("block"),
}
FIRST, LAYER, LAST = tuple(GPT)[:1], tuple(GPT)[1:14], tuple(GPT)[14:]
EMBEDDING, HEAD, RESIDUAL = FIRST[0], LAST[-1], "enc-post-MLP-dropout"
QKV, SCORE, DENSE = "enc-attention-qkv", "enc-attention-score", "enc-attention-dense"
ADDED = "enc-post-attention-dropout"


@dataclass(frozen=True)
class AcesoRow:
    """One line of a file, in seconds and bytes."""

    forward_s: float
    backward_s: float
    input: float
    output: float
    weights: float
    activations: float


def read_folder(folder: Path, size: str | None = None, hidden: int | None = None) -> Profile:
    """Return the profile of the GPT of that size ("13B") in a folder of Aceso's CSV files.

    Without a size, takes the one with the nearest hidden size. Raises `UsageError` if the folder has several and
    neither is given, `InputError` for a broken file.
    """
    return assemble({path.stem: _read_csv(path) for path in sorted(folder.glob("*.csv"))}, str(folder), size, hidden)


def assemble(tables: Mapping[str, Table], source: str, size: str | None = None, hidden: int | None = None) -> Profile:
    """Return the profile of one size from tables by the names of Aceso's files; raises as `read_folder` does."""
    try:
        return _assembled(tables, source, size, hidden)
    except ValidationError as error:
        raise InputError(f"{source}: {describe_faults(error)}") from None
    except ArithmeticError as error:
        raise InputError(f"{source}: its tables give no sizes of a model: {error}") from None


def _assembled(tables: Mapping[str, Table], source: str, size: str | None, hidden: int | None) -> Profile:
    named = [match for name in tables if (match := OPERATORS.fullmatch(name))]
    known = sorted({match["size"] for match in named})
    if size is None and hidden is not None and len(known) > 1:
        made = [assemble(tables, source, name) for name in known]
        return min(made, key=lambda profile: abs((profile.measures.hidden if profile.measures else 0) - hidden))
    chosen = _size(known, size, source)
    operators = [
        operator
        for match in named
        if match["size"] == chosen
        for operator in _read(match[0], tables, partial(_operators, match))
    ]
    embedding = next((o for o in operators if o.name == EMBEDDING and o.tp == 1), None)
    return Profile(
        name=f"gpt-{chosen.lower().replace('_', '.')}",
        source=source,
        operators=tuple(operators),
        first=FIRST,
        layer=LAYER,
        last=LAST,
        measures=_measures(operators),
        weight_gradients=False,
        alone=True,
        accumulation_bytes=ACCUMULATION,
        memory_rate=EMBEDDING_PASSES * embedding.weights / embedding.backward_s if embedding else None,
        collectives=_collectives(tables, chosen),
        message=_read(WITHIN, tables, _messages) if WITHIN in tables else None,
        network_message=_read(ACROSS, tables, _messages) if ACROSS in tables else None,
    )


def tables(named: Mapping[str, Any], source: str) -> dict[str, Table]:
    """Return tables that were published as JSON, {"columns": […], "rows": […]}, by the names of Aceso's files.

    Raises `InputError` for anything else.
    """
    made: dict[str, Table] = {}
    for name, table in named.items():
        if not isinstance(table, dict) or not {"columns", "rows"} <= set(table):
            raise InputError(f"{source}: /profiles/{name}: columns and rows are needed")
        rows: list[Any] = [table["columns"], *table["rows"]] if isinstance(table["rows"], list) else [None]
        if not all(isinstance(row, list) for row in rows):
            raise InputError(f"{source}: /profiles/{name}: columns are a list, and rows a list of lists")
        made[name] = rows if name.startswith(MESSAGES_PREFIX) else rows[1:]
    return made


def read_layout(config: Mapping[str, Any], gpus_per_node: int = 8) -> OperatorLayout:
    """Return the layout of one of Aceso's configurations; its lists may be run-length encoded, [value, count].

    Raises `InputError` for one that is incomplete.
    """
    try:
        sequence = (*FIRST, *LAYER * config["num_layers"], *LAST)
        stages, begin = [], 0
        for number, count in enumerate(config["num_ops_in_each_stage"]):
            stages.append(_stage(config, number, sequence[begin : begin + count]))
            begin += count
        batch, microbatch = config["global_batch_size"], config["micro_batch_size"]
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise InputError(f"not a configuration of Aceso: {type(error).__name__} {error}") from error
    if begin != len(sequence):
        raise InputError(f"the stages of the configuration hold {begin} operators, the model has {len(sequence)}")
    return OperatorLayout(tuple(stages), batch, microbatch, gpus_per_node)


def _stage(config: Mapping[str, Any], number: int, names: tuple[str, ...]) -> StageOperators:
    again = config["recompute_ops"][number] if config["checkpoint_activations"][number] else [0] * len(names)
    of_each = (
        _spelled_out(values)
        for values in (
            config["model_parallel_size_of_each_op"][number],
            config["data_parallel_size_of_each_op"][number],
            config["algo_of_each_op"][number],
            again,
        )
    )
    placed = tuple(Placed(n, tp, dp, cut, bool(r)) for n, tp, dp, cut, r in zip(names, *of_each, strict=True))
    return StageOperators(placed, config["num_gpus"][number])


def _spelled_out(values: Iterable[Any]) -> list[int]:
    """Return a run-length encoded list expanded: [value, count] repeats the value."""
    runs = [value if isinstance(value, list) else [value, 1] for value in values]
    return [value for value, count in runs for _ in range(count)]


def _size(known: list[str], size: str | None, source: str) -> str:
    if not known:
        raise InputError(f"{source}: no files of Aceso's operators, such as gpt_13B_mbs1_tp1_algo0.csv")
    if size is None and len(known) == 1:
        return known[0]
    if size is None:
        raise UsageError(f"{source} has profiles of {', '.join(known)}: say which")
    plain = {name.lower().replace("_", "."): name for name in known}
    if size.lower().replace("_", ".") not in plain:
        raise UsageError(f"{source} has no profile of a GPT of size {size!r}{suggest(size, known)}")
    return plain[size.lower().replace("_", ".")]


def _measures(operators: list[Operator]) -> Measures | None:
    """Return the sizes of the model, derived from the sizes of its operators."""
    one = {(o.name, o.tp): o for o in operators if o.microbatch == 1 and o.cut == 0}
    score, dense, head = (one.get((name, 1)) for name in (SCORE, DENSE, HEAD))
    if not (score and dense and head):
        return None
    hidden = round(sqrt(dense.weights / FP16_BYTES))
    heads, vocab = score.output / FP16_BYTES / score.seq**2, head.weights / FP16_BYTES / hidden
    return Measures(hidden=hidden, heads=round(heads), vocab=round(vocab))


def _read(name: str, tables: Mapping[str, Table], read: Callable[[Table], T]) -> T:
    """Return the result of `read` for a table; raises `InputError` with its name if it is malformed."""
    try:
        return read(tables[name])
    except ValidationError as error:
        raise InputError(f"{name}: not a table of Aceso's: {describe_faults(error)}") from None
    except (ValueError, TypeError, IndexError, ArithmeticError) as error:
        raise InputError(f"{name}: not a table of Aceso's: {error}") from None


def _operators(match: re.Match[str], table: Table) -> list[Operator]:
    tp, microbatch, cut = (int(match[name]) for name in ("tp", "microbatch", "cut"))
    measured = {str(row[0]): _row(row) for row in table}
    rows = {name: row for name, row in measured.items() if row is not None}
    if EMBEDDING not in rows or DENSE not in rows:
        return []
    hidden = rows[EMBEDDING].output
    width = sqrt(rows[DENSE].weights * tp / FP16_BYTES)
    seq = round(hidden / FP16_BYTES / width / microbatch)
    values = (rows[QKV].output - hidden) / 3 if QKV in rows else 0.0
    scale = _Scale(tp, microbatch, cut, seq, hidden, values)
    return [_operator(name, row, scale) for name, row in rows.items() if name in GPT]


@dataclass(frozen=True)
class _Scale:
    """Common properties of the operators of one file; `hidden` and `values`: bytes of the residual and of values."""

    tp: int
    microbatch: int
    cut: int
    seq: int
    hidden: float
    values: float


def _operator(name: str, row: AcesoRow, scale: _Scale) -> Operator:
    form = GPT[name]
    passed = form.carries * scale.hidden + form.values * scale.values
    output = max(row.output - passed, 0.0)
    enters, leaves, sums = _cuts(form, form.column and (name != QKV or scale.cut == 0), scale.hidden)
    masked = 1.5 * scale.hidden if name == EMBEDDING else 0.0
    return Operator(
        name=name,
        kind=form.kind,
        tp=scale.tp,
        microbatch=scale.microbatch,
        seq=scale.seq,
        cut=scale.cut,
        forward_s=row.forward_s,
        backward_s=row.backward_s,
        flops=row.weights * scale.microbatch * scale.seq if form.kind == "product" or name == HEAD else 0.0,
        all_reduce_forward=scale.hidden if name == EMBEDDING else sums[0],
        all_reduce_backward=sums[1],
        weights=row.weights,
        input=row.input,
        output=output,
        passed=passed,
        whole=form.carries * scale.hidden + (output if leaves == "whole" else 0.0),
        kept=max(row.activations, masked),
        output_freed=form.output_freed,
        scores=form.scores,
        in_place=form.in_place,
        aside={QKV: scale.values, ADDED: row.activations}.get(name, 0.0),
        aside_until={QKV: "enc-attention-context", ADDED: RESIDUAL}.get(name),
        split=form.kind != "pass" or form.cut or name == EMBEDDING,
        enters=enters,
        leaves=leaves,
    )


SplitState = Literal["whole", "cut"]


def _cuts(form: Form, by_columns: bool, hidden: float) -> tuple[SplitState, SplitState, tuple[float, float]]:
    """Return the tp states of an operator's input and output, and the bytes that forward and backward all-reduce."""
    if form.kind != "product":
        state: SplitState = "cut" if form.cut else "whole"
        return state, state, (0.0, 0.0)
    if by_columns:
        return "whole", "cut", (0.0, form.deep * hidden)
    return "cut", "whole", (form.wide * hidden, 0.0)


def _row(row: list[Any]) -> AcesoRow | None:
    """Return a line's measurements; None for an operator that ran out of memory."""
    forward, backward, *sizes = (float(cell) for cell in row[1:7])
    given, output, weights, activations = (size * MIB for size in sizes)
    if forward >= FAILED:
        return None
    return AcesoRow(forward * 1e-6, backward * 1e-6, given, output, weights, activations)


def _collectives(tables: Mapping[str, Table], size: str) -> dict[str, dict[int, Curve]]:
    made: dict[str, dict[int, Curve]] = {}
    for match in filter(None, map(COLLECTIVE.fullmatch, tables)):
        curve = _read(match[0], tables, _times) if match["size"] == size else None
        if curve:
            made.setdefault(match["kind"], {})[int(match["n"])] = curve
    return made


def _times(table: Table) -> Curve | None:
    """Return the curve of rates by size, from times by size."""
    points = sorted({float(mib): float(ms) for mib, ms in table if 0 < float(ms) < FAILED_COLLECTIVE}.items())
    sizes, rates = (mib * MIB for mib, _ in points), (mib * MIB / (ms * 1e-3) for mib, ms in points)
    return Curve(sizes=tuple(sizes), rates=tuple(rates)) if points else None


def _messages(table: Table) -> Curve:
    """Return the curve of a file of messages, whose header has the sizes."""
    sizes, rates = ([float(cell) for cell in row] for row in table[:2])
    return Curve(sizes=tuple(mib * MIB for mib in sizes), rates=tuple(rate * 2**30 for rate in rates))


def _read_csv(path: Path) -> Table:
    try:
        text = read_whole(path, MOST_ACESO_BYTES, "the table").decode("utf-8")
        rows: Table = [row for row in csv.reader(text.splitlines()) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    return rows if path.stem.startswith(MESSAGES_PREFIX) else rows[1:]
