"""Watch thread of a rank: sends the hub messages beside the cell, and ends the process after a verdict.

    rank's thread     wait fails ─▶ ask ──────────────┐  ◀── StallError(verdict): unwinds, and ends with 4
    this thread            hub ◀── error, goodbye ────┘──▶ verdict ─▶ prints it, unless the hub does; a moment later
                                                                      os._exit(4): the rank's thread may hang for ever

Where the hub reads the rank's cell directly, this thread sleeps until the end; otherwise it sends samples of it.
"""

from __future__ import annotations

import atexit
import math
import os
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from quintsched.errors import CodeError, QuintschedError, StallError, printable
from quintsched.files.terminal import StreamBroken
from quintsched.stalls.own_error_or_lost_peer import Suppressed, failed_in_code, headline, is_own, lost_peer, said

from . import torch_free_clock
from .monitor_sockets import (
    CHUNK,
    FrameError,
    FrameReader,
    answer,
    challenge,
    is_answer,
    json_frame,
    keep_alive,
    message_of,
    plan_frame,
)
from .position_in_shared_memory import PositionCell
from .process_state import HeldTerm, launcher, machine, process_of, run_in_children
from .uncaught_error import report_once
from .verdict_timing import RESTING

if TYPE_CHECKING:
    from quintsched.plan import Plan

CONNECT_S = 60.0
"""Timeout of a hub's answer to a rank: on a machine under load the hub's process takes its time to start."""
SAMPLE_S, BEAT_S = 0.25, 1.0
"""Seconds between samples of a cell that the hub cannot read, and between repeats of an unchanged one."""
ASK_HUB_S = 6.0
"""Seconds that a rank waits for the verdict after its wait for others has failed."""
GRACE_S, UNWIND_S = 2.0, 10.0
"""Seconds until a rank is ended after the verdict: while it does not know of it, and while it unwinds."""
TERM_S = 2.0
"""Seconds that a rank waits for the verdict after a SIGTERM, which may be a consequence of the failure."""


class Answer(NamedTuple):
    """The verdict as a rank receives it; `was_told`: it has been printed already."""

    message: str
    was_told: bool


class HubCall:
    """An authenticated connection to the hub; `words` are sent with the answer to its challenge.

    Raises `OSError` or `FrameError` where no hub at that address knows the key.
    """

    def __init__(self, address: str, key: str, wait_s: float, /, **words: Any) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=wait_s)
        self.reader = FrameReader()
        self.reader.is_known = True
        try:
            asked, given = challenge(), answer(key, str(self.next_message().get("ask")), "rank")
            self.socket.sendall(json_frame({"answer": given, "ask": asked, **words}))
            if not is_answer(self.next_message().get("answer"), key, asked, "hub"):
                raise FrameError("the hub does not know the key")
        except BaseException:
            self.socket.close()
            raise

    def next_message(self) -> dict[str, Any]:
        """Wait for the next message."""
        data = b""
        while True:
            for _, payload in self.reader.feed(data):
                return message_of(payload)
            data = self.socket.recv(CHUNK)
            if not data:
                raise FrameError("the hub hung up")


