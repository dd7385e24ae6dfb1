"""`devicify`: take the host out of the device's part of a Program, so that a graph of it can be recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from pygraph.errors import StageError, describe
from pygraph.ir.descriptors import Captured, Fallback, Input, Mutation, ScalarArgument, TensorSpec, tensor_specs
from pygraph.ir.effects import has_effect
from pygraph.ir.program import Program
from pygraph.transforms.foreach_rules import ONE_KERNEL, PER_ENTRY, one_dtype
from pygraph.transforms.scalar_rules import ITEM, RULES, SCALAR, Emitter, Host, aten, reaches_output
from pygraph.transforms.schedule import note_order

_Operation = torch._ops.OpOverload  # pyright: ignore[reportPrivateUsage]
_HigherOrder = torch._ops.HigherOrderOperator  # pyright: ignore[reportPrivateUsage]
_TO_COPY: Any = aten._to_copy.default

# Host tensors of any shape that these read on the device are uploaded first; others take theirs as they are.
_INDEXING: frozenset[Any] = frozenset(
    {aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten._unsafe_index_put.default}
)
_COPIES: frozenset[Any] = frozenset({aten.copy.default, aten.slice_scatter.default, aten.select_scatter.default})

# Numbers in these dtypes are no kernel's parameters: they are sent in another that has all their values, and cast.
_SENT_AS = {
    torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.float32,
    torch.complex64: torch.float32, torch.complex128: torch.float64,
    torch.uint16: torch.int64, torch.uint32: torch.int64, torch.uint64: torch.int64,
}  # fmt: skip

# Operations that want some of their tensors on the host.
_TAKE_HOST_TENSORS = ("attention", "rnn", "lstm", "gru", "padded_sequence")

# Operations of which a constant computed on the device has the same bits as one computed on the host.
_FACTORIES = frozenset({"arange", "eye", "full", "ones", "scalar_tensor", "tril_indices", "triu_indices", "zeros"})
_EXACT = frozenset(
    [
        "_to_copy",
        "abs",
        "add",
        "bitwise_and",
        "bitwise_not",
        "bitwise_or",
        "cat",
        "clone",
        "eq",
        "expand",
        "flip",
        "ge",
        "gt",
        "le",
        "logical_and",
        "logical_not",
        "logical_or",
        "lt",
        "mul",
        "ne",
        "neg",
        "permute",
        "reshape",
        "select",
        "slice",
        "squeeze",
        "stack",
        "sub",
        "t",
        "transpose",
        "tril",
        "triu",
        "unsqueeze",
        "_unsafe_view",
        "view",
        "where",
    ]
)


def devicify_program(program: Program) -> Program:
    """Make the device's part of a Program independent of host values and host memory.

    Before::

        def program(x: "bfloat16[4] cuda", k: "float", i: "int64[2] cpu"):
            mul = aten.mul.Tensor(x, k)
            index = aten.index.Tensor(mul, [i])

    After::

        def program(x: "bfloat16[4] cuda", k: "float", i: "int64[2] cpu"):
            copy = aten._to_copy.default(i, device="cuda:0")
            scalar = pygraph.scalar(k, dtype=float32, device="cuda:0")
            wide = aten._to_copy.default(x, dtype=float32)
            product = aten.mul.Tensor(wide, scalar)
            mul = aten._to_copy.default(product, dtype=bfloat16)
            index = aten.index.Tensor(mul, [copy])

    - A host number, or a 0-d CPU tensor, that a device operation takes becomes a ``pygraph.scalar``, and the
      operation the one that takes tensors (see `scalar_rules`). A number read from a device tensor only to go back
      to the device stays there, without a synchronisation.
    - Constants on the host become constants on the device, uploaded once. Those that are made by exact operations
      alone (``arange``, ``zeros`` ...) are made on the device. Random ones stay: the host's generator draws them.
      Tensors that the caller can change are read at every call.
    - Host work and uploads move to the front, downloads and the host work on them as far back as their users
      allow, so that device operations form long runs. Random draws on the host keep their order.

    Results are those of eager torch on CUDA bit for bit, except: ``pow`` with a number 2, 0.5, -1 ... (eager has
    special cases, also for ``(-inf) ** 0.5`` and ``(-0.0) ** 0.5``), and sums with a factor from the host
    (``addmm(..., alpha=k)``), which are within a rounding or two. ``x / k`` is ``x * (1 / k)`` on CUDA, as in
    eager. A number too large for the dtype becomes inf where eager's ``masked_fill`` or ``full`` raise.

    Method: CUDA-Graph-aware code transformation (CGCT) of PyGraph, arXiv 2503.19779.

    Args:
        program: A Program at stage ``aten``; it is not changed.

    Returns:
        A Program with the same results. Inputs are kept, used or not; uploaded constants are appended to them.
        ``fallbacks`` names every operation that still takes a host value. A Program without a device is returned
        with only its history changed.

    Raises:
        StageError: A later pass has been applied already.
        DeviceError: if a constant has to be uploaded and the device is not there.

    >>> import torch, pygraph
    >>> devicify_program(pygraph.trace(lambda x, k: x * k)(torch.ones(2), 3.0)).history
    ('trace', 'devicify')
    """
    if program.stage != "aten":
        raise StageError(
            describe(f"devicify({program.name})", f"stage {program.stage!r}", expected="'aten'",
                     remedy="Apply devicify first: graphify(indirect(devicify(f))).")
        )  # fmt: skip
    history = (*program.history, "devicify")
    if program.device.type == "cpu":
        return program.replace(history=history)
    edit = _Edit(program)
    note_order(edit.graph)
    for node in list(edit.graph.nodes):
        if node.target is _TO_COPY and _is_upload(node):
            edit.replace_upload(node)
    for node in list(edit.graph.nodes):
        if _is_device_operation(node):
            edit.rewrite_operation(node)
    edit.graph.eliminate_dead_code(is_impure_node=has_effect)
    _reorder(edit.graph, edit.device)
    edit.graph.lint()
    edit.module.recompile()
    new = tuple(fallback for fallback in edit.fallbacks if fallback not in program.fallbacks)
    return program.replace(
        module=edit.module, inputs=tuple(edit.inputs), history=history, fallbacks=(*program.fallbacks, *new)
    )


def undevicified_scalars(program: Program) -> set[int]:
    """Indices of the `ScalarArgument` inputs whose values a device operation still takes as host values.

    The caller can bake those in, by tracing again with them static. Host arithmetic is followed backwards.

    Args:
        program: A Program that `devicify_program` returned.
    """
    pending = [
        source
        for node in program.nodes
        if _is_device_operation(node)
        for source in node.all_input_nodes
        if _is_number(source)
    ]
    numbers = {
        node: index
        for index, (node, descriptor) in enumerate(zip(program.placeholders, program.inputs, strict=True))
        if isinstance(descriptor, ScalarArgument)
    }
    seen: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in seen and not _on_device(node):
            seen.add(node)
            pending.extend(node.all_input_nodes)
    return {numbers[node] for node in seen if node in numbers}


# ---- what a node is --------------------------------------------------------------------------------------------


def _on_device(node: fx.Node) -> bool:
    return any(spec.device.type not in ("cpu", "meta") for spec in tensor_specs(node.meta.get("spec")))


def _reads_device(node: fx.Node) -> bool:
    return any(_on_device(source) for source in node.all_input_nodes)


def _is_number(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("spec"), type)


def _is_host_tensor(node: Any) -> bool:
    spec = node.meta.get("spec") if isinstance(node, fx.Node) else None
    return isinstance(spec, TensorSpec) and spec.device.type == "cpu"


def _is_real_scalar(spec: TensorSpec) -> bool:
    return spec.shape == () and not spec.dtype.is_complex


def _is_upload(node: fx.Node) -> bool:
    """Whether a node brings a host value to the device."""
    if node.target is SCALAR:
        return _on_device(node)
    return node.target is _TO_COPY and _on_device(node) and _is_host_tensor(node.args[0])


def _is_download(node: fx.Node) -> bool:
    """Whether a node brings a device value to the host."""
    return _reads_device(node) and not _on_device(node) and node.meta.get("spec") is not None


def _is_device_operation(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, (_Operation, _HigherOrder)):
        return False
    return (_on_device(node) or _reads_device(node)) and not _is_upload(node) and not _is_download(node)


# ---- rewriting -------------------------------------------------------------------------------------------------


class _Edit:
    """A copy of a Program's graph under work, with what has been made so far."""

    def __init__(self, program: Program) -> None:
        self.module = program.copy_graph()
        self.graph = self.module.graph
        self.inputs: list[Input] = list(program.inputs)
        self.device = program.device
        self.fallbacks: list[Fallback] = []
        self._source: str | None = None  # the user's line that the current rewrite is for
        self._uploaded: dict[fx.Node, fx.Node] = {}
        self._items: dict[fx.Node, fx.Node] = {}
        self._scalars: dict[tuple[Any, torch.dtype], fx.Node] = {}
        self._on_device_too: dict[fx.Node, fx.Node] = {}
        self._values = _constants(self.graph, program)

    # -- host tensors

    def replace_upload(self, node: fx.Node) -> None:
        """Make an explicit copy to the device as cheap as what is copied allows."""
        source, spec = node.args[0], node.meta["spec"]
        self._source = node.meta.get("source")
        assert isinstance(source, fx.Node)
        if source in self._values:
            new = self._device_constant(source, node)
        elif _is_real_scalar(spec):
            new = self._live_scalar(source, spec.dtype)
        else:
            return
        made_for_this = new.op == "call_function" and not new.users and _is_factory(new)
        if reaches_output(node) and not made_for_this:  # a result has memory of its own
            new = self._call(aten.clone.default, (new,), {}, spec, node)
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)

    def upload(self, source: fx.Node) -> fx.Node:
        """A device tensor with the values of a host tensor, made once for all its users."""
        if source not in self._uploaded:
            spec = dataclasses.replace(source.meta["spec"], device=self.device, offset=0)
            if source in self._values:
                new = self._device_constant(source, None)
            elif _is_real_scalar(spec):
                new = self._live_scalar(source, spec.dtype)
            else:
                spec = dataclasses.replace(spec, stride=tuple(_copy_strides(spec)))
                new = self._call(_TO_COPY, (source,), {"device": self.device}, spec, self._after(source), source)
            self._uploaded[source] = new
        return self._uploaded[source]

    def _live_scalar(self, source: fx.Node, dtype: torch.dtype) -> fx.Node:
        """A 0-d host tensor as a 0-d device tensor: its number is sent, not its memory copied."""
        known = source.target is SCALAR and source.kwargs["dtype"] == dtype
        return self.scalar(source.args[0] if known else self.item(source), dtype)

    def scalar(self, number: Any, dtype: torch.dtype) -> fx.Node:
        """A 0-d device tensor of a number; a number known now is uploaded once."""
        key = (number if isinstance(number, fx.Node) else repr(number), dtype)
        if key not in self._scalars:
            if isinstance(number, fx.Node):
                before, sent = self._after(number), _SENT_AS.get(dtype, dtype)
                spec, kwargs = TensorSpec((), (), sent, self.device), {"dtype": sent, "device": self.device}
                new = self._call(SCALAR, (number,), kwargs, spec, before, number)
                if sent != dtype:
                    spec = dataclasses.replace(spec, dtype=dtype)
                    new = self._call(_TO_COPY, (new,), {"dtype": dtype}, spec, before, number)
                self._scalars[key] = new
            else:
                host = SCALAR(number, dtype=dtype, device=torch.device("cpu"))
                self._scalars[key] = self.capture(host, repr(number), None)
        return self._scalars[key]

    def item(self, source: fx.Node) -> fx.Node:
        """The number in a 0-d host tensor, as a node."""
        if source not in self._items:
            dtype = source.meta["spec"].dtype
            kind = bool if dtype is torch.bool else float if dtype.is_floating_point else int
            self._items[source] = self._call(ITEM, (source,), {}, kind, self._after(source), source)
        return self._items[source]

    # -- constants

    def _device_constant(self, source: fx.Node, copy: fx.Node | None) -> fx.Node:
        """The constant ``source``, or the result of its ``copy`` to the device, as a device tensor."""
        kwargs = {} if copy is None else dict(copy.kwargs)
        if self._is_exact(source) and kwargs.get("memory_format") is None:
            made = self._make_on_device(source)
            dtype = kwargs.get("dtype")
            if copy is None or (made.meta["spec"].dtype == copy.meta["spec"].dtype and _same_layout(made, copy)):
                return made
            if dtype is not None:
                return self._call(_TO_COPY, (made,), {"dtype": dtype}, copy.meta["spec"], copy)
        value = self._values[source]
        if copy is not None:
            kept = {name: kwargs[name] for name in ("dtype", "memory_format") if kwargs.get(name) is not None}
            value = aten._to_copy.default(value, **kept)
        return self.capture(value, _constant_name(source, self.inputs), source)

    def _is_exact(self, node: fx.Node) -> bool:
        """Whether a constant is made of nothing but operations that are exact everywhere."""
        if node.op != "call_function":
            return False
        name = _opname(node)
        if _is_factory(node):
            return name != "arange" or not node.meta["spec"].dtype.is_floating_point
        return name in _EXACT and "alpha" not in node.kwargs and all(self._is_exact(s) for s in node.all_input_nodes)

    def _make_on_device(self, node: fx.Node) -> fx.Node:
        if node not in self._on_device_too:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self._make_on_device)
            kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
            if "device" in kwargs or not node.all_input_nodes:
                kwargs["device"] = self.device
            spec = dataclasses.replace(node.meta["spec"], device=self.device)
            self._on_device_too[node] = self._call(node.target, args, kwargs, spec, self._after(node), node)
        return self._on_device_too[node]

    def capture(self, value: torch.Tensor, name: str, source: fx.Node | None) -> fx.Node:
        """A new input that holds ``value`` on the device."""
        value = value.detach().to(self.device)
        with self.graph.inserting_before(self._first()):
            node = self.graph.placeholder(f"device_constant_{len(self.inputs)}")
        node.meta = {
            "spec": TensorSpec.of(value),
            "source": source.meta.get("source") if source else self._source,
            "from": "devicify",
        }
        self.inputs.append(Captured("constant", name, value))
        return node

    # -- operations

    def rewrite_operation(self, node: fx.Node) -> None:
        """Take host values out of the operands of one device operation."""
        if not any(_is_number(source) or _is_host_tensor(source) for source in node.all_input_nodes):
            return
        self._source = node.meta.get("source")
        target, spec = node.target, node.meta.get("spec")
        if target in RULES and isinstance(spec, TensorSpec):
            args = self._operands(node)
            new = None if args is None else RULES[target](self._emitter(node, spec), args)
            if new is not None:
                node.replace_all_uses_with(new)
                self.graph.erase_node(node)
                return
        if target in PER_ENTRY and self._rewrite_lists(node):
            return
        if isinstance(node.target, _Operation):
            self._upload_operands(node)
        for source in node.all_input_nodes:
            if _is_number(source):
                reason = f"takes the host value {source.name} by value"
                self.fallbacks.append(Fallback(str(target), reason, node.meta.get("source")))

    def _emitter(self, node: fx.Node, spec: TensorSpec) -> Emitter:
        return Emitter(self.graph, node, self.device, spec, self.scalar)

    def _rewrite_lists(self, node: fx.Node) -> bool:
        """Take host numbers out of the operands of an operation on lists of tensors; False where that fails."""
        specs: Any = node.meta["spec"]
        values = [value for _, value in _arguments(node)]
        target: Any = ONE_KERNEL.get(node.target)
        dtype = one_dtype(specs)
        if target is not None and dtype is not None:
            node.target, node.args = target, (values[0], self.scalar(values[1], dtype))
            return True
        rule, defaults, names = PER_ENTRY[node.target]
        entries: list[fx.Node] = []
        for index, spec in enumerate(specs):
            given = [self._operand(_entry(value, index)) for value in values]
            args = {**defaults, **dict(zip(names, given, strict=False))}
            entry = rule(self._emitter(node, spec), args) if _fit_rules(args) else None
            if entry is None:
                return False
            entries.append(entry)
        for user in list(node.users):
            user.replace_all_uses_with(entries[user.args[1]])  # pyright: ignore  # operator.getitem(node, index)
            self.graph.erase_node(user)
        self.graph.erase_node(node)
        return True

    def _operands(self, node: fx.Node) -> dict[str, Any] | None:
        """The arguments by name, host values as `Host`; None if one is where no tensor can be."""
        args: dict[str, Any] = {}
        for argument, value in _arguments(node):
            scalar = str(argument.type) in ("number", "Tensor", "Optional[number]", "Optional[Tensor]")
            args[argument.name] = self._operand(value) if scalar else value
        return args if _fit_rules(args) else None

    def _operand(self, value: Any) -> Any:
        """A number or a 0-d tensor on the host as a `Host`; another value as it is."""
        if _is_number(value):
            return Host(value, value.meta["spec"](1))
        if _is_host_tensor(value) and _is_real_scalar(value.meta["spec"]):
            number = self._values[value].item() if value in self._values else self.item(value)
            return Host(number, torch.empty((), dtype=value.meta["spec"].dtype, device="meta"))
        return value

    def _upload_operands(self, node: fx.Node) -> None:
        target: Any = node.target
        if any(word in target._opname for word in _TAKE_HOST_TENSORS):
            return
        for source in node.all_input_nodes:
            if _is_host_tensor(source):
                if source.meta["spec"].shape == () or target in _INDEXING or target in _COPIES:
                    node.replace_input_with(source, self.upload(source))
                else:
                    reason = f"reads the host tensor {source.name}"
                    self.fallbacks.append(Fallback(str(target), reason, node.meta.get("source")))

    # -- nodes

    def _call(self, op: Any, args: Any, kwargs: Any, spec: Any, before: fx.Node, of: fx.Node | None = None) -> fx.Node:
        with self.graph.inserting_before(before):
            new = self.graph.call_function(op, args, kwargs)
        source = (of or before).meta.get("source") or self._source
        new.meta = {"spec": spec, "source": source, "from": "devicify", "order": (of or before).meta.get("order")}
        return new

    def _first(self) -> fx.Node:
        return next(node for node in self.graph.nodes if node.op != "placeholder")

    def _after(self, node: fx.Node) -> fx.Node:
        return self._first() if node.op == "placeholder" else node.next


