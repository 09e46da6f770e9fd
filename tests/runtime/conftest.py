"""Fixtures of the runtime's tests."""

from ..helpers.jobs import data_file

__all__ = ["data_file"]
