"""CUDA Graphs for PyTorch as composable function transforms."""

from pygraph import errors as errors
from pygraph.check import check_program as check_program
from pygraph.errors import PygraphError as PygraphError
from pygraph.evaluate import evaluate as evaluate
from pygraph.graphed_callables import make_graphed_callables as make_graphed_callables
from pygraph.interop.dynamo import backend as backend
from pygraph.interop.dynamo import explain as explain
from pygraph.jit import jit as jit
from pygraph.program import Program as Program
from pygraph.runtime.devices import default_device as default_device
from pygraph.stack import devicify as devicify
from pygraph.stack import fuse as fuse
from pygraph.stack import graphify as graphify
from pygraph.stack import indirect as indirect
from pygraph.stack import select as select
from pygraph.trace import trace as trace

__version__ = "0.1.0"
