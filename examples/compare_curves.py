"""Compare the loss curves of two runs, step by step.

    quintsched run examples/full_3d.yaml --set log.path=a.jsonl
    quintsched run examples/baseline.yaml --set log.path=b.jsonl
    python examples/compare_curves.py a.jsonl b.jsonl

Exits with 1 if the two differ anywhere by more than `--tolerance` times the second.
"""

import argparse
import json
import math
import sys
from pathlib import Path

BAR = 24


def read_losses(log: Path) -> dict[int, float]:
    """Return the mean losses in a log, each by the last of the steps that it averages."""
    try:
        records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        return {r["step"]: math.nan if r["loss"] is None else r["loss"] for r in records if r["event"] == "step"}
    except (OSError, ValueError, LookupError, TypeError) as error:
        sys.exit(f"{log}: is not a log of a run: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs=2, type=Path, metavar="LOG", help="a log of JSON lines")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="largest relative difference (default: 0.001)")
    arguments = parser.parse_args()

    first, second = map(read_losses, arguments.logs)
    steps = sorted(first)
    if not steps or steps != sorted(second):
        sys.exit(f"the logs do not hold the same steps: {len(steps)} and {len(second)} lines")

    names = [log.stem for log in arguments.logs]
    width = max(10, *map(len, names))
    height = max((loss for loss in first.values() if 0 < loss < math.inf), default=1.0)
    print(f"{'step':>6}  {names[0]:>{width}}  {names[1]:>{width}}  {'difference':>10}")
    for step in steps:
        a, b = first[step], second[step]
        bar = "█" * round(BAR * a / height) if 0 < a < math.inf else ""
        print(f"{step:>6}  {a:>{width}.6f}  {b:>{width}.6f}  {abs(a - b):>10.1e}  {bar}")

    worst = max(steps, key=lambda step: relative(first[step], second[step]))
    found = relative(first[worst], second[worst])
    print(f"largest difference: {found:.1e} of the loss, at step {worst} (allowed: {arguments.tolerance:g})")
    sys.exit(int(found > arguments.tolerance))


def relative(a: float, b: float) -> float:
    """Return |a - b| / |b|; infinite where that is not a number."""
    if a == b:
        return 0.0
    ratio = abs(a - b) / abs(b) if b else math.inf
    return math.inf if math.isnan(ratio) else ratio


if __name__ == "__main__":
    main()
