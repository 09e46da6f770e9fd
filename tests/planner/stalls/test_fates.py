"""Culprits of stalls and of processes that ended: who is to blame, what is said of it, files of reports, own errors."""

import ctypes
import json
import random
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import quintsched as qs
from quintsched.stalls.culprit import find_culprit
from quintsched.stalls.last_reported_rank_states import BlockingCall, Fate, RankState
from quintsched.stalls.own_error_or_lost_peer import came_from_handler, is_own
from quintsched.stalls.stall_report import StallReport

from .executor import Execution, faults_of

PLAN = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=4)
RECEIVES, NOTHING = BlockingCall("receive", 0), BlockingCall("nothing")
LOST = Fate("error", 4, "StallError: rank 1 receiving from rank 0: a peer died", 0.2)


def state(rank, fate=None, *, index=4, awaits=None, phase="step", host="a", heard_s=0.1, since_s=5.0, **more):
    return replace(
        RankState(rank, host, 10 + rank, phase, 3, "train", index, since_s, heard_s, fate, awaits, 3), **more
    )


def find(*fates, **extras):
    return find_culprit(PLAN, [state(rank, fate, **extras) for rank, fate in enumerate(fates)])


def found(*states):
    """Return the ranks to blame, and what is said; ranks that are not given are in the step."""
    given = {one.rank: one for one in states}
    report = find_culprit(PLAN, [given.get(rank) or state(rank) for rank in range(PLAN.mesh.size)])
    return report.ranks, report.words()


FATES = [
    (Fate("signal", 9), "was killed by SIGKILL"),
    (Fate("signal", 99), "was killed by signal 99"),
    (Fate("exit", 5), "ended with exit code 5"),
    (Fate("error", 1, "ValueError: no such digit"), "raised ValueError: no such digit"),
    (Fate("error", 1, "torch.cuda.OutOfMemoryError: 2 GiB"), "raised torch.cuda.OutOfMemoryError: 2 GiB"),
    (Fate("error", 1, "the loss function raised ValueError"), "failed: the loss function raised ValueError"),
    (Fate("error", 2, "m.py:3: the import failed"), "failed: m.py:3: the import failed (exit code 2)"),
    (Fate("error", 1), "raised an error"),
    (Fate("gone"), "ended, nobody saw how"),
    (Fate("stopped", 19), "is stopped, as by SIGSTOP"),
    (Fate("unreachable"), "cannot be reached"),
    (Fate("silent"), "does not answer, as if it were stopped"),
]


def test_a_process_that_failed_is_named_with_its_fate():
    for fate, words in FATES:
        report = find(None, LOST, fate, Fate("exit", 4))
        assert report.ranks == (2,)
        first = report.words().splitlines()[0]
        assert first.startswith(f"rank 2 (host a, dp=1, pp=0) {words}"), first
        assert "in step 3 at instruction 4 of 20: RecvGrad(stage=0, microbatch=0, peer=3)" in first


def test_who_ended_first_is_to_blame():
    late, soon = Fate("error", 1, "ValueError: mine", 4.0), Fate("signal", 11, ago_s=1.5)
    assert find(None, soon, late, None).ranks == (2,)
    assert find(None, Fate("signal", 15, ago_s=0.4), Fate("error", 1, "ValueError", 0.3), None).ranks == (2,)
    assert find(None, Fate("signal", 9, ago_s=0.3), Fate("exit", 1, ago_s=0.4), None).ranks == (1,), "at about one time"
    assert find(None, Fate("unreachable", ago_s=9.0), Fate("exit", 5, ago_s=0.4), None).ranks == (2,)


def test_a_host_that_died_is_several_culprits():
    states = [
        state(rank, Fate("signal", 9, ago_s=0.2 + rank / 100) if rank > 1 else None, host="ab"[rank > 1])
        for rank in range(4)
    ]
    assert find_culprit(PLAN, states).ranks == (2, 3)
    away = [state(rank, Fate("unreachable", ago_s=0.5) if rank > 1 else None, host="abcd"[rank]) for rank in range(4)]
    assert find_culprit(PLAN, away).ranks == (2, 3)


@pytest.mark.parametrize("fate", [Fate("signal", 6), Fate("exit", 134)])
def test_who_is_aborted_is_named_unless_the_sender_says_that_it_sent_too_much(fate):
    def find_with(sender, awaits, **sent):
        return found(state(0, index=sender, **sent), state(1, fate, index=1, awaits=awaits, room=4096))

    for sender in (2, 6):
        ranks, words = find_with(sender, RECEIVES, sent=5000, sent_at=1)
        assert ranks == (0,)
        assert "rank 0 (host a, dp=0, pp=0) sent what does not fit in step 3: its instruction 1 of 20" in words
        assert "(rank 1: it was aborted as 5000 bytes came, where it had room for 4096)" in words
    for sent in ({}, {"sent": 4000, "sent_at": 1}, {"sent": 5000, "sent_at": 3}):
        for awaits in (RECEIVES, NOTHING):
            ranks, words = find_with(6, awaits, **sent)
            assert ranks == (1,)
            assert "it did so itself, or gloo did as more came than there was room for" in words
            assert "messages of rank 0 were on the way" in words
    ranks, words = find_with(0, NOTHING)
    assert ranks == (1,)
    assert "gloo" not in words, "nothing was on its way"


