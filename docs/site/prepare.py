"""`python -m docs.site.prepare FOLDER`: the pages of the site, with one page for each schedule.

    README.md, docs/**/*.md, CHANGELOG.md …   ──▶  the same pages, links between them kept
    every schedule                            ──▶  schedules/NAME.md with its picture and its interactive page

Links to files of the repository that are no pages become their names.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import quintsched as qs
from quintsched.schedules import Schedule, all_schedules
from quintsched.viz import render, save_page

ROOT = Path(__file__).parents[2]
OF_ROOT = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Pages outside docs/, and their names in the site."""
COPIED = (".png", ".json", ".html")
RANKS, MICROBATCHES = 4, 8
_LINK = re.compile(r"(!?)\[([^\]\[]*)\]\((?!\w+:|#)([^)#\s]*)(#[^)\s]*)?\)")


def prepare(folder: Path, *, pictures: bool = True) -> None:
    """Write all pages into a folder; without `pictures`, those of schedules have neither picture nor page."""
    places = dict(_places())
    for source, place in places.items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            target.write_text(_linked(source, place, places), encoding="utf-8")
        else:
            shutil.copyfile(source, target)
    (folder / "schedules" / "live").mkdir(parents=True, exist_ok=True)
    for schedule in filter(lambda schedule: schedule.built_in, all_schedules()):
        _write_schedule(schedule, folder / "schedules", pictures=pictures)


def _places() -> Iterator[tuple[Path, str]]:
    for name, place in OF_ROOT.items():
        yield ROOT / name, place
    yield ROOT / "llms.txt", "llms.txt"
    for path in sorted((ROOT / "docs").rglob("*")):
        if path.suffix == ".md" or path.suffix in COPIED:
            yield path, path.relative_to(ROOT / "docs").as_posix()


def _linked(source: Path, place: str, places: Mapping[Path, str]) -> str:
    """Return a page's text with its links as they are within the site."""

    def moved(match: re.Match[str]) -> str:
        picture, said, path, anchor = match[1], match[2], match[3], match[4] or ""
        found = places.get((source.parent / path).resolve())
        if found is None:
            return said
        return f"{picture}[{said}]({os.path.relpath(found, Path(place).parent or '.')}{anchor})"

    fences = re.split(r"(^```.*?^```\n)", source.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _LINK.sub(moved, part) for part in fences)


def plan_of(schedule: Schedule) -> qs.Plan:
    """Compile the plan that a schedule's page shows."""
    chunks = min(max(2, schedule.min_chunks), schedule.max_chunks)
    slices = min(2, schedule.max_slices)
    return qs.compile(schedule, mesh=f"pp={RANKS}", microbatches=MICROBATCHES, chunks=chunks, slices=slices)


def _write_schedule(schedule: Schedule, folder: Path, *, pictures: bool) -> None:
    name, plan = schedule.name, plan_of(schedule)
    simulation = plan.simulate()
    if pictures:
        render(simulation, folder / f"{name}.png")
        save_page(simulation, (), folder / "live" / f"{name}.html")
    sizes = {"chunks": plan.schedule.chunks, "slices": plan.schedule.slices}
    flags = "".join(f" --{option} {value}" for option, value in sizes.items() if value > 1)
    also = f" Also called {', '.join(schedule.aliases)}." if schedule.aliases else ""
    lines = [
        f"# {name}",
        "",
        f"{schedule.summary[:1].upper()}{schedule.summary[1:]}.{also}",
        "",
        "| | |",
        "|---|---|",
        f"| bubble | {schedule.bubble or 'searched'} |",
        f"| activations on a rank, in microbatches | {schedule.memory or 'searched'} |",
        f"| with {RANKS} ranks, {MICROBATCHES} microbatches, unit costs | a bubble of {simulation.bubble:.1%} |",
        f"| proof | {plan.check().explain().splitlines()[0]} |",
        "",
        "P ranks, M microbatches, v chunks, q slices; F, I, W: the time of a forward, of a backward to its",
        "inputs and of one to its weights; r: the rank, from 0. [Schedules](../schedules.md) compares all of them.",
        "",
    ]
    if pictures:
        lines += [f"![{name} on {RANKS} ranks]({name}.png)", "", f"[The interactive page](live/{name}.html)", ""]
    command = (
        f"quintsched compile --schedule {name} --mesh pp={RANKS} --microbatches {MICROBATCHES}{flags} -o plan.json"
    )
    lines += ["```console", command, "quintsched render plan.json -o plan.html", "```", ""]
    (folder / f"{name}.md").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
