"""Commands run in this process, with what they write and their exit code."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import quintsched as qs
from quintsched.cli import main


@dataclass(frozen=True)
class Result:
    """Output of a command."""

    out: str
    err: str

    @property
    def data(self) -> Any:
        """JSON that it wrote: all of standard output."""
        return json.loads(self.out)


@pytest.fixture
def cli(capsys, tmp_path, monkeypatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object, code: int = 0) -> Result:
        """Run a command that has to end with this code."""
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        assert (end.value.code or 0) == code, out + err
        return Result(out, err)

    return run


@pytest.fixture
def refused(cli) -> Callable[..., str]:
    """Run a command that has to end with this code and one message; return the message."""

    def run(code: int, *arguments: object) -> str:
        result = cli(*arguments, code=code)
        assert result.out == ""
        assert result.err.startswith("error: ")
        assert result.err.count("error: ") == 1
        return result.err

    return run


@pytest.fixture
def plan_file(tmp_path) -> Path:
    path = tmp_path / "plan.json"
    qs.compile("1f1b", mesh="dp=2,pp=2,tp=2", microbatches=4).save(path)
    return path


@pytest.fixture(scope="session")
def root() -> Path:
    return Path(os.path.abspath(__file__)).parents[2]
