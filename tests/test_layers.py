"""Import rules of layers and rooms, read from the imports: the planner stands alone, runtime and viz depend on it only.

quintsched ◀── runtime      within each: rooms in an order, from the top (entry points) to the bottom; a room imports
    ▲                       only those after it, imports for type checkers included, and no files import each other
    └───────── viz          in a circle
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import pytest

from benchmarks.size import longest_chain, uses

from .layers import (
    IMPORTED_BY,
    INNER_ORDER,
    LAYERS,
    LOOK_ELSEWHERE,
    LOOKING,
    ORDER,
    ORDERED,
    ROOT,
    imports,
    meanings,
    module_of,
    room_of,
    sources,
    tree_of,
    within,
)

HEAVY = {"torch", "matplotlib", "safetensors", "sklearn"}
DRAWING = {
    *(ROOT / "quintsched" / "cli" / name for name in ("pictures.py", "simulate_and_compare.py")),
    *(ROOT / "quintsched" / name for name in ("cli/run_commands/report.py", "strategies/commands/tune_command.py")),
}
NAMING = {ROOT / "quintsched" / "__init__.py", ROOT / "quintsched" / "cli" / "__init__.py"}
"""Modules that list all commands and names, strategies included: no others beside that package know it."""

MOST_FILES, MOST_LINES, MOST_ROOMS_IN_A_CHAIN = 15, 400, 14
LONGEST_FUNCTION = 60

BUDGET = {
    "parallel": 6100,
    "saving": 3785,
    "interpreter": 3291,
    "comm": 2850,
    "splitting": 2622,
    "watch": 2066,
    "stage": 1970,
    "losses": 1993,
    "user_objects": 1798,
    "train": 1587,
    "weights_and_gradients": 1429,
    "launch": 1293,
    "blocks": 1274,
    "data": 1114,
    "guards": 1115,
    "examine": 1078,
    "optim": 1070,
    "step_setup": 774,
    "settings": 806,
    "run_checks": 776,
    "calibrate": 609,
    "models": 514,
    "autograd": 534,
    "agreement": 347,
    "engine_base": 137,
    "minimal": 120,
    "engine": 115,
    "plan_requirements": 79,
    "forward_engine": 35,
}
"""The most statements of each room of the runtime: a commit that makes one larger says so here."""

MOST_LINES_OF_PACKAGES = {"strategies": 12_200, "solve": 6_000}
"""The most lines of packages beside the planner: a law replaces what it replaces."""


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_keep_apart(layer):
    assert sources(layer)
    forbidden = {
        "quintsched": {"quintsched.runtime", "quintsched.viz", "quintsched.strategies", "runtime", "viz", *HEAVY},
        "quintsched.strategies": {"quintsched.runtime", "quintsched.viz", "runtime", "viz", *HEAVY},
        "quintsched.runtime": {"quintsched.viz", "quintsched.cli", "runtime", "viz", "matplotlib"},
        "quintsched.viz": {"quintsched.runtime", "quintsched.cli", "runtime", "viz", "torch", "safetensors"},
    }[layer]
    for path in sources(layer):
        for module, lazily in imports(path, layer):
            allowed = lazily and path in DRAWING and within(module, "quintsched.viz")
            allowed = allowed or (path in NAMING and within(module, "quintsched.strategies"))
            broken = [other for other in forbidden if within(module, other) and not allowed]
            assert not broken, f"{path.relative_to(ROOT)} imports {module}"


def require_order(layer: str, package: str, order: tuple[str, ...], *, whole: bool) -> None:
    """Assert that rooms of a package import only those below; `whole`: that all of its rooms are known."""
    for path in sources(layer):
        home = room_of(module_of(path, layer), package)
        for module, _ in imports(path, layer) if home in order else ():
            room = room_of(module, package)
            is_other = any(within(module, other) for other in LAYERS if other != layer and within(other, layer))
            if room != home and within(module, package) and not is_other:  # those: see above
                assert room in order or not whole, (
                    f"{path.relative_to(ROOT)} imports {module}; name the room that has it"
                )
                looks_up = room in order and order.index(home) > order.index(room)
                assert not looks_up, f"{path.relative_to(ROOT)} looks up to {module}"


@pytest.mark.parametrize("layer", ORDERED)
def test_a_room_imports_only_rooms_below_it(layer):
    found = {room_of(module_of(path, layer), layer) for path in sources(layer)} - {None, "__main__"}
    assert found == set(ORDER[layer]), "the order of rooms is not that of the folders"
    require_order(layer, layer, ORDER[layer], whole=True)
    for package, order in INNER_ORDER.items():
        if package.rpartition(".")[0] == layer:
            require_order(layer, package, order, whole=False)


def test_the_checker_of_certificates_knows_neither_search_nor_schedules():
    checker = [f"quintsched.solve.{n}" for n in ("check_order_certificate", "order_lower_bounds", "order_problem")]
    for name in checker:
        for module, _ in imports(ROOT.joinpath(*name.split(".")).with_suffix(".py"), "quintsched"):
            others = (room for room in ("quintsched.solve", "quintsched.schedules") if within(module, room))
            assert not any(others) or any(within(module, one) for one in checker), f"{name} imports {module}"


@pytest.mark.parametrize("package", IMPORTED_BY)
def test_a_room_is_imported_by_those_alone_that_pass_it_on(package):
    layer = package.rpartition(".")[0]
    users = {
        room_of(module_of(path, layer), layer)
        for path in sources(layer)
        for module, _ in imports(path, layer)
        if within(module, package)
    }
    assert users - {room_of(package, layer)} == IMPORTED_BY[package]


@pytest.mark.parametrize("layer", ORDERED)
def test_no_files_import_each_other_in_a_circle(layer):
    files = {module_of(path, layer): path for path in sources(layer)}
    uses: dict[str, set[str]] = {name: set() for name in files}
    for name, path in files.items():
        for module, _ in imports(path, layer):
            target = module if module in files else module.rpartition(".")[0]
            if target in files and target != name:
                uses[name].add(target)
    assert any(uses.values())
    try:
        TopologicalSorter(uses).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize("layer", ORDERED)
def test_rooms_and_files_are_small(layer):
    for path in sources(layer):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= MOST_LINES, f"{path.relative_to(ROOT)} has {lines} lines"
    for folder in {path.parent for path in sources(layer)} - {ROOT / "quintsched" / "schedules"}:  # one file for each
        files = len(list(folder.glob("*.py")))
        assert files <= MOST_FILES, f"{folder.relative_to(ROOT)} has {files} files"


def test_files_of_tests_are_small_and_import_no_test():
    for path in (ROOT / "tests").rglob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES, path.relative_to(ROOT)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                named = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                assert not any(name.startswith("test_") for name in named), f"{path.relative_to(ROOT)}:{node.lineno}"


@pytest.mark.parametrize("layer", LAYERS)
def test_functions_are_short(layer):
    for path in sources(layer):
        for node in ast.walk(tree_of(path)):
            lines = (node.end_lineno or 0) - node.lineno + 1 if isinstance(node, ast.FunctionDef) else 0
            assert lines <= LONGEST_FUNCTION, f"{path.relative_to(ROOT)}: {getattr(node, 'name', '')} has {lines} lines"


def test_chains_of_rooms_are_short():
    assert len(longest_chain(uses(LAYERS["quintsched.runtime"]))) <= MOST_ROOMS_IN_A_CHAIN


def test_names_of_modules_and_of_classes_of_the_runtime_have_one_meaning():
    """Each model has blocks of its own; "Split" is a part of a data set, and a model that is split."""
    names = Counter(path.name for layer in LAYERS for path in sources(layer) if not path.name.startswith("__"))
    assert not [name for name, times in names.items() if times > 1]
    files = (path for path in sources("quintsched.runtime") if path.parent.name != "models")
    names = Counter(name for path in files for name in meanings(tree_of(path)))
    assert [name for name, times in names.items() if times > 1] == ["Split"]


def test_rooms_keep_to_their_budgets():
    found = Counter[str]()
    for path in sources("quintsched.runtime"):
        room = path.relative_to(LAYERS["quintsched.runtime"]).with_suffix("").parts[0]
        found[room] += sum(isinstance(node, ast.stmt) for node in ast.walk(tree_of(path)))
    assert found.keys() - {"__init__", "__main__"} == BUDGET.keys()
    assert not {room: found[room] for room, most in BUDGET.items() if found[room] > most}
    for package, most in MOST_LINES_OF_PACKAGES.items():
        files = (ROOT / "quintsched" / package).rglob("*.py")
        assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= most, package


@pytest.mark.parametrize("layer", ORDERED)
def test_every_room_says_what_lives_there_and_what_it_may_import(layer):
    for folder in {path.parent for path in sources(layer)} - {LAYERS[layer]}:
        says = ast.get_docstring(tree_of(folder / "__init__.py")) or ""
        lines, place = [line for line in says.splitlines() if line], folder.relative_to(ROOT)
        assert (1 if folder.parent != LAYERS[layer] else 2) <= len(lines) <= 8, f"{place}: about five lines"
        assert re.search(r"\bimports?\b", says, re.IGNORECASE), f"{place} does not say what it may import"


FRAMES = {"_getframe", "currentframe", "f_back", "f_code", "f_locals", "f_globals"}
MODES = {"TorchFunctionMode", "TorchDispatchMode", "BaseTorchFunctionMode"}
OURS = re.compile(r"self(\._at)?|torch|recording|made|parser\..*")
"""Objects whose attributes may be read, as they are not a user's: this package's classes, and torch itself."""


def looks(tree: ast.Module) -> Iterator[str]:
    """Yield the ways in which a file looks into code and objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names}
            is_relative = isinstance(node, ast.ImportFrom) and node.level > 0
            known = {getattr(node, "module", ""), *(names if isinstance(node, ast.Import) else ())}
            yield from ["inspect"] * ("inspect" in known and not is_relative)
            yield from ["a frame"] * bool(names & FRAMES)
        elif isinstance(node, ast.Attribute):
            yield from ["a frame"] * (node.attr in FRAMES) + ["__code__"] * (node.attr == "__code__")
        elif isinstance(node, ast.Constant):
            yield from ["__code__"] * (node.value == "__code__")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "vars":
            yield from ["vars"] * (OURS.fullmatch(ast.unparse(node.args[0])) is None)
        elif isinstance(node, ast.ClassDef):
            yield from ["a mode"] * bool({ast.unparse(base).rpartition(".")[2] for base in node.bases} & MODES)


