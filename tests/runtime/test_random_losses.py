"""Random losses equal a plain loop over whole batches, or are refused in a sentence."""

import pytest

from .random_losses import draw, judge


@pytest.mark.sampled(25)
@pytest.mark.parametrize("seed", range(600))
def test_what_is_drawn_equals_one_process_or_is_refused(seed: int) -> None:
    case = draw(seed)
    verdict, words = judge(case)
    assert verdict in ("equal", "refused", "none"), f"{words}\n{case}"
