"""Settings are named, and have their defaults, in the room `settings` alone."""

import ast

from quintsched.runtime.agreement.job_fingerprint_between_ranks import flatten
from quintsched.runtime.settings.engine_and_job_settings import RunSettings, SettingRule
from quintsched.runtime.settings.job_file import JobConfig, marked

from ...layers import sources, tree_of

WHOLE = (
    {name for name, _ in flatten(JobConfig().model_dump())} - {*marked(SettingRule.OPEN)} - {"mode"}
)  # torch's word, too
MOST = 3
"""So many names of settings a class or a function may have by chance, or to act on them."""


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


def test_no_other_room_names_a_setting_or_states_settings_and_their_defaults() -> None:
    assert len(WHOLE) > 70
    assert {"train.clip", "runtime.precision", "model.tied"} <= WHOLE | {*marked(SettingRule.OPEN)}
    others = [path for path in sources("quintsched.runtime") if path.parent.name != "settings"]
    for path, node in ((file, node) for file in others for node in ast.walk(tree_of(file))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = node.value.partition("=")[0]
            assert named not in WHOLE, f"{path}, line {node.lineno} names {named}: mark it in settings"
        found = with_defaults(node) & RunSettings.model_fields.keys()
        assert len(found) < MOST, f"{path} states {sorted(found)}: take RunSettings"
