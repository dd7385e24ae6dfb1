"""Cut a Program that computes results and gradients into one that computes the results and one for the gradients."""

# torch has no public names for operator overloads and their schemas. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from pygraph.autograd.values import Values
from pygraph.errors import TraceError, describe
from pygraph.guards.objects import with_parts
from pygraph.ir.check import check_program
from pygraph.ir.descriptors import (
    Alias,
    Argument,
    Baked,
    Captured,
    Input,
    Mutation,
    Output,
    Result,
    ScalarArgument,
    Static,
    TensorSpec,
    tensor_specs,
)
from pygraph.ir.effects import has_effect, is_host_number, is_random, is_view, root
from pygraph.ir.interpreter import Interpreter
from pygraph.ir.program import Program, graph_module
from pygraph.lowering.states import settle_program

_COTANGENT = torch.ops.pygraph.cotangent.default

Origin = Literal["cotangent", "saved", "result", "argument"]


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a backward's argument comes from: a cotangent, a saved value, a result or an argument of the forward.

    ``index`` is the cotangent's number, the saved value's number, or the leaf of the result or argument. ``spec`` is
    what the Program was traced for; None for a number.
    """

    of: Origin
    index: int
    spec: TensorSpec | None


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """What `partition_program` makes of a joint Program.

    Attributes:
        forward: Arguments to ``(result, saved, mark)``.
        backward: Its sources' values to a tuple of gradients, None where there is none.
        sources: What the backward takes, in order.
        captured: Tensors that the backward reads where they are.
        values: Numbers for the values of both.
        results: The numbers of what the forward returns and updates.
        known: What of the forward the backward takes, by number.
    """

    forward: Program
    backward: Program
    sources: tuple[Source, ...]
    captured: tuple[torch.Tensor, ...]
    values: Values
    results: frozenset[int]
    known: Mapping[int, Source]


def partition_program(joint: Program, mark: object) -> Parts:
    """Cut a joint Program where gradients begin to be needed.

    As in autograd, the forward computes what the results need, and saves what the backward reads of it; views of what
    is there anyway, constants and numbers are computed again instead.

    IR before::

        exp = aten.exp.default(x)
        cotangent = pygraph.cotangent.default(exp, 0)
        mul = aten.mul.Tensor(cotangent, exp)
        return (exp, mul)  # (result, gradients)

    IR after, the forward::

        exp = aten.exp.default(x)
        return (exp,)  # (result, saved, mark)

    and the backward::

        mul = aten.mul.Tensor(cotangent, exp)
        return (mul,)

    Args:
        joint: A Program at stage ``aten`` whose result is ``(result, gradients)``, and in which ``pygraph.cotangent``
            stands for the gradients of results.
        mark: What the forward returns as the third part of its result.

    Returns:
        Both Programs, and what the backward takes.

    Raises:
        TraceError: The forward's effects depend on a gradient, or the backward needs what cannot be saved.
    """
    return _Partition(joint, Values(), mark).parts()


def another_backward(joint: Program, parts: Parts) -> tuple[Program, tuple[Source, ...]] | None:
    """The backward of another joint Program of the same function, for a forward that has run.

    Args:
        joint: A joint Program, of cotangents of other results.
        parts: The forward that has run, and the backward that it saved for.

    Returns:
        The backward and what it takes; None if the forward is not the same, or has not saved it.
    """
    return _Partition(joint, parts.values).backward_after(parts)


class _NotSavedError(Exception):
    """A backward needs what its forward has not saved."""


class _Partition:
    def __init__(self, joint: Program, values: Values, mark: object = None) -> None:
        self._joint = joint = settle_program(joint)  # its parts may be graphs of their own
        self._mark = mark
        self._values = values
        self._numbers = values.of(joint)
        self._after: Parts | None = None
        self._known: dict[int, Source] = {}
        result, self._gradients = pytree.tree_unflatten(range(joint.out_tree.num_leaves), joint.out_tree)
        self._result = with_parts(result, kind=int)  # every leaf is its number
        self._result_leaves = len(pytree.tree_leaves(self._result))
        self._shared = {a.index for a in joint.aliases if a.of == "output" and not self._is_gradient(a.leaf)}
        self._late = self._late_nodes()
        self._written = {d.input for d in joint.outputs if isinstance(d, Mutation)}
        self._of_placeholder = dict(zip(joint.placeholders, joint.inputs, strict=True))
        self._input_number = {node: number for number, node in enumerate(joint.placeholders)}
        self._returned: dict[fx.Node, int] = {}
        for descriptor, value in zip(joint.outputs, joint.results, strict=True):
            if isinstance(descriptor, Result) and 0 <= descriptor.leaf < self._result_leaves:
                self._returned.setdefault(value, descriptor.leaf)
        self._saved: list[fx.Node] = []
        self._sources: list[Source] = []

    def parts(self) -> Parts:
        backward = self._backward()
        forward = self._forward()
        return Parts(
            check_program(forward), check_program(backward), tuple(self._sources), _captured(backward),
            self._values, self._results(), {n: s for n, s in self._known.items() if s.of in ("saved", "result")},
        )  # fmt: skip

    def backward_after(self, parts: Parts) -> tuple[Program, tuple[Source, ...]] | None:
        self._after = parts
        try:
            backward = self._backward()
        except _NotSavedError:
            return None
        watched = {tensor.data_ptr() for tensor in parts.captured}
        if any(tensor.data_ptr() not in watched for tensor in _captured(backward)):
            return None
        if any(source not in parts.sources for source in self._sources if source.of == "argument"):
            return None
        if self._results() != parts.results:
            return None
        return check_program(backward), tuple(self._sources)

    def _results(self) -> frozenset[int]:
        return frozenset(self._numbers[value] for value in self._early_values())

    def _late_nodes(self) -> set[fx.Node]:
        """What autograd computes in the backward: all after the first cotangent that no result needs."""
        nodes = self._joint.nodes[:-1]
        first = next((place for place, node in enumerate(nodes) if node.target is _COTANGENT), len(nodes))
        dependent: set[fx.Node] = set()
        for node in nodes:
            if node.target is _COTANGENT or any(source in dependent for source in node.all_input_nodes):
                dependent.add(node)
        early = _closure(self._early_values())
        if early & dependent:
            raise self._error("a tensor that it updates or returns depends on a gradient")
        return set(nodes[first:]) - early

    def _early_values(self) -> list[fx.Node]:
        outputs = enumerate(zip(self._joint.outputs, self._joint.results, strict=True))
        return [value for number, (descriptor, value) in outputs if self._is_early(number, descriptor)]

    def _error(self, problem: str) -> TraceError:
        return TraceError(describe(f"partition({self._joint.name})", problem))

    def _is_gradient(self, leaf: int) -> bool:
        return leaf >= self._result_leaves

    def _is_early(self, number: int, descriptor: Output) -> bool:
        """Whether an output is the forward's: an update, a result, or memory that results share."""
        if isinstance(descriptor, Result):
            return number in self._shared or 0 <= descriptor.leaf < self._result_leaves
        return isinstance(descriptor, Mutation)

    # -- the backward -------------------------------------------------------------------------------------------------

    def _backward(self) -> Program:
        joint = self._joint
        outputs, aliases, statics = self._gradient_outputs()
        wanted = [joint.results[number] for number, _ in outputs]
        needed = self._needed(wanted)
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        inputs: list[tuple[Input, fx.Node]] = []  # with the node of the joint Program that it stands for
        cotangents = {node.args[1]: node for node in joint.nodes if node.target is _COTANGENT}
        for index, node in sorted(cotangents.items()):  # pyright: ignore
            inputs.append((self._argument("cotangent", index, node), node))  # pyright: ignore
        computed = set(cotangents.values())
        given = [n for n in joint.nodes if n in needed and n not in self._late and not self._is_recomputed(n)]
        for node in sorted(given, key=is_host_number):  # numbers are passed after tensors
            inputs.append((self._input(node), node))
            computed.add(node)
        for _, node in inputs:
            mapping[node] = graph.placeholder(node.name)
            mapping[node].meta = dict(node.meta)
        for node in joint.nodes:
            if node in needed and node not in computed:
                mapping[node] = _made_up(node, graph) or graph.node_copy(node, lambda source: mapping[source])
                mapping[node].meta = dict(node.meta)
        given = {node for _, node in inputs}
        graph.output(tuple(self._own(value, given, graph, mapping) for value in wanted))
        in_tree = pytree.tree_structure((tuple(0 for _ in self._sources), {}))
        out_tree = pytree.tree_structure(self._gradients)
        return Program(
            name=f"backward({joint.name})", module=graph_module(joint.module, graph),
            inputs=tuple(descriptor for descriptor, _ in inputs), outputs=tuple(d for _, d in outputs),
            aliases=tuple(aliases), statics=tuple(statics), in_tree=in_tree, out_tree=out_tree,
            stage="aten", history=(*joint.history, "partition"),
        )  # fmt: skip

    def _own(
        self, value: fx.Node, given: Container[fx.Node], graph: fx.Graph, mapping: Mapping[fx.Node, fx.Node]
    ) -> fx.Node:
        """A gradient in memory of its own: of what the backward is given it copies the memory, not a view of it."""
        if root(value) not in given:
            return mapping[value]
        views: list[fx.Node] = []
        while is_view(value):
            views.append(value)
            value = value.args[0]  # pyright: ignore[reportAssignmentType]
        copied = graph.call_function(torch.ops.aten.clone.default, (mapping[value],))
        copied.meta = {"spec": dataclasses.replace(value.meta["spec"], offset=0), "source": value.meta["source"]}
        for view in reversed(views):
            inner, source = copied, view.args[0]
            copied = graph.node_copy(
                view, lambda node, inner=inner, source=source: inner if node is source else mapping[node]
            )
            copied.meta = dict(view.meta)
        return copied

    def _gradient_outputs(self) -> tuple[list[tuple[int, Result]], list[Alias], list[Static]]:
        """The joint Program's outputs that gradients need, by number, and the rest of the gradients' leaves."""
        first = self._result_leaves
        of_gradients = [alias for alias in self._joint.aliases if self._is_gradient(alias.leaf)]
        hidden = {alias.index for alias in of_gradients if alias.of == "output"}
        kept: list[tuple[int, Result]] = []
        number_of: dict[int, int] = {}
        for number, descriptor in enumerate(self._joint.outputs):
            if not isinstance(descriptor, Result):
                continue
            if self._is_gradient(descriptor.leaf) or number in hidden:
                number_of[number] = len(kept)
                leaf = descriptor.leaf - first if descriptor.leaf >= 0 else -1
                kept.append((number, dataclasses.replace(descriptor, leaf=leaf)))
        aliases: list[Alias] = []
        for alias in of_gradients:
            if alias.of == "output":
                index = number_of[alias.index]
            elif alias.of == "result" and self._is_gradient(alias.index):
                index = alias.index - first
            else:
                raise self._error("a gradient is an argument or a result of the forward")
            aliases.append(dataclasses.replace(alias, leaf=alias.leaf - first, index=index))
        statics = [
            dataclasses.replace(static, leaf=static.leaf - first)
            for static in self._joint.statics
            if self._is_gradient(static.leaf)
        ]
        return kept, aliases, statics

    def _needed(self, wanted: Iterable[fx.Node]) -> set[fx.Node]:
        """Nodes that the backward has, as inputs or computed there."""
        needed: set[fx.Node] = set()
        queue = list(wanted)
        while queue:
            node = queue.pop()
            if node in needed:
                continue
            needed.add(node)
            if node.target is _COTANGENT or _is_unread(node):
                continue
            if node in self._late or self._is_recomputed(node):
                queue += node.all_input_nodes
        return needed

    def _is_recomputed(self, node: fx.Node) -> bool:
        """Whether the backward computes again what the forward has computed: it costs nothing, or next to it."""
        if node.op == "get_attr":
            return True
        if node.op != "call_function" or node in self._late:
            return False
        if is_view(node) or _is_unread(node):
            return True
        takes_tensors = any(True for source in node.all_input_nodes for _ in tensor_specs(source.meta.get("spec")))
        return not takes_tensors and not is_random(node)

    def _input(self, node: fx.Node) -> Input:
        """The backward's input that stands for a value of the forward."""
        descriptor = self._of_placeholder.get(node)
        if descriptor is not None and self._input_number[node] not in self._written:
            if isinstance(descriptor, Captured):
                return descriptor
            if isinstance(descriptor, Argument):
                return self._argument("argument", descriptor.leaf, node)
            if isinstance(descriptor, ScalarArgument):
                position = len(self._sources)
                self._sources.append(Source("argument", descriptor.leaf, None))
                return ScalarArgument(f"args[{position}]", position, descriptor.type)
        number = self._numbers[node]
        if self._after is not None:
            if number not in self._after.known:
                raise _NotSavedError
            source = self._after.known[number]
            return self._argument(source.of, source.index, node)
        if node in self._returned:
            return self._argument("result", self._returned[node], node)
        if node not in self._saved:
            self._saved.append(node)
        return self._argument("saved", self._saved.index(node), node)

    def _argument(self, of: Origin, index: int, node: fx.Node) -> Argument:
        spec = node.meta["spec"]
        if not isinstance(spec, TensorSpec):
            raise self._error("its backward needs a value whose shape depends on data")
        spec = dataclasses.replace(spec, offset=0)
        position = len(self._sources)
        self._sources.append(Source(of, index, spec))
        self._known[self._numbers[node]] = self._sources[-1]
        return Argument(f"args[{position}]", position, spec)

    # -- the forward --------------------------------------------------------------------------------------------------

    def _forward(self) -> Program:
        joint = self._joint
        saved_leaves = range(self._result_leaves, self._result_leaves + len(self._saved))
        mark_leaf = self._result_leaves + len(self._saved)
        out_tree = pytree.tree_structure((self._result, tuple(saved_leaves), mark_leaf))
        outputs: list[Output] = []
        values: list[fx.Node] = []
        number_of: dict[int, int] = {}
        for number, (descriptor, value) in enumerate(zip(joint.outputs, joint.results, strict=True)):
            if self._is_early(number, descriptor):
                number_of[number] = len(outputs)
                outputs.append(descriptor)
                values.append(value)
        aliases = [
            dataclasses.replace(alias, index=number_of[alias.index]) if alias.of == "output" else alias
            for alias in joint.aliases
            if not self._is_gradient(alias.leaf)
        ]
        for leaf, node in zip(saved_leaves, self._saved, strict=True):
            path, spec = f"result[1][{leaf - self._result_leaves}]", dataclasses.replace(node.meta["spec"], offset=0)
            shared = [i for i, v in enumerate(values) if v is node and isinstance(outputs[i], Result)]
            if shared:  # memory that results are views of
                aliases.append(Alias(path, leaf, "output", shared[0], spec))
            else:
                outputs.append(Result(path, leaf, spec))
                values.append(node)
        statics = [static for static in joint.statics if not self._is_gradient(static.leaf)]
        statics.append(Static("result[2]", mark_leaf, self._mark))
        return self._without_late(outputs, values, aliases, statics, out_tree)

    def _without_late(
        self,
        outputs: Sequence[Output],
        values: Sequence[fx.Node],
        aliases: Sequence[Alias],
        statics: Sequence[Static],
        out_tree: pytree.TreeSpec,
    ) -> Program:
        """The joint Program without what depends on cotangents, and without captured tensors that only that reads."""
        joint = self._joint
        used = self._used_by(values)
        inputs: list[Input] = []
        input_of: dict[int, int] = {}
        aliased = {alias.index for alias in aliases if alias.of == "input"} | self._written
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        for node in joint.nodes:
            descriptor = self._of_placeholder.get(node)
            if descriptor is not None:
                number = self._input_number[node]
                if isinstance(descriptor, Captured) and node not in used and number not in aliased:
                    continue
                input_of[number] = len(inputs)
                inputs.append(descriptor)
            elif node.op == "output" or node in self._late or node not in used:
                continue
            mapping[node] = graph.node_copy(node, lambda source: mapping[source])
            mapping[node].meta = dict(node.meta)
        graph.output(tuple(map_arg(list(values), lambda value: mapping[value])))
        return joint.replace(
            module=graph_module(joint.module, graph),
            inputs=tuple(inputs),
            outputs=tuple(Mutation(input_of[d.input]) if isinstance(d, Mutation) else d for d in outputs),
            aliases=tuple(
                dataclasses.replace(alias, index=input_of[alias.index]) if alias.of == "input" else alias
                for alias in aliases
            ),
            statics=tuple(statics),
            out_tree=out_tree,
            history=(*joint.history, "partition"),
        )

    def _used_by(self, values: Iterable[Any]) -> set[fx.Node]:
        """Nodes that these values need, and those with effects."""
        effects = [n for n in self._joint.nodes if n.op == "call_function" and has_effect(n)]
        return _closure([*values, *(node for node in effects if node not in self._late)])


