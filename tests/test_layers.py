"""Who may import whom, read from the imports: the planner stands alone, runtime and viz stand on it, apart."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "matplotlib", "safetensors", "sklearn"}
LAYERS = {"quintsched.runtime": ROOT / "runtime", "quintsched.viz": ROOT / "viz", "quintsched": ROOT / "quintsched"}
DRAWING = {ROOT / "quintsched" / "cli" / name for name in ("pictures.py", "timing.py")}


def sources(layer: str) -> list[Path]:
    links = {ROOT / "quintsched" / "runtime", ROOT / "quintsched" / "viz"} if layer == "quintsched" else set()
    return [path for path in sorted(LAYERS[layer].rglob("*.py")) if not links.intersection(path.parents)]


def module_of(path: Path, layer: str) -> str:
    parts = path.relative_to(LAYERS[layer]).with_suffix("").parts
    return ".".join((layer, *(part for part in parts if part != "__init__")))


def imports(path: Path, layer: str) -> Iterator[tuple[str, bool]]:
    """Yield each imported module or name, with whether a function imports it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    package = module_of(path, layer).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            home = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((f"{home}.{alias.name}", id(node) in inside) for alias in node.names)


def within(module: str, layer: str) -> bool:
    return module == layer or module.startswith(f"{layer}.")


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_keep_apart(layer):
    assert sources(layer)
    forbidden = {
        "quintsched": {"quintsched.runtime", "quintsched.viz", "runtime", "viz", *HEAVY},
        "quintsched.runtime": {"quintsched.viz", "quintsched.cli", "runtime", "viz", "matplotlib"},
        "quintsched.viz": {"quintsched.runtime", "quintsched.cli", "runtime", "viz", "torch", "safetensors"},
    }[layer]
    for path in sources(layer):
        for module, lazily in imports(path, layer):
            allowed = lazily and path in DRAWING and within(module, "quintsched.viz")
            broken = [other for other in forbidden if within(module, other) and not allowed]
            assert not broken, f"{path.relative_to(ROOT)} imports {module}"


@pytest.mark.parametrize("layer", ["quintsched.runtime", "quintsched.viz"])
def test_siblings_are_imported_relatively(layer):
    for path in sources(layer):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert not within(node.module or "", layer), f"{path.relative_to(ROOT)} names itself as {node.module}"


def test_the_command_line_imports_nothing_heavy_at_the_top():
    light = ("quintsched.cli", "quintsched.errors", "quintsched.request", "quintsched.ir.communication")
    for path in (ROOT / "quintsched" / "cli").glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and within(node.module or "", "quintsched"):
                assert any(within(node.module or "", module) for module in light), f"{path.name}: {node.module}"


@pytest.mark.processes
def test_help_is_light():
    code = (
        "import sys, quintsched, quintsched.cli\n"
        "try: quintsched.cli.main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "import resource; used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "assert used.ru_utime + used.ru_stime < 0.3, used\n"
        "heavy = {'torch', 'matplotlib', 'numpy', 'networkx', 'pydantic', 'rich', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "compile" in done.stdout


@pytest.mark.processes
def test_the_planner_works_without_torch_and_matplotlib():
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['torch', 'matplotlib', 'safetensors', 'sklearn'], None))\n"
        "import quintsched as qs\n"
        "plan = qs.compile('1f1b', mesh='dp=2,pp=2,tp=2', microbatches=8)\n"
        "assert plan.check().sound and plan.simulate().makespan == 27 and plan.graph()\n"
        "assert qs.Plan.from_json(plan.to_json()) == plan"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
