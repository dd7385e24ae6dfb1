"""What the tests of traces share."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.fakes import know_fakes


@pytest.fixture(autouse=True)
def fakes_of_others() -> Generator[None, None, None]:
    """Know the fakes that torch keeps of what it has compiled in other tests of the same process."""
    know_fakes()
    yield
    know_fakes(forget=True)
