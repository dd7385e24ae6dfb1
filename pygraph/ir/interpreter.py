"""FX's interpreter, for use beside compilers in other threads.

While any thread preserves the metadata of nodes, as AOTAutograd does when it traces, FX notes the current node of every
interpreter in one variable of the process. An interpreter in another thread would overwrite that note.
"""

# Checked with torch 2.13; where FX has no such method any more, a test of threads fails.
from __future__ import annotations

import contextlib
from collections.abc import Generator

from torch import fx


class Interpreter(fx.Interpreter):
    """Runs a graph node by node, without noting the current node."""

    @contextlib.contextmanager
    def _set_current_node(self, node: fx.Node) -> Generator[None, None, None]:
        del node
        yield
