"""What a rank holds from step to step: weights, their gradients, and what the optimizer keeps; whole, or its share.

plan without ZeRO    Masters          Pieces          every replica holds all of it
ZeRO                 SharedMasters    SharedPieces    every replica holds, and steps, its share (see `zero`)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer

from quintsched.ir.instructions import AllReduceBucket, OptStep, ReduceScatterBucket
from quintsched.plan import Plan

from ..blocks.dtensor import local_of
from ..parallel.mesh_groups import MeshGroups
from ..stage.build import Stage
from ..stage.tied_weights import TiedWeights
from .grad_buckets import Bucket, Piece, cut_all
from .grad_reducer import Gradients
from .master_weights import Masters
from .memory_stats import Held, Ledger, StateBytes
from .optimizers import OptimizerFn, build_optimizers
from .pretrained import load_pretrained
from .state_dict import full_weights, load_state, state_of
from .zero_grads import SharedPiece
from .zero_params import SharedMasters, SharedWeights, WeightShare, require_shareable

Cut = list[tuple[Bucket, list[nn.Parameter]]]


class TrainingState:
    """Weights, gradients and optimizers of one rank's stages.

    Args:
        plan: says what replicas share out, which buckets are reduced, and which stages step together.
        pp_rank: this rank's pp coordinate.
        stages: its stages, whose weights are what the training starts from.
        groups: the groups of the mesh.
        tied: weights that several stages hold.
        optimizer: builds an optimizer from parameters, or from (name, parameter) pairs.
        piece_bytes: gradients are reduced in pieces of at most so many bytes.

    Raises:
        MisfitError: weights that cannot be shared out.
    """

    def __init__(
        self,
        plan: Plan,
        pp_rank: int,
        stages: Mapping[int, Stage],
        groups: MeshGroups,
        tied: TiedWeights,
        optimizer: OptimizerFn,
        *,
        piece_bytes: int,
    ) -> None:
        self._stages, self._groups, self._tied, self._zero = stages, groups, tied, plan.zero
        self._ledger = Ledger()
        self.weights: SharedWeights | None = None
        cut = cut_all(
            stages,
            plan.buckets_per_stage,
            piece_bytes,
            tied.parameters,
            waiting_apart=plan.zero.shares_gradients,
        )
        if plan.zero.shares_optimizer:
            require_shareable(plan, stages)
            pieces = self._share_out(cut, plan.buckets_per_stage)
        else:
            self.masters = Masters(stages)
            pieces = [Piece(bucket, parameters, self.masters) for bucket, parameters in cut]
            self._count_whole(pieces)
        program = plan.programs[pp_rank]
        reductions = (i for i in program if isinstance(i, AllReduceBucket | ReduceScatterBucket))
        self.gradients = Gradients(
            stages,
            pieces,
            [(i.stage, i.bucket) for i in reductions],
            groups,
            buckets_per_stage=plan.buckets_per_stage,
            device=groups.world.device,
            tied=tied,
            twin_stages=[s for s in stages if plan.layout.twins(s)[:1] not in ((), (s,))],
            shared=plan.zero.shares_optimizer,
            in_turn=plan.zero.shares_weights,
        )
        steps = [i.stages for i in program if isinstance(i, OptStep)]
        self.optimizers: dict[tuple[int, ...], Optimizer] = build_optimizers(optimizer, steps, stages, self.masters)
        self.read_bytes()  # what stood while weights were shared out is none of the training's

    def _share_out(self, cut: Cut, first_expert_bucket: int) -> list[Piece]:
        """Share out weights over their replicas, and with them gradients and what the optimizer works on."""
        shares, zero = [], self._zero
        for bucket, parameters in cut:
            group = self._groups.expert_replicas if bucket[1] >= first_expert_bucket else self._groups.replicas
            shares.append(
                WeightShare(bucket, parameters, group, comes_and_goes=zero.shares_weights, ledger=self._ledger)
            )
        self.weights = SharedWeights(shares, come_and_go=zero.shares_weights)
        self.masters = SharedMasters(shares, self._stages)
        return [
            SharedPiece(share, self.masters, comes_and_goes=zero.shares_gradients, ledger=self._ledger)
            for share in shares
        ]

    def _count_whole(self, pieces: list[Piece]) -> None:
        weights = (local_of(p) for stage in self._stages.values() for p in stage.named_weights().values())
        self._ledger.add(Held.WEIGHTS, sum(weight.nbytes for weight in weights))
        self._ledger.add(Held.GRADIENTS, sum(piece.flat.nbytes for piece in pieces))

    def settle(self) -> None:
        """Wait for weights that are on their way to being whole."""
        if self.weights is not None:
            self.weights.settle()

    def read(self) -> dict[str, Tensor]:
        """Return this rank's shards: see `state`."""
        self.settle()
        return state_of(self._stages, self.optimizers, self.masters)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `read` gave (collective over replicas that share out)."""
        self.settle()
        load_state(self._stages, self.optimizers, self.masters, state)
        self._spread()

    def load_pretrained(self, path: str | Path, num_blocks: int) -> None:
        """Let the weights be those of a checkpoint (collective over replicas that share out); see `pretrained`."""
        self.settle()
        load_pretrained(self._stages, self.masters, path, num_blocks=num_blocks, tied=self._tied.names)
        self._spread()

    def _spread(self) -> None:
        if self.weights is not None:
            self.weights.spread()

    def full_weights(self) -> dict[str, Tensor]:
        """Return whole weights, put together from their shards (collective over tp, and replicas that share out)."""
        found = {}
        for number, stage in self._stages.items():
            with self._whole(number):
                found.update(full_weights({number: stage}, self._groups.tensor))
        return found

    @contextmanager
    def _whole(self, stage: int) -> Iterator[None]:
        with ExitStack() as stack:
            if self.weights is not None:
                stack.enter_context(self.weights.whole(stage))
            yield

    def read_bytes(self) -> StateBytes:
        """Return the most bytes that stood since the last call."""
        states = (kept for optimizer in self.optimizers.values() for kept in optimizer.state.values())
        tensors = (value for kept in states for value in kept.values() if isinstance(value, Tensor))
        return self._ledger.read(self.masters.num_bytes + sum(tensor.nbytes for tensor in tensors))
