"""Gradients of one rank: kept in flat pieces, summed over replicas while the last backward still runs.

    parameters of a stage, last layer first     p9 p8 p7 │ p6 p5 │ p4 … p0        pieces of at most 25 MB
    their gradients are views into              [ piece 0 ][piece 1][ piece 2 ]

In a stage's last backward a piece is ready when all its parameters have their gradient. Ready pieces are launched in
one fixed order, that of the plan's reductions, on all replicas alike: a piece that is ready early waits for those
before it. The plan's `AllReduceBucket` launches what is left. Weights that several stages hold, and those whose
gradient is in parts on the ranks of tp (`sequence_parallel`), stand in pieces of their own, which are ready when they
have been added up. So do the weights of experts that ep shares out, in a bucket behind the others, which is summed over
the replicas of this rank's experts only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quintsched.errors import MisfitError

from .deferred import Products
from .experts import expert_weights
from .groups import MeshGroups, Sharing
from .precision import Masters, is_low
from .stages import Stage
from .tied import TiedWeights
from .torch_sharded import comes_summed, local_gradient, local_of
from .transport import Group, Work

Bucket = tuple[int, int]


class Piece:
    """Some parameters of a stage, whose gradients are views into one flat tensor, float32 where theirs are shorter."""

    def __init__(self, bucket: Bucket, parameters: Sequence[nn.Parameter], masters: Masters) -> None:
        self.bucket = bucket
        self.parameters = tuple(parameters)
        self.comes_summed = comes_summed(parameters[0])
        local = [local_of(parameter) for parameter in parameters]
        dtype = torch.float32 if is_low(local[0].dtype) else local[0].dtype
        self.flat = torch.zeros(sum(t.numel() for t in local), dtype=dtype, device=local[0].device)
        self.missing: set[Tensor] = set(parameters)
        self.ready = False
        views = self.flat.split([t.numel() for t in local])
        self.views = [view.view_as(tensor) for tensor, view in zip(local, views, strict=True)]
        self._homes = [masters.of(parameter) for parameter in parameters]
        self.attach()

    def attach(self) -> None:
        """Let every weight's gradient be its view, also where `zero_grad` took it away."""
        for home, view in zip(self._homes, self.views, strict=True):
            if home.grad is not view:
                home.grad = view


