"""Main of a rank: `torchrun --nproc-per-node N -m quintsched.runtime [plan.json] --config job.yaml`.

All ranks run this. An error before the ranks are connected occurs on all of them: rank 0 prints it on one line,
and every rank ends with its exit code. Afterwards the rank that fails first prints its error at once; those that only
lost it wait a little, so that its error is what the user sees first.

Ranks that find a fault before they are connected end together, if all of them find it:

all of them find it     the first that came prints it, once                        error: no such data 'x'
some do not             the launcher's hub names them                              error: rank 1 (host a) raised the …
                        each prints that it is its own, where there is no hub      error: rank 1: the import failed
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from time import sleep
from typing import TYPE_CHECKING, Any, NoReturn

from quintsched.errors import CodeError, MisfitError, QuintschedError, StallError, UsageError
from quintsched.files.terminal import StreamBroken, write_error
from quintsched.stalls.own_error_or_lost_peer import failed_in_code, headline, is_own

from ..watch.rendezvous.end_with_parent import end_with_launcher
from ..watch.uncaught_error import report
from ..watch.verdict_timing import LATE_REFUSAL_S
from .run_arguments import RunRequest, read_request
from .stop_signals import StopNow, StopRequest

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from quintsched.plan import Plan

    from ..comm import Transport
    from ..settings.allowed_setting_values import Start
    from ..settings.job_file import JobConfig

ECHO_WAITS_S, VICTIM_WAITS_S = 2.0, 4.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank, or all ranks of a `local` job; returns the exit code."""
    request = read_request(RunRequest, sys.argv[1:] if argv is None else argv)
    end_with_launcher()
    stop = StopRequest(under_torchrun="ROLE_RANK" in os.environ)  # a variable that this launcher does not set
    with stop.listening():
        end = _run(request, stop)
    return end()


def _run(request: RunRequest, stop: StopRequest) -> Callable[[], int]:
    """Run the job, and return the function that ends this process, called once signals have their default handlers."""
    rank = int(os.environ.get("RANK", 0))
    try:
        job, plan, notes = prepare(request)
    except QuintschedError as error:
        return partial(leave_together, error, rank)
    try:
        how = {"notes": notes, "stop": stop, "overrides": request.override, "tunes": request.autotune}
        run(job, plan, request.start, **how)
    except BaseException as error:
        if isinstance(error, StopNow) or (isinstance(error, KeyboardInterrupt) and not is_own(error)):
            return lambda: 130
        return partial(explain, error, rank)
    return lambda: 0


def prepare(request: RunRequest, *, alone: bool = False) -> tuple[JobConfig, Plan, tuple[str, ...]]:
    """Return the job, its plan, and notes on how it was chosen.

    Unless `alone`, the world has to be of the plan's size. Torch is needed for `parallel: auto` only.
    """
    from ..train.reporter import require_sinks
    from .job_plan import for_processes, plan_of

    job = request.load_job()
    _require_forward(request, job)
    if request.autotune and (job.mode != "train" or (request.plan or job.parallel.plan) is not None):
        raise UsageError("--autotune compiles plans of its own, for a training; leave the plan file out, or --autotune")
    require_sinks(job.log.sinks)
    processes = int(os.environ.get("WORLD_SIZE", 1))
    job = job if alone else for_processes(job, request.plan, processes)
    if job.parallel.auto is None or request.plan is not None:
        job, plan, notes = job, plan_of(job, request.plan), tuple[str, ...]()
    else:
        from .auto_plan import choose

        job, plan, notes = choose(job)
    if not alone:
        _require_world(job, plan, processes)
    return job, plan, notes


def _require_forward(request: RunRequest, job: JobConfig) -> None:
    """Raise `UsageError` where a job that runs forward is asked for what trainings alone do."""
    if job.mode == "train":
        return
    if type(request) is not RunRequest:
        raise UsageError("the job says mode: forward, and this looks at a training; say --set mode=train")
    if request.start != "new":
        raise UsageError(
            f"--{request.start} is of trainings; a run with mode: forward takes the newest checkpoint of checkpoint.dir"
        )


