"""Buffers that a forward mutates, such as the running statistics of batch norms, kept equal on all replicas.

    "merge"    running averages become those of one process that runs the microbatches of replica 0, 1, … in turn; other
               buffers that differ between replicas are refused
    "sync"     batch norms share their statistics in every forward (`parallel.synced_norm`); others as above
    "first"    after every step, all copy those of the first replica
    "refuse"   a buffer that changes is refused

A running average r of statistics s₁ … s_k with momentum a is (1-a)^k r₀ plus a term of the s alone: so the updates of
replicas, each from the same r₀ over k microbatches, can be chained, whatever the s are:

    r = (1-a)^k r + (r_j - (1-a)^k r₀)      for replica j = 0, 1, …
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from quintsched.errors import MisfitError

from ..agreement.refuse_unequal_ranks import agree
from ..comm import Group, ReduceOp
from ..comm.host_collectives import share_texts
from ..parallel.expert.moe import MoE
from ..settings.allowed_setting_values import BufferChoice
from .build_stages import Stage

_logger = logging.getLogger("quintsched.runtime")


@dataclass(frozen=True)
class _Average:
    """A norm with running statistics, and a copy of these from the start of the step."""

    norm: _NormBase
    before: tuple[Tensor, Tensor]
    updates: int

    @classmethod
    def from_norm(cls, norm: _NormBase) -> _Average:
        """Copy the running statistics of a norm."""
        assert norm.running_mean is not None
        assert norm.running_var is not None
        return cls(norm, (norm.running_mean.clone(), norm.running_var.clone()), updates_of(norm))


class SharedBuffers:
    """Keeps the buffers of a rank's stages equal on all replicas.

    Args:
        choice: the method; see the module.
        stages: the stages of this rank.
        replicas: the ranks that hold the same weights, and run other samples or tokens.
        replica_of: the number of a rank's replica; the ranks of `replicas` are in the order of the mesh's axes.
    """

    def __init__(
        self, choice: BufferChoice, stages: Mapping[int, Stage], replicas: Group, replica_of: Callable[[int], int]
    ) -> None:
        self._choice, self._replicas = choice, replicas
        self._order = sorted(range(replicas.size), key=lambda member: replica_of(replicas.ranks[member]))
        self._norms = list(_averaging(stages))
        self._is_needed = replicas.size > 1
        self._buffers = [
            (f"{number}.{name}", module, key)
            for stage in stages.values()
            for number, block in stage.blocks.items()
            for name, module, key in _own_buffers(block)
        ]
        self.are_shared = self._is_needed and bool(self._buffers)
        self._known: set[str] | None = None
        self.late: set[str] = set()

    @contextmanager
    def shared(self, samples: Sequence[range]) -> Iterator[None]:
        """Return a context for one training step; after it buffers are equal on all replicas (collective).

        `samples` are those of each unit of this rank.
        """
        averages = [_Average.from_norm(norm) for _, norm in self._norms] if self._choice == "merge" else []
        is_first = self._known is None
        states = [_state(module, key, is_first) for _, module, key in self._buffers]
        yield
        buffers = zip(self._buffers, states, strict=True)
        self._learn({name for (name, module, key), was in buffers if _state(module, key, is_first) != was})
        assert self._known is not None
        if self._choice == "first":
            self._take_first()
        elif averages:
            self._merge(averages, sum(map(bool, samples)))
        self._compare()

    def _learn(self, changed: set[str]) -> None:
        """Find the buffers that change in the first step; a later change is known to this rank alone."""
        if self._known is None:
            self._known = changed
            agree("which buffers a forward changes", " ".join(sorted(changed)), self._replicas)
            if self._choice == "refuse" and changed:
                self._refuse(sorted(changed)[0], "changes in a forward")
            if self._known and self._choice == "first" and self._replicas.index == 0:
                _logger.info("of %s all replicas take what the first has", ", ".join(sorted(self._known)))
        elif late := sorted(changed - self._known - self.late):
            self.late.update(late)
            _logger.warning(
                "the buffer %s changes in a forward, and did not in the first step: replicas may differ in it",
                late[0],
            )

    def learn_late(self, world: Group) -> None:
        """Exchange the buffers that have begun to change on any rank (collective): they are shared from now on."""
        late = sorted({name for names in share_texts(world, " ".join(self.late)) for name in names.split()})
        if late and self._choice == "refuse":
            self._refuse(late[0], "changes in a forward")
        self._known = None if self._known is None else self._known.union(late)
        self.late.clear()

    def _watched(self) -> list[tuple[str, Tensor]]:
        """Return the buffers that change, in the same order on all replicas."""
        known = self._known or set()
        found = ((name, module._buffers.get(key)) for name, module, key in self._buffers if name in known)
        return [(name, buffer) for name, buffer in found if buffer is not None]

    def _take_first(self) -> None:
        for _, buffer in self._watched():
            sent = buffer.detach().contiguous()
            self._replicas.broadcast(sent, 0).wait()
            buffer.data.copy_(sent)

    def _merge(self, averages: list[_Average], runs: int) -> None:
        """Chain the running averages of all replicas."""
        mine = torch.cat([_flat(average, runs) for average in averages])
        gathered = mine.new_empty(self._replicas.size * len(mine))
        self._replicas.all_gather(gathered, mine).wait()
        rows, place = gathered.split(len(mine)), 0
        for average in averages:
            size = 1 + 2 * len(average.before[0])
            of_replicas = [rows[member][place : place + size] for member in self._order]
            place += size
            _put_together(average, of_replicas)

    def _compare(self) -> None:
        """Raise `MisfitError` for a buffer that differs between replicas."""
        watched = self._watched()
        if not watched or self._choice == "first":
            return
        sums = torch.stack([_numbers(buffer).sum() for _, buffer in watched])
        low, high = sums.clone(), sums.clone()
        self._replicas.all_reduce(low, ReduceOp.MIN).wait()
        self._replicas.all_reduce(high, ReduceOp.MAX).wait()
        differs = (low != high) & ~(low.isnan() | high.isnan())
        if differs.any():
            name = watched[int(differs.nonzero()[0])][0]
            self._refuse(name, "changes in a forward, and replicas have different numbers in it")

    def _refuse(self, name: str, what: str) -> None:
        raise MisfitError(
            f"the buffer {name!r} {what}; let all take what the first has: buffers='first'"
            + ("" if self._choice != "refuse" else ", or let batch norms share their statistics: buffers='sync'")
        )


@contextmanager
def buffers_kept(blocks: Iterable[nn.Module], *, synced: bool) -> Iterator[None]:
    """Return a context for a forward without samples, which leaves buffers unchanged.

    But those of `synced` norms, and those of experts, which are given rows of other ranks.
    """
    mixtures = (module for block in blocks for module in block.modules() if isinstance(module, MoE))
    experts = {module for mixture in mixtures for module in mixture.experts.modules()}
    places = [
        (module, key, held, held.clone())
        for block in blocks
        for _, module, key in _own_buffers(block)
        if (held := module._buffers[key]) is not None
        and module not in experts
        and not (synced and isinstance(module, _BatchNorm))
    ]
    yield
    for module, key, held, numbers in places:
        held.data.copy_(numbers)
        module._buffers[key] = held


def synced_choice(choice: BufferChoice, blocks: Sequence[nn.Module]) -> BufferChoice:
    """Return the method for buffers: "sync" where user blocks contain SyncBatchNorm."""
    asked = any(isinstance(module, nn.SyncBatchNorm) for block in blocks for module in block.modules())
    return "sync" if asked and choice == "merge" else choice


def has_batch_norms(blocks: Sequence[nn.Module]) -> bool:
    """Whether any block has a batch norm."""
    return any(isinstance(module, _BatchNorm) for block in blocks for module in block.modules())


def updates_of(norm: _NormBase) -> int:
    """Return the number of updates of running statistics, as far as the norm counts them."""
    return 0 if norm.num_batches_tracked is None else int(norm.num_batches_tracked)


def _averaging(stages: Mapping[int, Stage]) -> Iterator[tuple[str, _NormBase]]:
    for stage in stages.values():
        for number, block in stage.blocks.items():
            for name, module in block.named_modules():
                if isinstance(module, _NormBase) and module.running_mean is not None:
                    yield f"{number}.{name}" if name else number, module


def _own_buffers(block: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the places of a block's buffers; the token counts of a mixture of experts are per rank, and left out."""
    for name, module in block.named_modules():
        for key in module._buffers if not isinstance(module, MoE) else ():
            yield f"{name}.{key}" if name else key, module, key


