"""A job file on Ray Train: a worker for each rank, checkpoints in Ray's storage, exact resumption after a failure.

    pip install '.[examples]' 'ray[train]'
    python examples/clusters/ray_train.py examples/clusters/job.yaml --storage /shared/ray [--set A.B=C …]

checkpoint.dir is a folder that all nodes see, as Ray's storage is; give whole paths. Each saved step is handed to Ray,
which keeps it, and gives it back to workers that start again: after a lost worker, a lost node, or a node that is to be
drained. A failure is in Ray's error with the verdict: the rank, and the instruction that it was at.
"""

import argparse
import shutil
from pathlib import Path

import ray.train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from quintsched.runtime import Trainer, connect_for, load_job, plan_of
from quintsched.runtime.launch.job_plan import for_processes
from quintsched.runtime.train.reporter import reporter_of


def take_checkpoint(folder: Path) -> None:
    """Copy the step that Ray has kept to the job's folder, unless it is there."""
    kept = ray.train.get_checkpoint()
    if kept is None or ray.train.get_context().get_world_rank() > 0:
        return
    with kept.as_directory() as source:
        (step,) = Path(source).glob("step-*")
        if not (folder / step.name).exists():
            half = folder / f".ray-{step.name}"  # a worker may die while it copies
            shutil.copytree(step, half, dirs_exist_ok=True)
            half.rename(folder / step.name)


class Handover:
    """Hands the newest saved step to Ray; called on all ranks in each step, it stops a run whose node is drained."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.newest, self.is_preempted = folder, None, False
        self.is_first = ray.train.get_context().get_world_rank() == 0

    def report(self, trainer: Trainer) -> None:
        newest = max(self.folder.glob("step-*/manifest.json"), default=None) if self.is_first else None
        if newest == self.newest:
            ray.train.report({"step": trainer.progress.step})
            return
        self.newest = newest
        home = newest.parent.with_name(f".ray-{newest.parent.name}")  # what Ray keeps has the name of the step
        home.mkdir(exist_ok=True)
        shutil.copytree(newest.parent, home / newest.parent.name, dirs_exist_ok=True)
        ray.train.report({"step": trainer.progress.step}, checkpoint=Checkpoint.from_directory(home))
        shutil.rmtree(home)


def train(config: dict) -> None:
    """Train as one rank; Ray has set its number, and where ranks meet, in the environment."""
    job = for_processes(
        load_job(config["job"], config["settings"]), None, ray.train.get_context().get_world_size()
    )  # an elastic job has the replicas that there are workers for
    folder, every = Path(job.checkpoint.dir), int(job.checkpoint.every)
    plan = plan_of(job)
    take_checkpoint(folder)
    handover = Handover(folder)

    def wants_stop() -> bool:
        if trainer.progress.step % every == 0:
            handover.report(trainer)
        handover.is_preempted |= ray.train.get_preemption_info() is not None
        return handover.is_preempted

    transport = connect_for(plan, job.runtime.timeout_s, "gloo" if config["cpu"] else "auto")
    reporter = reporter_of(job.log.path, transport.rank)
    trainer = Trainer.of_job(job, plan, transport, reporter, wants_stop=wants_stop)
    trainer.fit("resume")
    handover.report(trainer)
    transport.close()
    if handover.is_preempted:
        raise RuntimeError(f"preempted: saved at step {trainer.progress.step}")  # Ray starts the workers again


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("job")
    parser.add_argument("--storage", required=True)
    parser.add_argument("--name", default="quintsched")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--min-workers", type=int, help="go on with fewer workers, which make whole replicas")
    parser.add_argument("--gpu", action="store_true")
    arguments = parser.parse_args()
    settings = [*arguments.set, "checkpoint.background=false"]
    job = load_job(arguments.job, settings)
    if job.checkpoint.folder is None:
        parser.error("checkpoint.dir has to be a folder that all nodes see, and no URL")
    workers = plan_of(job).mesh.size
    if arguments.min_workers:
        settings, workers = [*settings, "parallel.elastic=true"], (arguments.min_workers, workers)
    result = TorchTrainer(
        train,
        train_loop_config={"job": str(Path(arguments.job).resolve()), "settings": settings, "cpu": not arguments.gpu},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=arguments.gpu),
        run_config=RunConfig(
            name=arguments.name, storage_path=arguments.storage, failure_config=FailureConfig(max_failures=3)
        ),
    ).fit()
    print(result.metrics, result.checkpoint)
