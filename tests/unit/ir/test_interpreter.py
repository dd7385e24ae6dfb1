"""Graphs are run beside other threads without waiting for any."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.hub
from torch import fx

from pygraph.ir.interpreter import Interpreter


@pytest.mark.skipif(not hasattr(torch.hub.tqdm, "get_lock"), reason="torch has no progress bars here")
def test_it_makes_no_progress_bar() -> None:
    """Another thread holds the lock by which all bars of a process are made."""
    module, found = fx.symbolic_trace(lambda x: (x * 2).sin()), list[Any]()
    x = torch.ones(3)
    thread = threading.Thread(target=lambda: found.append(Interpreter(module).run(x)), daemon=True)
    with torch.hub.tqdm.get_lock():
        thread.start()
        thread.join(30)
        assert found
    torch.testing.assert_close(found[0], (x * 2).sin())
