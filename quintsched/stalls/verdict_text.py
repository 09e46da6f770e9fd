"""Text of a verdict: one message of a few lines for the terminal.

rank 2 (host a, pp=2) was killed by SIGKILL in step 17 at instruction 9 of 24: Fwd(stage=2, microbatch=3)
rank 1 waits for its RecvGrad(stage=1, microbatch=0, peer=2) from it since 0.4 s, and rank 0 for rank 1
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from quintsched.errors import counted, listed_ranks, printable
from quintsched.stalls.last_reported_rank_states import Fate, RankState
from quintsched.stalls.verdict_data import Culprit, ProgramPlace, WaitLink

MOST_LISTED = 8
"""Maximum number of ranks that a message lists; it counts the others."""

MOST_ERROR_LETTERS = 400
"""Maximum number of characters of an error's message that is repeated."""

PHASES = {
    "setup": "setting up",
    "data": "loading data",
    "evaluate": "evaluating",
    "save": "saving a checkpoint",
    "load": "loading a checkpoint",
    "idle": "between two steps",
    "ended": "at the end of its run",
}


_EXCEPTION = re.compile(r"(?:\w+\.)*[A-Z]\w*(?::|$)")
"""Beginning of an exception's text that is not this package's: with its class."""

LEFT = "it left its loop, or closed its engine, while others go on"
"""Explanation for a rank that has finished, by its own report, while others wait for it."""


def in_words(culprits: Sequence[Culprit], chain: Sequence[WaitLink], states: Sequence[RankState]) -> str:
    """Return a verdict as a message."""
    if not culprits:
        return unknown(states)
    together = _together(culprits)
    lines = [together] if together else [_accusation(culprit) for culprit in culprits[:MOST_LISTED]]
    if not together and len(culprits) > MOST_LISTED:
        lines.append(f"and so did {counted(len(culprits) - MOST_LISTED, 'other rank')}")
    waiting = _waiting(chain, [culprit.rank for culprit in culprits])
    return "\n".join([*lines, waiting] if waiting else lines)


def _together(culprits: Sequence[Culprit]) -> str:
    """Return one line for culprits with the same fault: the same error, or different data; "" for others."""
    first, ranks = culprits[0], listed_ranks(culprit.rank for culprit in culprits)
    in_step = "" if first.step is None else f" in step {first.step}"
    if len(culprits) == 1:
        return ""
    if all(culprit.fault == "other data" and culprit.said == first.said for culprit in culprits):
        return f"{ranks} were given different data{in_step}, and belong to one replica: {_shortened(first.said)}"
    texts = {culprit.fate.text if culprit.fate and culprit.fate.kind == "error" else "" for culprit in culprits}
    return f"{ranks} raised alike{in_step}: {_shortened(*texts)}" if len(texts) == 1 and "" not in texts else ""


def _accusation(culprit: Culprit) -> str:
    where = ", ".join([on_host(culprit.host), *(f"{axis}={at}" for axis, at in culprit.where)])
    name = f"rank {culprit.rank} ({where})"
    in_step = "" if culprit.step is None else f" in step {culprit.step}"
    if culprit.fault == "ended" and culprit.fate is not None:
        besides = f"; {culprit.said}" if culprit.said else ""
        return f"{name} {ending(culprit.fate)}{_where(culprit.place, in_step)}{besides}"
    if culprit.fault == "other data":
        return f"{name} was given other data{in_step} than most ranks of its replica: {_shortened(culprit.said)}"
    if culprit.fault == "skipped":
        return f"{name} passed over its instruction {_instruction(culprit.place)}{in_step}; it went on{_now(culprit)}"
    if culprit.fault == "wrong message":
        said = f" ({_shortened(culprit.said)})" if culprit.said else ""
        is_known = culprit.place.instruction is not None and culprit.place.instruction.startswith("Send")
        which = f": its instruction {_instruction(culprit.place)}" if is_known else ""
        return f"{name} sent what does not fit{in_step}{which}{said}"
    if culprit.phase == "ended":
        return f"{name} is{_where(culprit.place, in_step)}: {LEFT}"
    return f"{name} has not gone on for {in_seconds(culprit.since_s)}{_where(culprit.place, in_step)}"


def on_host(host: str) -> str:
    """Return the host of a rank as text; it is unknown for a rank that never connected."""
    return f"host {host or 'unknown'}"


def _where(place: ProgramPlace, in_step: str) -> str:
    if place.instruction is not None:
        return f"{in_step} at instruction {_instruction(place)}"
    about = doing(place.phase)
    return f" {about}{in_step.replace(' in ', ' after ')}" if about else in_step


def doing(phase: str) -> str:
    """Return a rank's activity outside of a program as text; "" within one."""
    return PHASES.get(phase, "")


def _instruction(place: ProgramPlace) -> str:
    return f"{place.index} of {place.num_instructions}: {place.instruction}"