class Watcher:
    """Connects a rank to the hub.

    Raises `OSError` or `FrameError` where no hub at that address knows the key.
    """

    def __init__(
        self, address: str, key: str, rank: int, cell: PositionCell, held: HeldTerm | None, **about: Any
    ) -> None:
        self._rank, self._cell = rank, cell
        host, (pid, started) = socket.gethostname(), process_of(os.getpid())
        about |= {"rank": rank, "host": host, "machine": machine(), "pid": pid, "started": started}
        call = HubCall(address, key, CONNECT_S, launcher=launcher(), file=cell.file, **about)
        self._socket, self._reader = call.socket, call.reader
        self._sending = threading.Lock()
        self._answer: Answer | None = None
        self._answered, self._closed = threading.Event(), threading.Event()
        self._asks = self._has_failed = self._refuses = self._is_of_all = False
        try:
            keep_alive(self._socket)
            welcome = call.next_message()
        except BaseException:
            self._socket.close()
            raise
        self._is_seen, self._hub_speaks = bool(welcome.get("seen")), bool(welcome.get("speaks"))
        self._socket.settimeout(None)
        self._held, self._term_s = held, math.inf
        self._thread = threading.Thread(target=self._run, name="quintsched watcher", daemon=True)
        self._thread.start()
        atexit.register(self._leave)
        run_in_children(self._socket.close)

    def tell_program(self, number: int, plan: Plan) -> None:
        """Send a plan and its number: rank 0 only, for all."""
        if self._rank == 0:
            with suppress(FrameError):
                self._send(plan_frame(number, plan.to_json()))

    def tell_group(self, ranks: tuple[int, ...]) -> None:
        """Send the ranks of a new group."""
        self._say(group=list(ranks))

    def tell_error(self, error: BaseException) -> None:
        """Send the error that ends this rank."""
        if isinstance(error, SystemExit) and not is_own(error):
            self._say(leaves=error.code if isinstance(error.code, int) else int(error.code is not None))
        elif is_own(error) and not self._has_failed:
            is_refusal = isinstance(error, QuintschedError) and not isinstance(error, CodeError)
            kind = "refusal" if is_refusal else "own"
            self._say(error=headline(error), kind=kind, code=_exit_code_alone(error))
            self._has_failed, self._refuses = True, is_refusal
        elif isinstance(error, Exception) and not (self._asks or self._has_failed):
            self._say(error=headline(error), kind="stall" if lost_peer(error) else "unclear")

    def ask(self, words: str, *, in_code: bool = False) -> Answer | None:
        """Report that a wait for others failed, and return the verdict, if one comes within `ASK_HUB_S`.

        A wait `in_code` of the user may turn out to be this rank's own error: the message is empty then.
        """
        if not self._has_failed:
            self._asks = True
            self._say(error=printable(words), kind="unclear" if in_code else "stall")
            self._answered.wait(ASK_HUB_S)
        return self._answer

    def has_said(self, error: BaseException) -> bool | None:
        """Return whether the hub has printed all of this rank's refusal, as it does unless all ranks refuse."""
        if not (self._refuses and self._hub_speaks):
            return None
        self._answered.wait(ASK_HUB_S)
        told = self._answer.message if self._answer is not None and self._answer.was_told else ""
        is_one_line = "\n" not in said(error) and not getattr(error, "__notes__", None)
        return True if is_one_line and headline(error) in told else False if self._is_of_all else None

    def close(self, *, clean: bool) -> None:
        """Disconnect, and end the thread."""
        if self._closed.is_set():
            return
        self._closed.set()
        atexit.unregister(self._leave)
        if self._held is not None:
            self._held.release()
        if clean:
            self._say(bye=1)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join(GRACE_S)
        self._socket.close()

    def _say(self, **message: Any) -> None:
        self._send(json_frame(message))

    def _send(self, frame: bytes) -> None:
        with self._sending, Suppressed(OSError):
            self._socket.sendall(frame)

    def _run(self) -> None:
        sent, sent_s = None, 0.0
        while not self._closed.is_set():
            try:
                data = self._receive()
            except (OSError, ValueError):
                self._end_alone()
                return
            if data == b"":
                self._answered.set()
                return
            for _, payload in self._reader.feed(data or b""):
                self._hear(message_of(payload))
            place, now_s = self._cell.read_position(), torch_free_clock.now_s()
            if not self._is_seen and (place != sent or now_s > sent_s + BEAT_S):
                sent, sent_s = place, now_s
                self._say_place()
            if now_s > self._term_s + TERM_S and not self._answered.is_set():
                _exit(128 + signal.SIGTERM)

    def _receive(self) -> bytes | None:
        """Wait for data from the hub, or a signal; return the data, b"" where it disconnected, None without data."""
        signals = None if self._held is None else self._held.reader
        sleeps = self._is_seen and self._term_s == math.inf
        ready, _, _ = select.select(
            [self._socket, *([signals] if signals else [])], [], [], None if sleeps else SAMPLE_S
        )
        if self._held is not None and signals in ready and self._held.has_come():
            self._term_s = min(self._term_s, torch_free_clock.now_s())
        return self._socket.recv(CHUNK) if self._socket in ready else None

    def _say_place(self) -> None:
        self._say(place=list(self._cell.numbers))

    def _hear(self, message: dict[str, Any]) -> None:
        if "ask" in message:
            self._say_place()
        if "over" in message:
            self._is_of_all = bool(message["alike"])
            self._answered.set()
        if "own" in message:
            self._asks, self._has_failed, self._answer = False, True, Answer("", was_told=False)
            self._answered.set()
        if "verdict" in message:
            self._end(str(message["verdict"]), was_told=bool(message["spoken"]), at_once=bool(message["at_once"]))

    def _end_alone(self) -> None:
        """End this rank as the network to the hub is cut: the other ranks are ended too, but cannot tell this one."""
        if not self._closed.is_set():
            lost = "cannot reach the host of rank 0: the link between them is cut, or that host is gone"
            self._end(f"rank {self._rank} (host {socket.gethostname()}) {lost}", was_told=False)

    def _end(self, message: str, *, was_told: bool, at_once: bool = False) -> None:
        """End this process, whatever its main thread does; it may end itself first, with its own message.

        A rank at fault may not, unless it has failed itself: one that merely slept would resume training.
        """
        if message and not was_told and not self._asks and not self._has_failed:
            report_once(message, self._rank)
            was_told = True
        self._answer = Answer(message, was_told)
        self._answered.set()
        if at_once and not (self._asks or self._has_failed):
            _exit(StallError.exit_code)
        if not self._closed.wait(GRACE_S) and not ((self._asks or self._has_failed) and self._closed.wait(UNWIND_S)):
            _exit(1 if self._has_failed else StallError.exit_code)

    def _leave(self) -> None:
        """Report at exit whether the process ends as expected; one that lost its peers exits with 4."""
        error = getattr(sys, "last_value", None)
        if error is not None:
            self.tell_error(error)
        self.close(clean=error is None and self._cell.read_position().phase in RESTING)
        if isinstance(error, StallError):
            _exit(error.exit_code)


def _exit_code_alone(error: BaseException) -> int:
    """Return the exit code of an error that no other rank has: an error raised by user code is no misfit then."""
    if isinstance(error, QuintschedError) and not failed_in_code(error):
        return error.exit_code
    return CodeError.exit_code


def _exit(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError, StreamBroken):
            stream.flush()
    os._exit(code)
