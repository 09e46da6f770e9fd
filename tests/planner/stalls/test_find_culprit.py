"""Faults in runs that are executed without tensors: who is to blame, by where ranks stand; and owners of errors."""

import ctypes
import random
import signal

import pytest

import quintsched as qs
from quintsched.stalls.culprit import find_culprit
from quintsched.stalls.own_errors import came_from_handler, is_own

from .executor import Execution, Fault, faults_of

NAMES = [schedule.name for schedule in qs.all_schedules()]
MESHES = ("pp=2", "pp=4", "dp=2,pp=2", "pp=2,tp=2", "dp=2,pp=2,tp=2")
EXTRAS = ({}, {"zero": 2}, {"recompute": 1}, {"overlap": True})


def plans_of(name, rng):
    """Yield a plan of a schedule for each mesh that it takes, with one of the extras that it takes there."""
    for mesh in MESHES:
        for extra in rng.sample(EXTRAS, len(EXTRAS)):
            try:
                yield qs.compile(name, mesh=mesh, microbatches=4, **extra)
            except qs.QuintschedError:
                continue
            break


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["freeze", "skip"])
@pytest.mark.parametrize("name", NAMES)
def test_the_rank_and_the_instruction_are_named(name, kind):
    rng = random.Random(f"{name} {kind}")
    for plan in plans_of(name, rng):
        for ahead in (True, False):
            fault = faults_of(plan, rng, kind)
            execution = Execution(plan, fault, ahead=ahead, seed=rng.randrange(2**32))
            assert not execution.finished
            report = find_culprit(plan, execution.states(execution.now + 5, [0.1] * plan.mesh.size))
            (culprit,) = report.culprits
            assert (culprit.rank, culprit.place.index, culprit.step) == (fault.rank, fault.index, fault.step)
            instruction = plan.programs[plan.mesh.pp_rank(fault.rank)][fault.index]
            assert culprit.fault == ("stands" if kind == "freeze" else "skipped")
            assert culprit.place.microbatch == getattr(instruction, "microbatch", None)
            waiters = {link.waiter.rank for link in report.chain}
            assert waiters, "somebody waits for it"
            assert fault.rank not in waiters
            assert f"rank {fault.rank} (host a" in report.words()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rank", range(6))
def test_a_rank_is_named_at_every_instruction(rank):
    plan = qs.compile("1f1b", mesh="dp=2,pp=3", microbatches=4)
    for index in range(len(plan.programs[plan.mesh.pp_rank(rank)])):
        execution = Execution(plan, Fault("freeze", rank, 2, index))
        report = find_culprit(plan, execution.states(execution.now + 5, [0.1] * 6))
        assert report.ranks == (rank,)
        assert report.culprits[0].place.index == index
        assert {link.waiter.rank for link in report.chain} == set(range(6)) - {rank}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("says_waits", [True, False])
@pytest.mark.parametrize("kind", ["freeze", "skip", "none"])
@pytest.mark.parametrize("name", NAMES)
def test_nobody_else_is_named_whenever_the_ranks_were_looked_at(name, kind, says_waits):
    rng = random.Random(f"{name} {kind} {says_waits}")
    for plan in plans_of(name, rng):
        fault = faults_of(plan, rng, kind)
        execution = Execution(plan, fault, ahead=rng.random() < 0.5, seed=rng.randrange(2**32))
        for _ in range(12):
            at, heard = rng.uniform(0, execution.now + 2), [rng.uniform(0, 0.3) for _ in range(plan.mesh.size)]
            report = find_culprit(plan, execution.states(at, heard, says_waits=says_waits))
            assert report.ranks in ((), (fault.rank,)) if kind != "none" else not report.ranks


def caught(code, handler=None, name="quintsched.runtime.comm.torch_process_groups"):
    """Return what code raises in a module, as it is caught there."""
    found = []
    code = f"try:\n    {code}\nexcept BaseException as error:\n    found.append(error)\n"
    exec(code, {"__name__": name, "found": found, "handler": handler})
    return found[0]


def handle(number, frame):
    raise TimeoutError("my own time limit")