def _arguments(node: fx.Node) -> list[tuple[Any, Any]]:
    """The arguments of an operation as its schema has them, each with its value."""
    target: Any = node.target
    return [
        (argument, node.args[position])
        if position < len(node.args) and not argument.kwarg_only
        else (argument, node.kwargs.get(argument.name, argument.default_value))
        for position, argument in enumerate(target._schema.arguments)
    ]


def _entry(value: Any, index: int) -> Any:
    """What an operation on lists takes for one entry: that of a list, or what it takes for all."""
    items: Any = value
    return items[index] if isinstance(value, (list, tuple)) else items


def _fit_rules(args: dict[str, Any]) -> bool:
    """Whether no host value is left where a rule expects none."""
    return not any(_is_number(item) or _is_host_tensor(item) for value in args.values() for item in _flat(value))


def _is_factory(node: fx.Node) -> bool:
    return _opname(node) in _FACTORIES


def _opname(node: fx.Node) -> str:
    return getattr(node.target, "_opname", "")


def _flat(value: Any) -> Iterable[Any]:
    items: Any = value
    return items if isinstance(value, (list, tuple)) else (value,)


def _copy_strides(spec: TensorSpec) -> tuple[int, ...]:
    meta = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
    return aten._to_copy.default(meta).stride()


