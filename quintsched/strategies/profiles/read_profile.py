"""Reader of measured files and folders of any form.

FOLDER with gpt_13B_mbs1_tp1_algo0.csv …          aceso
FOLDER with computation_profiling_….json          galvatron
FOLDER with rank0.json …, and its plan            traces
FILE.json with "traceEvents"                      kineto
FILE.json with "profiling_results"                primus
FILE.json with "operators" or "steps"             a Profile
FILE.json with "profiles": tables of Aceso's      aceso
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from quintsched.errors import InputError, UsageError
from quintsched.files.atomic import write_whole
from quintsched.files.strictjson import describe_faults
from quintsched.files.user_records import read_json
from quintsched.ir.plan_data import PlanData
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.profiles import aceso, galvatron, kernels_in_torch_trace, primus, profile_from_trace
from quintsched.strategies.profiles.profile import Profile

MOST_PROFILE_BYTES = 2**28


@dataclass(frozen=True)
class Measured:
    """Circumstances under which a trace was taken; a profile of operators needs at most the model."""

    model: Model | None = None
    """Model; for Aceso's profiles the nearest of its models is read."""
    strategy: Strategy | None = None
    plan: PlanData | None = None
    """Plan of a trace of this project's runtime."""


def read_profile(path: Path, measured: Measured | None = None, size: str | None = None) -> Profile:
    """Return the profile in a file or folder; `size`: the size of one of Aceso's models, "13B".

    Raises `UsageError` for a path without a profile, or if `measured` lacks what a trace needs, and `InputError` with
    the place for a broken file.
    """
    measured = measured or Measured()
    if path.is_dir():
        return _read_folder(path, measured, size)
    content = read_json(path, MOST_PROFILE_BYTES, "the profile")
    if not isinstance(content, dict):
        raise InputError(f"{path}: not a profile: an object is needed")
    if "traceEvents" in content:
        return kernels_in_torch_trace.from_trace(content, *_taken_under(path, measured), str(path))
    if isinstance(content.get("profiling_results"), dict):
        if measured.model is None:
            raise UsageError(f"{path} is a profile of Primus: say of which model it is")
        return primus.from_benchmark(content, measured.model, str(path))
    if isinstance(content.get("profiles"), dict):
        return aceso.assemble(aceso.tables(content["profiles"], str(path)), str(path), size, _hidden(measured))
    if "tflops" in content:
        raise UsageError(f"{path} describes hardware, measured or not: give it as --hardware {path}")
    try:
        return Profile.model_validate(content)
    except ValidationError as error:
        raise InputError(f"{path}: {describe_faults(error)}") from None


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile as JSON; raises `UsageError` on failure."""
    write_whole(path, profile.model_dump_json(exclude_defaults=True, indent=1) + "\n", "the profile")


def _read_folder(path: Path, measured: Measured, size: str | None) -> Profile:
    if any(path.glob("gpt_*_algo*.csv")):
        return aceso.read_folder(path, size, _hidden(measured))
    if any(path.rglob(galvatron.LAYERS)):
        if measured.model is None:
            raise UsageError(f"{path} is a profile of Galvatron: say of which model it is")
        return galvatron.read_folder(path, measured.model)
    if (path / "rank0.json").exists():
        if measured.plan is None:
            raise UsageError(f"{path} is a trace: say which plan was run")
        return profile_from_trace.read_trace(path, measured.plan, *_taken_under(path, measured))
    raise UsageError(
        f"{path}: neither Aceso's files (gpt_13B_mbs1_tp1_algo0.csv …) nor Galvatron's (computation_profiling_….json) "
        "nor a trace (rank0.json …)"
    )


def _hidden(measured: Measured) -> int | None:
    return measured.model.hidden if measured.model else None


def _taken_under(path: Path, measured: Measured) -> tuple[Model, Strategy]:
    if measured.model is None or measured.strategy is None:
        raise UsageError(f"{path} is a trace: say of which model it is, and under which strategy it was taken")
    return measured.model, measured.strategy
