"""What the tests of traces share."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch

from tests.fakes import know_fakes


@pytest.fixture(autouse=True)
def fakes_of_others() -> Generator[None, None, None]:
    """On CUDA, where Inductor compiles in tests of the same process, know the fakes that it keeps."""
    if torch.cuda.is_available():
        know_fakes()
    yield
    know_fakes(forget=True)
