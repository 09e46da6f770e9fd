"""Lets torchvision import beside a torch without CUDA.

The wheels on PyPI are built for CUDA. Beside a CPU torch their library does not load, and registering the shapes of
its operators fails ("operator torchvision::nms does not exist"). timm imports torchvision for transforms of pictures
and a frozen norm, none of which needs an operator; so it is enough that those have a schema.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

_SUPPRESSION = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def declare_missing() -> None:
    """Declare the operators that torchvision registers shapes for; nothing where its library has loaded, or is not."""
    if find_spec("torchvision") is None:
        return
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            _LIBRARY.define(name + _SUPPRESSION)
