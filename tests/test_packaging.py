"""Shipped archives: their contents, and that an installation from them plans without torch and runs with it.

checkout ─▶ sdist (no symbolic links) ─▶ wheel ─▶ clean virtual environment ─▶ plan, prove, time; with torch: run
"""

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SIZES = ("--schedule", "1f1b", "--mesh", "dp=1,pp=2", "--microbatches", "4")
JOB = """
model: {options: {hidden: 16, depth: 2, heads: 2}}
train: {batch_size: 256}
log: {path: log.jsonl, every: 1}
"""

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
"""Names of packages in conda, where they differ from those of PyPI."""

pytestmark = pytest.mark.processes


def run(*command: str | Path, cwd: Path, timeout: int = 200) -> subprocess.CompletedProcess[str]:
    """Run a command that knows nothing of the checkout."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    words, alone = [str(part) for part in command], environment | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=cwd, env=alone, capture_output=True, text=True, timeout=timeout, check=False)


def succeed(*command: str | Path, cwd: Path, timeout: int = 200) -> str:
    done = run(*command, cwd=cwd, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist from the checkout, and the wheel from that sdist."""
    directory = tmp_path_factory.mktemp("archives")
    succeed(sys.executable, "-m", "build", "--no-isolation", "--outdir", directory, ROOT, cwd=directory)
    return directory


@pytest.fixture(scope="module")
def wheel(archives: Path) -> Path:
    (found,) = archives.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a virtual environment with the wheel and what it requires, without extras."""
    environment = tmp_path_factory.mktemp("clean")
    succeed(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment)
    python = environment / "bin" / "python"
    succeed(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", wheel, cwd=environment)
    return environment / "bin"


def package_files() -> dict[str, bytes]:
    """Return the package as the checkout has it, through its symbolic links."""
    return {
        str(path.relative_to(ROOT)): path.read_bytes()
        for folder, _, files in os.walk(ROOT / "quintsched", followlinks=True)
        for path in (Path(folder, file) for file in files)
        if path.suffix != ".pyc"
    }


def test_the_sdist_holds_every_file_once_and_no_link(archives: Path) -> None:
    (file,) = archives.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        members = archive.getmembers()
        assert all(member.isfile() or member.isdir() for member in members)
        held = {
            member.name.partition("/")[2]: archive.extractfile(member).read() for member in members if member.isfile()
        }
    assert len(held) == sum(member.isfile() for member in members)
    assert {name: content for name, content in held.items() if name.startswith("quintsched/")} == package_files()
    assert not [name for name in held if name.startswith(("runtime/", "viz/"))]
    pages = {"README.md", "SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "CITATION.cff"}
    assert {*pages, "LICENSE", "pyproject.toml", "docs/versions.md", "examples/full_3d.yaml"} <= set(held)


def test_the_wheel_owns_one_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    assert len(held) == len(archive.namelist())
    assert {name for name in held if ".dist-info/" not in name} == set(package_files())
    assert {name: held[name] for name in package_files()} == package_files()


INSTALL_LINE = r"^pip install ((?:-e )?'?\..*?)(?:  +#.*)?$"
INSTALL_LINES = re.findall(INSTALL_LINE, (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
LLAMA = """
from quintsched.runtime import split
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
assert len(split(LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).train())) == 4
"""
TIMM = """
import torch
from quintsched.runtime import split
import timm

assert len(split(timm.create_model("vit_tiny_patch16_224", depth=2).train(), example=torch.zeros(2, 3, 224, 224))) == 4
"""
USES = {
    ".": "import quintsched as qs; assert qs.compile('1f1b', mesh='pp=2', microbatches=2).check().sound",
    "'.[runtime]'": "from quintsched.runtime import Engine, Trainer",
    "'.[viz]'": "import quintsched.viz",
    "'.[examples]'": "import matplotlib, sklearn; from quintsched.runtime import Engine",
    "-e '.[test]'": "import build, hypothesis, mypy, pytest, ruff, sklearn; from quintsched.runtime import Engine",
    "'.[hf]' -c constraints.txt": LLAMA + "import peft",
    "'.[timm]' -c constraints.txt": TIMM,
    "'.[solve]'": "import ortools, quintsched.solve",
    "'.[families]' -c constraints.txt": TIMM + LLAMA + "import tensorboard, torchdata",
}
"""Use of what each line of the README installs."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("line", INSTALL_LINES)
def test_each_install_line_of_the_readme_works_in_an_empty_environment(line: str, archives, tmp_path: Path) -> None:
    (file,) = archives.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    succeed(sys.executable, "-m", "venv", "--without-pip", tmp_path / "empty", cwd=tmp_path)
    python = tmp_path / "empty" / "bin" / "python"
    pinned = () if "-c" in line else ("-c", "constraints.txt")  # not the newest torch, which is large
    pip = sys.executable, "-m", "pip", "--python", python
    succeed(*pip, "install", "--quiet", *shlex.split(line), *pinned, cwd=folder, timeout=1500)
    succeed(python, "-c", USES[line], cwd=tmp_path)


