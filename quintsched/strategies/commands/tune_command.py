"""`quintsched tune`: the best strategies for a model, a cluster and a batch, with reasons.

tune --model gpt3-175b --hardware a100-80gb --gpus 1024 --batch 1536 --seq 2048       all axes free
tune … --tp 8 --zero 0,1 --recompute none,selective                                   some fixed, or few to choose among
tune … --explain dp=16,tp=8,pp=8                                                      why that one is not the best
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quintsched.cli.pictures import picture_path, write_picture
from quintsched.cli.shared_options import AsJson, emit, refuse_input, say
from quintsched.errors import MisfitError, UsageError, counted
from quintsched.files.terminal import percent
from quintsched.files.terminal_progress import progress
from quintsched.strategies.commands.calibrate import calibrate_first
from quintsched.strategies.commands.flags import CHOSEN, read_settings, taking_flags
from quintsched.strategies.commands.measured_flags import MeasuredStart, ProfileAt, ProfileFile
from quintsched.strategies.commands.predict_command import Emitted, For, Simulated, said, simulated, written_for
from quintsched.strategies.commands.prediction_report import as_data

if TYPE_CHECKING:
    from quintsched.strategies.prediction.predict_one_strategy import Prediction
    from quintsched.strategies.tuning.explain_choice import Explanation
    from quintsched.strategies.tuning.export.emit import Emitted as Files
    from quintsched.strategies.tuning.recommended_strategy import Row
    from quintsched.strategies.tuning.tune import Candidate, Tuning

WHERE = ("model", "hardware", "gpus", "gpus_per_node", "batch", "seq")
"""Flags that define the problem; the others fix parts of the strategy."""

SLOWEST_SHOWN, LEAST_SAVED = 1.5, 0.2
"""Printed part of the front: at most that many times the best time, and at least that fraction less memory each."""

Picture = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="PICTURE", help="Draw time against memory: .png, .svg.")
]
Top = Annotated[int, typer.Option("--top", metavar="K", min=1, max=1000, help="How many are ranked.")]
CertificateFile = Annotated[
    Path | None,
    typer.Option("--certificate", metavar="FILE", help="Write what was left out and why, checked without searching."),
]
Explained = Annotated[
    str | None,
    typer.Option("--explain", metavar="dp=16,tp=8,…", help="Say why this strategy is not the best, or does not fit."),
]
Beside = Annotated[
    str | None, typer.Option("--beside", metavar="RECIPE", help="Say how much longer a published recipe takes.")
]
Headroom = Annotated[
    float, typer.Option("--headroom", metavar="PERCENT", min=0, max=99, help="Memory of each GPU that is left free.")
]
Tokens = Annotated[str | None, typer.Option("--tokens", metavar="15T", help="Say how many days that many tokens take.")]
Price = Annotated[
    float | None, typer.Option("--price", metavar="MONEY", min=0, help="And what they cost, by GPU and hour.")
]
Exhaustive = Annotated[bool, typer.Option("--exhaustive", help="Evaluate everything; the result is the same.")]


@taking_flags(*CHOSEN, several=True)
def tune(
    flags: dict[str, Any],
    top: Top = 10,
    output: Picture = None,
    profile: ProfileFile = None,
    profile_at: ProfileAt = None,
    explain: Explained = None,
    framework: For = None,
    directory: Emitted = None,
    beside: Beside = None,
    certificate: CertificateFile = None,
    exhaustive: Exhaustive = False,
    headroom: Headroom = 6.0,
    tokens: Tokens = None,
    price: Price = None,
    simulate: Simulated = False,
    as_json: AsJson = False,
) -> None:
    """Find the fastest strategies that fit a model and a cluster.

    Flags of a strategy that are left out are free. If nothing fits, the exit code is 3.
    """
    from quintsched.strategies.prediction.predict_one_strategy import predict
    from quintsched.strategies.tuning import explain_choice, published_recipes, recommended_strategy

    whole = None if tokens is None else read_tokens(tokens)
    recipe = None if beside is None else published_recipes.find_recipe(beside)
    flags = _searched(flags if recipe is None else recipe.choices(flags), framework)
    for written in (output, certificate):
        refuse_input(written, flags.get("model"), flags.get("hardware"), profile)
    path = None if output is None else picture_path(output)
    found = _search(flags, top, exhaustive, MeasuredStart.from_options(profile, profile_at), headroom / 100)
    if certificate is not None:
        _write_certificate(found, certificate)
    explanation = None if explain is None else _explain(found, explain)
    if not found.best:
        raise MisfitError("\n".join((explanation or explain_choice.misfit(found)).lines))
    if path is not None:
        write_picture(path, partial(_draw, found, path))
    shown = found.best[:top] if as_json else [row.candidate for row in _rows(found, top)]
    predictions = [predict(found.model, found.hardware, one.strategy) for one in shown]
    simulations = _simulations(predictions) if simulate else [None] * len(predictions)
    chosen = recommended_strategy.recommended(found).strategy
    files = None if directory is None else written_for(framework, found.model, chosen, directory)
    published = () if recipe is None else published_recipes.beside(found, recipe)
    days, cost = (0.0, None) if whole is None else _days_and_cost(found, whole, price)
    if as_json:
        more: dict[str, Any] = {} if whole is None else {"days": days, "cost": cost}
        more |= {"beside": list(published)} if published else {}
        emit(_as_data(found, predictions, simulations) | _more_data(explanation, files) | more)
        return
    say(_describe(found, top, predictions, simulations))
    paid = "" if cost is None else f"; {cost:,.0f} at {price:g} by GPU and hour"
    training = () if whole is None else (f"{tokens} tokens: {days:,.1f} days{paid}",)
    for lines in (training, explanation.lines if explanation else (), published):
        if lines:
            say(["", *lines])
    if files is not None:
        say(said(files))


def _searched(flags: dict[str, Any], framework: str | None) -> dict[str, Any]:
    """Return the flags as far as a framework can run them; raises `UsageError` for a missing size of the problem."""
    from quintsched.strategies.tuning.export.frameworks import restrict

    if framework is not None:
        flags = flags | restrict(framework, {name: value for name, value in flags.items() if name not in WHERE})
    for name in ("gpus", "batch"):
        if name not in flags:
            raise UsageError(f"--{name} is missing; tune needs --model, --hardware, --gpus and --batch")
    return flags


def _search(
    flags: Mapping[str, Any], top: int, exhaustive: bool, start: MeasuredStart | None, headroom: float
) -> Tuning:
    from quintsched.strategies.descriptions.flag_rows import find_parts, longest_sequence
    from quintsched.strategies.prediction.profiled.measured_hardware import measured_hardware
    from quintsched.strategies.tuning.recommended_strategy import POOL
    from quintsched.strategies.tuning.tune import tune

    if isinstance(flags.get("hardware"), str):
        calibrate_first(flags["hardware"])
    model, hardware = find_parts(flags)
    if start is not None:
        hardware = measured_hardware(hardware, start.profile({name: flags[name] for name in WHERE if name in flags}))
    fixed = {name: value for name, value in flags.items() if name not in WHERE}
    with progress("searching") as found:

        def show(done: int, total: int, best_s: float) -> None:
            found.show_done(done, total, f"best {best_s:.4g} s" if best_s < float("inf") else "nothing fits yet")

        return tune(
            model,
            hardware,
            flags["gpus"],
            flags["batch"],
            longest_sequence(model) if flags.get("seq") is None else flags["seq"],
            fixed=fixed,
            top=max(top, POOL),
            prune=not exhaustive,
            progress=show,
            headroom=headroom,
        )


def _simulations(predictions: Sequence[Prediction]) -> list[float | None]:
    found: list[float | None] = []
    with progress(f"simulating {counted(len(predictions), 'strategy')}") as shown:
        for prediction in predictions:
            found.append(simulated(prediction))
            shown.show_done(len(found), len(predictions))
    return found


def _write_certificate(found: Tuning, file: Path) -> None:
    """Write the certificate of a search, after checking it; raises UnsoundError if it does not hold."""
    from quintsched.strategies.tuning.check_search_certificate import check_certificate
    from quintsched.strategies.tuning.search_certificate import make_certificate

    certificate = make_certificate(found)
    check_certificate(certificate)
    certificate.save(file)


def _explain(found: Tuning, text: str) -> Explanation:
    """Return why a strategy is not the best; what its text leaves out comes from the search, and from its best."""
    from quintsched.strategies.tuning.explain_choice import completed, explain

    explanation = explain(found, completed(found, read_settings("--explain", text)))
    judged, *rest = explanation.lines
    return replace(explanation, lines=(f"{judged}; what --explain leaves out is as in the best", *rest))


def _draw(found: Tuning, path: Path) -> None:
    from quintsched import viz

    viz.render_tuning(found, path)


def _more_data(explanation: Explanation | None, files: Files | None) -> dict[str, Any]:
    """Return the explanation and the emitted files as JSON data, as far as they were requested."""
    more: dict[str, Any] = {}
    if explanation is not None:
        more["explanation"] = {**as_data(explanation.prediction), "reason": list(explanation.lines)}
    if files is not None:
        more["files"] = files.as_data()
    return more


def _rows(found: Tuning, top: int) -> list[Row]:
    """Return the rows that are printed, the fastest first."""
    from quintsched.strategies.tuning.recommended_strategy import rows

    return rows(found.best)[:top]


def _days_and_cost(found: Tuning, tokens: float, price: float | None) -> tuple[float, float | None]:
    """Return the days, and the cost, of training on a number of tokens, by the recommended strategy."""
    from quintsched.strategies.tuning.recommended_strategy import recommended

    space = found.space
    days = tokens / (space.batch * space.seq) * recommended(found).step_s / 86400
    return days, None if price is None else days * 24 * space.gpus * price


def read_tokens(text: str) -> float:
    """Return a number of tokens: "15T", "300B", "2e12"; raises UsageError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)([KMBT]?)", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"--tokens: cannot read {text!r}; write it like 15T, 300B or 2e12")
    return float(match[1]) * 1000.0 ** " KMBT".index(match[2].upper() or " ")


