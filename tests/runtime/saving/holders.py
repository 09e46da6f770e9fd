"""Stand-ins for engines, whose checkpoints tests save, damage and load."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from safetensors.torch import load_file

import quintsched as qs
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.comm.host_collectives import ControlGroup
from quintsched.runtime.saving.checkpoints.manifest import Manifest
from quintsched.runtime.saving.checkpoints.save_and_load_checkpoints import Checkpoints, OpenCheckpoints

PLAN = qs.compile("1f1b", mesh="pp=2", microbatches=2)


class Holder:
    """Stand-in for an engine with the attributes that checkpoints use; its number tells saves apart."""

    def __init__(self, plan: qs.Plan, transport: Transport, number: float = 0.0) -> None:
        self.plan, self.transport, self.number = plan, transport, number
        world = transport.make_group([tuple(range(plan.mesh.size))])
        self.rank = SimpleNamespace(
            everyone=ControlGroup(world),
            number=world.index,
            replicas=(0, 1),
            held=list,
            groups=SimpleNamespace(world=world),
        )
        self.loaded: dict[str, torch.Tensor] = {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"model.0.weight": torch.full((3,), self.number), "rank": torch.tensor(self.transport.rank)}

    def state_metadata(self, state: Any = None) -> dict[str, str]:
        return {}

    @property
    def saves(self) -> Any:
        return self

    def holds_file(self, path: Path) -> bool:
        return True

    def load_state_files(self, paths: Sequence[Path], *, are_own: bool = False) -> None:
        self.loaded = load_file(paths[0])


Opened = AbstractContextManager[OpenCheckpoints]


def opened(holder: Holder, folder: Path, keep: int = 1, start: Any = "resume", *, background: bool = False) -> Opened:
    return Checkpoints(folder, keep, background).opened(cast(Any, holder), start)


def on_ranks(act: Callable[[Holder], Any], plan: qs.Plan = PLAN, number: float = 0.0) -> list[Any]:
    """Call with a stand-in on each rank."""
    return run_local(plan.mesh.size, lambda transport: act(Holder(plan, transport, number)))


def save(
    folder: Path, step: int, number: float, keep: int = 1, *, background: bool = False, plan: qs.Plan = PLAN
) -> None:
    """Save a step that holds a number, and has it in its progress."""

    def act(holder: Holder) -> None:
        with opened(holder, folder, keep, background=background) as saves:
            saves.save_step(step, {"number": number})

    on_ranks(act, plan, number)


@dataclass(frozen=True)
class Loaded:
    """The step that was loaded, its number and manifest, and the steps that were passed over, with their faults."""

    step: int
    number: float
    manifest: Manifest
    skipped: tuple[tuple[int, str], ...]


def load(folder: Path, plan: qs.Plan = PLAN) -> Loaded | None:
    """Load the newest step that is whole on all ranks, which have what was saved of it."""

    def act(holder: Holder) -> Loaded | None:
        with opened(holder, folder) as saves:
            found = saves.newest_whole()
            if found is None:
                return None
            found.load_step()
        number = float(holder.loaded["model.0.weight"][0])
        assert holder.loaded["model.0.weight"].tolist() == [number] * 3
        assert number == found.manifest.progress["number"]
        assert int(holder.loaded["rank"]) == holder.transport.rank
        return Loaded(found.step, number, cast(Manifest, found.manifest), found.skipped)

    first, *others = on_ranks(act, plan)
    assert others == [first] * len(others)
    return first
