"""Matrix of model families of transformers and timm by meshes: does each train there as in one process?

    python benchmarks/families.py [--family llama] [--mesh tp2] [--json] [--table]

    equal      losses and weights of two steps are those of one process, in float64 as if gradients were equal to 1e-9;
               in bf16 they are at most 1.5 times as far from float64's as those of one process in bf16
    refused    one line before the first step gives the reason, and an alternative
    wrong, crash, hang      must not be: the exit status is 1 if any cell is

Each family runs in a process of its own, with its ranks as threads. Models are tiny and randomly initialized; nothing
is downloaded. It needs the extra `families`. `--table` prints the table of docs/families.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.runtime.families.cells import BAD, MESHES, Verdict, judge  # noqa: E402
from tests.runtime.families.every import FAMILIES, family_named  # noqa: E402

SECONDS_PER_CELL = 120
MARKS = {"equal": "=", "refused": "refused", "": ""}


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix."""

    family: str
    mesh: str
    verdict: Verdict

    def line(self) -> str:
        return f"{self.family:20} {self.mesh:14} {self.verdict.result:8} {self.verdict.why}"


def known_families(wanted: Iterable[str] | None) -> list[str]:
    """Return the whole names of families wanted by whole name, name or library; all, if nothing is."""
    if not wanted:
        return list(FAMILIES)
    words = set(wanted)
    found = [name for name, family in FAMILIES.items() if words & {name, family.name, family.library}]
    unknown = words - {word for name in found for word in (name, *name.split("/"))}
    if unknown:
        raise SystemExit(f"there is no family {sorted(unknown)[0]!r}; there is: {', '.join(FAMILIES)}")
    return found


def in_process(family: str, meshes: Sequence[str]) -> None:
    """Judge cells of a family in this process, and print each as a line of JSON."""
    for mesh in meshes:
        print(json.dumps({"mesh": mesh, **asdict(judge(family_named(family), MESHES[mesh]))}), flush=True)


def cells_of(family: str, meshes: Sequence[str]) -> Iterator[Cell]:
    """Judge cells of a family in processes of their own: a cell in which a process stops is a crash, or a hang."""
    left = [mesh for mesh in meshes if MESHES[mesh].takes(family_named(family))]
    while left:
        command = [sys.executable, __file__, "--child", family, *(word for mesh in left for word in ("--mesh", mesh))]
        output, end = _run(command, SECONDS_PER_CELL * len(left))
        for line in output.splitlines():
            if line.startswith('{"mesh"'):
                found = json.loads(line)
                left.remove(mesh := found.pop("mesh"))
                yield Cell(family, mesh, Verdict(**found))
        if left and end is not None:
            yield Cell(family, left.pop(0), end)


def _run(command: Sequence[str], seconds: float) -> tuple[str, Verdict | None]:
    """Return a process's output, and the verdict if it crashed or hung."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment, check=False)
    except subprocess.TimeoutExpired as error:
        output: Any = error.stdout or b""
        return output if isinstance(output, str) else output.decode(), Verdict("hang", f"after {seconds:.0f} s")
    last = (done.stderr.strip().splitlines() or ["it printed nothing else"])[-1]
    return done.stdout, Verdict("crash", f"the process ended with {done.returncode}: {last}")


def table(cells: Sequence[Cell], meshes: Sequence[str]) -> str:
    """Return the matrix as a table of Markdown: a row per family, a column per mesh."""
    rows: dict[str, dict[str, str]] = {}
    for cell in cells:
        rows.setdefault(cell.family, {})[cell.mesh] = cell.verdict.result
    lines = [f"| | {' | '.join(meshes)} |", f"|---|{'---|' * len(meshes)}"]
    for family, found in rows.items():
        marks = (MARKS.get(found.get(mesh, ""), f"**{found.get(mesh)}**") for mesh in meshes)
        lines.append(f"| {family} | {' | '.join(marks)} |")
    counts = (f"{sum(found.get(mesh) == 'equal' for found in rows.values())}" for mesh in meshes)
    sizes = (f"{sum(mesh in found for found in rows.values())}" for mesh in meshes)
    lines.append(f"| equal | {' | '.join(f'{n} of {m}' for n, m in zip(counts, sizes, strict=True))} |")
    return "\n".join(lines)


def summary(cells: Sequence[Cell]) -> Mapping[str, int]:
    """Return the number of cells by result."""
    return dict(Counter(cell.verdict.result for cell in cells))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", action="append", help="a family's name, or a library; all, if there is none")
    parser.add_argument("--mesh", action="append", choices=list(MESHES), help="a column; all, if there is none")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each cell")
    parser.add_argument("--table", action="store_true", help="print the table of the documentation")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    meshes = options.mesh or list(MESHES)
    if options.child:
        in_process(options.child, meshes)
        return 0
    missing = [name for name in ("transformers", "timm") if find_spec(name) is None]
    if missing:
        print(f"{' and '.join(missing)} are not here; pip install -c constraints.txt -e '.[families]' installs them")
        return 0
    cells = []
    for family in known_families(options.family):
        for cell in cells_of(family, meshes):
            cells.append(cell)
            if not options.table:
                found = {"family": cell.family, "mesh": cell.mesh, **asdict(cell.verdict)}
                print(json.dumps(found) if options.json else cell.line(), flush=True)
    if options.table:
        print(table(cells, meshes))
    elif not options.json:
        print(summary(cells))
    return int(any(cell.verdict.result in BAD for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
