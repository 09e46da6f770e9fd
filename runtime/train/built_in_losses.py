"""Losses and metrics as sums over the real samples, with their weight.

A mean of means is wrong as soon as a batch is padded or divided unevenly, so nothing here divides: the engine
adds up sums and weights over microbatches and ranks, and divides once.

A loss or a metric with a parameter `vocabulary` supports sharded logits: where tensor parallelism cuts the model's last
layer over the vocabulary, the engine passes it this rank's part of the logits and the process group of tp.
If any of them lacks it, the logits are gathered first.

Also sums of steps' results, added up without waiting for pending reductions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from quintsched.errors import UsageError
from quintsched.import_user_code import load_object
from quintsched.plan import Plan

from ..blocks.block_builders import Blocks
from ..comm import Group
from ..comm.clocks import now_s
from ..data import IGNORED_TARGET
from ..interpreter.step_losses.sum_losses_across_ranks import StepResult
from ..parallel.tensor.vocab_loss import cut_argmax, cut_cross_entropy, cut_losses
from ..splitting.adapters.transformers_inputs_and_losses import CausalLMLoss, token_loss
from ..splitting.split_whole_model import Split
from ..stage.early_stage_losses import cuts_sequences


def cross_entropy_sum(logits: Tensor, targets: Tensor, vocabulary: Group | None = None) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy of the real samples and their number; both are 0-dimensional.

    `logits` (…, K), `targets` int64 (…), where IGNORED_TARGET marks padding. At least float32, also for bf16 logits.
    With `vocabulary`, `logits` (…, K / size) are those of this rank's classes.
    """
    logits = logits.to(_at_least_float32(logits))
    rows, wanted = logits.flatten(0, -2), targets.flatten()
    if vocabulary is None:
        losses = F.cross_entropy(rows, wanted, ignore_index=IGNORED_TARGET, reduction="sum")
    else:
        losses = cut_cross_entropy(rows, wanted, IGNORED_TARGET, vocabulary).sum()
    return losses, (targets != IGNORED_TARGET).sum().to(logits.dtype)


class ZLoss:
    """Cross entropy with a z-loss: factor x log(sum(exp(logits)))² for each target (Chowdhery et al. 2022, PaLM).

    Takes and returns what `cross_entropy_sum` does.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def __call__(self, logits: Tensor, targets: Tensor, vocabulary: Group | None = None) -> tuple[Tensor, Tensor]:
        """Return the sum of both losses over the targets that count, and how many those are."""
        logits = logits.to(_at_least_float32(logits))
        rows, wanted = logits.flatten(0, -2), targets.flatten()
        if vocabulary is None:
            losses = F.cross_entropy(rows, wanted, ignore_index=IGNORED_TARGET, reduction="none")
            normalizers = rows.logsumexp(-1)
        else:
            losses, normalizers = cut_losses(rows, wanted, IGNORED_TARGET, vocabulary)
        counts = wanted != IGNORED_TARGET
        return (losses + self._factor * normalizers.square().where(counts, 0)).sum(), counts.sum().to(logits.dtype)


class CausalZLoss(CausalLMLoss):
    """The same of each token's successor: labels are the ids (samples, tokens)."""

    def __init__(self, factor: float) -> None:
        self._loss = ZLoss(factor)

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of (samples, tokens, ids) logits, summed, and how many tokens it is of."""
        return self._loss(logits[:, :-1], labels[:, 1:])

    def prepared(self, logits: Tensor, successors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss where labels are successors."""
        return self._loss(logits, successors)


def with_z_loss(loss_fn: Callable[..., Any], factor: float) -> Callable[..., Any]:
    """Return a loss with a z-loss beside it; raises `UsageError` for one that is no cross-entropy of classes."""
    if not factor:
        return loss_fn
    if isinstance(loss_fn, CausalLMLoss):
        return CausalZLoss(factor)
    if loss_fn in (cross_entropy_sum, token_loss):
        return ZLoss(factor)
    raise UsageError("train.z_loss is for cross-entropies of classes; add the term in your own loss (train.loss)")


