"""Descriptions below assignments in the source: of constants and of attributes of classes."""

from __future__ import annotations

import ast
import copy
import inspect
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType


@cache
def _tree(path: str) -> ast.Module:
    return ast.parse(Path(path).read_text(encoding="utf-8"))


def constants(module: ModuleType) -> dict[str, str]:
    """Return the description of each name that a module assigns and describes."""
    return _described(_tree(module.__file__ or "").body)


def attributes(kind: type) -> dict[str, str]:
    """Return the description of each attribute that a class declares and describes, without those of its bases."""
    return _described(_body(kind))


def annotations(kind: type) -> dict[str, str]:
    """Return the type of each attribute as a class and its bases write it, without constraints on it."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        for node in _body(one):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = ast.unparse(_Plain().visit(copy.deepcopy(node.annotation)))
    return found


class _Plain(ast.NodeTransformer):
    """Replaces `Annotated[X, …]` by X."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """Visit one subscript."""
        is_annotated = isinstance(node.value, ast.Name) and node.value.id == "Annotated"
        inner = node.slice.elts[0] if is_annotated and isinstance(node.slice, ast.Tuple) else None
        return self.generic_visit(node) if inner is None else self.visit(inner)


def _body(kind: type) -> list[ast.stmt]:
    if not kind.__module__.startswith("quintsched"):
        return []
    try:
        tree = _tree(inspect.getfile(kind))
    except (OSError, TypeError):
        return []
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == kind.__qualname__)
    return next((node.body for node in nodes), [])


def _described(body: list[ast.stmt]) -> dict[str, str]:
    found: dict[str, str] = {}
    for node, after in pairwise(body):
        names = list[str]()
        for target in node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]:
            names += [name.id for name in getattr(target, "elts", [target]) if isinstance(name, ast.Name)]
        words = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
        if isinstance(words, str):
            found |= dict.fromkeys(names, inspect.cleandoc(words))
    return found