def test_only_examinations_look_at_users_code():
    runtime = LAYERS["quintsched.runtime"]
    files = {path.relative_to(runtime).as_posix(): path for path in sources("quintsched.runtime")}
    others = {name: path for name, path in files.items() if not name.startswith(LOOKING)}
    found = {name: {*looks(tree_of(path))} for name, path in others.items()}
    known = {name: ways for name, (ways, _) in LOOK_ELSEWHERE.items()}
    assert {name: ways for name, ways in found.items() if ways} == known, "ask user_objects or examine, or say why not"


STORED = re.compile(r"\.(json|jsonl|pt|bin|safetensors|distcp|metadata|yaml|npz)\b")
NAMED_ELSEWHERE = {
    "agreement/job_fingerprint_between_ranks.py": "which files of this package are its source",
    "calibrate/time_links.py": "what processes that measure links leave each other, in a folder of their own",
    "launch/verify_job.py": "what ranks have recorded for a comparison, in a folder of its own",
    "run_checks/nonfinite_steps.py": "a batch whose gradients were not finite, for people to read",
    "watch/connect_to_monitor.py": "the report of a run that stands still, for people to read",
}
"""Other files that name files, and which."""


def test_only_saving_knows_the_names_of_stored_files():
    runtime = LAYERS["quintsched.runtime"]
    found = set()
    for path in sources("quintsched.runtime"):
        words = {id(node.value) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Expr)}  # docstrings
        texts = (n for n in ast.walk(tree_of(path)) if isinstance(n, ast.Constant) and isinstance(n.value, str))
        if any(STORED.search(text.value) for text in texts if id(text) not in words):
            found.add(path.relative_to(runtime).as_posix())
    assert {name for name in found if not name.startswith("saving/")} == NAMED_ELSEWHERE.keys()
    assert len(found) > len(NAMED_ELSEWHERE)


