"""A browser for the tests of a module."""

from collections.abc import Iterator

import pytest

from .browser import Page, browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened
