"""A group of one process for ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from torch import distributed


@pytest.fixture(name="one_process")
def fixture_one_process(device: torch.device, tmp_path: Path) -> Generator[None, None, None]:
    backend = "nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
