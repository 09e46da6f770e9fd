"""README, docs and site: files, links and rooms that they name are there; the guide's code prints what it shows."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.site.pictures import DOCS, PICTURES, stamp_of
from docs.site.prepare import prepare
from quintsched.runtime.settings.job_file import load_job
from quintsched.schedules import all_schedules

from .layers import ORDER, ROOT
from .tutorials import blocks

INDEX = ROOT / "llms.txt"
PAGES = [INDEX, *sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
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


def test_the_index_for_programs_names_every_page_of_the_docs() -> None:
    named = re.findall(r"\]\((docs/[^)]*\.md)\)", INDEX.read_text(encoding="utf-8"))
    assert sorted(named) == sorted(page.relative_to(ROOT).as_posix() for page in PAGES if ROOT / "docs" in page.parents)


def test_the_map_of_the_code_names_every_room() -> None:
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    planner, runtime = re.findall(r"^(?:quintsched|runtime)/ .*\n((?:  .*\n)+)", page, re.MULTILINE)
    for text, layer in ((planner, "quintsched"), (runtime, "quintsched.runtime")):
        for room in ORDER[layer]:
            is_beside_engine = room.startswith("engine_")
            assert re.search(rf"\b{room}(/|\.py)", text) or is_beside_engine, f"{layer}: {room}"


def test_the_readme_can_be_read_at_one_go() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 200


GUIDE = ROOT / "docs" / "guide.md"
EXAMPLE = ROOT / "examples" / "tensor_parallel.py"
NEED_A_NETWORK = ("pip install ", "NCCL_DEBUG=INFO ")
"""Commands of the guide that no test runs."""


@pytest.mark.slow
@pytest.mark.processes
def test_code_of_the_guide_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", sysconfig.get_path("scripts"), prepend=os.pathsep)
    names: dict[str, Any] = {"__name__": "guide"}
    printed = ""
    for language, text in ((block.language, block.text) for block in blocks(GUIDE)):
        if language == "python" and text not in EXAMPLE.read_text(encoding="utf-8"):
            assert not printed, "the guide does not show what this prints"
            exec(compile(text, str(GUIDE), "exec"), names)
            printed = capsys.readouterr().out
        elif language == "text":
            assert text == printed
            printed = ""
        elif language == "bash":
            subprocess.run(["bash", "-ec", text], check=True, timeout=120, stdout=subprocess.DEVNULL)
        elif language == "yaml":
            (tmp_path / "job.yaml").write_text(text)
            load_job(tmp_path / "job.yaml")
        elif language == "console":
            assert all(line.startswith(NEED_A_NETWORK) for line in text.splitlines())
        else:
            assert language in ("", "python")  # sessions, which test_tutorials runs; figures; the example


@pytest.mark.parametrize("page", ["guide", "parallelism"])
def test_docs_show_the_example_of_tensor_parallelism_as_it_is(page: str) -> None:
    (shown,) = [block.text for block in blocks(ROOT / "docs" / f"{page}.md") if "deepcopy(whole), dist" in block.text]
    assert shown in EXAMPLE.read_text(encoding="utf-8")


def test_the_guide_names_every_field_of_the_log() -> None:
    train = ROOT / "runtime" / "train"
    records = [
        node
        for name in ("training_loop", "trainer", "forward_run")
        for node in ast.walk(ast.parse((train / f"{name}.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.Dict)
        and any(isinstance(key, ast.Constant) and key.value == "event" for key in node.keys)
    ]
    fields = {key.value for node in records for key in node.keys if isinstance(key, ast.Constant)}
    events = {node.values[0].value for node in records if isinstance(node.values[0], ast.Constant)}
    rates = re.findall(r'"(\w+_per_s|mfu|memory_gb)"', (train / "throughput.py").read_text(encoding="utf-8"))
    load = ROOT / "runtime" / "parallel" / "expert" / "expert_load.py"
    experts = re.findall(r'"(expert_\w+)"', load.read_text("utf-8"))
    assert len(rates) >= 4
    assert len(experts) >= 2
    log = GUIDE.read_text(encoding="utf-8").partition("## The log")[2].partition("## Troubleshooting")[0]
    assert {*fields, *events, *rates, *experts} <= {*re.findall(r"`(\w+)`", log)}


def test_references_are_those_that_the_code_names() -> None:
    page = (ROOT / "docs" / "references.md").read_text(encoding="utf-8")
    folders = ("quintsched", "runtime", "viz", "examples")
    files = {path.resolve() for folder in folders for path in (ROOT / folder).rglob("*.py")}
    code = " ".join(" ".join(path.read_text(encoding="utf-8").split()) for path in sorted(files))
    numbers = r"arXiv[: ](\d{4}\.\d{4,5})"
    assert {*re.findall(numbers, page)} == {*re.findall(numbers, code)}
    named = {*re.findall(r"([A-Z]\w+) et al\.,? (?:SC')?(\d{2,4})", code)}
    assert len(named) >= 25
    missing = {author for author, year in named if f"{author} et al. " not in page or year not in page}
    assert not missing


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


ROOT = Path(__file__).parents[1]
FOLDERS = ("runtime", "quintsched", "viz", "benchmarks", "examples", "tests")

RELATIVE = {
    *("What", "Who", "Which", "How", "Where", "When", "Why", "Whose", "Whom", "Whoever", "Whatever"),
    *("Such", "Those", "These", "That", "It", "They", "There", "If", "Something", "Somebody"),
}


def first_lines(path: Path) -> list[str]:
    """Return the first line of every docstring of a file, of those below assignments too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = getattr(statement, "value", None) if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value.strip():
                found.append(value.value.strip().splitlines()[0])
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_word_of_the_field(folder: str) -> None:
    found = 0
    for path in sorted((ROOT / folder).rglob("*.py")):
        for line in first_lines(path):
            found += 1
            assert line.split()[0] not in RELATIVE, f"{path.relative_to(ROOT)}: {line}"
    assert found


NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
DRAWN = {"first_plan": 5, "own_schedule": 3, "choose_a_strategy": 2}
"""Cells of each notebook whose value draws itself."""


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Run a cell, and return the value of the expression that it ends with, as Jupyter shows it."""
    tree = ast.parse(source)
    shown = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(shown.value), "cell", "eval"), names) if isinstance(shown, ast.Expr) else None


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_of_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    drawn = 0
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            value = run_cell("".join(cell["source"]), names)
            if hasattr(value, "_repr_html_"):
                assert "<table>" in value._repr_html_()
                drawn += 1
    assert drawn == DRAWN[path.stem]
    assert {"first_plan": {"both.png", "plan.html"}, "own_schedule": {"schedules.png", "waves.html"}}.get(
        path.stem, {"front.png"}
    ) == {file.name for file in tmp_path.iterdir()}


def test_notebooks_are_valid_and_have_no_outputs() -> None:
    assert {path.stem for path in NOTEBOOKS} == DRAWN.keys()
    for path in NOTEBOOKS:
        found = json.loads(path.read_text("utf-8"))
        assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
        assert len({cell["id"] for cell in found["cells"]}) == len(found["cells"])
        for cell in found["cells"]:
            needed = {"cell_type", "id", "metadata", "source"}
            assert cell.keys() == needed | ({"execution_count", "outputs"} if cell["cell_type"] == "code" else set())
            assert not cell.get("outputs")
