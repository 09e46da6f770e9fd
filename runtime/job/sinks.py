"""Where a job's figures go beside its log: the names, what each needs, and whether it is there.

    tensorboard            the package tensorboard
    wandb                  the package wandb
    my_file.py:sink        a function of (figures, step), or a class of such, built with the options

What is missing is found here, before any rank starts. Neither torch nor the packages are imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from pydantic import Field

from quintsched.errors import UsageError, suggest
from quintsched.user_code import load_object, names_file

from .settings import Settings

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}
"""The sinks that there are, and the package that each takes."""


class SinkConfig(Settings):
    """One sink of figures."""

    name: str
    """"tensorboard", "wandb", or a user's function or class: "my_file.py:sink"."""
    options: dict[str, Any] = Field(default_factory=dict)
    """What TensorBoard's `SummaryWriter`, `wandb.init` or the user's class is called with."""


def require_sinks(sinks: Iterable[SinkConfig]) -> None:
    """Raise `UsageError` for a sink that there is not, or whose package is not installed."""
    for sink in sinks:
        if names_file(sink.name):
            found = load_object(sink.name)
            if not callable(found):
                raise UsageError(f"log.sinks: {sink.name} is a {type(found).__name__}, not a function or a class")
            if sink.options and not isinstance(found, type):
                raise UsageError(
                    f"log.sinks: {sink.name} is a function, so that there is nothing to build with options"
                )
        elif sink.name not in PACKAGES:
            raise UsageError(f"log.sinks: there is no sink {sink.name!r}{suggest(sink.name, PACKAGES)}")
        elif find_spec(PACKAGES[sink.name]) is None:
            package = PACKAGES[sink.name]
            raise UsageError(
                f"log.sinks: {sink.name!r} needs the package {package}, which is not installed; pip install {package}, "
                "or leave the sink out"
            )
