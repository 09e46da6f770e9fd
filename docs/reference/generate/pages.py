"""The pages of the reference, by file name."""

from __future__ import annotations

from pathlib import Path

from .api import api_page
from .commands import commands_page
from .exit_codes import exit_codes_page
from .job import SINCE, job_page, schema_text, since_text
from .schemas import schema_texts

FOLDER = Path(__file__).parents[1]


def pages() -> dict[str, str]:
    """Return the text of every page; raises `ValueError` with the names that lack a description."""
    return {
        "api.md": api_page(),
        "commands.md": commands_page(),
        "exit-codes.md": exit_codes_page(),
        "job.md": job_page(),
        "job.schema.json": schema_text(),
        SINCE.name: since_text(),
        **schema_texts(),
    }
