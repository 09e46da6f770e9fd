"""Refusal of code between the layers of a model that reads outer state, which may differ in the next step.

    x * float(os.environ["TAU"])      asks: refused, with the line         os.environ (model.py, line 12)
    x * self.last()                   a weak reference: refused, by name   model.last (weakref.ReferenceType)
    x * self.tau, x * SETTINGS.tau    compared by value in each step

A module that is called whole (a leaf of the trace) asks by itself at each run: its calls do not count.
"""

from __future__ import annotations

from collections.abc import Sequence

from quintsched.errors import MisfitError

from ..comm.torch_modes import ModesLeftError

_OF_MODES = (
    *("is_inference_mode_enabled", "is_autocast_enabled", "is_autocast_cpu_enabled", "is_autocast_cache_enabled"),
    *("get_autocast_dtype", "get_autocast_cpu_dtype", "get_autocast_gpu_dtype"),
)
"""Functions of torch that return modes; code between layers is followed through these."""

_INSTEAD = (
    "read it in __init__ or in the training loop and keep it as an attribute of the model, which is followed, pass it "
    "as an input, or ask in the forward of a layer"
)


class AsksElsewhere(MisfitError):
    """Code between layers depends on state that cannot be compared."""


FINAL_ERRORS = (AsksElsewhere, ModesLeftError)
"""Errors that no other way of splitting the model avoids."""


def require_plain(name: str, found: Sequence[str]) -> None:
    """Raise `AsksElsewhere` for calls that `asking_elsewhere` recorded in the forward of the model of this name."""
    asked = [
        text for text in dict.fromkeys(found) if not text.startswith(tuple(f"torch.{mode} " for mode in _OF_MODES))
    ]
    applied = [text for text in asked if ".apply (" in text]
    if applied:
        raise AsksElsewhere(
            f"the forward of {name} applies {applied[0]} between its layers, whose backward is not that of what its "
            "forward does: apply it in the forward of a module of its own, which is a layer"
        )
    if asked:
        raise AsksElsewhere(
            f"the forward of {name} asks {', '.join(asked[:3])} between its layers, which may answer otherwise in the "
            f"next step or on another rank: {_INSTEAD}"
        )


def require_known(name: str, unseen: str | None, line: str) -> None:
    """Raise `AsksElsewhere` for an object of unknown content that the forward of the model of this name reads."""
    if unseen is not None:
        raise AsksElsewhere(
            f"the forward of {name} goes by {unseen}{line} between its layers, of which nobody can tell whether what "
            "is in it has changed: keep numbers, lists or dicts of them, or a tensor in a buffer, as attributes of the "
            "model, which are followed, or go by it in the forward of a layer"
        )
