"""The verbs of `engine.weights` and `engine.saves`, on the engine itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...optim.chained import LRSchedulers
from ...stage.build import Stage
from ...state.master_weights import Masters
from ...state.memory_stats import StateBytes
from ..averages import Decay, WeightAverage
from ..pretrained.load_pretrained import LoadedWeights
from .engine_saves import EngineSaves
from .engine_weights import EngineWeights


class EngineState:
    """Passes on what users call; each is described where it is done."""

    weights: EngineWeights
    saves: EngineSaves

    @property
    def stages(self) -> Mapping[int, Stage]:
        """See `EngineWeights.stages`."""
        return self.weights.stages

    def gathered(self, *, write: bool = False) -> AbstractContextManager[Mapping[int, Stage]]:
        """See `EngineWeights.gathered`."""
        return self.weights.gathered(write=write)

    @property
    def optimizers(self) -> dict[tuple[int, ...], Optimizer]:
        """See `EngineWeights.optimizers`."""
        return self.weights.optimizers

    @property
    def optimizer(self) -> Optimizer:
        """See `EngineWeights.optimizer`."""
        return self.weights.optimizer

    def lr_schedulers(self, make: Callable[[Optimizer], Any]) -> LRSchedulers:
        """See `EngineWeights.lr_schedulers`."""
        return self.weights.lr_schedulers(make)

    @property
    def zero_split(self) -> str | None:
        """See `EngineWeights.zero_split`."""
        return self.weights.zero_split

    @property
    def masters(self) -> Masters:
        """See `EngineWeights.masters`."""
        return self.weights.masters

    def ema(self, decay: Decay) -> WeightAverage:
        """See `EngineWeights.ema`."""
        return self.weights.ema(decay)

    def full_weights(self) -> dict[str, Tensor]:
        """See `EngineWeights.full_weights`."""
        return self.weights.full_weights()

    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """See `EngineWeights.set_weights`."""
        self.weights.set_weights(weights)

    def state_bytes(self) -> StateBytes:
        """See `EngineWeights.state_bytes`."""
        return self.weights.state_bytes()

    def state_dict(self) -> dict[str, Tensor]:
        """See `EngineSaves.state_dict`."""
        return self.saves.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """See `EngineSaves.load_state_dict`."""
        self.saves.load_state_dict(state)

    def state_metadata(self) -> dict[str, str]:
        """See `EngineSaves.state_metadata`."""
        return self.saves.state_metadata()

    def load_state_files(self, paths: Sequence[str | Path]) -> None:
        """See `EngineSaves.load_state_files`."""
        self.saves.load_state_files(paths)

    def full_state_dict(self, *, all_blocks: bool = False) -> dict[str, Tensor]:
        """See `EngineSaves.full_state_dict`."""
        return self.saves.full_state_dict(all_blocks=all_blocks)

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """See `EngineSaves.load_full_state_dict`."""
        self.saves.load_full_state_dict(state)

    def load_pretrained(
        self,
        path: str | Path,
        *,
        names: Mapping[str, str] | None = None,
        fresh: Sequence[str] = (),
        strict: bool = True,
    ) -> LoadedWeights:
        """See `EngineSaves.load_pretrained`."""
        return self.saves.load_pretrained(path, names=names, fresh=fresh, strict=strict)

    def save_pretrained(
        self, path: str | Path, *, dtype: torch.dtype | None = None, max_file_bytes: int = 5 * 10**9
    ) -> None:
        """See `EngineSaves.save_pretrained`."""
        self.saves.save_pretrained(path, dtype=dtype, max_file_bytes=max_file_bytes)

    def save_dcp(self, path: str | Path, *, beside: Mapping[str, object] | None = None) -> None:
        """See `EngineSaves.save_dcp`."""
        self.saves.save_dcp(path, beside=beside)

    def load_dcp(
        self,
        path: str | Path,
        *,
        fresh: Sequence[str] = (),
        strict: bool = True,
        optimizer: bool = True,
        beside: Sequence[str] = (),
    ) -> LoadedWeights:
        """See `EngineSaves.load_dcp`."""
        return self.saves.load_dcp(path, fresh=fresh, strict=strict, optimizer=optimizer, beside=beside)
