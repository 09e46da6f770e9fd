"""Pieces of gradients: some parameters of a stage, whose gradients are views into one flat tensor.

    parameters of a stage, last layer first     p9 p8 p7 │ p6 p5 │ p4 … p0        pieces of at most 25 MB
    their gradients are views into              [ piece 0 ][piece 1][ piece 2 ]

What has to be treated apart stands in pieces of its own: weights that several stages hold, those whose gradient is in
parts on the ranks of tp, and experts that ep shares out, in a bucket behind the others. Where full gradients come and
go, so do weights whose gradients wait for the second half of a backward: theirs need not stand before it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter

import torch
from torch import Tensor, nn

from ..autograd.deferred_weight_grads import queue_of
from ..blocks.dtensor import comes_summed, local_of
from ..comm import Group, Work
from ..parallel.expert.moe import expert_weights
from ..stage.build import Stage
from .flat_buffer import FlatLayout
from .master_weights import Masters, is_low

Bucket = tuple[int, int]
"""A stage, and the number of one of its buckets."""


class Piece:
    """Some parameters of a stage, whose gradients are views into one flat tensor, float32 where theirs are shorter.

    `own` is what this rank keeps of their sum over the replicas; `comes_and_goes` says that full gradients do not stand
    all the time.
    """

    comes_and_goes = False

    flat: Tensor
    own: Tensor
    views: list[Tensor]

    def __init__(self, bucket: Bucket, parameters: Sequence[nn.Parameter], masters: Masters) -> None:
        self.bucket = bucket
        self.parameters = tuple(parameters)
        self.comes_summed = comes_summed(parameters[0])
        local = [local_of(parameter) for parameter in parameters]
        dtype = torch.float32 if is_low(local[0].dtype) else local[0].dtype
        self.missing: set[Tensor] = set(parameters)
        self.ready = False
        self._homes: list[tuple[nn.Parameter, Tensor]] = []
        self._lay_out(local, dtype, masters)
        self.attach()

    def _lay_out(self, local: list[Tensor], dtype: torch.dtype, masters: Masters) -> None:
        layout = FlatLayout.packed(local)
        self.flat = self.own = torch.zeros(layout.size, dtype=dtype, device=local[0].device)
        self.views = layout.views(self.flat)
        homes = [masters.of(parameter) for parameter in self.parameters]
        self._homes = [(home, view) for home, view in zip(homes, self.views, strict=True) if home is not None]

    def attach(self) -> None:
        """Let every weight's gradient be its view, also where `zero_grad` took it away."""
        attach(self._homes)

    def make_room(self) -> None:
        """See to it that full gradients can be added up: they always can."""

    def reduce(self, group: Group) -> Work:
        """Begin to sum the gradients over the replicas."""
        return group.all_reduce(self.flat)

    def collect(self) -> None:
        """Take in what has been reduced: it is in its place."""

    def counted(self, counts: Sequence[bool]) -> list[Tensor]:
        """Return the gradients of those parameters that count in the norm, whole where all do."""
        return [self.own] if all(counts) else [view for view, here in zip(self.views, counts, strict=True) if here]

    def clear(self) -> None:
        """Begin again at zero."""
        self.flat.zero_()
        self.missing, self.ready = set(self.parameters), False


def attach(homes: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    """Let the gradients of parameters be these tensors."""
    for parameter, view in homes:
        if parameter.grad is not view:
            parameter.grad = view


def cut_all(
    stages: Mapping[int, Stage],
    buckets: int,
    piece_bytes: int,
    apart: Collection[nn.Parameter] = (),
    *,
    waiting_apart: bool = False,
) -> list[tuple[Bucket, list[nn.Parameter]]]:
    """Return the pieces of all stages; see `cut_pieces`."""
    return [
        found
        for stage in stages.values()
        for found in cut_pieces(stage, buckets, piece_bytes, apart, waiting_apart=waiting_apart)
    ]


def cut_pieces(
    stage: Stage,
    buckets: int,
    piece_bytes: int,
    apart: Collection[nn.Parameter] = (),
    *,
    waiting_apart: bool = False,
) -> list[tuple[Bucket, list[nn.Parameter]]]:
    """Cut a stage's parameters, last first, into `buckets` of like size and those into pieces of one dtype.

    Behind them come those with partial gradients, then those that stand `apart`, each in a piece of its own; then, in
    one more bucket, the experts that ranks along ep do not have in common. With `waiting_apart` no piece has both
    weights whose gradients can wait and others.
    """
    found, experts = list(stage.named_weights().values()), expert_weights(stage)
    alone = [parameter for parameter in found if parameter in apart]
    rest = [parameter for parameter in reversed(found) if parameter not in apart]
    dense = [parameter for parameter in rest if parameter not in stage.partial and parameter not in experts]
    partial_ = [parameter for parameter in rest if parameter in stage.partial]
    own = [parameter for parameter in rest if parameter in experts]
    last = buckets - 1

    def cut(parameters: list[nn.Parameter], number: int) -> Iterator[tuple[int, list[nn.Parameter]]]:
        waiting = {p for p in parameters if waiting_apart and queue_of(p) is not None}
        for group in ([p for p in parameters if p not in waiting], [p for p in parameters if p in waiting]):
            yield from _cut_evenly(group, number, piece_bytes)

    pieces = [
        *sorted(cut(dense, buckets), key=itemgetter(0)),
        *((last, piece) for _, piece in cut(partial_, 1)),
        *((last, [parameter]) for parameter in alone),
        *((buckets, piece) for _, piece in cut(own, 1)),
    ]
    return [((stage.index, bucket), piece) for bucket, piece in pieces]


def _cut_evenly(
    parameters: Sequence[nn.Parameter], buckets: int, piece_bytes: int
) -> list[tuple[int, list[nn.Parameter]]]:
    """Return pieces with the number of their bucket, in order."""
    total = sum(p.numel() for p in parameters)
    pieces: list[tuple[int, list[nn.Parameter]]] = []
    gathered: list[nn.Parameter] = []
    done = bucket = 0

    def close() -> None:
        if gathered:
            pieces.append((bucket, [*gathered]))
            gathered.clear()

    for parameter in parameters:
        if gathered and (_kind(gathered[0]) != _kind(parameter) or _bytes([*gathered, parameter]) > piece_bytes):
            close()
        gathered.append(parameter)
        done += parameter.numel()
        if bucket < buckets - 1 and done * buckets >= total * (bucket + 1):
            close()
            bucket += 1
    close()
    return pieces


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(local_of(p).nbytes for p in parameters)


def _kind(parameter: nn.Parameter) -> tuple[torch.dtype, bool]:
    """Return what the parameters of a piece have in common."""
    return parameter.dtype, comes_summed(parameter)