@pytest.mark.slow
def test_an_installation_from_the_archives_runs_a_plan(clean: Path, tmp_path: Path) -> None:
    """torch is lent by the environment of the tests, at the end of the path: quintsched is the wheel's."""
    lend_packages(clean)
    home = succeed(clean / "python", "-c", "import quintsched.viz, torch; print(quintsched.__file__)", cwd=tmp_path)
    assert Path(home).is_relative_to(clean.parent)
    (tmp_path / "job.yaml").write_text(JOB)
    succeed(clean / "quintsched", "compile", *SIZES, "-o", "plan.json", cwd=tmp_path)
    assert "epoch 1/1" in succeed(clean / "quintsched", "run", "plan.json", "job.yaml", cwd=tmp_path)
    records = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if record["event"] == "step"]
    assert losses[0] > losses[-1]
    succeed(clean / "quintsched", "render", "plan.json", "-o", "timeline.png", cwd=tmp_path)
    assert (tmp_path / "timeline.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_oldest_packages_that_are_allowed_plan_draw_and_run(wheel: Path, tmp_path: Path) -> None:
    """torch is lent by the environment of the tests: its oldest one comes with gigabytes for GPUs."""
    extras = PROJECT["optional-dependencies"]
    allowed = [*PROJECT["dependencies"], *extras["viz"], *extras["solve"]]
    succeed(sys.executable, "-m", "venv", "--without-pip", tmp_path / "oldest", cwd=tmp_path)
    commands = tmp_path / "oldest" / "bin"
    pip = sys.executable, "-m", "pip", "--python", commands / "python", "install", "--quiet"
    succeed(*pip, wheel, *(one.replace(">=", "==") + ".*" for one in allowed), cwd=tmp_path, timeout=1500)
    lend_packages(commands)
    (tmp_path / "job.yaml").write_text(JOB)
    for command in (
        ("compile", "--help"),
        ("compile", *SIZES, "-o", "plan.json"),
        ("run", "plan.json", "job.yaml"),
        ("compile", "job.yaml", "-o", "job.json"),
        ("render", "plan.json", "-o", "timeline.png"),
        ("render", "plan.json", "-o", "page.html"),
        ("solve", "--pp", "2", "-m", "4", "--effort", "1", "-o", "solved.json"),
        *(("check", plan) for plan in ("plan.json", "job.json", "solved.json")),
    ):
        succeed(commands / "quintsched", *command, cwd=tmp_path)


def lend_packages(clean: Path) -> None:
    """Let an environment import the packages of this one, after its own."""
    own = succeed(clean / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=clean)
    folders = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    Path(own.strip(), "lent.pth").write_text("\n".join(folders) + "\n")


def conda_lines(requirements: list[str]) -> set[str]:
    """Return requirements of PyPI as a recipe of conda has them: "pyyaml >=6.0"."""
    split = [re.split("(?=>=)", requirement.lower()) for requirement in requirements]
    return {f"{CONDA_NAMES.get(name, name)} {bound}" for name, bound in split}


def test_version_and_dependencies_are_the_same_everywhere() -> None:
    recipe = (ROOT / "conda" / "meta.yaml").read_text("utf-8")
    listed = yaml.safe_load(re.sub(r"{%.*%}", "", recipe).replace("{{", "").replace("}}", ""))["requirements"]
    python = f"python {PROJECT['requires-python']}"
    extras = PROJECT["optional-dependencies"]
    assert set(listed["run"]) == {python, *conda_lines(PROJECT["dependencies"])}
    assert set(listed["run_constrained"]) == conda_lines([*extras["runtime"], *extras["viz"]])
    assert f'version = "{PROJECT["version"]}"' in recipe
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))["version"] == PROJECT["version"]
    assert f" {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text("utf-8")


@pytest.mark.slow
def test_types_hold_for_a_strict_user_of_the_wheel(clean: Path, tmp_path: Path) -> None:
    lend_packages(clean)
    (tmp_path / "user.py").write_text((ROOT / "tests" / "data" / "strict_user.py").read_text("utf-8"))
    check = ("-m", "mypy", "--strict", "--config-file=", "--python-executable", clean / "python", "user.py")
    assert succeed(sys.executable, *check, cwd=tmp_path).startswith("Success")
