"""Lets torchvision import beside a torch for the CPU, and with it timm and transformers.

The wheels of torchvision on PyPI are built for CUDA. Beside another torch their library does not load, and registering
the shapes of its operators fails ("operator torchvision::nms does not exist"). timm and transformers import torchvision
for transforms of pictures, which need no operator; so it is enough that those have a schema.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import torch

_SUPPRESSION = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def declare_missing() -> None:
    """Declare the operators that torchvision registers shapes for, if it is installed and its library does not load."""
    found = None if "torchvision" in sys.modules else find_spec("torchvision")
    if found is None or found.origin is None:
        return
    try:
        for library in Path(found.origin).parent.glob("_C.*"):
            torch.ops.load_library(str(library))
    except OSError:
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                _LIBRARY.define(name + _SUPPRESSION)
