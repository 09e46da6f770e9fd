"""What an engine's user may want to know of its rank: its place among the replicas, and which data it needs."""

from __future__ import annotations

from torch import Tensor

from .rank_model import RankModel


class RankView:
    """What a rank needs, and its place among the replicas, as whoever has a `RankModel` shows them."""

    _model: RankModel

    @property
    def deferred_share(self) -> float | None:
        """Which share of the weights of stages with split backwards has gradients that wait; None without such."""
        return self._model.deferred_share

    @property
    def tensor_cuts(self) -> str | None:
        """What tensor parallelism cuts of the model and what stays whole, in a line; None without tp."""
        return self._model.tensor.report

    @property
    def expert_shares(self) -> str | None:
        """Which experts are shared out over ep, and which are on all of its ranks, in a line; None without ep."""
        return self._model.expert_shares

    @property
    def needs_inputs(self) -> bool:
        """Whether this rank holds a first stage, and so has to be given inputs."""
        return self._model.needs_inputs

    @property
    def needs_targets(self) -> bool:
        """Whether this rank holds a last stage, or another that takes targets, and so has to be given them."""
        return self._model.needs_targets

    @property
    def num_replicas(self) -> int:
        """How many replicas divide the batch (dp x ep)."""
        return self._model.num_replicas

    @property
    def replica(self) -> int:
        """Which of them this rank belongs to."""
        return self._model.replica

    def expert_tokens(self) -> dict[str, Tensor]:
        """Return how often each expert was chosen in training since the last call, on every rank (collective).

        Per mixture of experts, by its name in the whole model: (experts,), int64, over the whole batches.
        """
        return self._model.expert_load.read()
