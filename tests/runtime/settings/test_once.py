"""Settings are named, and have their defaults, in the room `settings` alone; what follows from a new one."""

import ast
import re
import sys
from pathlib import Path

import pytest

from quintsched.runtime.agreement.job_fingerprint_between_ranks import flatten
from quintsched.runtime.settings.engine_settings import RunSettings, SettingRule
from quintsched.runtime.settings.job_file import JobConfig, marked

from ...helpers.commands import run
from ...layers import sources, tree_of

ROOT = Path(__file__).parents[3]
SETTINGS = ROOT / "runtime" / "settings" / "engine_settings.py"

CHECK = """
import importlib.util
import inspect
import sys

NAME = "quintsched.runtime.settings.engine_settings"
spec = importlib.util.spec_from_file_location(NAME, sys.argv[1])
sys.modules[NAME] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

import pytest
import torch

import quintsched as qs
from quintsched.errors import MisfitError, UsageError
from quintsched.runtime import Engine, load_job, run_local
from quintsched.runtime.agreement.job_fingerprint_between_ranks import job_settings
from quintsched.runtime.agreement.settings_on_resume import require_kept


def engine(transport, warmup):
    plan = qs.compile("1f1b", mesh="dp=2", microbatches=1)
    loss, sgd = torch.nn.functional.mse_loss, lambda params: torch.optim.SGD(params, lr=0.1)
    return Engine(plan, [torch.nn.Linear(2, 2)], loss, sgd, warmup=warmup, transport=transport)


assert inspect.signature(Engine).parameters["warmup"].default == 0
assert "warmup: Steps before" in Engine.__doc__
assert run_local(2, lambda transport: engine(transport, 3).settings.warmup) == [3, 3]
with pytest.raises(MisfitError, match="engine.warmup is 0 on rank 0, but 1 on rank 1"):
    run_local(2, lambda transport: engine(transport, transport.rank))
with pytest.raises(UsageError, match="warmup: input should be greater than or equal to 0, not -1"):
    run_local(2, lambda transport: engine(transport, -1))

job, other = (load_job(sys.argv[2], [f"train.warmup={steps}"]) for steps in (3, 4))
assert job.run.warmup == job.train.warmup == 3
with pytest.raises(UsageError, match="train.warmup: input should be a valid integer"):
    load_job(sys.argv[2], ["train.warmup=few"])
with pytest.raises(MisfitError, match="train.warmup was 3 and is 4.*--override train.warmup"):
    require_kept(job_settings(job), job_settings(other), (), "the checkpoint")
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_new_setting_is_one_field(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    (field,) = re.findall(r"### A setting of runs\n.*?```python\n(.*?)```", page, re.DOTALL)
    source, first = SETTINGS.read_text(encoding="utf-8"), "    loss_over: "
    assert source.count(first) == 1
    changed, job = tmp_path / SETTINGS.name, tmp_path / "job.yaml"
    changed.write_text(source.replace(first, field + first), encoding="utf-8")
    job.write_text("")
    code, _, err = run(sys.executable, "-c", CHECK, changed, job)
    assert code == 0, err


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
