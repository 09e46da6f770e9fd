import pytest

from quintsched.strategies.tuning import search


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    """Searches of small problems prune too: they evaluate few leaves before they look at the bounds again."""
    monkeypatch.setattr(search, "FIRST_ROWS", 16)
    monkeypatch.setattr(search, "ROWS_AT_ONCE", 64)
    monkeypatch.setattr(search, "GROUPS_AT_ONCE", 4)