class Gradients:
    """All gradients of a rank's stages, and their sums over the replicas.

    `twin_stages` are stages that another rank's stage counts for in the global norm, since it holds the same piece.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        reductions: Sequence[Bucket],
        groups: MeshGroups,
        masters: Masters,
        *,
        buckets_per_stage: int,
        piece_bytes: int,
        device: torch.device,
        tied: TiedWeights,
        twin_stages: Collection[int] = (),
    ) -> None:
        self._groups = groups
        self._device = device
        self._tied = tied
        self._first_expert_bucket = buckets_per_stage
        self._home: dict[nn.Parameter, tuple[Piece, Tensor]] = {}
        by_bucket: dict[Bucket, list[Piece]] = {}
        for stage in stages.values():
            for bucket, parameters in cut_pieces(stage, buckets_per_stage, piece_bytes, tied.parameters):
                piece = Piece(bucket, parameters, masters)
                by_bucket.setdefault(bucket, []).append(piece)
                self._home.update({p: (piece, view) for p, view in zip(parameters, piece.views, strict=True)})
        partial_ = {parameter for stage in stages.values() for parameter in stage.partial}
        self._pieces = [piece for pieces in by_bucket.values() for piece in pieces]
        self._order = [piece for bucket in reductions for piece in by_bucket.get(bucket, ()) if not piece.comes_summed]
        self._partial = [piece for piece in self._pieces if not partial_.isdisjoint(piece.parameters)]
        self.launched: list[Work] = []
        self._syncing: list[_Sum] = []
        self._counted = list(self._find_counted([p for p in self._pieces if not p.comes_summed], twin_stages))
        self._has_parts = any(piece.comes_summed for piece in self._pieces)
        self._counted_parts = list(self._find_counted([p for p in self._pieces if p.comes_summed], twin_stages))
        for parameter, (_, view) in self._home.items():
            parameter._quintsched_sum = view  # type: ignore[attr-defined]
            if parameter.dtype != view.dtype or isinstance(parameter, DTensor):
                parameter.register_post_accumulate_grad_hook(partial(_move_into, view))

    def _find_counted(self, pieces: Iterable[Piece], twin_stages: Collection[int]) -> Iterator[Tensor]:
        """Yield what of these pieces this rank counts in the global norm: whole pieces where it can."""
        for piece in pieces:
            if piece.bucket[0] not in twin_stages:
                views = [view for p, view in zip(piece.parameters, piece.views, strict=True) if self._counts(p)]
                yield from [piece.flat] if len(views) == len(piece.views) else views

    def _counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank counts a parameter: of copies along tp or ep, and of tied ones, one does."""
        is_expert = self._is_of_experts(self._home[parameter][0])
        return self._tied.counts(parameter) and self._groups.counts(parameter, is_expert=is_expert)

    def _is_of_experts(self, piece: Piece) -> bool:
        return piece.bucket[1] >= self._first_expert_bucket

    def _replicas_of(self, piece: Piece) -> Group:
        return self._groups.expert_replicas if self._is_of_experts(piece) else self._groups.replicas

    def _accumulate(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add to the gradient of a parameter, as a backward does."""
        self._home[parameter][1].add_(gradient)

    def attach(self) -> None:
        """See to it that backwards add to the pieces, whatever was done to the parameters between steps."""
        for piece in self._pieces:
            piece.attach()

    @contextmanager
    def last_backward(self, stage: int) -> Iterator[None]:
        """A context in which pieces of `stage` are launched as soon as the backward in it has filled them."""
        pieces = [piece for piece in self._pieces if piece.bucket[0] == stage and self._is_filled_by_backwards(piece)]
        hooks = [
            p.register_post_accumulate_grad_hook(self._noting(piece)) for piece in pieces for p in piece.parameters
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _is_filled_by_backwards(self, piece: Piece) -> bool:
        is_added_up = piece in self._partial or not self._tied.parameters.isdisjoint(piece.parameters)
        return self._replicas_of(piece).size > 1 and not is_added_up and not piece.comes_summed

    def _noting(self, piece: Piece) -> Callable[[Tensor], None]:
        def arrived(parameter: Tensor) -> None:
            if parameter not in piece.missing:
                raise MisfitError(
                    f"a weight of stage {piece.bucket[0]}, {tuple(parameter.shape)}, got gradients twice in one "
                    "backward, as one does that checkpointed parts of a block share; let the plan recompute instead"
                )
            self._note(piece, parameter)

        return arrived

    def _note(self, piece: Piece, parameter: Tensor) -> None:
        """Note that the gradient of a parameter is complete, and launch the piece if all are."""
        piece.missing.discard(parameter)
        if not piece.missing:
            piece.ready = True
            self._launch_ready()

    def drain(self, products: Products) -> None:
        """Compute and add up what a backward has put off."""
        products.drain(self._accumulate)

    def drain_last(self, stage: int, products: Products) -> None:
        """`drain` after which the stage's gradients are complete: pieces are launched as soon as they are filled."""
        coming = set(products.parameters())
        early = {p for p in self._pieces if p.bucket[0] == stage and self._is_filled_by_backwards(p)}
        for piece in (piece for piece in self._pieces if piece in early):
            for parameter in [p for p in piece.parameters if p not in coming]:
                self._note(piece, parameter)

        def accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
            self._accumulate(parameter, gradient)
            piece = self._home[parameter][0]
            if piece in early:
                self._note(piece, parameter)

        products.drain(accumulate)

    def has_parts(self, stage: int) -> bool:
        """Whether a stage has gradients that are in parts on the ranks of tp."""
        return any(piece.bucket[0] == stage for piece in self._partial)

    def add_parts(self, stage: int) -> None:
        """Begin to sum the gradients of a stage that are in parts on the ranks of tp; as with `add_up` nobody waits."""
        for piece in self._partial:
            if piece.bucket[0] == stage:
                self._syncing.append(_Sum([piece.flat], self._groups.tensor.all_reduce(piece.flat)))

    def add_up(self, params: str, stages: tuple[int, ...]) -> None:
        """Begin to sum the gradients of what several stages hold: all weights of twins ("stage"), or one that is named.

        `reduce` and `end_sums` wait for it: until then the program goes on.
        """
        self.end_sums()
        sharing = self._groups.sharing.get(stages)
        if params == "stage":
            own = [[piece.flat] for piece in self._pieces if piece.bucket[0] in stages]
        else:
            own = [[self._home[parameter][1] for parameter in self._tied.own(params)]]
        self._syncing += _begin_sums(own, sharing)

    def reduce(self, bucket: Bucket) -> None:
        """Launch what is left of a bucket; parameters that no backward reached bring their zeros."""
        self.end_sums()
        for piece in self._order[len(self.launched) :]:
            if piece.bucket == bucket:
                piece.ready = True
        self._launch_ready()

    def _launch_ready(self) -> None:
        while len(self.launched) < len(self._order) and self._order[len(self.launched)].ready:
            piece = self._order[len(self.launched)]
            self.launched.append(self._replicas_of(piece).all_reduce(piece.flat))

    def end_sums(self) -> None:
        """Wait for the sums that `add_up` has begun."""
        for sum_ in self._syncing:
            sum_.end()
        self._syncing.clear()

    def finish(self, weight: Tensor) -> None:
        """Divide the sums, which have been waited for, by the batch's total loss weight (a 0-dimensional tensor)."""
        self.launched.clear()
        for piece in self._pieces:
            piece.flat.div_(weight)

    def global_norm(self) -> tuple[Tensor, Work]:
        """Return the square of the 2-norm of the whole model's gradient, to be waited for: 0-dimensional, float64."""
        square = self._square(self._counted)
        if self._has_parts:
            parts = self._square(self._counted_parts)
            self._groups.replicas.all_reduce(parts).wait()
            square = square + parts
        return square, self._groups.model.all_reduce(square)

    def _square(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the sum of all squares: 0-dimensional, float64."""
        norms = [torch.linalg.vector_norm(tensor) for tensor in tensors]
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        if len(norms) == 1:
            square = norms[0].to(torch.float64).square()
        elif norms:
            square = torch.stack([norm.to(torch.float64) for norm in norms]).square().sum()
        return square

    def scale(self, factor: Tensor) -> None:
        """Multiply every gradient with `factor`."""
        for piece in self._pieces:
            piece.flat.mul_(factor)

    def clear(self, stages: Sequence[int]) -> None:
        """Set the gradients of these stages to zero, ready for the next step."""
        for piece in self._pieces:
            if piece.bucket[0] in stages:
                piece.flat.zero_()
                piece.missing, piece.ready = set(piece.parameters), False


def _move_into(view: Tensor, parameter: Tensor) -> None:
    """Add a parameter's new gradient to its sum, longer or local; one that was put off is not there yet.

    The sum may be that of an engine which is no longer in use, while another one trains the same weights.
    """
    if parameter.grad is not None and getattr(parameter, "_quintsched_sum", None) is view:
        view.add_(local_gradient(parameter))
        parameter.grad = None


class _Sum:
    """Tensors, here and on other ranks, that are becoming their sum."""

    def __init__(self, own: Sequence[Tensor], work: Work | None) -> None:
        self._own = own
        self._work = work

    def end(self) -> None:
        """Wait, and let all tensors here be the sum."""
        if self._work is not None:
            self._work.wait()
        for other in self._own[1:]:
            other.copy_(self._own[0])


def _begin_sums(copies: Sequence[Sequence[Tensor]], sharing: Sharing | None) -> list[_Sum]:
    """Begin to sum the tensors of each list with each other, and with those of the ranks that share them."""
    sums = []
    for own in copies:
        for other in own[1:]:
            own[0].add_(other)
        sums.append(_Sum(own, sharing.group.all_reduce(own[0]) if sharing else None))
    return sums


def cut_pieces(
    stage: Stage, buckets: int, piece_bytes: int, apart: Collection[nn.Parameter] = ()
) -> list[tuple[Bucket, list[nn.Parameter]]]:
    """Cut a stage's parameters, last first, into `buckets` of like size and those into pieces of one dtype.

    Behind them come those with partial gradients, then those that stand `apart`, each in a piece of its own; then, in
    one more bucket, the experts that ranks along ep do not have in common.
    """
    found, experts = list(stage.named_weights().values()), expert_weights(stage)
    alone = [parameter for parameter in found if parameter in apart]
    rest = [parameter for parameter in reversed(found) if parameter not in apart]
    dense = [parameter for parameter in rest if parameter not in stage.partial and parameter not in experts]
    partial_ = [parameter for parameter in rest if parameter in stage.partial]
    own = [parameter for parameter in rest if parameter in experts]
    last = buckets - 1
    pieces = [
        *_cut_evenly(dense, buckets, piece_bytes),
        *((last, piece) for _, piece in _cut_evenly(partial_, 1, piece_bytes)),
        *((last, [parameter]) for parameter in alone),
        *((buckets, piece) for _, piece in _cut_evenly(own, 1, piece_bytes)),
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