def test_what_ranks_and_files_say_is_fit_for_a_terminal():
    fate = Fate("error", 1, "ValueError: \udcff\x1b[31mred\nerror: rank 0 did it\x00\u202e")
    words = found(state(1, fate, host="h\n\x1b[2J"))[1]
    assert "(host h \\x1b[2J, " in words
    assert "raised ValueError: \\udcff\\x1b[31mred error: rank 0 did it\\x00\\u202e (exit code 1)" in words
    report = find(None, Fate("error", 1, "x" * 10**6), None, None)
    assert len(report.words()) < 1000
    assert "… (cut) (exit code 1)" in report.words()
    assert StallReport.from_json(report.to_json()).words() == report.words()


SHORT = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=2)


@pytest.fixture
def report():
    awaits = [BlockingCall("receive", 2), BlockingCall("nothing"), BlockingCall("collective", ranks=(0, 1, 2, 3)), None]
    fates = [None, Fate("signal", 9), None, None]
    state = partial(
        RankState, host="a", phase="step", step=1, program="train", index=2, since_s=3.0, heard_s=0.1, run=1
    )
    return find_culprit(SHORT, [state(rank=r, pid=r, fate=fates[r], awaits=awaits[r]) for r in range(4)])


def test_a_report_comes_back(report, tmp_path):
    path = tmp_path / "stall.json"
    report.save(path)
    again = StallReport.load(path)
    assert again == report
    assert again.words() == report.words()
    assert again.plan == SHORT
    assert json.loads(path.read_text())["culprits"][0]["rank"] == 1


def test_a_broken_report_is_refused_with_the_place(report, tmp_path):
    path = tmp_path / "stall.json"
    for change, says in (
        (lambda d: d.update(format="quintsched.plan"), "/format: this is not a stall report"),
        (lambda d: d.update(version=2), "/version: this release reads 1, not 2"),
        (lambda d: d.pop("plan"), "/plan: a report holds the plan"),
        (lambda d: d["plan"].update(mesh=[["pp", 0]]), "/plan: /mesh"),
        (lambda d: d.update(more=1), "/more: unknown key"),
        (lambda d: d["states"][0].update(rank="0"), "/states/0/rank"),
        (lambda d: d["states"][0].update(rank=9), "rank 9 is not in the mesh"),
        (lambda d: d["states"][0].update(index=99), "rank 0 has no instruction 99"),
        (lambda d: d["states"][0].update(phase="asleep"), "/states/0/phase"),
        (lambda d: d["culprits"][0].update(fault="none"), "/culprits/0/fault"),
        (lambda d: d["chain"].append({}), "/chain/"),
    ):
        data = json.loads(report.to_json())
        change(data)
        path.write_text(json.dumps(data))
        with pytest.raises(qs.InputError, match=r"stall\.json: ") as refused:
            StallReport.load(path)
        assert says in str(refused.value)


def test_the_example_of_the_docs_says_what_it_says(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[3] / "docs" / "reliability.md").read_text()
    code, _, rest = page.partition("```python\n")[2].partition("```")
    exec(code, {})
    assert capsys.readouterr().out == rest.partition("```text\n")[2].partition("```")[0]
    assert StallReport.load("stall.json").ranks == (1,)


@pytest.mark.parametrize("name", ["culprits", "chain", "states"])
def test_more_of_them_than_the_mesh_has_ranks_are_not_looked_at(report, name, monkeypatch):
    data = json.loads(report.to_json())
    data[name] = data[name][:1] * 17
    monkeypatch.setattr("quintsched.stalls.stall_report.StallFile", None)
    with pytest.raises(qs.InputError, match=f"^/{name}: there are 17, but the mesh dp=2,pp=2 has 4 ranks$"):
        StallReport.from_json(json.dumps(data))


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
LOST_CONNECTION = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"
COLLECTIVE = {"__name__": "torch.distributed.distributed_c10d", "c": ctypes.pythonapi.PyErr_SetString, "RE": RE}
exec(
    f"def all_reduce(): c(RE, b'{LOST_CONNECTION}')\ndef check(): raise NotImplementedError('no gloo/ sharding')",
    COLLECTIVE,
)

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
    names |= {"call": OTHERS["call"], "LOST": LOST_CONNECTION.encode(), "DistStoreError": DIST_ERROR}
    assert is_own(of_user(code, DIST=ctypes.py_object(DIST_ERROR), **names)) is own
