"""Gradients of one rank: kept in flat pieces, summed over replicas while the last backward still runs.

    parameters of a stage, last layer first     p9 p8 p7 │ p6 p5 │ p4 … p0        pieces of at most 25 MB
    their gradients are views into              [ piece 0 ][piece 1][ piece 2 ]

In a stage's last backward a piece is ready when all its parameters have their gradient. Ready pieces are launched in
one fixed order, that of the plan's reductions, on all replicas alike: a piece that is ready early waits for those
before it. The plan's `AllReduceBucket` launches what is left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from .groups import MeshGroups
from .stages import Stage
from .tensor_parallel import shard_of
from .transport import Group, Work

Bucket = tuple[int, int]


class Piece:
    """Some parameters of a stage, whose gradients are views into one flat tensor."""

    def __init__(self, bucket: Bucket, parameters: Sequence[nn.Parameter]) -> None:
        self.bucket = bucket
        self.parameters = tuple(parameters)
        first = parameters[0]
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        self.missing = len(parameters)
        self.ready = False
        views = self.flat.split([p.numel() for p in parameters])
        self.views = [view.view_as(parameter) for parameter, view in zip(parameters, views, strict=True)]
        self.attach()

    def attach(self) -> None:
        """Let every parameter's gradient be its view, also where `zero_grad` took it away."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is not view:
                parameter.grad = view


class Gradients:
    """All gradients of a rank's stages, and their sums over the replicas.

    `twin_stages` are stages that another rank's stage counts for in the global norm, since it holds the same piece.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        reductions: Sequence[Bucket],
        groups: MeshGroups,
        *,
        buckets_per_stage: int,
        piece_bytes: int,
        device: torch.device,
        twin_stages: Collection[int] = (),
    ) -> None:
        self._groups = groups
        self._device = device
        self._last_backward_of: int | None = None
        by_bucket: dict[Bucket, list[Piece]] = {}
        for stage in stages.values():
            for piece in cut_pieces(stage, buckets_per_stage, piece_bytes):
                by_bucket.setdefault(piece.bucket, []).append(piece)
                self._watch(piece)
        self._pieces = [piece for pieces in by_bucket.values() for piece in pieces]
        self._order = [piece for bucket in reductions for piece in by_bucket.get(bucket, ())]
        self._launched: list[Work] = []
        self._counted = [
            view
            for piece in self._pieces
            for parameter, view in zip(piece.parameters, piece.views, strict=True)
            if self._counts(parameter) and piece.bucket[0] not in twin_stages
        ]

    def _counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank counts the parameter in the global norm: of tensor-parallel copies, one does."""
        return shard_of(parameter) is not None or self._groups.tensor.index == 0

    def _watch(self, piece: Piece) -> None:
        def arrived(_: Tensor) -> None:
            if self._last_backward_of == piece.bucket[0]:
                piece.missing -= 1
                if not piece.missing:
                    piece.ready = True
                    self._launch_ready()

        for parameter in piece.parameters:
            parameter.register_post_accumulate_grad_hook(arrived)

    def attach(self) -> None:
        """See to it that backwards add to the pieces, whatever was done to the parameters between steps."""
        for piece in self._pieces:
            piece.attach()

    @contextmanager
    def last_backward(self, stage: int) -> Iterator[None]:
        """A context in which pieces of `stage` are launched as soon as the backward in it has filled them."""
        self._last_backward_of = stage
        yield
        self._last_backward_of = None

    def add_up(self, stage: int, group: Group) -> None:
        """Sum the gradients of a stage over the ranks that hold the same piece of the model."""
        for work in [group.all_reduce(piece.flat) for piece in self._pieces if piece.bucket[0] == stage]:
            work.wait()

    def reduce(self, bucket: Bucket) -> None:
        """Launch what is left of a bucket; parameters that no backward reached bring their zeros."""
        for piece in self._order[len(self._launched) :]:
            if piece.bucket == bucket:
                piece.ready = True
        self._launch_ready()

    def _launch_ready(self) -> None:
        while len(self._launched) < len(self._order) and self._order[len(self._launched)].ready:
            piece = self._order[len(self._launched)]
            self._launched.append(self._groups.replicas.all_reduce(piece.flat))

    def finish(self, weight: Tensor) -> None:
        """Wait for all sums, and divide them by the batch's total loss weight (a 0-dimensional tensor)."""
        for work in self._launched:
            work.wait()
        self._launched.clear()
        for piece in self._pieces:
            piece.flat.div_(weight)

    def global_norm(self) -> Tensor:
        """Return the 2-norm of the whole model's gradient: 0-dimensional, float64, the same on every rank."""
        total = get_total_norm(self._counted)
        square = total.to(self._device, torch.float64).square()
        self._groups.model.all_reduce(square).wait()
        return square.sqrt()

    def scale(self, factor: Tensor) -> None:
        """Multiply every gradient with `factor`."""
        for piece in self._pieces:
            piece.flat.mul_(factor)

    def clear(self, stages: Sequence[int]) -> None:
        """Set the gradients of these stages to zero, ready for the next step."""
        for piece in self._pieces:
            if piece.bucket[0] in stages:
                piece.flat.zero_()
                piece.missing, piece.ready = len(piece.parameters), False


def cut_pieces(stage: Stage, buckets: int, piece_bytes: int) -> list[Piece]:
    """Cut a stage's parameters, last first, into `buckets` of like size and those into pieces of one dtype."""
    parameters = list(reversed(list(stage.named_weights().values())))
    total = sum(p.numel() for p in parameters)
    pieces: list[Piece] = []
    gathered: list[nn.Parameter] = []
    done = bucket = 0

    def close() -> None:
        if gathered:
            pieces.append(Piece((stage.index, bucket), gathered))
            gathered.clear()

    for parameter in parameters:
        if gathered and (gathered[0].dtype != parameter.dtype or _bytes(gathered) + _bytes([parameter]) > piece_bytes):
            close()
        gathered.append(parameter)
        done += parameter.numel()
        if bucket < buckets - 1 and done * buckets >= total * (bucket + 1):
            close()
            bucket += 1
    close()
    return pieces


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)
