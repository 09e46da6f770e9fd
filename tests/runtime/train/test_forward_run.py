"""Forward runs of a job: each sample's outputs once, in order, as one process gives them; what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quintsched.errors import MisfitError, UsageError
from quintsched.runtime import JobConfig, Transport, build_model, plan_of, run_local
from quintsched.runtime.data import DataSpec
from quintsched.runtime.data.data_sources import load_dataset
from quintsched.runtime.data.memory_dataset import gather_batch
from quintsched.runtime.launch.worker import main
from quintsched.runtime.models.vit import ViTOptions, vit
from quintsched.runtime.train.forward_run import ForwardRun
from quintsched.runtime.train.reporter import Reporter

from ...helpers.jobs import DATA, fit, joined
from ..toys import difference

MODEL = {"hidden": 8, "depth": 2, "heads": 2}
OWN = """
import torch
from torch import nn
from quintsched.runtime.data import Loaders

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x, scale):
        return {"logits": self.layer(x) * scale, "hidden": (x, x.sum(1)), "words": "left out"}

def build(data):
    return [lambda: nn.Linear(4, 4), Head]

def batches(sizes):
    return [(torch.full((n, 4), float(k)), None, {"scale": torch.ones(n, 1)}) for k, n in enumerate(sizes)]

def load(replica, num_replicas):
    return Loaders(batches([2]), validation=batches([3, 2] if replica else [2, 4]))

def complex_numbers(data):
    class Complex(nn.Module):
        def forward(self, x, scale):
            return torch.view_as_complex(x.view(-1, 2, 2))
    return [lambda: nn.Linear(4, 4), Complex]
