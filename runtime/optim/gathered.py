"""Steps of whole matrices under tensor parallelism: gathered before the step, scattered behind it.

    rank 0  [ shard 0 ]─┐                               ┌─▶ [ shard 0 ]
                        ├─▶ [ whole ] ── the step ─────▶│       the same on every rank of tp, with the same state
    rank 1  [ shard 1 ]─┘                               └─▶ [ shard 1 ]

An optimizer whose update of a number depends on its whole parameter (Muon, Adafactor, LAMB) gets the same numbers so as
in one process. It takes the memory of its matrices and of their state on every rank of tp.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from quintsched.errors import MisfitError

from ..comm import Group
from ..parallel.tensor.shard import gather_full, shard_of, take_shard
from .chained import parts_of


class GatheredMatrix:
    """A parameter that is cut over tp, and as a whole while it is stepped.

    Attributes:
        shard: what this rank has of it.
        full: what the optimizer steps.
    """

    def __init__(self, shard: nn.Parameter, group: Group) -> None:
        self.shard, self._group = shard, group
        how = shard_of(shard)
        if how is None:
            raise MisfitError(f"a parameter {tuple(shard.shape)} is not cut, and cannot be gathered")
        self._how = how
        shape = list(shard.shape)
        shape[how.dim] *= how.size
        self.full = nn.Parameter(torch.empty(shape, dtype=shard.dtype, device=shard.device))

    @torch.no_grad()
    def gather(self) -> None:
        """Gather the parameter and its gradient (collective over tp)."""
        self.full.copy_(gather_full(self.shard, self._group, self._how))
        gradient = self.shard.grad
        self.full.grad = None if gradient is None else gather_full(gradient, self._group, self._how)

    @torch.no_grad()
    def scatter(self) -> None:
        """Take over this rank's shard of what was stepped."""
        self.shard.copy_(take_shard(self.full, self._how))
        self.full.grad = None


class Stepper:
    """Steps an optimizer, with whole matrices where it needs them."""

    def __init__(self, optimizer: Optimizer, gathered: Iterable[GatheredMatrix]) -> None:
        self.optimizer, self._gathered = optimizer, tuple(gathered)
        self._handles = {matrix.shard: matrix.full for matrix in self._gathered}
        parts = parts_of([optimizer])
        self._part_of = {p: part for part in parts for group in part.param_groups for p in group["params"]}

    def state_of(self, master: nn.Parameter) -> dict[str, Any]:
        """Return what the optimizer keeps for a parameter; of one that it does not step, nothing."""
        parameter = self._handles.get(master, master)
        part = self._part_of.get(parameter)
        return {} if part is None else part.state[parameter]

    def gathers(self, master: nn.Parameter) -> bool:
        """Whether a parameter is stepped as a whole matrix, of which `master` is this rank's shard."""
        return master in self._handles

    def group_of(self, master: nn.Parameter) -> tuple[nn.Parameter, dict[str, Any]] | None:
        """Return what is stepped for a parameter, itself or its whole matrix, and its group; None: nothing is."""
        parameter = self._handles.get(master, master)
        part = self._part_of.get(parameter)
        if part is None:
            return None
        holds = (group for group in part.param_groups if any(parameter is other for other in group["params"]))
        return parameter, next(holds)

    def step(self) -> None:
        """Make a step; collective over tp where matrices are gathered."""
        for matrix in self._gathered:
            matrix.gather()
        self.optimizer.step()
        for matrix in self._gathered:
            matrix.scatter()
