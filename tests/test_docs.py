"""README and docs name files that there are, link to places that there are, and map every room of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .test_layers import ORDER, ROOT

PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
ROOTS = ("quintsched", "runtime", "viz", "tests", "benchmarks", "examples", "docs")


def anchors(page: Path) -> set[str]:
    """Return what a link to a heading of a page may end with."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_are_named_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(rf"`((?:{'|'.join(ROOTS)})/[\w./-]*)[`:]", text)
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8")):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def test_the_map_of_the_code_names_every_room() -> None:
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    planner, runtime = re.findall(r"^(?:quintsched|runtime)/ .*\n((?:  .*\n)+)", page, re.MULTILINE)
    for text, layer in ((planner, "quintsched"), (runtime, "quintsched.runtime")):
        for room in ORDER[layer]:
            is_beside_engine = room.startswith("engine_")
            assert re.search(rf"\b{room}(/|\.py)", text) or is_beside_engine, f"{layer}: {room}"


def test_the_readme_can_be_read_at_one_go() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 200
