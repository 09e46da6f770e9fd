"""Ranks in real processes: groups and channels, rings and trees, queues, bf16, traces; and jobs of a command."""

import json
import sys
from pathlib import Path

import pytest

import quintsched as qs
from quintsched.ir.instruction_set import Message, Recv, RecvAct, Send, SendAct
from quintsched.simulation.simulator import Span
from quintsched.trace.measured_trace import Trace
from tests.helpers.commands import DATA, run

from .machine import Machine

pytestmark = [pytest.mark.processes]
LIMIT_S, CLOCKS_APART_S = 180.0, 0.005


def try_part(machine: Machine, world_size: int, folder: Path, part: str, **variables: str) -> None:
    worker = ("tests.gpu.wires_worker", machine.backend, folder, part)
    machine.run(world_size, *worker, timeout_s=LIMIT_S, variables=variables)


@pytest.mark.ranks(4)
def test_groups_and_channels(tmp_path: Path, machine: Machine) -> None:
    try_part(machine, 4, tmp_path, "transport")


@pytest.mark.ranks(3)
def test_rings_and_trees(tmp_path: Path, machine: Machine) -> None:
    try_part(machine, 3, tmp_path, "spelled")


@pytest.mark.ranks(2)
def test_too_few_queues_are_refused(tmp_path: Path, machine: Machine) -> None:
    machine.require_cuda("a CPU has no queues")
    try_part(machine, 2, tmp_path, "queues", CUDA_DEVICE_MAX_CONNECTIONS="1")


@pytest.mark.ranks(4)
def test_communicators_are_made_before_the_first_step(tmp_path: Path, machine: Machine) -> None:
    machine.require_cuda("gloo has no communicators")
    log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": f"{tmp_path}/nccl.%p"}
    try_part(machine, 4, tmp_path, "communicators", **log)


@pytest.mark.ranks(2)
def test_two_stages_in_bf16_give_the_bits_of_one(tmp_path: Path, machine: Machine) -> None:
    try_part(machine, 2, tmp_path, "bf16")


@pytest.mark.ranks(2)
def test_nothing_arrives_before_it_is_sent_in_a_trace(tmp_path: Path, machine: Machine) -> None:
    """The clocks of two processes of one machine agree within a few milliseconds."""
    try_part(machine, 2, tmp_path, "trace")
    step = Trace.load(tmp_path / "trace", qs.compile("zb-h1", mesh="pp=2", microbatches=4)).step(unit="s")
    assert 0 < step.bubble < 1
    spans = [span for row in step.timeline for span in row]
    assert all(span.start <= span.end for span in spans)
    sent = {_message(span): span.start for span in spans if isinstance(span.instruction, Send)}
    taken = {_message(span): span.end for span in spans if isinstance(span.instruction, Recv)}
    assert sent.keys() == taken.keys()
    assert all(taken[message] >= sent[message] - CLOCKS_APART_S for message in sent)


def _message(span: Span) -> tuple[bool, int]:
    """Return which message a span of a pipeline of two belongs to: whether it is an activation, and the microbatch."""
    assert isinstance(span.instruction, Message)
    return isinstance(span.instruction, SendAct | RecvAct), span.instruction.microbatch


JOB_LIMIT_S = 240

JOB = """
model: {options: {hidden: 32, depth: 6, heads: 4}}
data: {name: "DATA:load"}
train: {epochs: 2, batch_size: 16, optimizer: {name: sgd, lr: 0.05, momentum: 0.9}, clip: 1.0}
runtime: {timeout_s: 120, precision: float64}
log: {every: 1}
"""


def losses(machine: Machine, job: Path, log: Path, *settings: str) -> list[float]:
    sets = [part for setting in (*settings, f"log.path={log}") for part in ("--set", setting)]
    command = (sys.executable, "-m", "quintsched.runtime.launch.local_run", "--config", job, *sets)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in machine.environment(8).items():
            patch.setenv(name, value)
        code, _, err = run(*command, timeout_s=JOB_LIMIT_S)
    assert code == 0, err
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return [record["loss"] for record in records if record["event"] == "step"]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    (folder / "data.py").write_text(DATA)
    (folder / "job.yaml").write_text(JOB.replace("DATA", str(folder / "data.py")))
    return folder / "job.yaml"


@pytest.fixture(scope="module")
def alone(machine: Machine, job: Path) -> list[float]:
    """Return the losses of one process on the CPU."""
    return losses(machine, job, job.with_name("alone.jsonl"), "runtime.transport=gloo")


@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [
        pytest.param("pp=2", "1f1b", marks=pytest.mark.ranks(2)),
        pytest.param("pp=4", "interleaved-1f1b", marks=pytest.mark.ranks(4)),
        pytest.param("dp=2,pp=2,tp=2", "1f1b", marks=pytest.mark.ranks(8)),
    ],
)
def test_losses_equal_one_process(tmp_path: Path, machine: Machine, job: Path, alone, mesh: str, schedule: str) -> None:
    how = (f"parallel.mesh='{mesh}'", f"parallel.schedule={schedule}", "parallel.microbatches=4")
    found = losses(machine, job, tmp_path / "found.jsonl", *how, f"runtime.transport={machine.backend}")
    assert found == pytest.approx(alone, abs=1e-10)