def _captured(program: Program) -> tuple[torch.Tensor, ...]:
    return tuple(d.value for d in program.inputs if isinstance(d, Captured))


def _closure(values: Iterable[Any]) -> set[fx.Node]:
    """All nodes that values need."""
    found: set[fx.Node] = set()
    queue = list(values)
    while queue:
        node = queue.pop()
        if isinstance(node, fx.Node) and node not in found:
            found.add(node)
            queue += node.all_input_nodes
    return found


# What attention returns for its backward if it drops: the state of the generator. Checked with torch 2.11 and 2.13.
_GENERATOR_STATES = frozenset({"philox_seed", "philox_offset", "rng_state", "unused"})


def _is_unread(node: fx.Node) -> bool:
    """Whether a node is a generator's state that an operation returns without having drawn: memory as it was found."""
    if node.target is not operator.getitem:
        return False
    source: Any = node.args[0]
    target: Any = source.target
    if not isinstance(target, torch._ops.OpOverload) or is_random(source):
        return False
    returns: list[Any] = target._schema.returns
    if len(returns) == 1:  # a list of tensors
        return False
    return returns[node.args[1]].name in _GENERATOR_STATES  # pyright: ignore


def _made_up(node: fx.Node, graph: fx.Graph) -> fx.Node | None:
    """Zeros for what nobody reads; None for any other node."""
    spec = node.meta.get("spec")
    if not _is_unread(node) or not isinstance(spec, TensorSpec):
        return None
    settings: Any = {"dtype": spec.dtype, "device": spec.device}
    return graph.call_function(torch.ops.aten.zeros.default, (list(spec.shape),), settings)


