"""The value that a number has in the call that is traced: the trace so far is run on the call's own arguments.

What Python asks of a value on the device decides how a trace goes on. Fake tensors do not know it. But each operation
up to there is in the graph, so its value can be computed as eager would, from the very arguments, which stay as they
are: what the graph updates is copied before its first update.
"""

# The tracer works on torch's private parts (storages' identities) and on values of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor  # checked with torch 2.11 and 2.13
from torch.utils import _pytree as pytree

from pygraph.errors import TraceError
from pygraph.ir.decisions import is_question
from pygraph.ir.effects import KNOWN_NAMESPACES, is_action, is_operation
from pygraph.ir.functional_variants import written_values
from pygraph.ir.printing import target_text
from pygraph.ir.python_draws import PythonStates
from pygraph.tracing.hidden_writes import written_in_hiding


def are_known(values: Iterable[Any]) -> bool:
    """Whether values are those of a call, and not descriptions of tensors alone."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return not any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors)


def value_at(node: fx.Node, last: fx.Node, root: Any, values: Sequence[Any], restore: Callable[[], None]) -> Any:
    """The value of a node in a call.

    Args:
        node: The node.
        last: The last node of its graph that is run.
        root: The module of the graph's attributes.
        values: The call's tensors and numbers, one for each placeholder.
        restore: Puts random generators back to where they were when the call began.

    Raises:
        TraceError: An operation fails, or must not be run twice.
    """
    nodes: list[fx.Node] = []
    for one in node.graph.nodes:
        if not is_question(one):
            nodes.append(one)
        if one is last:
            break
    for one in nodes:
        if is_operation(one) and not _is_repeatable(one):
            raise TraceError(f"it decides by a value after {target_text(one.target)}, not to be repeated")
    found: list[Any] = []
    failed: list[Exception] = []

    def run() -> None:
        drawn = PythonStates()  # by what the trace runs as Python; that has changed them is noticed at its end
        restore()
        try:
            with torch.no_grad():
                found.append(_Run(root, nodes, node).value(values))
        except Exception as error:
            failed.append(error)
        finally:
            restore()
            drawn.restore()

    device = next((value.device for value in values if isinstance(value, torch.Tensor) and value.is_cuda), None)
    outside_of_modes(run, device)
    if failed:
        raise TraceError(f"it fails before it decides: {failed[0]}") from failed[0]
    return found[0]


def _is_repeatable(node: fx.Node) -> bool:
    target: Any = node.target
    return "c10d" not in target.namespace and (target.namespace in KNOWN_NAMESPACES or not is_action(node))


def outside_of_modes(run: Callable[[], None], device: torch.device | None = None) -> None:
    """Run outside all modes and levels of the trace, which are a thread's own, on the current stream of a device."""
    stream = torch.cuda.current_stream(device) if torch.cuda.is_initialized() else None

    def on_stream() -> None:
        with torch.cuda.stream(stream):
            run()

    with ThreadPoolExecutor(1, "pygraph values") as thread:
        thread.submit(on_stream).result()


class _Run:
    """A run of nodes.

    Args:
        root: The module of the graph's attributes.
        nodes: The nodes, in order.
        wanted: The one whose value is wanted.
    """

    def __init__(self, root: Any, nodes: Sequence[fx.Node], wanted: fx.Node) -> None:
        self._root, self._nodes, self._wanted = root, nodes, wanted
        self._known: dict[fx.Node, Any] = {}
        self._outside: set[int] = set()  # storages that are there before and after the call
        self._last_use = {argument: node for node in nodes for argument in node.all_input_nodes}

    def value(self, values: Sequence[Any]) -> Any:
        """The value that is wanted."""
        given = iter(values)
        for node in self._nodes:
            if node.op == "placeholder":
                value = next(given)
                self._known[node] = self._noted(value.detach() if isinstance(value, torch.Tensor) else value)
            elif node.op == "get_attr":
                value = getattr(self._root, str(node.target))
                self._known[node] = self._noted(value.detach() if isinstance(value, torch.Tensor) else value)
            else:
                self._known[node] = self._result(node)
            for argument in node.all_input_nodes:
                if self._last_use[argument] is node and argument is not self._wanted:
                    del self._known[argument]
        return self._known[self._wanted]

    def _noted(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self._outside.add(value.untyped_storage()._cdata)
        return value

    def _result(self, node: fx.Node) -> Any:
        target: Any = node.target
        args, kwargs = self._arguments(node)
        if not is_operation(node):  # control flow and kernels say it in ways of their own
            written: Any = (args, kwargs) if isinstance(target, torch._ops.HigherOrderOperator) else ()
        else:
            declared = written_values(target, args, kwargs) if target._schema.is_mutable else ()
            written = (*declared, *written_in_hiding(target, args))
        if self._copy(pytree.tree_leaves(written)):
            args, kwargs = self._arguments(node)
        return target(*args, **kwargs)

    def _arguments(self, node: fx.Node) -> Any:
        return fx.map_arg((node.args, node.kwargs), lambda argument: self._known[argument])

    def _copy(self, written: Iterable[Any]) -> bool:
        """Have what is about to be written, and all that shares its memory, lie in a copy; whether it has moved."""
        storages = [one.untyped_storage() for one in written if isinstance(one, torch.Tensor)]
        copies = {one._cdata: _copy_of(one) for one in storages if one._cdata in self._outside}
        if copies:
            self._known = pytree.tree_map_only(torch.Tensor, lambda one: _moved(one, copies), self._known)
        return bool(copies)


def _copy_of(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,)).clone().untyped_storage()


def _moved(tensor: torch.Tensor, copies: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """A tensor in the copy of its storage, if there is one."""
    copy = copies.get(tensor.untyped_storage()._cdata)
    if copy is None:
        return tensor
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())
