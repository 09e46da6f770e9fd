"""Scripts of the page, run by node."""

import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "page"
NEEDS_NODE = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


def run_node(script: str, *arguments: str | Path, text: bytes = b"") -> bytes:
    """Return what a script of tests/viz/page prints."""
    return subprocess.run(["node", FOLDER / script, *arguments], input=text, capture_output=True, check=True).stdout
