"""The logger ``pygraph`` of the standard library: what is compiled, and what becomes of it.

At level INFO it says each compilation with its seconds, whatever does not run as a graph, and kinds of calls that made
room for others; at DEBUG also traces, selections, and what was found on disk. It is shown by
``logging.basicConfig(level=logging.INFO)``, and by ``TORCH_LOGS=pygraph`` (``TORCH_LOGS=+pygraph`` for DEBUG): torch
takes the names of packages.
"""

from __future__ import annotations

import logging

log = logging.getLogger("pygraph")
log.addHandler(logging.NullHandler())
