"""Requirements of tests with torch.compile."""

import os
import shutil
import sys
from collections.abc import Callable
from typing import TypeVar

import pytest

COMPILER = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
"""Compiler that torch looks for."""
NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which(COMPILER) is None, reason=f"torch.compile needs {COMPILER}, which is not there"
)
TORCH_WARNS = [  # torch's own compiler
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

TORCH_COMPILES = [NEEDS_COMPILER, *TORCH_WARNS]

Test = TypeVar("Test", bound=Callable[..., None])


def torch_compiles(test: Test) -> Test:
    """Give a test these marks."""
    for mark in TORCH_COMPILES:
        test = mark(test)
    return test
