"""The nodes of a captured CUDA graph: their parameters as bytes that can be changed and sent.

Kernel arguments come in two forms: an array of pointers to arguments (``kernelParams``), or one packed buffer
(``extra``, as cuBLAS launches). An argument may be a struct with several pointers, or a TMA descriptor, whose first
word is an address. Copy nodes hold their addresses in a ``CUDA_MEMCPY3D``, fill nodes in their own struct. Nodes of a
child graph are changed in the child, which is then sent as a whole.
"""

from __future__ import annotations

import ctypes
from typing import Any

from pygraph.errors import CaptureError
from pygraph.runtime.cuda.api import check, cu, function_pointer
from pygraph.runtime.recorded_graph import NativeCommit


class NodeParams:
    """One node with a writable copy of its parameter bytes.

    Attributes:
        kind: ``kernel``, ``memcpy``, ``memset``, or the driver's name of another kind.
        name: The kernel's name, or the kind.
        buffer: The bytes; `commit` sends them.
    """

    kind: str
    name: str
    buffer: ctypes.Array[ctypes.c_char]

    def __init__(self, node: Any) -> None:
        self.node = node

    def commit(self, executable: Any) -> None:
        """Send the bytes to an executable graph."""
        raise CaptureError(f"a {self.name} node cannot be patched")

    def commit_template(self) -> None:
        """Write the bytes into the graph that the node is in, from which executables are made."""
        raise CaptureError(f"a {self.name} node cannot be patched")

    def restore_template(self) -> None:
        """Undo what `commit` has changed in the graph itself, once the bytes are those of the recording."""

    def native(self, executable: Any) -> NativeCommit | None:
        """The driver's function that does what `commit` does; None if there is none."""
        return None


