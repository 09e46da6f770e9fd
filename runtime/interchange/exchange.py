"""What goes between an engine and files that other libraries read and write; all ranks call each method together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ..comm.control import ControlGroup
from ..parallel.mesh_groups import MeshGroups
from ..stage.rank_model import RankModel
from ..state.training_state import TrainingState
from .held import HeldTensor, held_tensors
from .load_pretrained import LoadedWeights, load_pretrained
from .model_names import ModelNames
from .save_pretrained import save_pretrained


@dataclass(frozen=True)
class Exchange:
    """One rank's side of it."""

    model: RankModel
    state: TrainingState
    groups: MeshGroups
    names: ModelNames

    @property
    def _everyone(self) -> ControlGroup:
        return ControlGroup(self.groups.world)

    def _held(self) -> list[HeldTensor]:
        self.state.weights.settle()
        return list(held_tensors(self.model.stages, self.state.masters, self.groups))

    @contextmanager
    def _writing(self) -> Iterator[list[HeldTensor]]:
        """A context in which this rank's tensors are written; blocks have the same numbers after it."""
        yield self._held()
        self.state.masters.publish(list(self.model.stages))
        self.state.weights.gather_again()

    def load_pretrained(
        self, path: str | Path, given: Mapping[str, str] | None, fresh: Sequence[str], *, strict: bool
    ) -> LoadedWeights:
        """See `Engine.load_pretrained`."""
        with self._writing() as held:
            return load_pretrained(
                Path(path), self.names, held, self._everyone, given=given, fresh=fresh, strict=strict
            )

    def save_pretrained(self, path: str | Path, dtype: torch.dtype | None, max_file_bytes: int) -> None:
        """See `Engine.save_pretrained`."""
        save_pretrained(Path(path), self.names, self._held(), self.model, self.groups, dtype, max_file_bytes)
