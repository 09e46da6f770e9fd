"""Settings are named, and have their defaults, in the room `settings` alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from quintsched.runtime.agreement.run_records import flatten
from quintsched.runtime.settings.job_file import JobConfig, marked
from quintsched.runtime.settings.run_settings import RunSettings, SettingRule

ROOT = Path(__file__).parents[3]
WHOLE = (
    {name for name, _ in flatten(JobConfig().model_dump())} - {*marked(SettingRule.OPEN)} - {"mode"}
)  # torch's word, too
MOST = 3
"""So many names of settings a class or a function may have by chance, or to act on them."""


def others() -> Iterator[tuple[str, ast.AST]]:
    for path in sorted((ROOT / "runtime").rglob("*.py")):
        if "settings" not in path.relative_to(ROOT / "runtime").parts:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                yield f"{path.relative_to(ROOT)}, line {getattr(node, 'lineno', 0)}", node


def with_defaults(node: ast.AST) -> set[str]:
    """Return what a function or a class gives defaults to."""
    if isinstance(node, ast.FunctionDef):
        plain = (*node.args.posonlyargs, *node.args.args)[-len(node.args.defaults) :] if node.args.defaults else ()
        named = [one for one, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if default]
        return {one.arg for one in (*plain, *named)}
    if isinstance(node, ast.ClassDef):
        fields = (one for one in node.body if isinstance(one, ast.AnnAssign) and one.value is not None)
        return {one.target.id for one in fields if isinstance(one.target, ast.Name)}
    return set()


def test_there_are_settings_to_look_for() -> None:
    assert len(WHOLE) > 70
    assert {"train.clip", "runtime.precision", "model.tied"} <= WHOLE | {*marked(SettingRule.OPEN)}


def test_no_other_room_names_a_setting() -> None:
    for where, node in others():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert node.value.partition("=")[0] not in WHOLE, f"{where} names {node.value}: mark it in settings"


def test_no_other_room_states_settings_and_their_defaults() -> None:
    for where, node in others():
        found = with_defaults(node) & set(RunSettings.model_fields)
        assert len(found) < MOST, f"{where} states {sorted(found)}: take RunSettings"
