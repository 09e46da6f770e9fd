"""Gradients of one rank: kept in flat pieces, summed over replicas while the last backward still runs.

    parameters of a stage, last layer first     p9 p8 p7 │ p6 p5 │ p4 … p0        pieces of at most 25 MB
    their gradients are views into              [ piece 0 ][piece 1][ piece 2 ]

In a stage's last backward a piece is ready when all its parameters have their gradient. Ready pieces are launched in
one fixed order, that of the plan's reductions, on all replicas alike: a piece that is ready early waits for those
before it. The plan's `AllReduceBucket` launches what is left. Weights that several stages hold, and those whose
gradient is in parts on the ranks of tp (`sequence_parallel`), stand in pieces of their own, which are ready when they
have been added up. So do the weights of experts that ep shares out, in a bucket behind the others, which is summed over
the replicas of this rank's experts only.

Where replicas share out gradients (`zero_gradients`), the plan's `ReduceScatterBucket` launches them, as often as it
says, and what follows (division, norm, scaling) is done to each rank's own share.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quintsched.errors import MisfitError

from ..autograd.deferred_weight_grads import Products
from ..blocks.dtensor import local_gradient
from ..comm import Group, Work
from ..parallel.mesh_groups import MeshGroups, Sharing
from ..stage.build import Stage
from ..stage.tied_weights import TiedWeights
from .grad_buckets import Bucket, Piece

Wait = Callable[[Iterable[Work]], None]
"""Waits for what comes from other ranks."""


class Gradients:
    """All gradients of a rank's stages, and their sums over the replicas.

    Args:
        stages: this rank's stages.
        pieces: all pieces of these, in the order of `cut_all`.
        reductions: the buckets that the program reduces, in its order, each as often as it does.
        groups: the groups of the mesh.
        buckets_per_stage: how many buckets a stage has, without that of experts.
        device: where figures are.
        tied: weights that several stages hold.
        twin_stages: those that another rank's stage counts for in the global norm, since it holds the same piece.
        shared: whether replicas share out what is reduced.
        in_turn: whether a piece is launched at its place in the program, and never before.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        pieces: Sequence[Piece],
        reductions: Sequence[Bucket],
        groups: MeshGroups,
        *,
        buckets_per_stage: int,
        device: torch.device,
        tied: TiedWeights,
        twin_stages: Collection[int] = (),
        shared: bool = False,
        in_turn: bool = False,
    ) -> None:
        self._groups = groups
        self._device = device
        self._tied = tied
        self._first_expert_bucket = buckets_per_stage
        self._home: dict[nn.Parameter, tuple[Piece, Tensor]] = {}
        self._shared, self._in_turn = shared, in_turn
        by_bucket: dict[Bucket, list[Piece]] = {}
        for piece in pieces:
            by_bucket.setdefault(piece.bucket, []).append(piece)
            self._home.update({p: (piece, view) for p, view in zip(piece.parameters, piece.views, strict=True)})
        partial_ = {parameter for stage in stages.values() for parameter in stage.partial}
        self._pieces = [piece for some in by_bucket.values() for piece in some]
        self._order = [piece for bucket in reductions for piece in by_bucket.get(bucket, ()) if not piece.comes_summed]
        self._partial = [piece for piece in self._pieces if not partial_.isdisjoint(piece.parameters)]
        self.come_and_go = any(piece.comes_and_goes for piece in pieces)
        """Whether full gradients stand only from a backward to their reduction."""
        self._num_launched = 0
        self._under_way: list[tuple[Piece, Work]] = []
        self._syncing: list[_Sum] = []
        self._counted = list(self._find_counted([p for p in self._pieces if not p.comes_summed], twin_stages))
        self._has_parts = any(piece.comes_summed for piece in self._pieces)
        self._counted_parts = list(self._find_counted([p for p in self._pieces if p.comes_summed], twin_stages))
        for parameter, (piece, view) in self._home.items():
            parameter._quintsched_sum = view  # type: ignore[attr-defined]
            if piece.comes_and_goes or not _can_be(view, parameter):
                parameter.register_post_accumulate_grad_hook(partial(_move_into, piece, view))

    def _find_counted(self, pieces: Iterable[Piece], twin_stages: Collection[int]) -> Iterator[Tensor]:
        """Yield what of these pieces this rank counts in the global norm: whole pieces where it can."""
        for piece in pieces:
            if piece.bucket[0] not in twin_stages:
                yield from piece.counted([self._counts(parameter) for parameter in piece.parameters])

    def _counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank counts a parameter: of copies along tp or ep, and of tied ones, one does."""
        differs_along_ep = self._shared or self._is_of_experts(self._home[parameter][0])
        return self._tied.counts(parameter) and self._groups.counts(parameter, is_expert=differs_along_ep)

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
        is_reduced = self._replicas_of(piece).size > 1 and not piece.comes_summed
        return is_reduced and not is_added_up and not self._in_turn

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
        """Whether a stage's last backward leaves gradients in parts on the ranks of tp that are added up at once.

        Those that replicas share out wait for the end of the step, when there is less of them.
        """
        return not self._shared and any(piece.bucket[0] == stage for piece in self._partial)

    def add_parts(self, stage: int) -> None:
        """Begin to sum the gradients of a stage that are in parts on the ranks of tp; as with `add_up` nobody waits."""
        for piece in self._partial:
            if piece.bucket[0] == stage:
                self._syncing.append(_Sum([piece.flat], self._groups.tensor.all_reduce(piece.flat)))

    def add_up(self, params: str, stages: tuple[int, ...]) -> None:
        """Begin to sum the gradients of what several stages hold: all weights of twins ("stage"), or one that is named.

        `reduce` and `end_sums` wait for it: until then the program goes on.
        """
        if self._partial:
            self.end_sums()  # what is tied has to be whole
        sharing = self._groups.sharing.get(stages)
        if params == "stage":
            own = [[piece.flat] for piece in self._pieces if piece.bucket[0] in stages]
        else:
            own = [[self._home[parameter][1] for parameter in self._tied.own(params)]]
        self._syncing += _begin_sums(own, sharing)

    def make_room(self, stage: int, wait: Wait) -> None:
        """Let full gradients of `stage` stand, once those that are under way are gone."""
        self.collect(wait)
        for piece in self._pieces:
            if piece.bucket[0] == stage:
                piece.make_room()

    def reduce(self, bucket: Bucket) -> None:
        """Launch what is left of a bucket; parameters that no backward reached bring their zeros."""
        self.end_sums()
        for piece in self._order[self._num_launched :]:
            if piece.bucket == bucket:
                piece.ready = True
        self._launch_ready()

    def _launch_ready(self) -> None:
        while self._num_launched < len(self._order) and self._order[self._num_launched].ready:
            piece = self._order[self._num_launched]
            piece.ready = False  # its turn may come again
            self._num_launched += 1
            self._under_way.append((piece, piece.reduce(self._replicas_of(piece))))

    def collect(self, wait: Wait) -> None:
        """Wait for the reductions that are under way."""
        if self._under_way:
            wait([work for _, work in self._under_way])
            for piece, _ in self._under_way:
                piece.collect()
            self._under_way.clear()

    def complete(self, wait: Wait) -> None:
        """Wait until all gradients are the sums that they have to be."""
        self.end_sums()
        self.collect(wait)
        if self._shared:
            wait([self._groups.tensor.all_reduce(piece.own) for piece in self._partial])

    def end_sums(self) -> None:
        """Wait for the sums that `add_up` has begun."""
        for sum_ in self._syncing:
            sum_.end()
        self._syncing.clear()

    def finish(self, weight: Tensor) -> None:
        """Divide the sums, which are complete, by the batch's total loss weight (a 0-dimensional tensor)."""
        self._num_launched = 0
        for piece in self._pieces:
            piece.own.div_(weight)

    def global_norm(self) -> tuple[Tensor, Work]:
        """Return the square of the 2-norm of the whole model's gradient, to be waited for: 0-dimensional, float64."""
        square = self._square(self._counted)
        if self._shared:
            return square, self._groups.world.all_reduce(square)
        if self._has_parts:
            parts = self._square(self._counted_parts)
            self._groups.replicas.all_reduce(parts).wait()
            square = square + parts if self._groups.experts.index == 0 else square  # ranks along ep meet below
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
            piece.own.mul_(factor)

    def clear(self, stages: Sequence[int]) -> None:
        """Set the gradients of these stages to zero, ready for the next step."""
        for piece in self._pieces:
            if piece.bucket[0] in stages:
                piece.clear()


def _can_be(view: Tensor, parameter: Tensor) -> bool:
    """Whether a parameter's gradient can be this part of a sum, so that backwards add to it."""
    return parameter.dtype == view.dtype and not isinstance(parameter, DTensor)


def _move_into(piece: Piece, view: Tensor, parameter: Tensor) -> None:
    """Add a parameter's new gradient to its sum, which is longer, local or not there yet; one put off is none yet.

    The sum may be that of an engine which is no longer in use, while another one trains the same weights.
    """
    if parameter.grad is None or parameter.grad is view or getattr(parameter, "_quintsched_sum", None) is not view:
        return
    gradient = local_gradient(parameter)
    piece.make_room()
    view.add_(gradient)
    parameter.grad = view if _can_be(view, parameter) else None


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
