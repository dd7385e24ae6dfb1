"""What the tests of traces share."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.fakes import fakes_followed
from tests.memory import free_objects


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> None:
    """Have few objects in the process: a search for what a trace has left goes through all of them, again and again."""
    free_objects()


@pytest.fixture(autouse=True)
def fakes_are_followed() -> Generator[None, None, None]:
    """Have `tests.fakes` know the fakes that a test makes."""
    with fakes_followed():
        yield
