"""Fixtures of examinations."""

import logging

import pytest


@pytest.fixture
def named(caplog):
    """Return what gives the places that were said to be changed."""
    caplog.set_level(logging.WARNING, "quintsched")
    return lambda words="changed by forwards": [
        record.message.partition(": ")[0] for record in caplog.records if words in record.message
    ]
