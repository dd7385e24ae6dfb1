"""Launches of Triton kernels while a function is traced: recorded as ``pygraph::launch``, never run.

Fake tensors have no memory, so a kernel that runs on them would end the process. While a function is traced, the
``run`` methods of Triton's kernel classes (jitted functions, autotuners, heuristics) are replaced by methods that add
the launch to the graph. The tensors that the kernel writes are found in its Triton IR by torch's own analysis; if that
fails, every tensor counts as written.
"""

# Triton and torch's analysis of its kernels have no types, and the tracer works on torch's private parts.
# pyright: reportPrivateUsage=false, reportMissingImports=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
import torch.fx.experimental.proxy_tensor as proxy_tensor
from torch._C._functorch import is_functorch_wrapped_tensor  # checked with torch 2.11 and 2.13
from torch._library.triton import set_wrap_triton_enabled  # checked with torch 2.11 and 2.13
from torch._subclasses.fake_tensor import FakeTensor  # checked with torch 2.11 and 2.13

from pygraph.errors import TraceError
from pygraph.ir.constants import IMMUTABLE
from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.kernel_writes import jit_function, written_by
from pygraph.ir.launches import Kind, Launch, kernel_name, register
from pygraph.tracing.patches import replaced
from pygraph.tracing.proxy_trace import tracing_here

# Where Triton launches kernels. Checked with triton 3.6.
_LAUNCHERS = (("triton.runtime.jit", "JITFunction"), ("triton.runtime.autotuner", "Autotuner"))

# Runs a kernel in Python, on the arguments' memory.
_INTERPRETER = ("triton.runtime.interpreter", "GridExecutor", "__call__")


@contextlib.contextmanager
def launches_recorded() -> Generator[None, None, None]:
    """Add launches of Triton kernels to the graph that is traced, for the time of the context.

    Other threads launch as ever: only where a graph is being traced, or a tensor is fake, is anything different.
    """
    if importlib.util.find_spec("triton") is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        # torch's wrapper has a way of its own to record launches; without it, it calls the kernel.
        stack.enter_context(set_wrap_triton_enabled(False))
        for module, name in _LAUNCHERS:
            owner = getattr(importlib.import_module(module), name)
            stack.enter_context(replaced(owner, "run", _instead(_record_launch)))
        module, name, method = _INTERPRETER
        stack.enter_context(replaced(getattr(importlib.import_module(module), name), method, _instead(_refuse)))
        yield


def _instead(record: Callable[..., Any]) -> Callable[[Any], Any]:
    """A maker of methods that call ``record(self, args, kwargs)`` wherever a launch must not reach the device."""

    def make(original: Any) -> Any:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            tracing = proxy_tensor.get_proxy_mode() is not None and tracing_here()
            fake = tracing or any(isinstance(value, FakeTensor) for value in (*args, *kwargs.values()))
            if kwargs.get("warmup") or not fake:
                return original(self, *args, **kwargs)
            return record(self, args, kwargs) if tracing else None

        return run

    return make


def _refuse(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise TraceError("it launches a Triton kernel in Triton's interpreter")


def _record_launch(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Add ``pygraph::launch`` to the graph that is traced."""
    kwargs = {name: value for name, value in kwargs.items() if name != "warmup"}
    grid = kwargs.pop("grid")
    function = jit_function(kernel)
    name = kernel_name(kernel)
    given = dict(zip(function.arg_names, args, strict=False))
    options = {name: value for name, value in kwargs.items() if name not in function.arg_names}
    given.update((name, value) for name, value in kwargs.items() if name in function.arg_names)
    constexprs = {parameter.name for parameter in function.params if parameter.is_constexpr}
    given = {key: _known(value) if key in constexprs else value for key, value in given.items()}
    options = {key: _known(value) for key, value in options.items()}
    for key, value in (*given.items(), *options.items()):
        _check_value(name, key, value)

    metas = list(_metas(kernel, function, {**given, **options}))
    choices = tuple(dict.fromkeys(key for config in getattr(kernel, "configs", ()) for key in config.kwargs))
    grids = {tuple(meta[key] for key in choices): _grid(grid, meta) for meta in metas}
    written = written_by(kernel, function, metas[0])

    tensors: dict[Kind, list[torch.Tensor]] = {"written": [], "read": []}
    parameters: dict[Any, tuple[Kind, int]] = {}
    numbers: list[Any] = []
    arguments: list[tuple[str, Kind, Any]] = []
    memory = {_memory(given[key]) for key in written}
    for key in function.arg_names:
        if key not in given:
            continue  # a default, or chosen by an autotuner or a heuristic
        value = given[key]
        if isinstance(value, torch.Tensor):
            if _memory(value) not in parameters:  # the same tensor twice is the same memory twice
                kind: Kind = "written" if _memory(value) in memory else "read"
                parameters[_memory(value)] = (kind, len(tensors[kind]))
                tensors[kind].append(value)
            arguments.append((key, *parameters[_memory(value)]))
        elif isinstance(value, (torch.SymInt, torch.SymFloat)):
            arguments.append((key, "number", len(numbers)))
            numbers.append(value)
        else:
            arguments.append((key, "constant", value))
    launch = Launch(kernel, tuple(arguments), options, choices, grids)
    with torch._C._AutoDispatchBelowAutograd():  # a launch is nothing that autograd sees
        torch.ops.pygraph.launch.default(register(launch), tensors["written"], tensors["read"], numbers)


def _known(value: Any) -> Any:
    """The value of a number that decides how the kernel is compiled: a live one is baked in, and the trace repeated."""
    if isinstance(value, torch.SymInt):
        return int(value)
    if isinstance(value, torch.SymFloat):
        return float(value)
    return bool(value) if isinstance(value, torch.SymBool) else value


def _check_value(kernel: str, name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        if is_functorch_wrapped_tensor(value):
            raise TraceError(f"a torch.func transform reaches into the Triton kernel {kernel}")
        return
    module = type(value).__module__.partition(".")[0]
    plain = isinstance(value, (*IMMUTABLE, torch.SymInt, torch.SymFloat))
    if not plain and (module != "triton" or hasattr(value, "base")):
        raise TraceError(f"it passes a {type(value).__name__} as {name} to the Triton kernel {kernel}")


def _metas(kernel: Any, function: Any, known: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The values that a grid is computed from, for each choice of an autotuner: the kernel's parameters by name."""
    if hasattr(kernel, "configs"):
        for config in kernel.configs:
            yield from _metas(kernel.fn, function, {**known, **config.all_kwargs()})
    elif hasattr(kernel, "values"):
        known = dict(known)
        for name, heuristic in kernel.values.items():
            known[name] = _known(heuristic(dict(known)))
        yield from _metas(kernel.fn, function, known)
    else:
        meta: dict[str, Any] = {}
        for name, parameter in function.signature.parameters.items():
            if name in known:
                meta[name] = known[name]
            elif parameter.default is not inspect.Parameter.empty:
                meta[name] = parameter.default
            else:
                raise TraceError(f"the Triton kernel {kernel_name(function)} gets no value for {name}")
        yield meta


def _grid(grid: Any, meta: dict[str, Any]) -> tuple[int, ...]:
    found: Any = grid(meta) if callable(grid) else grid
    return tuple(int(size) for size in (found if isinstance(found, (tuple, list)) else (found,)))


def _memory(tensor: torch.Tensor) -> Any:
    """A key of a tensor's memory and layout, equal for two tensors that are the same memory in the same layout."""
    return tensor.untyped_storage()._cdata, TensorSpec.of(tensor)
