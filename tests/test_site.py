"""The site of the documentation: every page is prepared, its links lead to pages, and mkdocs.yml names all of them."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.site.pictures import DOCS, PICTURES, stamp_of
from docs.site.prepare import prepare
from quintsched.schedules import all_schedules

from .layers import ROOT


def named(nav: Any) -> Iterator[str]:
    for entry in nav if isinstance(nav, list) else [nav]:
        if isinstance(entry, dict):
            for inner in entry.values():
                yield from named(inner)
        else:
            yield entry


def test_pages_are_whole_and_named_in_the_navigation(tmp_path: Path) -> None:
    prepare(tmp_path, pictures=False)
    pages = {path.relative_to(tmp_path).as_posix(): path for path in tmp_path.rglob("*.md")}
    navigation = [*named(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])]
    assert sorted(navigation) == sorted(pages)
    assert {f"schedules/{one.name}.md" for one in all_schedules() if one.built_in} <= set(pages)
    for path in pages.values():
        prose = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", prose):
            assert (path.parent / link).exists(), f"{path.name}: {link}"


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_show_what_is_drawn_today(name: str, tmp_path: Path) -> None:
    drawn_by = "Chromium" if PICTURES[name].suffix == ".html" else "matplotlib"
    assert stamp_of(DOCS / name) == PICTURES[name].digest(tmp_path), f"`make docs` makes it anew, with {drawn_by}"


@pytest.mark.slow
@pytest.mark.processes
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: make docs")
    prepare(tmp_path / "pages")
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    config |= {"docs_dir": str(tmp_path / "pages"), "site_dir": str(tmp_path / "site")}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(tmp_path / "mkdocs.yml")]
    subprocess.run(command, check=True, timeout=300)
    for schedule in all_schedules():
        live = (tmp_path / "site" / "schedules" / "live" / f"{schedule.name}.html").read_text("utf-8")
        assert "http" not in re.sub(r"http://www\.w3\.org\S*", "", live[:2000])
