"""Graphs are run beside other threads without waiting for any."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.hub

import pygraph


@pytest.mark.skipif(not hasattr(torch.hub.tqdm, "get_lock"), reason="torch has no progress bars here")
def test_it_makes_no_progress_bar(device: torch.device) -> None:
    """Another thread holds the lock by which all bars of a process are made."""
    program = pygraph.indirect(lambda x: (x * 2).sin())
    x, found = torch.ones(3, device=device), list[Any]()
    traced = pygraph.trace(program)(x)
    with torch.hub.tqdm.get_lock():
        thread = threading.Thread(target=lambda: found.append(traced(x)), daemon=True)
        thread.start()
        thread.join(30)
    assert found
    torch.testing.assert_close(found[0], (x * 2).sin())
