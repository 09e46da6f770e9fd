"""A browser for the tests of a module, whose pages raise no error."""

from collections.abc import Iterator

import pytest

from .browser import Page, browser


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def page(chromium: Page) -> Iterator[Page]:
    yield chromium
    assert not chromium.errors