def _require_world(job: JobConfig, plan: Plan, processes: int) -> None:
    """Raise `MisfitError` unless there are as many processes as ranks; one where ranks are threads."""
    if job.runtime.transport != "local":
        plan.mesh.require_world_size(processes)
    elif processes > 1:
        raise MisfitError(
            f"runtime.transport is local, with ranks that are threads of one process, but there are {processes}; "
            "set it to gloo or auto, or start one process"
        )


def run(job: JobConfig, plan: Plan, start: Start, **how: Any) -> None:
    """Train the job on the transport it names, until its end or until a stop is asked for; `how` goes to `train`."""
    from ..comm import LocalTransport, run_local
    from ..comm.choose_transport import watch_by
    from ..watch.rendezvous.rendezvous_store import meet_alone

    if job.runtime.transport != "local":
        with connected(job, plan) as transport:
            train(job, plan, transport, "resume" if transport.goes_on else start, **how)
        return
    timeout_s = watch_by(job.run).timeout_s
    attempt = meet_alone(timeout_s)
    start = "resume" if attempt is not None and attempt.goes_on else start

    def train_here(transport: Transport) -> None:
        if isinstance(transport, LocalTransport):
            transport.attempt = attempt
        train(job, plan, transport, start, **how)

    run_local(plan.mesh.size, train_here, timeout_s, rules=job.runtime.rules or "mailbox")


@contextmanager
def connected(job: JobConfig, plan: Plan) -> Iterator[Transport]:
    """Yield this process's transport; an error within aborts it, and is raised as a stall where a peer was lost."""
    from ..comm.choose_transport import connect_for, watch_by
    from ..comm.torch_process_groups import as_stall

    assert job.runtime.transport != "local"
    watch = watch_by(job.run, job.folder)
    transport = connect_for(plan, watch.timeout_s, job.runtime.transport, job.runtime.rules, watch)
    try:
        yield transport
    except Exception as error:
        found = as_stall(error, transport.publisher)
        _abort(transport, found)
        if found is error:
            raise
        raise found from error
    except BaseException as error:
        _abort(transport, error)
        raise
    transport.close()


def _abort(transport: Transport, error: BaseException) -> None:
    """Abort a transport because of an error; an exception of a signal handler meanwhile is published as well."""
    try:
        transport.abort(error)
        if isinstance(error, QuintschedError) and error.was_told is None:
            error.was_told = transport.publisher.has_said(error)
    except BaseException as another:
        transport.publisher.fail(another)
        raise


def train(
    job: JobConfig,
    plan: Plan,
    transport: Transport,
    start: Start,
    notes: Sequence[str] = (),
    stop: StopRequest | None = None,
    overrides: Sequence[str] = (),
    *,
    tunes: bool = False,
) -> None:
    """Train, or run forward, as one rank; rank 0 reports, `notes` first."""
    from ..train.forward_run import ForwardRun
    from ..train.reporter import reporter_of
    from ..train.trainer import Trainer

    stop, lines = stop or StopRequest(), (*notes, plan.title)
    if tunes:
        from .job_plan import request_of
        from .tune_while_training import Autotune, proposer

        tuner = proposer(request_of(job))
        Autotune(job, plan, transport, tuner, lambda: stop.asked, overrides).tune_and_train(start, lines)
        return
    reporter = reporter_of(job.log.path, transport.rank)
    for line in lines:
        reporter.say(line)
    if job.mode == "forward":
        ForwardRun(
            job, plan, transport, reporter, wants_stop=lambda: stop.asked, overrides=tuple(overrides)
        ).write_outputs()
        return
    Trainer.of_job(job, plan, transport, reporter, wants_stop=lambda: stop.asked, overrides=overrides).fit(start)


