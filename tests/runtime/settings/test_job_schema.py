"""A printed job is the same job, with every key and its meaning; the schema is that of job files."""

import re
import sys
from pathlib import Path

import pytest

from quintsched.errors import UsageError
from quintsched.files.strictyaml import parse_yaml
from quintsched.runtime.settings.engine_settings import SettingRule, Settings
from quintsched.runtime.settings.job_file import JobConfig, load_job
from quintsched.runtime.settings.job_json_schema import job_yaml

from ...helpers.commands import run

ROOT = Path(__file__).parents[3]


def given(settings: Settings, prefix: str = "") -> set[str]:
    """Return the keys that mean something by being given, and are."""
    fields = type(settings).model_fields
    found = {f"{prefix}{name}" for name in settings.model_fields_set if SettingRule.GIVEN in fields[name].metadata}
    for name in fields:
        if isinstance(below := getattr(settings, name), Settings):
            found |= given(below, f"{prefix}{name}.")
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_printed_job_is_the_same_job(path: Path, tmp_path: Path) -> None:
    job, printed = load_job(path), tmp_path / "printed.yaml"
    printed.write_text(job_yaml(job))
    again = load_job(printed)
    assert again == job
    assert given(again) == given(job)


def test_a_printed_job_has_every_key_with_its_meaning() -> None:
    lines = job_yaml(JobConfig()).splitlines()
    values = parse_yaml("\n".join(lines), "the job", UsageError)
    assert (values["train"]["batch_size"], values["mode"], values["log"]["path"]) == (32, "train", None)
    for name in JobConfig.model_fields["train"].annotation.model_fields:
        number = next(n for n, line in enumerate(lines) if re.match(rf"  (# )?{name}:", line))
        assert re.match(r" {2,}# \w|  # \(", lines[number - 1]), lines[number]
    assert "  # epochs: 1  # default" in lines
    assert "epochs" not in values["train"]


@pytest.mark.processes
def test_the_command_prints_both_and_runs_nothing(tmp_path: Path) -> None:
    quintsched = (sys.executable, "-c", "import quintsched.cli; quintsched.cli.main()", "run")
    code, out, err = run(*quintsched, ROOT / "examples/full_3d.yaml", "--print-config", "--set", "train.epochs=7")
    assert (code, err) == (0, "")
    assert "\n  epochs: 7\n" in out
    code, out, err = run(*quintsched, "--print-schema")
    assert (code, err) == (0, "")
    assert out == (ROOT / "docs/reference/job.schema.json").read_text()