class KernelParams(NodeParams):
    """A kernel node; every argument starts at a multiple of eight in ``buffer``.

    Attributes:
        function: The ``CUfunction``, or zero for a kernel without one.
    """

    kind = "kernel"

    def __init__(self, node: Any) -> None:
        super().__init__(node)
        self.params = check(cu.cuGraphKernelNodeGetParams(node))
        self.function = int(self.params.func)
        self.name = _kernel_name(self.params)
        # (offset in the buffer, offset among the kernel's parameters, size) of every argument
        self.arguments: list[tuple[int, int, int]] = []
        if int(self.params.kernelParams):
            self._copy_arguments()
        elif int(self.params.extra):
            self._copy_extra()
        else:
            self.buffer = ctypes.create_string_buffer(8)

    def _copy_arguments(self) -> None:
        layout = _argument_layout(self.params)
        self.buffer = ctypes.create_string_buffer(max(sum(-(-size // 8) * 8 for _, size in layout), 8))
        source = ctypes.cast(int(self.params.kernelParams), ctypes.POINTER(ctypes.c_void_p))
        pointers = (ctypes.c_void_p * max(len(layout), 1))()
        position = 0
        for index, (offset, size) in enumerate(layout):
            address = ctypes.addressof(self.buffer) + position
            ctypes.memmove(address, source[index] or 0, size)
            pointers[index] = address
            self.arguments.append((position, offset, size))
            position += -(-size // 8) * 8
        self._keep = pointers
        self.params.kernelParams = ctypes.addressof(pointers)

    def _copy_extra(self) -> None:
        """Arguments in one packed buffer (CU_LAUNCH_PARAM_BUFFER_POINTER 1, _SIZE 2, _END 0): cuBLAS's way."""
        extra = ctypes.cast(int(self.params.extra), ctypes.POINTER(ctypes.c_void_p))
        entries: dict[int, int] = {}
        index = 0
        while extra[index]:
            entries[extra[index] or 0] = extra[index + 1] or 0
            index += 2
        size = ctypes.cast(entries[2], ctypes.POINTER(ctypes.c_size_t))[0]
        self.buffer = ctypes.create_string_buffer(ctypes.string_at(entries[1], size), -(-size // 8) * 8)
        length = ctypes.c_size_t(size)
        array = (ctypes.c_void_p * 5)(1, ctypes.addressof(self.buffer), 2, ctypes.addressof(length), 0)
        self._keep = (length, array)
        self.params.extra = ctypes.addressof(array)
        self.arguments.append((0, 0, size))

    def argument_at(self, offset: int) -> tuple[int, int]:
        """The argument that holds byte ``offset`` of the buffer, and that byte's offset among the parameters."""
        for index, (position, parameter, size) in enumerate(self.arguments):
            if position <= offset < position + size:
                return index, parameter + offset - position
        raise CaptureError(f"byte {offset} belongs to no argument of {self.name}")

    def commit(self, executable: Any) -> None:
        """Send the bytes."""
        check(cu.cuGraphExecKernelNodeSetParams(executable, self.node, self.params))

    def commit_template(self) -> None:
        """Write the bytes into the graph."""
        check(cu.cuGraphKernelNodeSetParams(self.node, self.params))

    def native(self, executable: Any) -> NativeCommit:
        """The driver's function that sends the bytes."""
        function = function_pointer("cuGraphExecKernelNodeSetParams")
        return NativeCommit(function, int(executable), int(self.node), int(self.params.getPtr()), 0)


class MemcpyParams(NodeParams):
    """A copy node of one to three dimensions; the bytes are a ``CUDA_MEMCPY3D``."""

    kind = name = "memcpy"

    def __init__(self, node: Any) -> None:
        super().__init__(node)
        recorded = check(cu.cuGraphMemcpyNodeGetParams(node))
        self.buffer = ctypes.create_string_buffer(
            ctypes.string_at(int(recorded.getPtr()), _MEMCPY_BYTES), _MEMCPY_BYTES
        )
        self.params = cu.CUDA_MEMCPY3D(ctypes.addressof(self.buffer))
        self._context = check(cu.cuCtxGetCurrent())

    def commit(self, executable: Any) -> None:
        """Send the bytes."""
        check(cu.cuGraphExecMemcpyNodeSetParams(executable, self.node, self.params, self._context))

    def commit_template(self) -> None:
        """Write the bytes into the graph."""
        check(cu.cuGraphMemcpyNodeSetParams(self.node, self.params))

    def native(self, executable: Any) -> NativeCommit:
        """The driver's function that sends the bytes."""
        function = function_pointer("cuGraphExecMemcpyNodeSetParams")
        return NativeCommit(
            function, int(executable), int(self.node), ctypes.addressof(self.buffer), int(self._context)
        )


class MemsetParams(NodeParams):
    """A fill node; the bytes are a ``CUDA_MEMSET_NODE_PARAMS``."""

    kind = name = "memset"

    def __init__(self, node: Any) -> None:
        super().__init__(node)
        recorded = check(cu.cuGraphMemsetNodeGetParams(node))
        self.buffer = ctypes.create_string_buffer(
            ctypes.string_at(int(recorded.getPtr()), _MEMSET_BYTES), _MEMSET_BYTES
        )
        self.params = cu.CUDA_MEMSET_NODE_PARAMS(ctypes.addressof(self.buffer))
        self._context = check(cu.cuCtxGetCurrent())

    def commit(self, executable: Any) -> None:
        """Send the bytes."""
        check(cu.cuGraphExecMemsetNodeSetParams(executable, self.node, self.params, self._context))

    def commit_template(self) -> None:
        """Write the bytes into the graph."""
        check(cu.cuGraphMemsetNodeSetParams(self.node, self.params))

    def native(self, executable: Any) -> NativeCommit:
        """The driver's function that sends the bytes."""
        function = function_pointer("cuGraphExecMemsetNodeSetParams")
        return NativeCommit(
            function, int(executable), int(self.node), ctypes.addressof(self.buffer), int(self._context)
        )


class ChildParams(NodeParams):
    """A node inside a child graph: changed there, and sent with the whole child."""

    def __init__(self, inner: NodeParams, child_node: Any) -> None:
        super().__init__(inner.node)
        self.kind, self.name, self.buffer = inner.kind, inner.name, inner.buffer
        self._inner = inner
        self._child_node = child_node

    def commit(self, executable: Any) -> None:
        """Send the child graph with these bytes in it."""
        self._inner.commit_template()
        child = check(cu.cuGraphChildGraphNodeGetGraph(self._child_node))
        check(cu.cuGraphExecChildGraphNodeSetParams(executable, self._child_node, child))

    def restore_template(self) -> None:
        """Write the bytes into the child."""
        self._inner.commit_template()


class OpaqueParams(NodeParams):
    """A node of another kind, without parameters that could be patched."""

    def __init__(self, node: Any, kind: str) -> None:
        super().__init__(node)
        self.kind = self.name = kind
        self.buffer = ctypes.create_string_buffer(8)


_MEMCPY_BYTES = 200
_MEMSET_BYTES = 40
_KINDS = {"KERNEL": KernelParams, "MEMCPY": MemcpyParams, "MEMSET": MemsetParams}


def graph_nodes(graph: Any) -> list[Any]:
    """The handles of a graph's nodes in the order in which they were added."""
    return listed(cu.cuGraphGetNodes, graph)


def listed(query: Any, of: Any) -> list[Any]:
    """The nodes that a query of the driver lists, which takes their number as an argument."""
    number = check(query(of, 0))[-1]
    return list(check(query(of, number))[0])[:number] if number else []


def replace_by_kernel(graph: Any, node: Any, params: Any) -> Any:
    """Put a kernel where a node is, in a graph that has not been instantiated; returns the kernel's node."""
    before, after = listed(cu.cuGraphNodeGetDependencies, node), listed(cu.cuGraphNodeGetDependentNodes, node)
    kernel = check(cu.cuGraphAddKernelNode(graph, before or None, len(before), params))
    if after:
        check(cu.cuGraphAddDependencies(graph, [kernel] * len(after), after, None, len(after)))
    check(cu.cuGraphDestroyNode(node))
    return kernel


def node_params(handle: Any) -> list[NodeParams]:
    """The parameters of a node; of a child graph, those of all nodes in it."""
    kind = str(check(cu.cuGraphNodeGetType(handle)).name).removeprefix("CU_GRAPH_NODE_TYPE_")
    if kind == "GRAPH":
        child = check(cu.cuGraphChildGraphNodeGetGraph(handle))
        found = [params for inner in graph_nodes(child) for params in node_params(inner)]
        return [ChildParams(_innermost(params), handle) for params in found]
    if kind in _KINDS:
        return [_KINDS[kind](handle)]
    return [OpaqueParams(handle, kind.lower())]


def _innermost(params: NodeParams) -> NodeParams:
    return params._inner if isinstance(params, ChildParams) else params  # pyright: ignore[reportPrivateUsage]


def _argument_layout(params: Any) -> list[tuple[int, int]]:
    """Offset and size of every argument of a kernel."""
    layout: list[tuple[int, int]] = []
    while True:
        if int(params.func):
            result = cu.cuFuncGetParamInfo(params.func, len(layout))
        else:
            result = cu.cuKernelGetParamInfo(params.kern, len(layout))
        if result[0] != cu.CUresult.CUDA_SUCCESS:  # one past the last argument
            return layout
        layout.append((result[1], result[2]))


def _kernel_name(params: Any) -> str:
    result = cu.cuFuncGetName(params.func) if int(params.func) else cu.cuKernelGetName(params.kern)
    if result[0] != cu.CUresult.CUDA_SUCCESS:
        return "kernel"
    return result[1].decode() if isinstance(result[1], bytes) else str(result[1])