def _same_layout(a: fx.Node, b: fx.Node) -> bool:
    return a.meta["spec"].stride == b.meta["spec"].stride


def _constants(graph: fx.Graph, program: Program) -> dict[fx.Node, torch.Tensor]:
    """Host tensors that are the same at every call, with their values.

    Only ``constant`` captures count: parameters, buffers and closed-over tensors can change between calls.
    """
    written = {output.input for output in program.outputs if isinstance(output, Mutation)}
    values: dict[fx.Node, torch.Tensor] = {}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for index, (node, descriptor) in enumerate(zip(placeholders, program.inputs, strict=True)):
        if not isinstance(descriptor, Captured) or descriptor.kind != "constant" or index in written:
            continue
        if _is_host_tensor(node):
            values[node] = descriptor.value.detach()
    wanted = _needed_constants(graph, set(values))
    with torch.no_grad():
        for node in graph.nodes:
            if node in wanted:
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda source: values[source])
                values[node] = node.target(*args, **kwargs)
    return values


def _needed_constants(graph: fx.Graph, known: set[fx.Node]) -> set[fx.Node]:
    """The nodes that compute constants, of those that end at the device."""
    constant = set(known)
    for node in graph.nodes:
        target: Any = node.target
        if node.op != "call_function" or not isinstance(target, _Operation) or has_effect(node):
            continue
        known_operation = target.namespace in ("aten", "prims") and "empty" not in _opname(node)
        if known_operation and _is_host_tensor(node) and constant.issuperset(node.all_input_nodes):
            constant.add(node)
    needed: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node not in constant or node in known:
            continue
        if any(user in needed or _on_device(user) or _is_device_operation(user) for user in node.users):
            needed.add(node)
    return needed


