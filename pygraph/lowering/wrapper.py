"""What Inductor's code launches, as a graph of kernels and allocations.

Inductor compiles a graph to a Python function, its *wrapper*: allocations, calls of library operations and launches of
Triton kernels in a row, without branches. Run once on fake tensors, with every launch written down instead of made, it
shows all of that as nodes. Nothing of how a kernel is launched is lost on the way: a node launches the same tuned
kernel that the wrapper does.
"""

# The wrapper's functions and Inductor's kernels are private. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import bisect
import dataclasses
import functools
import operator
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pygraph.ir import ops
from pygraph.ir.descriptors import TensorSpec, tensor_specs
from pygraph.ir.effects import is_random
from pygraph.ir.kernel_writes import written_parameters
from pygraph.ir.launches import Kind, Number, constant_key, register
from pygraph.ir.program import graph_module
from pygraph.lowering import states

aten = torch.ops.aten


class UntraceableError(Exception):
    """A wrapper does something that cannot be written down as nodes."""


@dataclasses.dataclass(frozen=True, eq=False)
class TunedLaunch:
    """A launch of one of Inductor's kernels.

    Attributes:
        kernel: The ``CachingAutotuner``, which chooses among its configurations at the first launch.
        arguments: Per argument where it comes from: the kind, and the position among the tensors of that kind, or the
            number itself.
    """

    kernel: Any
    arguments: tuple[tuple[Kind, Any], ...]

    def __call__(
        self, written: Sequence[torch.Tensor], read: Sequence[torch.Tensor], numbers: Sequence[Number]
    ) -> None:
        """Launch the kernel on the current stream."""
        values = [
            written[value] if kind == "written" else read[value] if kind == "read" else value
            for kind, value in self.arguments
        ]
        index = (written or read)[0].device.index
        stream = torch._C._cuda_getCurrentRawStream(index)
        if torch.cuda.current_device() == index:
            self.kernel.run(*values, stream=stream)
            return
        with torch.cuda.device(index):  # as the wrapper has it around all that it does
            self.kernel.run(*values, stream=stream)

    def signature(self) -> Any:
        """What two launches that are the same have in common."""
        return repr((id(self.kernel), [(kind, constant_key(value)) for kind, value in self.arguments]))


@dataclasses.dataclass(frozen=True)
class KernelGraph:
    """The nodes of a wrapper.

    Attributes:
        module: The graph: one placeholder per tensor that is passed, then one per entry of ``constants``. Nodes have a
            ``spec``. It returns a tuple of nodes and constants.
        constants: Tensors that Inductor has made.
    """

    module: fx.GraphModule
    constants: tuple[torch.Tensor, ...]


def kernel_graph(
    call: Callable[[list[Any]], Sequence[Any]],
    inputs: Sequence[TensorSpec | Number],
    lines: Mapping[str, str] | None = None,
) -> KernelGraph:
    """The kernels and allocations of a wrapper for these inputs.

    Wrapper::

        def call(args):
            x, w = args
            buf0 = empty_strided_cuda((8, 8), (8, 1), torch.float32)
            extern_kernels.mm(x, w, out=buf0)
            triton_poi_fused_relu_0.run(buf0, 64, stream=stream0)
            return (buf0,)

    Nodes::

        empty_strided = aten.empty_strided.default([8, 8], [8, 1], dtype=torch.float32, device=device("cuda:0"))
        mm = aten.mm.out(x, w, out=empty_strided)
        launch = pygraph.launch("triton_poi_fused_relu_0", [empty_strided], [], [])
        return (empty_strided,)

    Args:
        call: The wrapper: a Python function of one list, which it empties.
        inputs: What is passed; numbers (sizes) as they are.
        lines: The user's lines, by the names that the wrapper's comments have for what it computes.

    Raises:
        UntraceableError: The wrapper calls code that is not known here, as kernels for the CPU.
    """
    if not isinstance(call, types.FunctionType):
        raise UntraceableError(f"its wrapper is a {type(call).__name__}")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        recorder = _Recorder(mode, _SourceLines(call.__code__, lines or {}))
        values = [recorder.placeholder(spec) if isinstance(spec, TensorSpec) else spec for spec in inputs]
        run = types.FunctionType(call.__code__, _globals(call, recorder), call.__name__, call.__defaults__)
        try:
            with torch.no_grad(), recorder:
                returned = run(values)
        except UntraceableError:
            raise
        except Exception as error:  # of whatever kind: nothing has run but fake operations
            raise UntraceableError(f"{type(error).__name__}: {error}") from error
        return recorder.finish(returned)


# What Inductor writes above every launch: the nodes of Dynamo's graph that it computes.
_COMMENT = re.compile(r"# Topologically Sorted Source Nodes: \[(.*?)\]")


