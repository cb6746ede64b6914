"""What tests of commands share."""

from collections.abc import Iterator

import pytest

from helpers.browser import Browser, browser


@pytest.fixture(scope="module")
def shown() -> Iterator[Browser]:
    with browser() as opened:
        yield opened
