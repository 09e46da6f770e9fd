"""Objects from a user's own file, named "path/to/my_file.py:name".

Only job files and command lines name code in this way; plans never do.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import threading
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from quintsched.errors import QuintschedError, UsageError, suggest

_IMPORTING = threading.RLock()
"""Held while a user's file is imported: ranks may be threads, and none may see half a module."""


def is_user_object(name: str) -> bool:
    """Return whether `name` is meant as an object of a user's file: "my_file.py:name", or the file alone."""
    return ".py:" in name or name.endswith(".py")


def load_object(name: str) -> Any:
    """Return the object that "my_file.py:name" names; the path is relative to the current directory.

    A file is imported once per process. Its directory goes to the end of `sys.path`, so that it can import its
    siblings but never hides an installed package.
    Raises UsageError where there is no such file or name, and where the import fails.
    """
    file, _, attribute = name.rpartition(":")
    path = Path(file)
    if ".py:" not in name or not attribute:
        raise UsageError(f"{name!r} does not name an object of a file; write it as my_file.py:name")
    if not path.is_file():
        raise UsageError(f"{name}: there is no file {file!r}{_nearest_file(path)}")
    module = _import_file(path.resolve())
    if not hasattr(module, attribute):
        names = [known for known in vars(module) if not known.startswith("_")]
        raise UsageError(f"{name}: {path.name} has no {attribute!r}{suggest(attribute, names) if names else ''}")
    return getattr(module, attribute)


def call_object(name: str, *args: Any, **options: Any) -> Any:
    """Call the function that "my_file.py:name" names, and return what it returns.

    Raises UsageError where it is not a function or does not take these arguments; what it raises itself passes.
    """
    function = load_object(name)
    if not callable(function):
        raise UsageError(f"{name}: is a {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind(*args, **options)
    except TypeError as error:
        raise UsageError(f"{name}{inspect.signature(function)}: {error}") from None
    return function(*args, **options)


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
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # first: dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        if isinstance(error, QuintschedError):
            raise
        raise UsageError(f"{_place(path, error)}: the import failed: {type(error).__name__}: {error}") from error
    return module


def _place(path: Path, error: Exception) -> str:
    """Return the path with the line of `path` that the error came through, where one is known."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{lines[-1]}" if lines else str(path)


def _nearest_file(path: Path) -> str:
    """Suggest the Python file of the same directory that was meant."""
    names = sorted(sibling.name for sibling in path.parent.glob("*.py"))
    return suggest(path.name, names) if names else ""