def _constant_name(node: fx.Node, inputs: list[Input]) -> str:
    """Where a constant comes from: the capture's own name, or that of the operation and its line."""
    placeholders = [other for other in node.graph.nodes if other.op == "placeholder"]
    if node in placeholders:
        descriptor = inputs[placeholders.index(node)]
        return descriptor.name if isinstance(descriptor, Captured) else node.name
    if len(node.all_input_nodes) == 1:
        return _constant_name(node.all_input_nodes[0], inputs)
    return f"{node.target} at {node.meta.get('source')}"


# ---- order -----------------------------------------------------------------------------------------------------


def _reorder(graph: fx.Graph, device: torch.device) -> None:
    """Host work and uploads first, device operations in their order, downloads and what follows from them last.

    Effects on the host keep their order. Where host and device draw from one random generator, as they do on the
    emulated device, those on the device keep their order among them too.
    """
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    one_generator = device.type != "cuda"
    early = _early(nodes, one_generator)
    late = [node for node in nodes if node not in early and _waits(node)]
    is_late, done = set(late), set[fx.Node]()
    at = {node: position for position, node in enumerate(nodes)}
    order = [node for node in nodes if node in early]
    effects = {
        node: [other for other in late if has_effect(other) and at[other] < at[node]]
        for node in nodes
        if has_effect(node)
    }

    def place(node: fx.Node) -> None:
        """Put ``node`` next, after the late nodes that it needs."""
        pending = [node]
        while pending:
            current = pending[-1]
            needs = [source for source in current.all_input_nodes if source in is_late and source not in done]
            if has_effect(current) and (current in is_late or one_generator):
                needs += [other for other in effects[current] if other not in done]
            if needs and current not in done:
                pending.extend(needs)
                continue
            pending.pop()
            if current not in done:
                done.add(current)
                order.append(current)

    for node in nodes:
        if node not in early and node not in is_late:
            place(node)
    for node in late:
        place(node)
    output = graph.output_node()
    for node in order:
        output.prepend(node)


def _early(nodes: list[fx.Node], one_generator: bool) -> set[fx.Node]:
    """Host work and uploads that need nothing from the device; effects among them stay in order."""
    early: set[fx.Node] = set()
    effects_wait = False
    for node in nodes:
        host = _is_upload(node) or not (_on_device(node) or _reads_device(node))
        ready = all(source.op == "placeholder" or source in early for source in node.all_input_nodes)
        if host and ready and not (effects_wait and has_effect(node)):
            early.add(node)
        elif has_effect(node) and (one_generator or not _on_device(node)):
            effects_wait = True
    return early


def _waits(node: fx.Node) -> bool:
    """Whether a node that cannot go first should go as late as possible: it is not the device's work."""
    return _is_upload(node) or _is_download(node) or not (_on_device(node) or _reads_device(node))