def without_results(program: Program, unwanted: Iterable[int]) -> Program:
    """A Program of which some results are None, and not computed.

    Args:
        program: A Program that updates nothing.
        unwanted: The leaves of those results.
    """
    left_out = set(unwanted)
    aliases = [alias for alias in program.aliases if alias.leaf not in left_out]
    if any(alias.of == "result" and alias.index in left_out for alias in aliases):
        return program
    hidden = {alias.index for alias in aliases if alias.of == "output"}
    kept = [
        number
        for number, descriptor in enumerate(program.outputs)
        if isinstance(descriptor, Result) and (number in hidden or 0 <= descriptor.leaf not in left_out)
    ]
    module = program.copy_graph()
    results = program.results
    module.graph.output_node().args = (tuple(module.graph.output_node().args[0][number] for number in kept),)  # pyright: ignore
    assert len(results) == len(program.outputs)
    module.graph.eliminate_dead_code(is_impure_node=has_effect)
    module.recompile()
    known = {static.leaf for static in program.statics}
    return program.replace(
        module=module,
        outputs=tuple(program.outputs[number] for number in kept),
        aliases=tuple(
            dataclasses.replace(alias, index=kept.index(alias.index)) if alias.of == "output" else alias
            for alias in aliases
        ),
        statics=(*program.statics, *(Static(f"result[{leaf}]", leaf, None) for leaf in sorted(left_out - known))),
    )