def explain(error: BaseException, rank: int) -> int:
    """Write an error to standard error, with a traceback for one of user code or a bug, and return its exit code.

    Under torchrun the first rank to end takes the others with it. So a rank that may only repeat rank 0's error, or has
    only lost a peer and has no verdict, waits before it prints.
    """
    if isinstance(error, QuintschedError) and error.was_told:
        return error.exit_code
    known = isinstance(error, QuintschedError) and not isinstance(error, CodeError)
    if "RANK" in os.environ and known and not (isinstance(error, StallError) and error.was_told is not None):
        sleep(VICTIM_WAITS_S if isinstance(error, StallError) else ECHO_WAITS_S * (rank > 0))
    is_of_all = isinstance(error, QuintschedError) and error.was_told is False
    is_named = is_of_all or "RANK" not in os.environ  # else a note says which
    report(error, rank, with_trace=not known or failed_in_code(error), is_named=is_named)
    return error.exit_code if isinstance(error, QuintschedError) else 1


def leave(code: int) -> NoReturn:
    """End the process at once: threads of a broken transport must not keep it alive."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, StreamBroken):
            if stream is not None:
                stream.flush()
    os._exit(code)


WAIT_S = 5.0
"""Time that a rank waits for others to find the same error, after the last that did."""
HEARD_WAITS_S = LATE_REFUSAL_S + 2.0
"""The same where the hub knows of it: longer than it takes to name the ranks that find it, if others do not."""


def leave_together(error: QuintschedError, rank: int) -> int:
    """Print the error, once where all ranks find it, and return its exit code.

    A launcher ends all ranks as soon as one has failed; one that torchrun ends here has the same exit code.
    """
    from ..watch.connect_to_monitor import tell_refusal

    world_size = int(os.environ.get("WORLD_SIZE", 1))
    words = error if world_size == 1 else f"rank {rank}: {error}"

    def leave_at_once(*_: object) -> None:
        write_error(words)
        os._exit(error.exit_code)

    signal.signal(signal.SIGTERM, leave_at_once)
    is_heard = world_size > 1 and tell_refusal(rank, headline(error), error.exit_code)
    try:
        store = _open_store()
        number = 0 if store is None else store.add("ranks", 1)
        found_by_all = store is not None and _all_come(store, world_size, HEARD_WAITS_S if is_heard else WAIT_S)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(error.exit_code))
        if store is not None and found_by_all:
            _say_once(error, store, number)
        elif store is None or not is_heard:  # else the hub has named this rank by now
            write_error(words)
    except RuntimeError:
        write_error(words)
    return error.exit_code


def _say_once(error: QuintschedError, store: Store, number: int) -> None:
    """Print an error that all ranks find, on the first that came; the others wait until it has."""
    if number == 1:
        write_error(error)
        store.set("said", "so")
    else:
        _until(lambda: store.check(["said"]), WAIT_S)


def _open_store() -> Store | None:
    """Return the launcher's store; None where there is none."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    from torch.distributed.distributed_c10d import PrefixStore

    from ..watch.rendezvous.rendezvous_store import open_store

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"quintsched/leave/{attempt}", open_store(WAIT_S))


def _all_come(store: Store, world_size: int, wait_s: float) -> bool:
    """Wait for all ranks; return whether they came, none more than `wait_s` after the one before."""
    came = 0
    while came < world_size:
        known = came
        if not _until(lambda known=known: store.add("ranks", 0) > known, wait_s):  # type: ignore[misc]
            return False
        came = store.add("ranks", 0)
    return True


def _until(is_so: Callable[[], bool], wait_s: float) -> bool:
    """Wait until a condition holds; return whether it did in time."""
    from ..comm.clocks import now_s

    deadline = now_s() + wait_s
    while not is_so():
        if now_s() > deadline:
            return False
        sleep(0.02)
    return True
