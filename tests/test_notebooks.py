"""Notebooks: valid files, whose cells all run in order, and whose results draw themselves."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
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
