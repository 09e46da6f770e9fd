"""Job keys of other frameworks are refused with ours, and docs/guide.md shows the table of both."""

from pathlib import Path
from typing import Any

import pytest

from quintsched.errors import UsageError
from quintsched.runtime.settings.engine_and_job_settings import RunSettings, Settings, read_settings
from quintsched.runtime.settings.foreign_keys import FOREIGN_KEYS, find_foreign_key
from quintsched.runtime.settings.job_file import JobConfig

GUIDE = Path(__file__).parents[3] / "docs" / "guide.md"
WORDS = [(meaning, word) for meaning in FOREIGN_KEYS for word in meaning.theirs.split()]


def refusal(values: dict[str, Any], kind: type[Settings] = JobConfig, prefix: str = "") -> str:
    """Return what settings are refused with, without the line of their source."""
    with pytest.raises(UsageError) as error:
        read_settings(kind, values, "job.yaml", prefix)
    return str(error.value).partition("\n  ")[2]


@pytest.mark.parametrize("section", ["", "train.optimizer"])
def test_every_word_is_understood_at_every_level(section: str) -> None:
    for meaning, word in WORDS:
        values: Any = {"train": {"optimizer": {word: 1}}} if section else {word: 1}
        value = f" ({meaning.value})" if meaning.value else ""
        place = f"{section}.{word}".strip(".")
        assert refusal(values) == f"{place}: unknown key; did you mean {meaning.ours!r}{value}?"


def test_an_engine_names_its_arguments_and_a_job_its_sections() -> None:
    assert refusal({"max_grad_norm": 1.0}, RunSettings) == "max_grad_norm: unknown key; did you mean 'clip'?"
    assert "train." not in refusal({"num_epochs": 1}, RunSettings)
    assert refusal({"lr": 1}) == "lr: unknown key; did you mean 'train.optimizer.lr'?"
    assert refusal({"parallel": {"epochs": 1}}) == "parallel.epochs: unknown key; did you mean 'train.epochs'?"
    assert "data.path" not in refusal({"train": {"path": 1}})  # log has a path, too
    assert find_foreign_key("learning_ratte") is None
    assert refusal({"train": {"epoch": 1}}) == "train.epoch: unknown key; did you mean 'epochs'?"


def test_the_guide_has_the_same_table() -> None:
    rows = [
        f"| {', '.join(f'`{word}`' for word in meaning.theirs.split())} | `{meaning.ours}` | {meaning.value} |"
        for meaning in FOREIGN_KEYS
    ]
    table = "\n".join(["| their word | ours | its value |", "|---|---|---|", *rows, ""])
    assert table in GUIDE.read_text(encoding="utf-8"), f"docs/guide.md needs this table:\n{table}"