def _as_data(found: Tuning, predictions: Sequence[Prediction], simulations: Sequence[float | None]) -> dict[str, Any]:
    from quintsched.strategies.tuning.recommended_strategy import advice, reasons, recommended

    return {
        "model": found.model.name,
        "hardware": found.hardware.name,
        "gpus": found.space.gpus,
        "batch": found.space.batch,
        "seq": found.space.seq,
        "considered": found.strategies,
        "evaluated": found.evaluated,
        "seconds": found.seconds,
        "strategies": list(map(as_data, predictions, simulations)),
        "front": [
            {
                "strategy": candidate.strategy.model_dump(mode="json", exclude_none=True),
                "step_s": candidate.step_s,
                "memory_bytes": candidate.memory_bytes,
            }
            for candidate in found.front
        ],
        "recommended": recommended(found).strategy.model_dump(mode="json", exclude_none=True),
        "reason": [*advice(found), *reasons(found, predictions)],
    }


def _describe(
    found: Tuning, top: int, predictions: Sequence[Prediction], simulations: Sequence[float | None]
) -> Iterator[str]:
    from quintsched.strategies.descriptions.strategy_text import duration, gigabytes, strategy_name
    from quintsched.strategies.tuning.recommended_strategy import advice, reasons
    from quintsched.text.plan_listing import table

    space = found.space
    count = counted(found.strategies, "strategy", "," if found.strategies < 10**9 else ".1e")
    samples = counted(space.batch, "sample")
    yield f"{found.model.name} on {space.gpus} {found.hardware.name}, {samples} of {space.seq} tokens"
    yield f"{count}; what was not evaluated cannot win"
    yield ""
    chosen = _rows(found, top)
    rows = [
        (str(rank + 1), *_row(predictions[rank], simulations[rank], chosen[rank].variations))
        for rank in range(len(predictions))
    ]
    more = ("simulated",) if simulations[0] is not None else ()
    yield from table(("", "step", *more, "MFU", "GB", "strategy"), rows)
    yield ""
    yield from advice(found)
    yield from reasons(found, predictions)
    if smaller := _smaller(found):
        yield ""
        points = [(duration(one.step_s), gigabytes(one.memory_bytes), strategy_name(one.strategy)) for one in smaller]
        yield from table(("slower, smaller", "GB", "strategy"), points)


def _smaller(found: Tuning) -> list[Candidate]:
    """Return the part of the front that is printed."""
    best, shown = found.best[0], []
    held = best.memory_bytes
    for candidate in found.front:
        if candidate.step_s <= SLOWEST_SHOWN * best.step_s and candidate.memory_bytes <= (1 - LEAST_SAVED) * held:
            shown.append(candidate)
            held = candidate.memory_bytes
    return shown


def _row(prediction: Prediction, simulated_s: float | None, variations: Sequence[str] = ()) -> tuple[str, ...]:
    from quintsched.strategies.descriptions.strategy_text import duration, gigabytes, strategy_name

    held = gigabytes(prediction.memory_bytes)
    more = () if simulated_s is None else (duration(simulated_s),)
    name = strategy_name(prediction.strategy) + (f" (or {'; '.join(variations)})" if variations else "")
    return duration(prediction.step_s), *more, percent(prediction.mfu), held, name
