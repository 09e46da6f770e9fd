"""Public properties of an engine's rank: its place among the replicas, and the data it needs."""

from __future__ import annotations

from torch import Tensor

from .rank_stages import RankModel


class RankView:
    """Properties of a rank's `RankModel`, for classes that have one: the data it needs, its place among replicas."""

    _model: RankModel

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._model.in_words})"

    @property
    def deferred_share(self) -> float | None:
        """Share of the weights whose gradients are deferred, on stages with split backwards; None without these."""
        return self._model.deferred_share

    @property
    def tensor_cuts(self) -> str | None:
        """Report, in a line, of the parts that tensor parallelism shards and those that stay whole; None without tp."""
        return self._model.tensor.report

    @property
    def expert_shares(self) -> str | None:
        """Report, in one line, of experts sharded over ep and experts on all its ranks; None without ep."""
        return self._model.expert_shares

    @property
    def needs_inputs(self) -> bool:
        """Whether this rank holds a first stage, and so needs inputs."""
        return self._model.needs_inputs

    @property
    def needs_targets(self) -> bool:
        """Whether this rank holds a last stage, or another that takes targets, and so needs them."""
        return self._model.needs_targets

    @property
    def num_replicas(self) -> int:
        """Number of replicas that divide the batch (dp x ep)."""
        return self._model.num_replicas

    @property
    def replica(self) -> int:
        """Index of the replica that this rank belongs to."""
        return self._model.replica

    def expert_tokens(self) -> dict[str, Tensor]:
        """Return how often each expert was chosen in training since the last call, on every rank (collective).

        Per mixture of experts, by its name in the whole model: (experts,), int64, over the whole batches.
        """
        return self._model.expert_load.read_counts()
