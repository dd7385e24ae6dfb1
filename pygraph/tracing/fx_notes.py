"""FX's notes on the current node (``torch.fx.traceback``), separate for traces of ours.

FX has them in variables of a module, for the whole process: tracers of torch switch preservation of metadata on, note
node after node, and read the notes. Traces of ours have a copy of that module: in threads that are in such a trace,
functions of the module forward to the copy.
"""

# FX's notes are private. Checked with torch 2.13; tests/unit/tracing/test_fx_notes.py says what another has not.
from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import types
from collections.abc import Callable, Generator
from typing import Any

import torch.fx.traceback as shared

from pygraph.tracing.patches import of_class, replaced
from pygraph.tracing.proxy_trace import tracing_here

# Functions that read or write the notes; some are new in torch 2.13. Another one, `annotate`, Dynamo knows by identity:
# where another thread exports, functions that Dynamo does not trace note their names by it.
NAMES = (
    "preserve_node_meta", "has_preserved_node_meta", "_preserve_node_seq_nr", "_is_preserving_node_seq_nr",
    "set_current_meta", "get_current_meta", "set_current_replay_node", "get_current_replay_node",
    "set_stack_trace", "format_stack", "set_grad_fn_seq_nr", "reset_grad_fn_seq_nr",
    "_set_autograd_backward", "_mark_autograd_backward", "_reset_autograd_backward",
)  # fmt: skip
FUNCTIONS = tuple(name for name in NAMES if hasattr(shared, name))


@contextlib.contextmanager
def separated() -> Generator[None, None, None]:
    """Give threads that are in a trace of ours notes of their own."""
    with contextlib.ExitStack() as stack:
        for name in FUNCTIONS:
            stack.enter_context(replaced(shared, name, functools.partial(_forwarding, name)))
        dynamo = sys.modules.get("torch._dynamo.eval_frame")
        if hasattr(dynamo, "fx_traceback"):
            stack.enter_context(replaced(dynamo, "fx_traceback", _Unannotated))
        stack.enter_context(of_class(shared, _Module))
        yield


@functools.cache
def own() -> types.ModuleType:
    """The copy of the module."""
    spec = importlib.util.spec_from_file_location("torch.fx._traceback_of_pygraph", shared.__file__)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in vars(shared).items():
        if isinstance(value, type):  # of what it puts at nodes, there is one class
            setattr(module, name, value)
    return module


def _forwarding(name: str, asked: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(asked)
    def function(*args: Any, **kwargs: Any) -> Any:
        return (getattr(own(), name) if tracing_here() else asked)(*args, **kwargs)

    return function


class _Unannotated:
    """The module, with an `annotate` that does nothing in a trace of ours."""

    pygraph_ended = False

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name == "annotate" and tracing_here():
            return contextlib.nullcontext
        return getattr(self._module, name)


class _Module(types.ModuleType):
    """The module's class, with a property for the variable that torch uses directly."""

    @property
    def current_meta(self) -> Any:
        return vars(own() if tracing_here() else self)["current_meta"]

    @current_meta.setter
    def current_meta(self, value: Any) -> None:
        vars(own() if tracing_here() else self)["current_meta"] = value
