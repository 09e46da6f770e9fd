"""Report of the error that ends a rank: one traceback of all ranks that raise alike, a line on each of the others.

    the first rank that raises at a place     error: rank 2 …, block 1 (Late): ValueError: no such token
                                              Traceback … of the user's code, with this package's frames left out
    other ranks that raise there              error: rank 0: ValueError: no such token (rank 2 has printed all of it)
    ranks that lost a peer                    the verdict on one of them, a line on the others

Ranks find out who is first in the launcher's store; where there is none, as with mpirun, each prints all. torchrun gets
the message as well, for its summary.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from sysconfig import get_path
from types import TracebackType

from quintsched.errors import QuintschedError, StallError, printable
from quintsched.files.terminal import write_error
from quintsched.stalls.own_error_or_lost_peer import WORKER_ERROR, causes_of, headline, message_of, said

from .torch_free_clock import epoch_s

MOST_PRINTED_LETTERS = 20_000
"""Limit of letters that are printed of an error's message, and of each line of its traceback."""
MOST_LETTERS_OF_A_LINE = 300
STORE_S = 2.0
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_OWN = str(Path(__file__).parents[2])
_WRAPPERS = (
    *("torch/nn/modules/module.py", "torch/_functorch/functional_call.py", "torch/nn/utils/stateless.py"),
    *("torch/utils/data/dataloader.py", "torch/utils/data/_utils/worker.py", "torch/utils/data/_utils/fetch.py"),
    "torch/_utils.py",
)
"""Files whose frames only pass a call on."""
_FRAME = re.compile(r'^  File "(.*)", line (\d+), in (.*)$', re.MULTILINE)
_LIBRARIES = tuple(get_path(name) for name in ("stdlib", "purelib", "platlib"))


def report_uncaught(before: Hook | None = None) -> None:
    """Report errors that end this process so, from now on, in place of the hook that torch has set for them.

    `before`: the hook that was there before torch's; one of the user's stays.
    """
    is_torchs = "_distributed_excepthook" in getattr(sys.excepthook, "__qualname__", "")
    if is_torchs and before in (None, sys.__excepthook__, _report, _report_own):
        sys.excepthook = _report


def report_own_uncaught() -> None:
    """Report errors of this package that end a script so, before its ranks have met; a hook of the user's stays."""
    if sys.excepthook is sys.__excepthook__ and not hasattr(sys, "ps1"):
        sys.excepthook = _report_own


def _report_own(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, QuintschedError):
        alone = int(os.environ.get("WORLD_SIZE", 1)) == 1
        report(error, int(os.environ.get("RANK", 0)), with_trace=True, is_named=alone)
    else:
        sys.__excepthook__(kind, error, trace)


def _report(_kind: type[BaseException], error: BaseException, _trace: TracebackType | None) -> None:
    report(error, int(os.environ.get("RANK", 0)), with_trace=not isinstance(error, StallError))


def report(error: BaseException, rank: int, *, with_trace: bool, is_named: bool = False) -> None:
    """Write an error to standard error: all of it on the first rank that has it, a line on others.

    `is_named`: the message need not say whose it is. Nothing is written where that was done by another process.
    """
    is_ours = isinstance(error, QuintschedError)
    if isinstance(error, QuintschedError) and error.was_told:
        return
    _tell_torchrun(error)
    if isinstance(error, StallError) and error.was_told is not None:
        report_once(said(error), rank)
        return
    whose = "" if is_named or said(error).startswith("rank ") else f"rank {rank}: "
    notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()) if is_ours)
    trace = f"\n{_trace_of(error)}" if with_trace else ""
    words = f"{whose}{_fit(said(error))}{_fit(notes)}{trace}".rstrip("\n")
    report_once(words, rank, _place_of(error), headline(error, first_line=True))


def report_once(words: str, rank: int, of_all: str = "", line: str = "") -> None:
    """Write words on the first rank that has `of_all` to report, by default the words, and a line on others."""
    first = first_rank(of_all or words, rank)
    short = printable(line or words.partition("\n")[0], MOST_LETTERS_OF_A_LINE)
    write_error(words if first == rank else f"rank {rank}: {short} (rank {first} has printed all of it)")


