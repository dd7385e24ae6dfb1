"""What the tests of traces share."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.fakes import fakes_followed


@pytest.fixture(autouse=True)
def fakes_are_followed() -> Generator[None, None, None]:
    """Have `tests.fakes` know the fakes that a test makes."""
    with fakes_followed():
        yield