def _state(module: nn.Module, key: str, by_numbers: bool) -> tuple[int, int, float]:
    """Return a key that changes with a buffer; some in-place operations of torch do not bump its version counter."""
    buffer = module._buffers.get(key)  # user code may delete it
    if buffer is None:
        return 0, 0, 0.0
    total = float(_numbers(buffer).nan_to_num().sum()) if by_numbers else 0.0
    return id(buffer), buffer._version, total


def _numbers(buffer: Tensor) -> Tensor:
    plain = buffer.detach()
    return (torch.view_as_real(plain) if plain.is_complex() else plain).double()


def _flat(average: _Average, runs: int) -> Tensor:
    """Return the number of updates of a norm in the step, then its running statistics, as one row, float64."""
    norm, mean = average.norm, average.before[0]
    assert norm.running_mean is not None
    assert norm.running_var is not None
    count = updates_of(norm) - average.updates
    if not isinstance(norm, _BatchNorm):  # no counter
        count = runs if not torch.equal(mean, norm.running_mean) else 0
    number = torch.tensor([count], dtype=torch.float64, device=mean.device)
    return torch.cat([number, norm.running_mean.double(), norm.running_var.double()])


@torch.no_grad()
def _put_together(average: _Average, of_replicas: list[Tensor]) -> None:
    norm = average.norm
    assert norm.running_mean is not None
    assert norm.running_var is not None
    before = torch.cat([tensor.double() for tensor in average.before])
    counts = [int(row[0]) for row in of_replicas]
    if norm.momentum is None:
        made = sum(
            (average.updates + k) * row[1:] - average.updates * before
            for k, row in zip(counts, of_replicas, strict=True)
        )
        found = (average.updates * before + made) / max(average.updates + sum(counts), 1)
    else:
        found = before
        for count, row in zip(counts, of_replicas, strict=True):
            kept = (1 - norm.momentum) ** count
            found = kept * found + (row[1:] - kept * before)
    mean, variance = found.chunk(2)
    norm.running_mean.data.copy_(mean)
    norm.running_var.data.copy_(variance)
    if norm.num_batches_tracked is not None and isinstance(norm, _BatchNorm):
        norm.num_batches_tracked.data.fill_(average.updates + sum(counts))
