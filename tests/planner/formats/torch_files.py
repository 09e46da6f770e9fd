"""The published schedule files of PyTorch, and what tests of ours ask of them."""

from pathlib import Path

import pytest

import quintsched as qs
from quintsched import torch_csv

PUBLISHED = Path(__file__).parents[2] / "data" / "torch_csv"
SCHEDULES = qs.all_schedules()
"""Ours; other tests add their own later."""


def published(name: str) -> str:
    return (PUBLISHED / f"{name}.csv").read_text()


def refusal(text: str, **options) -> str:
    with pytest.raises(qs.InputError) as caught:
        torch_csv.loads(text, **options)
    return str(caught.value)
