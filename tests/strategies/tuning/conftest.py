import pytest

from quintsched.strategies.tuning import branch_and_bound


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    """Searches of small problems prune too: they evaluate few leaves before they look at the bounds again."""
    monkeypatch.setattr(branch_and_bound, "FIRST_ROWS", 16)
    monkeypatch.setattr(branch_and_bound, "ROWS_AT_ONCE", 64)
    monkeypatch.setattr(branch_and_bound, "GROUPS_AT_ONCE", 4)
