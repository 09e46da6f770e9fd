"""Exception classes of quintsched, with their exit codes, and helpers for the text of messages.

    QuintschedError               exit code
    ├── UsageError                2   a wrong request: an unknown name, a number, a setting, a path
    │   └── WriteError            1   a file could not be written, and may be at another time: a full disk, a quota
    ├── InputError                1   a file that was read is broken: a plan, a costs file, a data file
    │   └── UnsoundError          1   a plan that is not sound; carries the findings
    ├── MisfitError               3   the run does not fit the plan: world size, shapes, divisibility
    │   └── CodeError             1   user code (a block, loss function or metric) raised an error
    ├── NotFiniteError            1   gradients of several steps in a row were not finite; names the first source
    └── StallError                4   a run stalled or a peer died

Each message says what is wrong, where, and what to do. The command line prints it on standard error and
exits with `exit_code`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class QuintschedError(Exception):
    """Base class of all errors raised on purpose.

    `was_told` is true if a process that outlives the ranks has already reported the cause to the user; false if every
    rank has this error or gets it reported; None if that is not known.
    """

    exit_code = 1
    was_told: bool | None = None


class UsageError(QuintschedError):
    """A wrong request: an unknown name, a size out of range, a setting, a path."""

    exit_code = 2


class WriteError(UsageError):
    """A file that could not be written for a reason that may pass: a full disk, a quota, a failing device."""

    exit_code = 1


class InputError(QuintschedError):
    """A broken input file; the message names the place in it."""

    exit_code = 1


class UnsoundError(InputError):
    """A plan that is not sound; the message is the counter-example."""


class MisfitError(QuintschedError):
    """A run that does not fit its plan: world size, shapes, sizes that do not divide."""

    exit_code = 3


class CodeError(MisfitError):
    """An error raised by user code (a block, a loss function or a metric), which is the `__cause__`."""

    exit_code = 1


class NotFiniteError(QuintschedError):
    """Non-finite gradients in several steps in a row; the message names the place where the first one arose."""

    exit_code = 1


class StallError(QuintschedError):
    """A stalled run, or a peer that died."""

    exit_code = 4


EXIT_CODES = {
    0: "Success. A run that was asked to stop has saved.",
    1: "A plan or an input file is not sound, a comparison differs, user code raised an error, or a file could not be "
    "written now.",
    2: "Wrong usage: a flag, a name, a setting, a path.",
    3: "The run does not fit the plan, or a model the memory: number of processes, shapes, sizes that do not divide, "
    "no strategy of `tune` that fits.",
    4: "A run stalled, or a rank died.",
}
"""Meaning of each exit code."""

SURE = (UsageError.exit_code, MisfitError.exit_code)
"""Exit codes that a restart of the run would repeat: a wrong setting, a misfit."""


def listed_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as text: "rank 2", "ranks 0, 1 and 3", "ranks 0 to 63", "9 ranks (0, 2, 4, 6, 8, 10, …)"."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if len(ordered) > 3 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"ranks {ordered[0]} to {ordered[-1]}"
    if len(ordered) > 8:
        return f"{len(ordered)} ranks ({', '.join(map(str, ordered[:6]))}, …)"
    return f"ranks {', '.join(map(str, ordered[:-1]))} and {ordered[-1]}"


def counted(number: float, noun: str, form: str = "") -> str:
    """Return a number with its noun: "1 microbatch", "8 microbatches"; "1 rank's", "8 ranks'"."""
    stem, apostrophe, _ = noun.partition("'")
    if number != 1:
        ending = "es" if stem.endswith(("ch", "s")) else "s"
        plural = f"{stem[:-1]}ies" if stem.endswith(("gy", "ry")) else stem + ending
        noun = plural + apostrophe
    return f"{number:{form}} {noun}"


MOST_QUOTED = 120
"""Maximum number of characters of a quoted value in a message."""


def quoted(value: object) -> str:
    """Return the `repr` of a value, cut to a length fit for a message."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, a number of too many digits
        return f"a {type(value).__name__}"
    return text if len(text) <= MOST_QUOTED else f"{text[: MOST_QUOTED - 1]}…"


MOST_PRINTED = 4000
"""Maximum number of characters printed of text from outside: another process, a file, user code."""


def printable(text: str, most: int = MOST_PRINTED, *, lines: bool = False) -> str:
    """Return text from another process, a file or user code, made safe for a terminal: cut, and on one line.

    Control characters, lone surrogates and characters that change the writing direction are escaped as Python does.
    With `lines`, line breaks and tabs stay.
    """
    cut = text[:most] + (" … (cut)" if len(text) > most else "")
    shown = cut if lines else " ".join(cut.split())
    if shown.isprintable():
        return shown
    kept = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in shown)


EXTRAS = {"torch": "runtime", "safetensors": "runtime", "matplotlib": "viz", "hypothesis": "testing"} | {
    "transformers": "hf",
    "tokenizers": "hf",
    "peft": "hf",
    "accelerate": "hf",
    "timm": "timm",
    "torchvision": "timm",
}
"""Extra of the package that brings each import."""


def import_advice(error: BaseException | None) -> str:
    """Return "; " and the command that mends a failed import, or nothing where it is not known.

    Libraries hide the first cause of a failed import behind errors of their own: the whole chain is searched.
    """
    while error is not None:
        if "torchvision::" in str(error):
            return (
                "; the torchvision that is installed does not go with this torch, and transformers and timm do not "
                "import with it. Import quintsched.runtime's Engine, Trainer or split before them; or uninstall "
                "torchvision, if timm is not needed; or take both from one index: pip install torch torchvision "
                "--index-url https://download.pytorch.org/whl/cpu"
            )
        missing = (getattr(error, "name", None) or "") if isinstance(error, ImportError) else ""
        if missing in EXTRAS and isinstance(error, ModuleNotFoundError):
            return f"; pip install 'quintsched[{EXTRAS[missing]}]'"
        error = error.__cause__ or error.__context__
    return ""


def nearest(name: str, known: Iterable[str], *, closeness: float = 0.5) -> str:
    """Return "; did you mean 'x'?" for the known name nearest to `name`, at least as close (0 to 1), or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=closeness)
    return f"; did you mean {near[0]!r}?" if near else ""


def suggest(name: str, known: Iterable[str], *, closeness: float = 0.5) -> str:
    """Return "; did you mean 'x'?" for the known name nearest to `name`, or else the list of known names."""
    known = list(known)
    return nearest(name, known, closeness=closeness) or (f"; there is: {', '.join(known)}" if known else "")
