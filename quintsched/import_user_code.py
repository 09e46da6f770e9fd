"""Import of objects from a user's own file, named "path/to/my_file.py:name".

Command lines, Python code and job files may name code in this way; plan files never do. A plan file may be named as a
schedule: it has an order of computation.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
import sys
import threading
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from quintsched.errors import QuintschedError, UsageError, import_advice, nearest, printable, quoted, suggest

if TYPE_CHECKING:
    from quintsched.schedules import Schedule

PLAN_FILES = (".json", ".qplan")
"""Endings of plan files."""
_IMPORTING = threading.RLock()
"""Lock held while a user's file is imported: ranks may be threads, and none may see a half-imported module."""


def is_user_object(name: str) -> bool:
    """Return whether `name` has the form of an object in a user's file: "my_file.py:name"."""
    return ".py:" in name


def names_file(name: str) -> bool:
    """Return whether `name` refers to a user's file, even if the object's name is missing."""
    return is_user_object(name) or name.endswith(".py")


def file_of(name: str) -> str:
    """Return the path of the file in "my_file.py:name"; other names unchanged."""
    return name.rpartition(":")[0] if is_user_object(name) else name


def require_file(path: Path) -> None:
    """Raise `UsageError`, with the folder that was searched, unless the user's file exists."""
    if not os.path.isfile(path):
        siblings = (str(sibling) for sibling in sorted(path.parent.glob("*.py")))
        folder = "" if path.is_absolute() else f" in {printable(os.getcwd())}"
        raise UsageError(f"there is no file {quoted(str(path))}{folder}{nearest(str(path), siblings)}")


def load_object(name: str) -> Any:
    """Return the object named by "my_file.py:name"; the path is relative to the current directory.

    Each file is imported once per process. Its directory is appended to `sys.path`, so that it can import its
    siblings but never shadows an installed package.
    Raises `UsageError` for a missing file or name, and if the import fails.
    """
    file, _, attribute = name.rpartition(":")
    path = Path(file)
    if not name.isprintable():
        raise UsageError(f"{quoted(name)} does not name an object of a file: not all of it can be seen")
    if not is_user_object(name) or not attribute:
        raise UsageError(f"{quoted(name)} does not name an object of a file; write it as my_file.py:name")
    require_file(path)
    module = _import_file(path.resolve())
    if not hasattr(module, attribute):
        raise UsageError(f"{file} has no {quoted(attribute)}{suggest(attribute, _own_names(module))}")
    return getattr(module, attribute)


def load_schedule(name: str | Schedule) -> Schedule:
    """Return the schedule of this name: a registered one, a user-defined "my_file.py:name", or that of a plan file.

    A `Schedule` object is returned unchanged. Raises `UsageError` for an unknown name, and for any other object.
    """
    from quintsched.plan import Plan
    from quintsched.schedules import Schedule, find_schedule
    from quintsched.schedules.kit.given_order import schedule_of_plan

    if isinstance(name, Schedule):
        return name
    if name.endswith(PLAN_FILES):
        return schedule_of_plan(Plan.load(name), name)
    if not names_file(name):
        return find_schedule(name)
    found = load_object(name)
    if not isinstance(found, Schedule):
        what = "a function" if inspect.isfunction(found) else f"a {type(found).__name__}"
        raise UsageError(f"{name} is {what}, not a schedule; decorate a generator with @quintsched.schedule(…)")
    return found


def call_object(name: str, *args: Any, **options: Any) -> Any:
    """Call the function named by "my_file.py:name", and return its result.

    Raises `UsageError` if it is not callable or does not take these arguments; its own exceptions pass through.
    """
    return call_function(name, load_object(name), *args, **options)


def call_function(name: str, function: object, *args: Any, **options: Any) -> Any:
    """Call an object that a user has named; raises as `call_object` does."""
    if not callable(function):
        raise UsageError(f"{name} is a {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind(*args, **options)
    except TypeError as error:
        raise UsageError(f"{name}{inspect.signature(function)}: {error}") from None
    return function(*args, **options)


def _own_names(module: ModuleType) -> list[str]:
    """Return the public names that a module defines itself, without imported modules, classes and functions."""
    return [name for name, thing in vars(module).items() if not name.startswith("_") and _is_own(thing, module)]


def _is_own(thing: object, module: ModuleType) -> bool:
    if inspect.isclass(thing) or inspect.isroutine(thing):
        return thing.__module__ == module.__name__
    return not isinstance(thing, ModuleType)


def _import_file(path: Path) -> ModuleType:
    """Return the module of the file at `path`, importing it on first use."""
    name = f"quintsched_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    with _IMPORTING:
        if name in sys.modules:
            return sys.modules[name]
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        return _execute(name, path)


def _execute(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path}: is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # before it runs: dataclasses look it up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        if isinstance(error, QuintschedError):
            raise
        what = error.msg if isinstance(error, SyntaxError) else error
        said = f"{_place(path, error)}: the import failed: {type(error).__name__}: {what}{import_advice(error)}"
        raise UsageError(said) from error
    return module


def _place(path: Path, error: BaseException) -> str:
    """Return the path, with the last line of it in the error's traceback where one is known."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines.append(error.lineno)
    return f"{path}:{lines[-1]}" if lines else str(path)
