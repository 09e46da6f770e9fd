"""Bars of text: where the time of each rank goes, a letter for each part of it.

rank 0  ████████████████████████████wwwwwwwccccc  peak 4, waits for rank 1 (21.2 %)
        █ computing 72.7 %, w warm-up 15.2 %, c cool-down 12.1 %
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from quintsched.simulation.idle_time import CAUSES, COMPUTING_TIME, EXCHANGES, OTHERS, TimeOfRank, times_of_ranks
from quintsched.simulation.simulator import Simulation

BAR = 48
MOST_RANKS = 16
"""Ranks of a plan that have a bar; of more, these are evenly spread."""
LETTERS = {COMPUTING_TIME: "█", EXCHANGES: "x", OTHERS: "▒", **{cause: cause[0] for cause in CAUSES}, "cap": "k"}
LETTERS["collective"] = "g"


def time_bars(simulation: Simulation, memory_cap: float | None = None) -> Iterator[str]:
    """Yield the bars of a plan's ranks, and a line with what the letters mean and the share of each."""
    times = times_of_ranks(simulation, memory_cap)
    label = len(f"rank {len(times) - 1}")
    number = min(len(times), MOST_RANKS)
    for time in (times[k * len(times) // number] for k in range(number)):
        peak = f"peak {simulation.peak_activations[time.rank]:g}"
        waits = f", waits for {_named(time.waits, simulation.makespan)}" if time.waits else ""
        yield f"{f'rank {time.rank}':<{label}}  {bar(time.parts, simulation.makespan)}  {peak}{waits}"
    shares = _shares(times, simulation.makespan)
    yield f"{'':<{label}}  {', '.join(f'{LETTERS[name]} {name} {100 * share:.1f} %' for name, share in shares.items())}"


def bar(parts: Mapping[str, float], whole: float) -> str:
    """Return the parts of a whole as a row of letters."""
    text, until = "", 0.0
    for name, time in parts.items():
        until += time
        text += LETTERS[name] * (round(BAR * until / whole) - len(text))
    return text.ljust(BAR)


def _named(waits: Mapping[int, float], whole: float) -> str:
    rank, time = next(iter(waits.items()))
    others = f" and {len(waits) - 1} more" if len(waits) > 1 else ""
    return f"rank {rank} ({100 * time / whole:.1f} %){others}"


def _shares(times: Sequence[TimeOfRank], makespan: float) -> dict[str, float]:
    """Return the share of each part in all ranks' time."""
    whole = makespan * len(times)
    found = {name: sum(time.parts.get(name, 0.0) for time in times) / whole for name in LETTERS}
    return {name: share for name, share in found.items() if share > 0}