def test_what_a_handler_raises_in_a_wait_is_told_from_what_the_wait_raises():
    assert not came_from_handler(caught("raise RuntimeError('connection closed by peer')"))
    assert not came_from_handler(caught("int('x')"))
    assert came_from_handler(caught("handler(1, None)", handle))
    before = signal.signal(signal.SIGUSR2, handle)
    try:
        assert came_from_handler(caught("import signal; signal.raise_signal(signal.SIGUSR2)"))
    finally:
        signal.signal(signal.SIGUSR2, before)
    dead = {"__name__": "torch.utils.data._utils.signal_handling"}
    exec("def handler(number, frame): raise RuntimeError('DataLoader worker is killed')", dead)
    assert came_from_handler(caught("handler(1, None)", dead["handler"]))


def of_user(code, **names):
    """Return what code of the user's raises."""
    try:
        exec(code, {"__name__": "my.blocks", "c": ctypes.pythonapi.PyErr_SetString, "RE": RE, **names})
    except Exception as error:
        return error
    raise AssertionError("it has to raise")


RE = ctypes.py_object(RuntimeError)
LOST = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"
COLLECTIVE = {"__name__": "torch.distributed.distributed_c10d", "c": ctypes.pythonapi.PyErr_SetString, "RE": RE}
exec(f"def all_reduce(): c(RE, b'{LOST}')\ndef check(): raise NotImplementedError('no gloo/ sharding')", COLLECTIVE)

LOADER = {"__name__": "torch.utils.data.dataloader"}
exec("def fetch(): raise RuntimeError('Caught RuntimeError: NCCL ProcessGroup, Connection reset by peer')", LOADER)

OTHERS = {"__name__": "torch._ops", "inner": COLLECTIVE["all_reduce"]}
exec("def call(): inner()", OTHERS)

DIST_ERROR = type("DistStoreError", (RuntimeError,), {})


@pytest.mark.parametrize(
    ("code", "own"),
    [
        ("raise RuntimeError('reading failed: Connection reset by peer while reading shard-17')", True),
        ("raise RuntimeError('[gloo/transport/tcp/pair.cc:547] Connection closed by peer')", True),
        ("raise DistStoreError('a store of mine')", True),
        ("fetch()", True),
        ("check()", True),
        ("c(RE, b'mat1 and mat2 shapes cannot be multiplied')", True),
        ("c(RE, LOST)", False),
        ("c(DIST, b'wait timeout after 4000ms')", False),
        ("all_reduce()", False),
        ("call()", False),
        ("try: all_reduce()\nexcept RuntimeError as error: raise KeyError('my sync') from error", False),
        ("try: all_reduce()\nexcept RuntimeError: raise KeyError('my sync')", False),
        ("try: all_reduce()\nexcept RuntimeError: raise", False),
        ("try: all_reduce()\nexcept RuntimeError as error: kept = error\nraise kept", False),
        ("try: fetch()\nexcept RuntimeError as error: raise RuntimeError(f'gloo/ {error}') from error", True),
        ("try: all_reduce()\nexcept RuntimeError as error: raise ExceptionGroup('sync', [error])", False),
        ("try: all_reduce()\nexcept RuntimeError as e: kept = e\nraise ExceptionGroup('', [kept, KeyError()])", True),
        ("try: all_reduce()\nexcept RuntimeError as e: kept = e\nraise ExceptionGroup('', [kept, kept])", False),
        ("try: all_reduce()\nexcept* RuntimeError: raise", False),
        ("raise ExceptionGroup('two', [ValueError('gloo/'), ExceptionGroup('in', [TypeError('c')])])", True),
        ("try: open('/no/gloo/such')\nexcept OSError as error: raise RuntimeError(str(error)) from error", True),
    ],
)
def test_the_last_frames_decide_whose_error_it_is_and_no_words(code, own):
    names = {"all_reduce": COLLECTIVE["all_reduce"], "check": COLLECTIVE["check"], "fetch": LOADER["fetch"]}
    names |= {"call": OTHERS["call"], "LOST": LOST.encode(), "DistStoreError": DIST_ERROR}
    assert is_own(of_user(code, DIST=ctypes.py_object(DIST_ERROR), **names)) is own