def evaluate_batched(program: Program, leaves: Sequence[Any]) -> Any:
    """Evaluate a backward on tensors that `torch.vmap` may have wrapped, whose strides are not those of the trace.

    Raises:
        TraceError: The Program depends on strides.
    """
    if program.aliases or any(str(node.target).startswith("aten.as_strided") for node in program.nodes):
        raise TraceError(describe(f"vmap({program.name})", "it depends on the strides of its tensors"))
    module = program.copy_graph()
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    module.recompile()
    return _joined(program, module(*_values(program, leaves)))


def evaluate_cast(program: Program, leaves: Sequence[Any]) -> Any:
    """Evaluate a backward that is called under autocast, which holds for its operations.

    As in autograd, gradients are in the dtypes of what they are gradients of, whatever an operation returns.
    """
    return _joined(program, _InTheirDtypes(program.module).run(*_values(program, leaves)))


class _InTheirDtypes(Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        result, spec = super().run_node(n), n.meta.get("spec")
        return result.to(spec.dtype) if isinstance(spec, TensorSpec) and isinstance(result, torch.Tensor) else result


def _values(program: Program, leaves: Sequence[Any]) -> list[Any]:
    return [d.value.detach() if isinstance(d, Captured) else leaves[d.leaf] for d in program.inputs]  # pyright: ignore


def _joined(program: Program, values: Iterable[Any]) -> Any:
    out: list[Any] = [None] * program.out_tree.num_leaves
    for descriptor, value in zip(program.outputs, values, strict=True):
        assert isinstance(descriptor, Result)
        out[descriptor.leaf] = value
    return pytree.tree_unflatten(out, program.out_tree)


def with_numbers(program: Program, values: Mapping[int, Any]) -> Program:
    """A Program in which numbers are baked in.

    Args:
        program: A Program.
        values: Values by leaf of the arguments; those of leaves that are no live numbers do not matter.
    """
    baked = [d for d in program.inputs if isinstance(d, ScalarArgument) and d.leaf in values]
    if not baked:
        return program
    module = program.copy_graph()
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, descriptor in zip(placeholders, program.inputs, strict=True):
        if descriptor in baked:
            value = values[descriptor.leaf]  # pyright: ignore
            for user in list(node.users):
                user.args, user.kwargs = map_arg(
                    (user.args, user.kwargs), lambda used, node=node, value=value: value if used is node else used
                )
            module.graph.erase_node(node)
    module.recompile()
    return program.replace(
        module=module,
        inputs=tuple(descriptor for descriptor in program.inputs if descriptor not in baked),
        baked=(*program.baked, *(Baked(d.path, d.leaf, values[d.leaf]) for d in baked)),
    )
