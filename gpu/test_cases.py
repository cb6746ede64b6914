"""The cases of a command as tests; conftest.py runs each in a process of its own."""

from harness import Case


def test_case(case: Case) -> None:
    """Not called: conftest.py calls the case."""
