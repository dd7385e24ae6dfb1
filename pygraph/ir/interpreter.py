"""FX's interpreter, for use beside compilers in other threads.

While any thread preserves the metadata of nodes, as AOTAutograd does when it traces, FX notes the current node of every
interpreter in one variable of the process. An interpreter in another thread would overwrite that note. FX also makes a
progress bar for each run, by a lock of the whole process, in which a backward of the autograd engine's thread has been
seen to wait for ever.
"""

# FX's interpreter is not typed. Checked with torch 2.11 and 2.13; where FX has no such methods any more, a test of
# threads fails.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from torch import fx


class Interpreter(fx.Interpreter):
    """Runs a graph node by node, without noting the current node, and without a progress bar."""

    def run(self, *args: Any, initial_env: dict[fx.Node, Any] | None = None, enable_io_processing: bool = True) -> Any:
        """Run the graph; errors are those of its operations, as they are.

        Args:
            args: The inputs of the graph, in order.
            initial_env: Values of nodes that are known; they are not run.
            enable_io_processing: Whether inputs and results have the structure that the graph's code says.

        Returns:
            The result of the graph.
        """
        graph: Any = self.graph
        self.env = {} if initial_env is None else initial_env
        self.args_iter = iter(graph.process_inputs(*args) if enable_io_processing else args)
        for node in graph.nodes:
            if node in self.env:
                continue
            self.env[node] = self.run_node(node)
            if self.garbage_collect_values:
                for unused in self.user_to_last_uses.get(node, ()):
                    del self.env[unused]
        found = self.env[graph.output_node()]
        return graph.process_outputs(found) if enable_io_processing else found

    @contextlib.contextmanager
    def _set_current_node(self, node: fx.Node) -> Generator[None, None, None]:
        del node
        yield
