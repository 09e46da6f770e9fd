"""SLURM with two nodes: scancel saves, a killed rank's job is queued again; by submitit; and on one node."""

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from .engine_runs import EXAMPLES, JOB, VERDICT, WAIT_S, EngineRun, wait_until
from .slurm_cluster import ask, require_slurm, slurm

pytestmark = [pytest.mark.slow, pytest.mark.engines, pytest.mark.processes, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    require_slurm()
    with slurm(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


def submit(run: EngineRun, cluster: dict[str, str], log: str, *options: str, nodes: int = 2) -> str:
    """Submit the script; return the job's number."""
    told = run.environment | cluster | {"CHECKPOINTS": str(run.folder / "checkpoints")}
    script = (EXAMPLES / "slurm.sh", JOB, *run.options, *options)
    command = ["sbatch", "--parsable", f"--nodes={nodes}", "-o", log, *script]
    done = subprocess.run(command, cwd=run.folder, env=told, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def is_gone(cluster: dict[str, str], job: str) -> bool:
    return state_of(cluster, job) in ("COMPLETED", "CANCELLED", "FAILED", "")


def state_of(cluster: dict[str, str], job: str) -> str:
    return ask(cluster, "squeue", "--noheader", "--states=all", "-j", job, "-o", "%T")


def test_scancel_and_a_killed_rank_change_no_weight(run: EngineRun, cluster: dict[str, str], expected: str) -> None:
    job = submit(run, cluster, "first.txt")
    run.wait_for_step(12)
    ask(cluster, "scancel", job)
    wait_until(lambda: run.steps_of("stop") and is_gone(cluster, job), "a save after scancel")
    (stopped,) = run.steps_of("stop")
    job = submit(run, cluster, "second.txt")
    run.wait_for_step(stopped + 12)
    run.kill_rank(3)
    wait_until(lambda: is_gone(cluster, job), "the end of the job that was queued again")
    said = run.said("second.txt")
    assert re.search(VERDICT, said), said
    run.require_one_end(expected, stopped)


def test_submitit_queues_a_job_again_that_is_to_leave(run: EngineRun, cluster: dict[str, str], expected: str) -> None:
    pytest.importorskip("submitit")
    with run.started(sys.executable, EXAMPLES / "slurm_submitit.py", JOB, *run.options, **cluster) as process:
        run.wait_for_step(12)
        ask(cluster, "scancel", "--signal=USR2", run.said().split()[0])
        assert process.wait(WAIT_S) == 0
    assert "Job completed successfully" in run.said()
    first, second = run.steps_of("start")
    assert 0 == first < second
    assert run.weights() == expected


def test_a_job_whose_node_fails_goes_on_with_fewer_replicas(run: EngineRun, cluster, plain: EngineRun) -> None:
    elastic = ("--nproc", "2", "--set", "parallel.elastic=true")
    job = submit(run, cluster, "out.txt", *elastic)
    run.wait_for_step(12)
    ask(cluster, "scontrol", "update", "NodeName=n1", "State=DOWN", "Reason=test")
    wait_until(lambda: state_of(cluster, job) == "PENDING", "a job that waits for two nodes")
    ask(cluster, "scontrol", "update", f"JobId={job}", "NumNodes=1", "NumTasks=1")
    wait_until(lambda: is_gone(cluster, job), "the end of the job on one node")
    ask(cluster, "scontrol", "update", "NodeName=n1", "State=RESUME")
    run.require_fewer_replicas(plain)


def test_one_node_ends_with_the_same_weights(run: EngineRun, cluster: dict[str, str], expected: str) -> None:
    job = submit(run, cluster, "out.txt", nodes=1)
    wait_until(lambda: is_gone(cluster, job), "the end of the job")
    run.require_one_end(expected)
