"""Requirements of tests with torch.compile."""

import os
import shutil
import sys

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
