"""Many drawn cases from a command line, a verdict on each."""

import argparse
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any


def judge_many(draw: Callable[[int], Any], judge: Callable[[Any], tuple[str, str]], says: str | None) -> None:
    """Draw and judge as many cases as the command line says, a verdict and a case each, and end the process.

    It ends with 1 where one is unequal or raises; `says` is what its help tells.
    """
    parser = argparse.ArgumentParser(description=says, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.count):
        case = draw(seed)
        try:
            verdict, words = judge(case)
        except Exception:
            verdict, words = "crashed", traceback.format_exc()
        counts[verdict] += 1
        sys.stdout.write(f"{verdict:8} {words}\n         {case}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{dict(counts)}\n")
    sys.exit(bool(counts["unequal"] or counts["crashed"]))