def first_rank(words: str, rank: int) -> int:
    """Return the first rank of this attempt that had these words to report; `rank` itself where that is unknown."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return rank
    from .rendezvous.rendezvous_store import has_launchers_store, open_store

    digest = hashlib.sha256(words.encode(errors="replace")).hexdigest()
    key = f"quintsched/reported/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{digest}"
    with suppress(RuntimeError, ValueError, QuintschedError):
        if has_launchers_store():
            return int(open_store(STORE_S).compare_set(key, "", str(rank)))
    return rank


def _place_of(error: BaseException) -> str:
    """Return what errors of several ranks have in common: the kind and the place of the one that caused them."""
    *_, root = causes_of(error)
    frames = traceback.extract_tb(root.__traceback__)
    return f"{type(root).__name__} {frames[-1].filename}:{frames[-1].lineno}" if frames else said(root)


class _Frames(traceback.StackSummary):
    """Frames of a traceback; those without a file stand for frames that were left out."""

    def format_frame_summary(self, frame_summary: traceback.FrameSummary, **how: bool) -> str:
        """Return the lines for a frame; Python 3.13 says whether to colour them."""
        return (
            super().format_frame_summary(frame_summary, **how)
            if frame_summary.filename
            else f"  {frame_summary.name}\n"
        )


def _trace_of(error: BaseException) -> str:
    """Return an error's traceback.

    One of the user's code, or one that this package raised on purpose, has the frames from the user's call to the
    user's code that failed, as one traceback; all frames of a defect of this package are there.
    """
    cause: BaseException = error
    frames = list(traceback.extract_tb(error.__traceback__))
    while isinstance(cause, QuintschedError) and cause.__cause__ is not None:
        cause = cause.__cause__
        frames += traceback.extract_tb(cause.__traceback__)
    found = traceback.TracebackException.from_exception(cause)
    if in_worker := WORKER_ERROR.search(message_of(cause)):
        places = _FRAME.findall(in_worker["frames"])
        frames += [traceback.FrameSummary(file, int(line), name) for file, line, name in places]
        found.stack = _Frames(_shortened(frames, keeps_end=True))
        return _fit("".join(["Traceback (most recent call last):\n", *found.stack.format(), in_worker["error"]]))
    if isinstance(error, QuintschedError) or _is_in_users_code(frames):
        found.stack = _Frames(_shortened(frames, keeps_end=cause is not error))
    lines = found.stack.format() if cause is error and isinstance(error, QuintschedError) else found.format()
    return _fit("".join(lines))


def _shortened(frames: list[traceback.FrameSummary], *, keeps_end: bool) -> Iterable[traceback.FrameSummary]:
    """Yield frames without runs of this package's, except those behind the last of the user's if `keeps_end`."""
    users = [number for number, frame in enumerate(frames) if not _is_ours(frame)]
    last = users[-1] if users and keeps_end else len(frames) if users else -1
    left_out = 0
    for number, frame in enumerate(frames):
        if number < last and _is_ours(frame):
            left_out += 1
            continue
        if left_out:
            yield traceback.FrameSummary("", 0, f"… {left_out} frame{'s' * (left_out > 1)} of quintsched and torch")
            left_out = 0
        yield frame


def _is_in_users_code(frames: Sequence[traceback.FrameSummary]) -> bool:
    """Whether the innermost frame outside of libraries is one of the user's."""
    known = [frame for frame in frames if _is_ours(frame) or not frame.filename.startswith((*_LIBRARIES, "<"))]
    return bool(known) and not _is_ours(known[-1])


def _is_ours(frame: traceback.FrameSummary) -> bool:
    is_made = (frame.filename, frame.name) == ("<string>", "__init__")  # by a dataclass
    return is_made or frame.filename.startswith(_OWN) or frame.filename.endswith(_WRAPPERS)


def _tell_torchrun(error: BaseException) -> None:
    """Write the message into the file from which torchrun takes it for its summary, unless that is written."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    words = printable(said(error).partition("\n")[0])
    about = {"message": words, "extraInfo": {"py_callstack": words, "timestamp": str(int(epoch_s()))}}
    with suppress(OSError):
        if path and not Path(path).exists():
            Path(path).write_text(json.dumps({"message": about}), encoding="utf-8")


def _fit(text: str) -> str:
    return printable(text, MOST_PRINTED_LETTERS, lines=True)
