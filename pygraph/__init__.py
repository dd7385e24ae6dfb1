"""CUDA Graphs for PyTorch as composable function transforms."""

from pygraph import errors
from pygraph.api.graphed_callables import make_graphed_callables
from pygraph.api.jit import jit
from pygraph.api.laws import check_transform
from pygraph.api.trace import trace
from pygraph.api.transforms import devicify, fuse, graphify, indirect, select, transform
from pygraph.calls.disabling import disable
from pygraph.calls.stages import Compiled, Lowered
from pygraph.calls.transformed import Transformed
from pygraph.errors import PygraphError
from pygraph.interop.dynamo import backend
from pygraph.interop.live import explain
from pygraph.ir.check import check_program
from pygraph.ir.diff import ProgramDiff, diff
from pygraph.ir.drawing import Drawing
from pygraph.ir.evaluate import evaluate
from pygraph.ir.program import Program
from pygraph.report.explain import Explanation
from pygraph.runtime.devices import default_device

__version__ = "0.1.0"

__all__ = [
    "Compiled", "Drawing", "Explanation", "Lowered", "Program", "ProgramDiff", "PygraphError", "Transformed",
    "backend", "check_program", "check_transform", "default_device", "devicify", "diff", "disable", "errors",
    "evaluate", "explain", "fuse", "graphify", "indirect", "jit", "make_graphed_callables", "select", "trace",
    "transform",
]  # fmt: skip