"""


def job_of(folder: Path, **sections: Any) -> JobConfig:
    (folder / "steps.py").write_text(DATA)
    (folder / "own.py").write_text(OWN)
    values: dict[str, Any] = {
        "model": {"options": MODEL},
        "data": {"name": f"{folder / 'steps.py'}:load"},
        "parallel": {"mesh": "dp=2,pp=2", "microbatches": 2},
        "train": {"batch_size": 8},
        "runtime": {"precision": "float64"},
        "forward": {"outputs": str(folder / "outputs")},
    }
    mode = {"mode": sections.pop("mode")} if "mode" in sections else {}
    return JobConfig.model_validate(joined(values, sections) | mode)


def run(job: JobConfig, said: list[str] | None = None, *, stops: bool = False) -> int:
    plan = plan_of(job)

    def start(transport: Transport) -> int:
        say = said.append if said is not None and transport.rank == 0 else lambda line: None
        return ForwardRun(job, plan, transport, Reporter(None, say), wants_stop=lambda: stops).write_outputs()

    (samples,) = set(run_local(plan.mesh.size, start))
    return samples


def read(folder: Path, name: str = "outputs") -> Tensor:
    """Return the outputs, as the documentation says that they are read."""
    index = json.loads((folder / "index.json").read_text())
    return torch.cat([load_file(folder / file["name"])[name] for file in index["files"]])


def expected_of(job: JobConfig, split: str, weights: dict[str, Tensor] | None = None) -> Tensor:
    """Return what one process gives for a split of the data."""
    data = load_dataset(job.data)
    samples = getattr(data, split)
    inputs, _ = gather_batch(samples, torch.arange(len(samples)).numpy())
    blocks = vit(DataSpec(input_shape=(1, 8, 8), num_classes=4), ViTOptions(**MODEL))
    model = build_model(blocks, 0, torch.float64).eval()
    if weights is not None:
        model.load_state_dict(weights)
    with torch.no_grad():
        found: Tensor = model(inputs.double())
    return found


@pytest.mark.parametrize(
    ("parallel", "samples", "count"),
    [
        ({"mesh": "dp=3", "schedule": "zb-h1"}, "train", 45),
        ({"mesh": "pp=2", "schedule": "inference"}, "validation", 19),
    ],
)
def test_a_training_job_runs_forward_from_its_checkpoint(tmp_path, parallel, samples, count):
    saved = {"dir": str(tmp_path / "saved"), "export": str(tmp_path / "export")}
    fit(job_of(tmp_path, checkpoint=saved))
    said: list[str] = []
    forward = {"outputs": str(tmp_path / "outputs"), "samples": samples, "max_file_mb": 1e-4}
    job = job_of(tmp_path, mode="forward", checkpoint={"dir": saved["dir"]}, parallel=parallel, forward=forward)
    assert run(job, said) == count
    weights = {name: p for file in (tmp_path / "export").glob("*.safetensors") for name, p in load_file(file).items()}
    assert difference(read(tmp_path / "outputs"), expected_of(job, samples, weights)) < 1e-12
    index = json.loads((tmp_path / "outputs" / "index.json").read_text())
    spans = [file["samples"] for file in index["files"]]
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
    assert spans[-1][1] == index["samples"] == count
    assert len(spans) > index["files"][-1]["replica"] + 1  # none is longer than 100 bytes, or one batch
    assert [file["tensors"]["outputs"] for file in index["files"]] == [[stop - start, 4] for start, stop in spans]
    assert any(line.startswith("weights of step 6") for line in said)
    other = job_of(tmp_path, mode="forward", checkpoint=saved, model={"options": {**MODEL, "heads": 4}})
    with pytest.raises(MisfitError, match=r"model\.options\.heads was 2 and is 4"):
        run(other)


def test_pretrained_weights_and_a_folder_that_is_replaced(tmp_path: Path) -> None:
    blocks = vit(DataSpec(input_shape=(1, 8, 8), num_classes=4), ViTOptions(**MODEL))
    weights = {name: p.detach().clone() for name, p in build_model(blocks, 3, torch.float64).state_dict().items()}
    save_file(weights, tmp_path / "weights.safetensors")
    old = tmp_path / "outputs"
    old.mkdir()
    (old / "outputs-00007-00000.safetensors").write_text("of a run before")
    (old / "notes.txt").write_text("stays")
    job = job_of(tmp_path, mode="forward", model={"pretrained": str(tmp_path / "weights.safetensors")})
    assert run(job) == 19
    assert difference(read(old), expected_of(job, "validation", weights)) < 1e-12
    assert {path.name for path in old.iterdir()} == {
        "index.json",
        "notes.txt",
        "outputs-00000-00000.safetensors",
        "outputs-00001-00000.safetensors",
    }
    assert run(job, stops=True) == 0  # what was there stays
    assert len(read(old)) == 19


def own_job(folder: Path, build: str = "build", **sections: Any) -> JobConfig:
    own = {
        "model": {"name": f"{folder / 'own.py'}:{build}", "options": {}},
        "data": {"name": f"{folder / 'own.py'}:load"},
    }
    return job_of(folder, mode="forward", **own, **sections)


def test_loaders_give_each_replica_its_samples_and_trees_are_written_by_names(tmp_path: Path) -> None:
    said: list[str] = []
    assert run(own_job(tmp_path), said) == 6 + 5
    assert any("blocks are built with" in line for line in said)
    assert read(tmp_path / "outputs", "logits").shape == (11, 2)
    rows = [0.0] * 2 + [1.0] * 4 + [0.0] * 3 + [1.0] * 2
    hidden, sums = read(tmp_path / "outputs", "hidden.0"), read(tmp_path / "outputs", "hidden.1")
    torch.manual_seed(0)
    assert torch.equal(hidden.sum(1), sums)
    assert [bool(torch.equal(hidden[k], hidden[0])) for k in range(11)] == [row == 0 for row in rows]
    assert run(own_job(tmp_path, forward={"samples": "train"})) == 4


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...], str, int]] = {
    "no outputs": ({"forward": {"outputs": None}}, (), "mode: forward writes outputs; say where", 2),
    "traced": ({"runtime": {"trace": "traces"}}, (), "runtime.trace", 2),
    "no checkpoint": ({"checkpoint": {"dir": "nothing-here"}}, (), "there is no checkpoint there", 2),
    "its checkpoints": ({"checkpoint": {"dir": "out"}, "forward": {"outputs": "out"}}, (), "their own folder", 2),
    "few samples": ({"data": {"options": {"validation": 1}}}, (), "1 sample cannot be shared out over 2 replicas", 3),
    "trains": ({"mode": "train", "parallel": {"schedule": "inference"}}, (), "in a job file, mode: forward", 2),
    "resumes": ({}, ("--resume",), "--resume is of trainings", 2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sections, arguments, words, code = REFUSED[name]
    runtime = {"transport": "local", **sections.get("runtime", {})}
    job = job_of(tmp_path, **{"mode": "forward", **sections, "runtime": runtime})
    Path("job.yaml").write_text(job.model_dump_json(exclude_unset=True))
    assert main(["--config", "job.yaml", *arguments]) == code
    assert words in capsys.readouterr().err


def test_outputs_that_no_file_can_hold_are_refused_on_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="complex"):
        run(own_job(tmp_path, "complex_numbers"))
    assert not (tmp_path / "outputs").exists()
    assert not (tmp_path / "outputs.saving").exists()