def has_perplexity(loss_fn: Callable[..., Any]) -> bool:
    """Return whether exp(loss) is a perplexity: the loss is a cross-entropy of classes alone."""
    return (isinstance(loss_fn, CausalLMLoss) and not isinstance(loss_fn, CausalZLoss)) or loss_fn in (
        cross_entropy_sum,
        token_loss,
    )


def correct_sum(logits: Tensor, targets: Tensor, vocabulary: Group | None = None) -> Tensor:
    """Return the number of real samples that are predicted right: 0-dimensional, at least float32.

    `logits` (…, K), `targets` int64 (…); no prediction equals IGNORED_TARGET, so padding never counts. With
    `vocabulary`, `logits` (…, K / size) are those of this rank's classes.
    """
    predicted = logits.argmax(-1) if vocabulary is None else cut_argmax(logits, vocabulary)
    return (predicted == targets).sum().to(_at_least_float32(logits))


def next_correct_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the number of next tokens predicted right: `logits` (samples, tokens, K), `labels` are the token ids."""
    return correct_sum(logits[:, :-1], labels[:, 1:])


def loss_of(name: str | None, blocks: Blocks) -> Callable[..., Any]:
    """Return the loss of a job: its own, that of the split model, or cross-entropy.

    Raises `UsageError` where the job names an object that is not callable.
    """
    if name is None:
        known = blocks.loss_fn if isinstance(blocks, Split) else None
        return known or cross_entropy_sum
    found = load_object(name)
    if not callable(found):
        raise UsageError(f"train.loss: {name} is a {type(found).__name__}, not a function of (output, targets)")
    return found  # type: ignore[no-any-return]


def accuracy_of(loss_fn: Callable[..., Any], plan: Plan) -> dict[str, Callable[..., Tensor]]:
    """Return the metric "accuracy" where the loss is a cross-entropy of classes; else no metric."""
    if isinstance(loss_fn, CausalLMLoss):
        return {"accuracy": correct_sum if cuts_sequences(plan) else next_correct_sum}
    is_of_classes = isinstance(loss_fn, ZLoss) or loss_fn in (cross_entropy_sum, token_loss)
    return {"accuracy": correct_sum} if is_of_classes else {}


def _at_least_float32(tensor: Tensor) -> torch.dtype:
    """Return the dtype to sum in: bf16 cannot count beyond 256."""
    return torch.promote_types(tensor.dtype, torch.float32)


UNDER_WAY = 4
"""Number of latest results that may still be in reduction."""


class ResultSums:
    """Sums of results over batches; they stay tensors until they are read.

    The latest results are added later: reading one waits for its reduction over the ranks.

    Args:
        start: sums of batches before.
        begun: called when the first batch is added.
    """

    def __init__(self, start: dict[str, float], begun: Callable[[], object] | None = None) -> None:
        self._sums = {name: torch.tensor(value, dtype=torch.float64) for name, value in start.items()}
        self._begun = begun
        self._latest: deque[StepResult] = deque()

    def add_result(self, result: StepResult) -> None:
        """Add a batch's sums."""
        if self._begun is not None:
            self._begun()
            self._begun = None
        self._latest.append(result)
        if len(self._latest) > UNDER_WAY:
            self._add_oldest()

    def _add_oldest(self) -> None:
        for name, value in self._latest.popleft().sums.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def read_sums(self) -> dict[str, float]:
        """Return the sums as numbers."""
        while self._latest:
            self._add_oldest()
        return {name: value.item() for name, value in self._sums.items()}


class StepsWindow:
    """The steps since it was made: how many, their sums, and how long they took."""

    def __init__(self) -> None:
        self.steps, self._began, self._sums = 0, now_s(), ResultSums({})

    def add_step(self, result: StepResult) -> None:
        """Add a step."""
        self._sums.add_result(result)
        self.steps += 1

    def read_window(self) -> tuple[int, float, dict[str, float]]:
        """Return (steps, seconds, sums); reading the sums waits for the last steps."""
        sums = self._sums.read_sums()
        return self.steps, now_s() - self._began, sums


def figures_in_words(means: Mapping[str, object]) -> str:
    """Return loss, and accuracy where there is one, for a line that people read."""
    accuracy = f"  accuracy {means['accuracy']:.2%}" if "accuracy" in means else ""
    return f"loss {means['loss']:.4f}{accuracy}"
