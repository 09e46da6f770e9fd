"""Layers and rooms of the code, in their order, and what their files import."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYERS = {
    "quintsched.runtime": ROOT / "runtime",
    "quintsched.viz": ROOT / "viz",
    "quintsched.strategies": ROOT / "quintsched" / "strategies",
    "quintsched": ROOT / "quintsched",
}
ORDER: dict[str, tuple[str, ...]] = {
    "quintsched.runtime": (
        "minimal",
        "launch",
        "calibrate",
        "train",
        "engine",
        "forward_engine",
        "engine_base",
        "plan_requirements",
        "run_checks",
        "examine",
        "interpreter",
        "step_setup",
        "saving",
        "weights_and_gradients",
        "optim",
        "stage",
        "models",
        "splitting",
        "guards",
        "parallel",
        "losses",
        "blocks",
        "data",
        "autograd",
        "agreement",
        "user_objects",
        "comm",
        "watch",
        "settings",
    ),
    "quintsched.viz": (
        "frontier",
        "runs",
        "draw_timeline",
        "timeline_window",
        "activation_panel",
        "idle_panel",
        "legend",
        "figure_sheet",
        "pipeline_rows",
        "house_style",
        "write_chrome_trace",
        "page",
        "instruction_colours",
        "collective_scene",
        "timeline_objects",
    ),
    "quintsched.strategies": ("commands", "tuning", "prediction", "profiles", "descriptions"),
    "quintsched": (
        "cli",
        "testing",
        "check_many_shapes",
        "solve",
        "recorded_runs",
        "compiler",
        "request",
        "import_user_code",
        "stalls",
        "torch_csv",
        "plan",
        "trace",
        "formats",
        "passes",
        "verify",
        "text",
        "schedules",
        "simulation",
        "collectives",
        "graph",
        "instructions",
        "ir",
        "tokens",
        "files",
        "check_call_arguments",
        "errors",
    ),
}
"""The rooms of each layer from top to bottom: folders, or modules beside them. Empty: no order yet, no check."""

INNER_ORDER = {"quintsched.runtime.parallel": ("cut_proofs", "tensor", "expert", "context")}
"""The folders of a room, from top to bottom; the files beside them may be anywhere."""

IMPORTED_BY = {"quintsched.runtime.examine": {"engine"}}
"""Rooms that those named here alone import, and pass on to the rooms below."""

LOOKING = ("examine", "guards", "losses/experiments", "user_objects", "parallel/cut_proofs")
"""Rooms that inspect user code: examinations, the walks of `user_objects` below, and the proofs of cuts of blocks."""

LOOK_ELSEWHERE = {
    "blocks/failing_submodule_from_traceback.py": ({"a frame"}, "an error's traceback: where in a block it arose"),
    "data/torch_loader_position.py": ({"a frame"}, "torch's loader in a traceback: which worker has ended"),
    "interpreter/errors_with_rank_and_stage.py": ({"a frame", "__code__"}, "whether our own call of autograd failed"),
    "blocks/block_builders.py": ({"vars"}, "builds stand-ins of blocks"),
    "blocks/trees.py": ({"vars"}, "whether tensors have attributes, which do not go to other stages"),
    "losses/save_and_restore_loss_state.py": ({"__code__"}, "numbers in a loss's code, which its targets may be"),
    "optim/tensors_each_optimizer_needs.py": (
        {"inspect", "__code__", "vars"},
        "whether an update goes by other parameters",
    ),
    "splitting/state_between_layers.py": ({"vars"}, "whether attributes that layers share change"),
    "optim/step_on_gathered_matrices.py": ({"a mode"}, "refuses draws of an optimizer, as it steps"),
    "parallel/seeded_block_draws.py": ({"__code__", "a mode"}, "keys what blocks draw, in each step; torch's own code"),
    "parallel/synced_norm.py": ({"a mode"}, "adds up the statistics of norms over replicas, in each step"),
    "splitting/split_whole_model.py": ({"vars"}, "whether a row of modules is called as torch calls it"),
    "splitting/layer_and_segment_blocks.py": ({"inspect", "vars"}, "makes blocks of a layer"),
    "splitting/find_layers.py": ({"vars"}, "makes a module that has a tied weight, and all else of another"),
    "splitting/thread_safe_fx_tracer.py": ({"vars"}, "traces a whole model by torch.fx, which reads attributes"),
    "splitting/weightless_model.py": ({"vars"}, "lends attributes to the frame of a model that is split"),
    "parallel/tensor/parameter_shards.py": ({"vars"}, "whether a layer still is as it was cut, in each step"),
    "parallel/tensor/cuttable_layers.py": ({"vars"}, "whether a layer that is to be cut runs torch's own forward"),
    "parallel/tensor/known_layer_name_pairs.py": ({"vars"}, "which sizes are divided with a layer"),
    "optim/build_optimizers.py": ({"vars"}, "gives a parameter's stand-in what the user has set on it"),
    "optim/optimizer_extra_state.py": ({"vars"}, "saves what an optimizer keeps beside its state"),
    "optim/accepted_optimizer_forms.py": ({"vars"}, "makes an optimizer anew over other parameters"),
    "settings/engine_settings.py": ({"inspect", "vars"}, "signs `Engine`, which is ours, with the settings"),
}
"""Other files that inspect code or objects: their means, and their purpose."""

ORDERED = [layer for layer, rooms in ORDER.items() if rooms]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def sources(layer: str) -> list[Path]:
    others = (
        {ROOT / "quintsched" / name for name in ("runtime", "viz", "strategies")} if layer == "quintsched" else set()
    )
    return [path for path in sorted(LAYERS[layer].rglob("*.py")) if not others.intersection(path.parents)]


def module_of(path: Path, layer: str) -> str:
    parts = path.relative_to(LAYERS[layer]).with_suffix("").parts
    return ".".join((layer, *(part for part in parts if part != "__init__")))


@cache
def imports(path: Path, layer: str) -> tuple[tuple[str, bool], ...]:
    """Return each imported module or name, with whether a function imports it."""
    return tuple(_imports(path, layer))


def _imports(path: Path, layer: str) -> Iterator[tuple[str, bool]]:
    tree = tree_of(path)
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


def room_of(module: str, package: str) -> str | None:
    """Return the first name below `package` in a module's path; None for the package itself and for others."""
    below = module.removeprefix(package).split(".")[1:]
    return below[0] if within(module, package) and below else None


def meanings(tree: ast.Module) -> Iterator[str]:
    """Yield the public classes, types and constants of a module; variables of types mean nothing by themselves."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name
        elif isinstance(node, ast.Assign) and "TypeVar" not in ast.unparse(node.value):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            yield from (name for name in names if name[0].isupper())