def _now(culprit: Culprit) -> str:
    at = culprit.stands_at
    since = f"where it is since {in_seconds(culprit.since_s)}"
    return f", and is {PHASES.get(culprit.phase, culprit.phase)}" if at is None else f" to instruction {at}, {since}"


def ending(fate: Fate) -> str:
    """Return the fate of a process as text."""
    text = _shortened(fate.text)
    because = f" ({text})" if text else ""
    match fate.kind:
        case "signal":
            return f"was killed by {_signal(fate.code)}{because}"
        case "exit":
            return f"ended with exit code {fate.code}{because}"
        case "stopped":
            return f"is stopped, as by SIGSTOP{because},"
        case "error":
            did = f"{_verb(text)} {text}" if text else "raised an error"
            return f"{did}," if fate.code is None else f"{did} (exit code {fate.code}),"
        case "gone":
            return f"ended, nobody saw how{because},"
        case "unreachable":
            return f"cannot be reached{because}; it was last heard of"
        case "silent":
            return f"does not answer{because}, as if it were stopped; it was last heard of"


def _verb(text: str) -> str:
    """Return the verb before a rank's error: messages of this package already are sentences."""
    return "raised" if _EXCEPTION.match(text) else "failed:"


def _shortened(text: str) -> str:
    return printable(text, MOST_ERROR_LETTERS)


def _signal(number: int | None) -> str:
    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return "a signal" if number is None else f"signal {number}"


def _waiting(chain: Sequence[WaitLink], culprits: Sequence[int]) -> str:
    """Return the chain of waits as text: with instructions for ranks that wait for a culprit, else without."""
    parts = []
    for link in chain[:MOST_LISTED]:
        on, waiter = link.waits_for.rank, link.waiter
        if on not in culprits:
            parts.append(f"rank {waiter.rank} for rank {on}")
            continue
        name = "it" if len(culprits) == 1 else f"rank {on}"
        what = f"for {name}" if waiter.instruction is None else _awaited(waiter, name)
        parts.append(f"rank {waiter.rank} waits {what} since {in_seconds(link.since_s)}")
    if len(chain) > MOST_LISTED:
        parts.append(f"{counted(len(chain) - MOST_LISTED, 'other rank')} for these")
    return ", and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)


def _awaited(place: ProgramPlace, name: str) -> str:
    """Return the wait of a rank as text: to receive, to send, or in a collective."""
    instruction = place.instruction or ""
    if instruction.startswith("Recv"):
        return f"for its {instruction} from {name}"
    if instruction.startswith("Send"):
        return f"for {name} to take its {instruction}"
    return f"for {name} in {instruction}"


NO_CULPRIT = "nobody can be told from the others"
"""Beginning of a verdict that names no culprit."""


def unknown(states: Sequence[RankState]) -> str:
    """Return the text of a verdict without culprit: the states of all ranks, failed processes first."""
    lines = [f"{NO_CULPRIT}{_lost_hosts(states)}; the ranks were last heard of here:"]
    for state in sorted(states, key=lambda state: (state.fate is None, state.rank))[:MOST_LISTED]:
        step = "" if state.step is None else f" in step {state.step}"
        ended = "" if state.fate is None else f" {ending(state.fate).rstrip(',')}"
        at = f" {doing(state.phase)}" if state.index is None else f" at instruction {state.index}"
        since = f" since {in_seconds(state.since_s)}"
        lines.append(f"rank {state.rank} ({on_host(state.host)}){ended}{step}{at.rstrip()}{since}")
    if len(states) > MOST_LISTED:
        lines.append(f"and {counted(len(states) - MOST_LISTED, 'other rank')}")
    return "\n".join([*lines, *_other_calls(states)])


def _other_calls(states: Sequence[RankState]) -> list[str]:
    """Return a hint if some ranks evaluate while others train, which may be why they wait for each other."""
    calls = {phase: [state for state in states if state.phase == phase] for phase in ("evaluate", "step")}
    if not all(calls.values()):
        return []
    one, other = (found[0] for found in calls.values())
    after = "" if one.step is None else f" after step {one.step}"
    return [
        f"rank {one.rank} evaluates{after} while rank {other.rank} is in step {other.step}; all ranks have to make the "
        "same calls in the same order, or they wait for each other"
    ]


def _lost_hosts(states: Sequence[RankState]) -> str:
    """Return the hosts that are unreachable from rank 0's, if that is why no rank is named."""
    lost = dict.fromkeys(one.host for one in states if one.fate is not None and one.fate.kind == "unreachable")
    if not lost:
        return ""
    here = min(states, key=lambda state: state.rank).host
    return f": host {here} and host {', '.join(lost)} cannot reach each other, and either may be cut off"


def in_seconds(seconds: float) -> str:
    """Return a duration as text."""
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"
