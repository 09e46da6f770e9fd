"""Docstrings begin with a verb or a noun of the field, never with a relative clause."""

import ast
from pathlib import Path

import pytest

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
