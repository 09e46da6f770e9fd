"""`python -m docs.site.pictures`: the pictures in docs/; those are made anew whose contents have changed.

plan ──▶ page ──▶ Chromium ──▶ docs/page.png        each has the digest of what it shows within the file, so that
plan ──▶ matplotlib ─────────▶ docs/timeline.png    a test sees without a browser whether one is out of date
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import quintsched as qs
from quintsched.ir.instruction_set import Fwd, RecvAct, RecvGrad
from quintsched.stalls.culprit import find_culprit
from quintsched.stalls.last_reported_rank_states import Fate, RankState
from quintsched.viz import compare, render, render_measured, render_stall
from tests.traces import write_trace
from tests.viz.browser import CHROMIUM, browser

DOCS = Path(__file__).parents[1]
STAMP = b"tEXtshows\0"
HEADER = 33
"""Bytes of a PNG file in front of its second chunk."""

GAP = "quintsched.showGap(quintsched.needWaits().gaps(0)[0])"
DEADLOCK = """const { plan, playground } = quintsched; playground.toggle();
const rows = [...Array(plan.first[1]).keys()].filter((row) => plan.unit[row] === 0);
playground.move(rows.find((row) => plan.is(row, "Bwd")), rows.find((row) => plan.is(row, "Fwd")));
quintsched.setMode("planned"); quintsched.showVerdict()"""
PUZZLE = """quintsched.playground.toggle(); const list = document.querySelector("[aria-label=puzzle]");
list.value = 7; list.dispatchEvent(new Event("change"))"""


@dataclass(frozen=True)
class Picture:
    """A picture: `make` writes its page, or its drawing as SVG; `act` is run on the page."""

    make: Callable[[Path], None]
    act: str = ""
    suffix: str = ".html"

    def contents(self, folder: Path) -> bytes:
        """Return the page or the drawing."""
        self.make(folder / f"made{self.suffix}")
        return (folder / f"made{self.suffix}").read_bytes()

    def digest(self, folder: Path) -> str:
        """Return the digest of what it shows."""
        made = self.contents(folder)
        return hashlib.sha256((_shown(made) if self.suffix == ".html" else made) + self.act.encode()).hexdigest()


def _plan(name: str = "1f1b", mesh: str = "pp=4") -> qs.Plan:
    return qs.compile(name, mesh=mesh, microbatches=8)


def _page(path: Path) -> None:
    render(_plan(mesh="dp=2,pp=4").simulate(qs.Costs(p2p=0.25)), path)


def _timeline(path: Path) -> None:
    render(_plan().simulate(), path)


def _compared(path: Path) -> None:
    compare([_plan(name).simulate() for name in ("1f1b", "zb-h1")], path)


def _measured(path: Path) -> None:
    simulation = _plan().simulate(qs.Costs(unit="ms", forward=3, backward_input=3, backward_weight=3, p2p=0.5))
    with tempfile.TemporaryDirectory() as folder:
        trace = write_trace(Path(folder), simulation, scales=(1.2, 1.4))
        render_measured(simulation, trace.select("2"), path)


def _stall(path: Path) -> None:
    """Draw the stall of the tutorial "When a rank dies": rank 2 is killed within a forward."""
    plan, killed = _plan(), Fate("signal", 9)
    stopped = RecvGrad(0, 4, 1), RecvGrad(1, 4, 2), Fwd(2, 5), RecvAct(3, 5, 2)
    states = [
        RankState(
            rank, "vm", rank, "step", 19, "train", program.index(at), 0.3, 0.1, killed if rank == 2 else None, None, 19
        )
        for rank, (program, at) in enumerate(zip(plan.programs, stopped, strict=True))
    ]
    render_stall(find_culprit(plan, states), path)


PICTURES = {
    "page.png": Picture(_page, GAP),
    "path.png": Picture(_page, "quintsched.setTheme(); quintsched.walkPath(); quintsched.walkPath()"),
    "measured.png": Picture(_measured, "quintsched.setMode('difference')"),
    "compared.png": Picture(_compared),
    "playground.png": Picture(_page, DEADLOCK),
    "puzzle.png": Picture(_page, PUZZLE),
    "timeline.png": Picture(_timeline, suffix=".svg"),
    "stall.png": Picture(_stall, suffix=".svg"),
}


def _shown(page: bytes) -> bytes:
    """Return what a page shows: its program, and its plans with their times; not the planner's tables."""
    text = page.decode()
    (packed,) = re.findall(r'<script id="data" type="text/plain">([^<]*)<', text)
    data = gzip.decompress(base64.b64decode(packed))
    end = 4 + int.from_bytes(data[:4], "little")
    head = json.loads(data[4:end])
    shown = [(plan["title"], plan["runs"]) for plan in head["plans"]]
    return json.dumps(shown).encode() + data[end:] + text.split(packed)[1].encode()


def stamp_of(path: Path) -> str | None:
    """Return the digest within a picture; None without one."""
    data = path.read_bytes() if path.exists() else b""
    return data[HEADER + 4 + len(STAMP) :][:64].decode() if data[HEADER + 4 :].startswith(STAMP) else None


def _stamped(png: bytes, digest: str) -> bytes:
    chunk = STAMP + digest.encode()
    added = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return png[:HEADER] + added + png[HEADER:]


def draw(names: list[str]) -> None:
    """Make pictures."""
    with tempfile.TemporaryDirectory() as made, browser(Path(made) / "profile") as page:
        for name in names:
            picture, path = PICTURES[name], DOCS / name
            digest = picture.digest(Path(made))
            if picture.suffix == ".svg":
                picture.make(path)
            else:
                page.open(Path(made) / "made.html")
                page.evaluate(f"{{ {picture.act} }}")
                page.settle()
                page.evaluate("new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)))")
                page.screenshot(path)
            path.write_bytes(_stamped(path.read_bytes(), digest))


def outdated(folder: Path) -> list[str]:
    """Return the names of pictures that are out of date."""
    return [name for name, one in PICTURES.items() if stamp_of(DOCS / name) != one.digest(folder)]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        old = outdated(Path(scratch))
    if old and CHROMIUM is None:
        sys.exit(f"out of date: {', '.join(old)}; install Chromium to make them anew")
    if old:
        draw(old)
