"""Means beside losses of blocks: each microbatch has to weigh as much for each of its samples.

loss of microbatch i + losses of its blocks        both are means, and weigh as its samples
6 targets for 2 samples, 6 for 2, 6 for 2          the mean over targets is that of the whole batch
6 targets for 2 samples, 3 for 2                   refused: one weight is wrong for either of both
"""

from __future__ import annotations

from torch import Tensor

from ..examine.losses.rules import LossWeight


class EvenWeights:
    """What a mean is over for each sample, the same in all microbatches.

    Args:
        rule: what the mean is over.

    Attributes:
        of_each: what one sample weighs, as the first microbatch has it; None: there was none.
    """

    def __init__(self, rule: LossWeight) -> None:
        self.rule = rule
        self.of_each: float | None = None

    def doubt(self, weight: Tensor | float, samples: int) -> str:
        """Return why the samples of a microbatch do not weigh as others did, in words; "": they do."""
        weight = float(weight)
        self.of_each = weight / samples if self.of_each is None else self.of_each
        if abs(weight - samples * self.of_each) <= 1e-6 * weight:
            return ""
        return (
            "blocks have losses of their own beside it, which weigh as samples do, but there is a mean over "
            f"{self.rule.over}, of which a microbatch has {weight:g} for {samples} samples, and others have "
            f"{self.of_each:g} for each"
        )
