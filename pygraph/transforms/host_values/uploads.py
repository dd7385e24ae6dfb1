"""Uploads: device tensors with the values of host tensors and numbers, each made once for all that use it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import fx

from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.scopes import came_from
from pygraph.transforms.host_values.constants import constant_name, is_exact, is_factory
from pygraph.transforms.host_values.graph_edit import GraphEdit, number_type
from pygraph.transforms.host_values.transfers import TO_COPY, is_real_scalar
from pygraph.transforms.rules.emitter import ITEM, SCALAR, aten, reaches_output

_SENT_AS = {
    torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.float32,
    torch.complex64: torch.float32, torch.complex128: torch.float64,
    torch.uint16: torch.int64, torch.uint32: torch.int64, torch.uint64: torch.int64,
}  # fmt: skip
"""By dtype that is no kernel's parameter, the one in which its numbers are sent before they are cast. It has all their
values."""


class Uploads:
    """Device tensors with the values of host tensors and numbers.

    Args:
        edit: The graph that is edited.
        constants: Host tensors that are the same at every call, with their values.
        arithmetic: Operations on 0-d host tensors that the device does instead.
    """

    def __init__(
        self, edit: GraphEdit, constants: Mapping[fx.Node, torch.Tensor], arithmetic: Container[fx.Node] = ()
    ) -> None:
        self.edit = edit
        self._constants, self._arithmetic = constants, arithmetic
        self._tensors: dict[fx.Node, fx.Node] = {}
        self._numbers: dict[fx.Node, fx.Node] = {}
        self._scalars: dict[tuple[Any, torch.dtype], fx.Node] = {}
        self._recomputed: dict[fx.Node, fx.Node] = {}

    def replace_copy(self, node: fx.Node) -> None:
        """Replace an explicit copy of a constant, or of a 0-d tensor, to the device by a cheaper upload."""
        source, spec = node.args[0], node.meta["spec"]
        self.edit.origin = came_from(node)
        assert isinstance(source, fx.Node)
        if source in self._constants:
            new = self._constant(source, node)
        elif is_real_scalar(spec):
            new = self._sent(source, spec.dtype)
        else:
            return
        is_its_own = new.op == "call_function" and not new.users and is_factory(new)
        if reaches_output(node) and not is_its_own:  # a result has memory of its own
            new = self.edit.call(aten.clone.default, (new,), {}, spec, node)
        node.replace_all_uses_with(new)
        self.edit.graph.erase_node(node)

    def tensor(self, source: fx.Node) -> fx.Node:
        """A device tensor with the values of a host tensor."""
        if source not in self._tensors:
            edit = self.edit
            spec = dataclasses.replace(source.meta["spec"], device=edit.device, offset=0)
            if source in self._constants:
                new = self._constant(source, None)
            elif is_real_scalar(spec):
                new = self._sent(source, spec.dtype)
            else:
                spec = dataclasses.replace(spec, stride=tuple(_copy_strides(spec)))
                new = edit.call(TO_COPY, (source,), {"device": edit.device}, spec, edit.after(source), source)
            self._tensors[source] = new
        return self._tensors[source]

    def scalar(self, number: Any, dtype: torch.dtype) -> fx.Node:
        """A 0-d device tensor of a number; a constant number is uploaded once."""
        key = (number if isinstance(number, fx.Node) else repr(number), dtype)
        if key not in self._scalars:
            edit = self.edit
            if isinstance(number, fx.Node):
                before, sent = edit.after(number), _SENT_AS.get(dtype, dtype)
                spec, kwargs = TensorSpec((), (), sent, edit.device), {"dtype": sent, "device": edit.device}
                new = edit.call(SCALAR, (number,), kwargs, spec, before, number)
                if sent != dtype:
                    spec = dataclasses.replace(spec, dtype=dtype)
                    new = edit.call(TO_COPY, (new,), {"dtype": dtype}, spec, before, number)
                self._scalars[key] = new
            else:
                host = SCALAR(number, dtype=dtype, device=torch.device("cpu"))
                self._scalars[key] = edit.capture(host, repr(number), None)
        return self._scalars[key]

    def number(self, source: fx.Node) -> Any:
        """The number in a 0-d host tensor: a node, or the number itself if it is a constant."""
        if source in self._constants:
            return self._constants[source].item()
        return self._read(self.tensor(source) if source in self._arithmetic else source)

    def _read(self, source: fx.Node) -> fx.Node:
        """The node that reads the number in a 0-d host tensor."""
        if source not in self._numbers:
            kind = number_type(source.meta["spec"].dtype)
            self._numbers[source] = self.edit.call(ITEM, (source,), {}, kind, self.edit.after(source), source)
        return self._numbers[source]

    def _sent(self, source: fx.Node, dtype: torch.dtype) -> fx.Node:
        """A 0-d host tensor as a 0-d device tensor: its number is sent, not its memory copied."""
        if source in self._arithmetic and source not in self._constants:
            computed = self._recompute(source, self.tensor)
            if computed.meta["spec"].dtype == dtype:
                return computed
            spec = dataclasses.replace(computed.meta["spec"], dtype=dtype)
            return self.edit.call(TO_COPY, (computed,), {"dtype": dtype}, spec, self.edit.after(computed), source)
        is_number = source.target is SCALAR and source.kwargs["dtype"] == dtype
        return self.scalar(source.args[0] if is_number else self._read(source), dtype)

    def _constant(self, source: fx.Node, copy: fx.Node | None) -> fx.Node:
        """The constant ``source``, or the result of its ``copy`` to the device, as a device tensor."""
        kwargs = {} if copy is None else dict(copy.kwargs)
        if is_exact(source) and kwargs.get("memory_format") is None:
            computed = self._recompute(source)
            dtype = kwargs.get("dtype")
            if copy is None or _same_dtype_and_strides(computed, copy):
                return computed
            if dtype is not None:
                return self.edit.call(TO_COPY, (computed,), {"dtype": dtype}, copy.meta["spec"], copy)
        value = self._constants[source]
        if copy is not None:
            options = {name: kwargs[name] for name in ("dtype", "memory_format") if kwargs.get(name) is not None}
            value = aten._to_copy.default(value, **options)
        return self.edit.capture(value, constant_name(source, self.edit.inputs), source)

    def _recompute(self, node: fx.Node, operand: Callable[[fx.Node], fx.Node] | None = None) -> fx.Node:
        """The result of an operation of the host, computed on the device.

        Args:
            node: The operation.
            operand: The device tensor for one of its operands; by default that is recomputed as well, as of a constant.
        """
        if node not in self._recomputed:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), operand or self._recompute)
            kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
            if "device" in kwargs or not node.all_input_nodes:
                kwargs["device"] = self.edit.device
            spec = dataclasses.replace(node.meta["spec"], device=self.edit.device)
            self._recomputed[node] = self.edit.call(node.target, args, kwargs, spec, self.edit.after(node), node)
        return self._recomputed[node]


def _copy_strides(spec: TensorSpec) -> tuple[int, ...]:
    meta = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
    return aten._to_copy.default(meta).stride()


def _same_dtype_and_strides(a: fx.Node, b: fx.Node) -> bool:
    first, second = a.meta["spec"], b.meta["spec"]
    return first.dtype == second.dtype and first.stride == second.stride
