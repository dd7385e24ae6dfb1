"""FX's interpreter, for use beside compilers in other threads.

FX notes which node an interpreter is at in a variable of the process, while any thread says that it keeps what nodes
are known to be, as AOTAutograd does all the while it traces. Another interpreter would take that note away from it.
"""

# Checked with torch 2.13; where FX has no such method any more, a test of threads fails.
from __future__ import annotations

import contextlib
from collections.abc import Generator

from torch import fx


class Interpreter(fx.Interpreter):
    """Runs a graph node by node, and tells FX of none of them."""

    @contextlib.contextmanager
    def _set_current_node(self, node: fx.Node) -> Generator[None, None, None]:
        del node
        yield
