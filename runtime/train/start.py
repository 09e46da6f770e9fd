"""What all ranks of a job have to have alike, compared as soon as they are connected: before data, models, gradients.

job file, plan, code, wires ──▶ agreement ──▶ settings, which checkpoints keep
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quintsched.plan import Plan

from ..agreement.comparison import Plain, Section, require_same
from ..agreement.records import code_settings, job_settings, of_all_ranks, plan_section, world_settings
from ..comm import Transport
from ..settings.job import JobConfig


def agreed_settings(job: JobConfig, plan: Plan, transport: Transport) -> dict[str, Plain]:
    """Return the settings of a run by name (collective).

    Raises `MisfitError`, on all ranks alike, where theirs differ.
    """
    settings = {**job_settings(job), **code_settings(job)}
    require_same(
        {
            "world": Section.of(world_settings(transport)),
            "job": Section.of(of_all_ranks(settings)),
            "plan": plan_section(plan),
        },
        transport.world_group(),
        "what they run",
        "start all ranks with one job file, one plan and the same code",
    )
    return settings


def agree_on_start(start: str, overrides: Sequence[str], transport: Transport) -> None:
    """Raise `MisfitError`, on all ranks alike, where some resume a run and others do not (collective)."""
    said = Section.of({"start": start, "--override": " ".join(sorted(overrides))})
    advice = "start all ranks with the same options"
    require_same({"start": said}, transport.world_group(), "how the run begins", advice)


def spike_dir_of(job: JobConfig) -> Path | None:
    """Return where the batch of a step goes whose gradients are not finite: beside the log, or the checkpoints."""
    if job.log.path is not None:
        return Path(job.log.path).parent
    return None if job.checkpoint.dir is None else Path(job.checkpoint.dir)
