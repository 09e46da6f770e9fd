"""Fault injection in real processes: delay and accuracy of the report, by rank and instruction.

python benchmarks/faults.py                      300 faults on five meshes, 11 minutes on two cores; as root, with links
python benchmarks/faults.py --count 40 --json out.json
python benchmarks/faults.py --plain              the same faults in a pipeline written by hand with torch.distributed
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from cut_links import run_with_cut  # noqa: E402

from tests.runtime.faults.injection import all_injections  # noqa: E402
from tests.runtime.faults.judged import Judged, judge_all  # noqa: E402
from tests.runtime.faults.launched import plan_of_job  # noqa: E402
from tests.runtime.launch.hosts import why_no_hosts  # noqa: E402

JOBS = (("pp=3", "1f1b"), ("dp=2,pp=2", "1f1b"), ("pp=4", "zb-h1"), ("pp=2,tp=2", "1f1b"), ("dp=2,pp=3", "gpipe"))


def main() -> None:
    """Inject the faults, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plain", action="store_true")
    arguments = parser.parse_args()
    if arguments.plain:
        from plain_pipeline import judge_plain

        found = judge_plain()
    else:
        found = run_all(arguments.count, arguments.at_once)
    for line in table(found):
        sys.stdout.write(line + "\n")
    for one in found:
        if one.wrong or one.left or not one.placed:
            sys.stdout.write(f"\n{one.injection}: {one.code}, {one.left} left\n{one.said[-1500:]}\n")
    if arguments.json is not None:
        rows = [{"fault": one.injection.name, **vars(one), "injection": vars(one.injection)} for one in found]
        arguments.json.write_text(json.dumps(rows, indent=1))


def run_all(count: int, at_once: int) -> list[Judged]:
    """Inject so many faults, spread over the jobs; those of links where network namespaces can be made."""
    found, why = [], why_no_hosts()
    if why is not None:
        sys.stderr.write(f"no link is cut: {why}\n")
    for number, (mesh, schedule) in enumerate(JOBS):
        share = count // len(JOBS) + (number < count % len(JOBS))
        injections = all_injections(plan_of_job(mesh, schedule), share, seed=number, links=why is None)
        with tempfile.TemporaryDirectory() as folder:
            found += judge_all(injections, Path(folder), mesh, schedule=schedule, at_once=at_once, cut=run_with_cut)
        sys.stderr.write(f"{mesh} {schedule}: {share} faults\n")
    return found


def table(found: Sequence[Judged]) -> Iterable[str]:
    """Yield the lines of a table: a row for each kind of fault, and one for all."""
    yield "| fault | faults | rank right | instruction right | wrong | unknown | silent | told after, median | most |"
    yield "|---|---|---|---|---|---|---|---|---|"
    by_kind: dict[str, list[Judged]] = defaultdict(list)
    for one in found:
        by_kind[one.injection.kind].append(one)
    for kind, some in (*by_kind.items(), ("all", found)):
        told = sorted(one.told_s for one in some if one.told_s is not None)
        median, most = (f"{statistics.median(told):.2f} s", f"{told[-1]:.2f} s") if told else ("–", "–")
        counts = [sum(getattr(one, name) for one in some) for name in ("named", "placed", "wrong", "unknown", "silent")]
        yield f"| {kind} | {len(some)} | {' | '.join(map(str, counts))} | {median} | {most} |"
    yield f"\nprocesses left: {sum(one.left for one in found)}"


if __name__ == "__main__":
    main()
