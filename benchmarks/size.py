"""Size of the runtime, room by room, and depth of its imports: the effort of reading it.

    python benchmarks/size.py                 lines, statements, tokens and names of the runtime's rooms
    python benchmarks/size.py quintsched      of the planner's; quintsched/strategies, viz

Statements are those of the syntax tree; tokens are those of Python without comments, docstrings and whitespace; names
are classes, functions and assignments at the top of modules, and those of them without an underscore. The chain is the
longest path from room to room by imports.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
_SPACE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


class Size(NamedTuple):
    """The size of some modules."""

    files: int = 0
    lines: int = 0
    statements: int = 0
    tokens: int = 0
    names: int = 0
    public: int = 0

    def plus(self, other: Size) -> Size:
        """Return the sum of both sizes."""
        return Size(*(mine + its for mine, its in zip(self, other, strict=True)))


def size_of(path: Path) -> Size:
    """Return the size of one module."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node, clean=False) is not None
    }
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in _SPACE and token.start not in docstrings
    ]
    names = list(_names(tree.body))
    return Size(
        files=1,
        lines=len(text.splitlines()),
        statements=sum(isinstance(node, ast.stmt) for node in ast.walk(tree)),
        tokens=len(tokens),
        names=len(names),
        public=sum(not name.startswith("_") for name in names),
    )


def _names(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield the names that a module defines at its top level."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        for target in node.targets if isinstance(node, ast.Assign) else []:
            yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def room_of(path: Path, package: Path) -> str:
    """Return the room that a module is in: a folder of the package, or a module beside them."""
    return path.relative_to(package).with_suffix("").parts[0]


def sizes(package: Path) -> dict[str, Size]:
    """Return the size of each room of a package."""
    found: dict[str, Size] = {}
    for path in modules(package):
        room = room_of(path, package)
        found[room] = found.get(room, Size()).plus(size_of(path))
    return found


def modules(package: Path) -> list[Path]:
    """Return the modules of a package, except those of nested packages."""
    own = {package / name for name in ("runtime", "viz", "strategies")}
    return [path for path in sorted(package.rglob("*.py")) if not own.intersection(path.parents)]


def uses(package: Path) -> dict[str, set[str]]:
    """Return the rooms that each room imports."""
    rooms = {room_of(path, package) for path in modules(package)} - {"__init__", "__main__"}
    found: dict[str, set[str]] = {room: set() for room in rooms}
    prefix = ".".join(package.relative_to(ROOT).parts)
    for path in modules(package):
        home, depth = room_of(path, package), len(path.relative_to(package).parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if home in rooms else ():
            if not isinstance(node, ast.ImportFrom):
                continue
            module = (node.module or "").split(".") if node.module else []
            if node.level == depth:
                found[home] |= {module[0]} & rooms if module else {alias.name for alias in node.names} & rooms
            elif not node.level and node.module and node.module.startswith(f"{prefix}."):
                found[home] |= {node.module.removeprefix(f"{prefix}.").split(".")[0]} & rooms
    return {room: others - {room} for room, others in found.items()}


def longest_chain(uses: Mapping[str, Set[str]]) -> list[str]:
    """Return the longest path from room to room."""

    @cache
    def below(room: str) -> tuple[str, ...]:
        ways: list[tuple[str, ...]] = [below(other) for other in sorted(uses[room])]
        return (room, *max(ways, key=len, default=()))

    chains = [below(room) for room in sorted(uses)]
    return list(sorted(chains, key=len)[-1]) if chains else []


def main() -> None:
    """Print a table."""
    package = ROOT / (sys.argv[1] if len(sys.argv) > 1 else "runtime")
    found = sizes(package)
    total = Size()
    for size in found.values():
        total = total.plus(size)
    print(f"{'room':<20}" + "".join(f"{name:>12}" for name in Size._fields))
    for room, size in [*sorted(found.items(), key=lambda item: -item[1].lines), ("together", total)]:
        print(f"{room:<20}" + "".join(f"{number:>12,}" for number in size))
    chain = longest_chain(uses(package))
    print(f"\nlongest chain: {len(chain)} rooms: {' > '.join(chain)}")


if __name__ == "__main__":
    main()
