"""Mixed precision: blocks compute in bf16 or fp16, the optimizer steps float32 master copies of their weights.

    weight (bf16) ──▶ forward, backward ──▶ gradient (bf16) ──added to──▶ sum (float32)
       ▲                                                                      │
       └──────────── rounded ◀── master (float32) ◀── optimizer step ◀────────┘

Weights of 32 bits or more are their own masters.

Writes by user code between steps would be lost in masters and shards, or go by a shard where the whole is meant. They
are found by version counters and memory. On the CPU a few numbers of each weight are compared too, as `.data` counts no
versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..blocks.dtensor import local_of
from ..blocks.dtype_names import is_low
from ..parallel.tensor.parameter_shards import mark_shard, shard_of
from ..stage.build_stages import Stage

NUM_SAMPLES = 16
"""Count of numbers of a weight that are compared, from one end of its memory to the other."""


class Masters:
    """The weights that the optimizer of one rank works on; where nothing is `stepped`, they are all themselves."""

    def __init__(self, stages: Mapping[int, Stage], *, stepped: bool = True) -> None:
        self._of: dict[nn.Parameter, nn.Parameter | None] = {}
        self._pairs: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        for stage in stages.values():
            weights = list(stage.named_weights().values())
            low = [p for p in weights if stepped and is_low(p.dtype)]
            high = [_master(parameter) for parameter in low]
            self._of.update({p: nn.Parameter(local_of(p)) for p in weights if isinstance(p, DTensor)})
            self._of.update(zip(low, high, strict=True))
            self._pairs[stage.index] = ([local_of(parameter) for parameter in low], list(high))
        named = ((name, p) for stage in stages.values() for name, p in stage.named_weights().items())
        self._watch((name, p) for name, p in named if is_low(p.dtype) or shard_of(p) is not None)

    def _watch(self, named: Iterable[tuple[str, nn.Parameter]], *, in_buffers: bool = False) -> None:
        """Watch weights for changes by user code; `in_buffers`: between steps they always have the memory of now."""
        self._watched = [(name, weight) for name, weight in named if not isinstance(weight, DTensor)]
        self._in_buffers, self.are_watched = in_buffers, bool(self._watched)
        """Whether any weights are watched."""
        self._versions, self._samples, self._numbers = list[tuple[int, int]](), list[Tensor](), torch.empty(0)
        if self.are_watched:
            self._versions = self._now()
            self._sample()

    def _memory_of(self, weight: nn.Parameter) -> Tensor:
        """Return the memory that the engine alone writes of a weight; none on a device, which would be waited for."""
        return weight.data if weight.is_cpu else weight.data.new_empty(0)

    def _sample(self) -> None:
        self._samples = [_spread(self._memory_of(weight)) for _, weight in self._watched]
        self._numbers = self._row()

    def _row(self) -> Tensor:
        return torch.cat(self._samples) if self._samples else torch.empty(0)

    def note_versions(self) -> None:
        """Record version counters and numbers of weights, after changes by the engine itself."""
        now, before = self._now(), self._versions
        places = before if self._in_buffers else now
        self._versions = [(version, place) for (version, _), (_, place) in zip(now, places, strict=True)]
        if [place for _, place in before] == [place for _, place in places]:
            self._numbers = self._row()
        else:
            self._sample()

    def _now(self) -> list[tuple[int, int]]:
        return [(weight._version, weight.data_ptr()) for _, weight in self._watched]

    @property
    def has_copies(self) -> bool:
        """Whether some weights have float32 master copies, which are stepped."""
        return any(low for low, _ in self._pairs.values())

    def changed(self) -> list[tuple[str, bool]]:
        """Return weights that were changed in place, or moved, by user code: (name, whether tp shards it).

        Only weights with a master copy, or of which shards are stepped, are watched.
        """
        now, row = self._now(), self._row()
        if now == self._versions and _equal(row, self._numbers):
            return []
        lengths = [*map(len, self._samples)]
        same = map(_equal, row.split(lengths), self._numbers.split(lengths))
        pairs = zip(self._watched, self._versions, now, same, strict=True)
        changed = [weight for weight, was, here, is_same in pairs if was != here or not is_same]
        return [(name, shard_of(weight) is not None) for name, weight in changed]

    @torch.no_grad()
    def take_over(self) -> None:
        """Copy user changes of low-precision weights to their masters; unchanged numbers keep full precision."""
        for lows, highs in self._pairs.values():
            for low, high in zip(lows, highs, strict=True):
                high.copy_(torch.where(low == high.to(low.dtype), high, low.to(high.dtype)))

    def master_of(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return the master of a parameter: itself where it has 32 bits or more; for a DTensor its local shard.

        With ZeRO it is the segment that this rank steps; None where it has none.
        """
        return self._of.get(parameter, parameter)

    def span_of(self, parameter: nn.Parameter) -> tuple[int, int] | None:
        """Return the range of the flat parameter in its master, [start, stop); None: its master is not flat."""
        return None

    @property
    def num_bytes(self) -> int:
        """Bytes of all masters that are not weights themselves."""
        return sum(master.nbytes for _, high in self._pairs.values() for master in high)

    def publish(self, stages: Sequence[int]) -> None:
        """Copy (round) the masters of these stages to the weights that blocks compute with."""
        for stage in stages:
            low, high = self._pairs[stage]
            if low:
                with torch.no_grad():
                    torch._foreach_copy_(low, high)
        if self._watched:
            self.note_versions()


def _master(parameter: nn.Parameter) -> nn.Parameter:
    master = nn.Parameter(local_of(parameter).detach().to(torch.float32))
    shard = shard_of(parameter)
    if shard is not None:
        mark_shard(master, shard)
    return master


def _spread(memory: Tensor) -> Tensor:
    """Return a view of some numbers of a tensor; of one where it is not contiguous, as others' may lie between."""
    if memory.is_contiguous():
        return memory.view(-1)[:: 1 + memory.numel() // NUM_SAMPLES]
    return memory.as_strided((min(1, memory.numel()),), (1,))


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two rows have the same bits: not-a-number equals itself."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