class _SourceLines:
    """Which line of the user's a wrapper is at.

    Args:
        code: The wrapper's.
        lines: The user's lines, by the names in its comments.
    """

    def __init__(self, code: types.CodeType, lines: Mapping[str, str]) -> None:
        self._code = code
        self._numbers: list[int] = []
        self._sources: list[str | None] = []
        if not lines:
            return
        try:
            text = Path(code.co_filename).read_text()
        except (OSError, UnicodeDecodeError):  # its file is gone, as torch's caches may be
            return
        for number, line in enumerate(text.splitlines(), 1):
            comment = _COMMENT.search(line)
            if comment is not None:
                self._numbers.append(number)
                names = comment.group(1).split(", ")
                self._sources.append(next((lines[name] for name in names if name in lines), None))

    def now(self) -> str | None:
        """The user's line behind what the wrapper runs now, as ``train.py:41``."""
        frame = sys._getframe(1) if self._numbers else None
        while frame is not None and frame.f_code is not self._code:
            frame = frame.f_back
        index = -1 if frame is None else bisect.bisect(self._numbers, frame.f_lineno) - 1
        return self._sources[index] if index >= 0 else None


class _Recorder(TorchDispatchMode):
    """Writes operations on fake tensors to a graph; what an operation has written to stays the node that it was."""

    def __init__(self, mode: FakeTensorMode, lines: _SourceLines) -> None:
        super().__init__()
        self._mode = mode
        self._lines = lines
        self._graph = fx.Graph()
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[torch.Tensor] = []
        self._constants: list[torch.Tensor] = []
        self._last_placeholder: fx.Node | None = None

    def placeholder(self, spec: TensorSpec) -> torch.Tensor:
        """A tensor that stands for one that is passed."""
        tensor = spec.empty()
        node = self._new_placeholder(f"arg{len(self._nodes)}")
        self._know(tensor, node)
        return tensor

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor that stands for a real one."""
        fake = self._mode.from_tensor(tensor, static_shapes=True)
        self._know(fake, self._new_placeholder(f"constant{len(self._constants)}"))
        self._constants.append(tensor)
        return fake

    def _new_placeholder(self, name: str) -> fx.Node:
        before = self._last_placeholder
        place = self._graph._root if before is None else before
        with self._graph.inserting_after(place):
            self._last_placeholder = self._graph.placeholder(name)
        return self._last_placeholder

    def _know(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)
        node.meta = {"spec": TensorSpec.of(tensor), "source": self._lines.now()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation on fake tensors and write it down."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        args, kwargs = self._with_states(func, args, kwargs)
        known = {id(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        if func.namespace == "prim" or func in (aten.detach.default, aten.alias.default, aten.lift_fresh.default):
            if isinstance(result, torch.Tensor) and id(args[0]) in self._nodes:
                self._nodes[id(result)] = self._nodes[id(args[0])]
                self._alive.append(result)
            return result
        node: fx.Node = self._graph.call_function(func, *self._as_nodes((args, kwargs)))
        specs: Any = tuple(map(_spec, result)) if isinstance(result, (list, tuple)) else _spec(result)
        node.meta = {"spec": specs, "source": self._lines.now()}
        if isinstance(result, torch.Tensor):
            if id(result) not in known:
                self._know(result, node)
        elif isinstance(result, (list, tuple)):
            for index, item in enumerate(result):
                if isinstance(item, torch.Tensor) and id(item) not in known:
                    self._know(item, self._graph.call_function(operator.getitem, (node, index)))
                    self._settle_state(node, index, item)
                elif item is not None and not isinstance(item, (torch.Tensor, int)):
                    raise UntraceableError(f"{func} returns a {type(item).__name__}")
        elif result is not None:
            raise UntraceableError(f"{func} returns a {type(result).__name__}")
        return result

    def _with_states(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments, with a generator's state where attention reads one from, which depends on who launches it."""
        names = states.reads(func)
        if not names:
            return args, kwargs

        def settled(name: str, value: Any) -> Any:
            if name not in states.STATES or not isinstance(value, torch.Tensor):
                return value
            node = self._graph.call_function(torch.ops.pygraph.state_to_read.default, (self._as_nodes(value),))
            read = torch.empty_like(value)
            self._know(read, node)
            return read

        return (
            tuple(settled(name, value) for name, value in zip(names, args, strict=False)),
            {name: settled(name, value) for name, value in kwargs.items()},
        )

    def _settle_state(self, node: fx.Node, index: int, item: torch.Tensor) -> None:
        """Have the generator's state that attention returns on the device, whoever launches it."""
        if not states.is_state(node, index):
            return
        device = next(spec.device for a in node.all_input_nodes for spec in tensor_specs(a.meta["spec"]))
        args = (self._nodes[id(item)], device, is_random(node))
        kept = self._graph.call_function(torch.ops.pygraph.state_to_keep.default, args)
        self._nodes[id(item)] = kept
        kept.meta = {"spec": dataclasses.replace(TensorSpec.of(item), device=device), "source": node.meta["source"]}

    def _as_nodes(self, values: Any) -> Any:
        def node_of(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) not in self._nodes:
                if isinstance(leaf, FakeTensor):
                    raise UntraceableError("a tensor appears that no operation has made")
                self.constant(leaf)
                self._nodes[id(leaf)] = self._last_placeholder  # pyright: ignore
                self._alive.append(leaf)
            return self._nodes[id(leaf)]

        return pytree.tree_map(node_of, values)

    def finish(self, returned: Sequence[Any]) -> KernelGraph:
        """The graph, given what the wrapper has returned."""
        self._graph.output(tuple(self._as_nodes(list(returned))))
        for node in reversed(list(self._graph.nodes)):
            if node.target is torch.ops.pygraph.state_to_keep.default and not node.users:
                self._graph.erase_node(node)  # a state that nobody takes
        return KernelGraph(graph_module(torch.nn.Module(), self._graph), tuple(self._constants))