KINDS = {"cuda", "xpu", "mps", "hpu", "npu", "accelerator"}


def test_kinds_of_accelerators_are_known_in_one_file():
    for path in sources("quintsched.runtime"):
        if path == ROOT / "runtime" / "comm" / "device.py":
            continue
        tree = tree_of(path)
        for node in ast.walk(tree):
            is_of_torch = (
                isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch"
            )
            named = node.attr if is_of_torch else node.value if isinstance(node, ast.Constant) else None
            assert named not in KINDS, f"{path.relative_to(ROOT)}, line {node.lineno}: ask comm.device"
        used = {part for module, _ in imports(path, "quintsched.runtime") for part in module.split(".")[:2]}
        assert not ("torch" in used and used & KINDS), f"{path.relative_to(ROOT)} imports of an accelerator"


def test_the_time_is_read_by_the_clocks_alone():
    clocks = {ROOT / "runtime" / name for name in ("comm/clocks.py", "watch/torch_free_clock.py")}
    for path in sources("quintsched.runtime"):
        read = {module for module, _ in imports(path, "quintsched.runtime") if within(module, "time")} - {"time.sleep"}
        assert not read or path in clocks, f"{path.relative_to(ROOT)} imports {read}"


HELP = """
import sys, quintsched, quintsched.cli
try: quintsched.cli.main(["--help"])
except SystemExit as end: assert end.code == 0
assert len(sys.modules) < 300, len(sys.modules)
heavy = {"torch", "matplotlib", "numpy", "networkx", "pydantic", "rich", "yaml"} & set(sys.modules)
assert not heavy, heavy
"""
PLANNER = """
import sys
sys.modules.update(dict.fromkeys(["torch", "matplotlib", "safetensors", "sklearn"], None))
import quintsched as qs, quintsched.viz
plan = qs.compile("1f1b", mesh="dp=2,pp=2,tp=2", microbatches=8)
assert plan.check().sound and plan.simulate().makespan == 27 and plan.graph()
assert qs.Plan.from_json(plan.to_json()) == plan
"""


@pytest.mark.processes
@pytest.mark.parametrize("code", [HELP, PLANNER], ids=["help is light", "the planner works without torch"])
def test_what_is_imported(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert ("compile" in done.stdout) == (code == HELP)
