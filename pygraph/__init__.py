"""CUDA Graphs for PyTorch as composable function transforms."""

from pygraph import errors as errors
from pygraph.api.graphed_callables import make_graphed_callables as make_graphed_callables
from pygraph.api.jit import jit as jit
from pygraph.api.transforms import devicify as devicify
from pygraph.api.transforms import fuse as fuse
from pygraph.api.transforms import graphify as graphify
from pygraph.api.transforms import indirect as indirect
from pygraph.api.transforms import select as select
from pygraph.errors import PygraphError as PygraphError
from pygraph.interop.dynamo import backend as backend
from pygraph.interop.live import explain as explain
from pygraph.ir.check import check_program as check_program
from pygraph.ir.evaluate import evaluate as evaluate
from pygraph.ir.program import Program as Program
from pygraph.runtime.devices import default_device as default_device
from pygraph.tracing.trace import trace as trace

__version__ = "0.1.0"