def _spec(value: Any) -> TensorSpec | None:
    return TensorSpec.of(value) if isinstance(value, torch.Tensor) else None


# ---- what the wrapper calls ------------------------------------------------------------------------------------


def _globals(call: types.FunctionType, recorder: _Recorder) -> dict[str, Any]:
    """The wrapper's globals, with stand-ins for all that does not go through torch's dispatcher."""
    found = dict(call.__globals__)
    for name in call.__code__.co_names:
        value = found.get(name)
        if name in _STAND_INS:
            found[name] = _STAND_INS[name]
        elif name.startswith("empty_strided_"):
            found[name] = functools.partial(_empty_strided, name.removeprefix("empty_strided_"))
        elif isinstance(value, torch.Tensor):
            found[name] = recorder.constant(value)
        elif hasattr(value, "run") and hasattr(value, "triton_meta"):
            found[name] = _Kernel(value)
        elif value is not None and not _is_known(value):
            raise UntraceableError(f"it calls {name}, a {type(value).__name__}")
    return found


def _is_known(value: Any) -> bool:
    """Whether a global may be used as it is: torch's modules and operations, and what has no effect on tensors."""
    if isinstance(value, (types.ModuleType, types.BuiltinFunctionType, type, int, float, str, tuple, torch.device)):
        return True
    return type(value).__module__.startswith(("torch._ops", "torch._inductor.select_algorithm"))


def _empty_strided(device: str, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    if device == "cpu":
        raise UntraceableError("it computes on the cpu")
    return torch.empty_strided(size, stride, dtype=dtype, device=torch.device(device, torch.cuda.current_device()))


def _reinterpret(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    if dtype is not None and dtype != tensor.dtype:
        raise UntraceableError("it reads memory as another dtype")
    return ops.reinterpret(tensor, size, stride, offset)


def _same(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return tensor


def _nothing(*_: Any, **__: Any) -> None:
    return None


# Graphs check layouts by their cache keys, and addresses before they take this way at all.
_STAND_INS: Mapping[str, Any] = {
    "reinterpret_tensor": _reinterpret,
    "assert_size_stride": _nothing,
    "assert_alignment": _nothing,
    "copy_if_misaligned": _same,
    "get_raw_stream": _nothing,
}


_PARAMETER = re.compile(r"(in_out_ptr|out_ptr|in_ptr|ws_ptr|seed_offset|arg_)\w*")
_READ = ("in_ptr", "arg_")


class _Kernel:
    """Stands for one of Inductor's kernels: its launches become nodes."""

    def __init__(self, tuner: Any) -> None:
        self._tuner = tuner

    def run(self, *args: Any, stream: Any = None, **kwargs: Any) -> None:
        """Write a launch down."""
        if kwargs:
            raise UntraceableError(f"a launch has options: {', '.join(kwargs)}")
        written_names = self._written(args)
        names = self._tuner.fn.arg_names
        tensors: dict[Kind, list[torch.Tensor]] = {"written": [], "read": []}
        places: dict[int, tuple[Kind, int]] = {}
        written = {id(arg) for name, arg in zip(names, args, strict=False) if name in written_names}
        arguments: list[tuple[Kind, Any]] = []
        for arg in args:
            if not isinstance(arg, torch.Tensor):
                arguments.append(("constant", arg))
                continue
            if id(arg) not in places:
                kind: Kind = "written" if id(arg) in written else "read"
                places[id(arg)] = (kind, len(tensors[kind]))
                tensors[kind].append(arg)
            arguments.append(places[id(arg)])
        name = register(TunedLaunch(self._tuner, tuple(arguments)))
        torch.ops.pygraph.launch.default(name, tensors["written"], tensors["read"], [])

    def _written(self, args: Sequence[Any]) -> set[str]:
        """Names of the parameters that the kernel writes: Inductor's own say so, a user's code is looked at."""
        names = self._tuner.fn.arg_names
        tensors = {name: arg for name, arg in zip(names, args, strict=False) if isinstance(arg, torch.Tensor)}
        if all(_PARAMETER.fullmatch(name) for name in tensors):
            changed = set(self._tuner.mutated_arg_names)
            return {name for name in tensors if not name.startswith(_READ) or name in changed}
        return set(written_parameters(self._tuner, dict(zip(names, args, strict=False))))
