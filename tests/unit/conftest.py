"""What all tests without processes need."""

import pytest


@pytest.fixture(autouse=True)
def small_models(one_thread: None) -> None:
    """Models here are too small for more than one thread."""
