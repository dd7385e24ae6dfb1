"""Which tensors of a Triton kernel have values that its addresses depend on, read off its source."""

from __future__ import annotations

import ast
import functools
import textwrap
from collections import defaultdict
from collections.abc import Iterator

from pygraph.process.syntax_trees import syntax_tree

_MEMORY = ("load", "store")  # and the names that begin with the next
_ATOMIC = "atomic_"


@functools.cache
def parameters_in_addresses(source: str) -> frozenset[str] | None:
    """The parameters from whose memory come values that addresses are made of, or that the kernel makes assertions of.

    Every value is followed back through the names that it is made of; where a pointer is passed on, as to a helper that
    looks into its memory, all that goes with it counts.

    Args:
        source: The kernel's function, as Inductor generates it: one value per name, pointers that are parameters.

    Returns:
        Names of parameters, those of numbers as well; None if the source is of another form.
    """
    try:
        tree = syntax_tree(textwrap.dedent(source))
    except SyntaxError:
        return None
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    if len(functions) != 1:
        return None
    kernel = _Kernel(functions[0])
    return None if kernel.is_foreign else frozenset(kernel.found())


class _Kernel:
    """The names that each name of a kernel is made of, and those that its addresses and assertions are made of."""

    def __init__(self, function: ast.FunctionDef) -> None:
        arguments = function.args
        self._parameters = {one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        self._made_of: defaultdict[str, set[str]] = defaultdict(set)
        self._stored: defaultdict[str, set[str]] = defaultdict(set)
        self._needed = set[str]()
        self.is_foreign = False
        for node in ast.walk(function):
            self._note(node)

    def found(self) -> set[str]:
        """Parameters that are reached from addresses and assertions."""
        reached, waiting = set[str](), set(self._needed)
        while waiting:
            name = waiting.pop()
            reached.add(name)
            waiting |= (self._made_of[name] | self._stored[name]) - reached
        return reached & self._parameters

    def _note(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._note_value(target, node.value)
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)):
            if node.value is not None:
                self._note_value(node.target, node.value)
        elif isinstance(node, ast.For):
            self._note_value(node.target, node.iter)
        elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
            self._needed |= _names(node.test)
        elif isinstance(node, ast.Call):
            self._note_call(node)

    def _note_value(self, target: ast.expr, value: ast.expr) -> None:
        names = _names(value)
        if isinstance(value, ast.Name) and value.id in self._parameters:
            self._needed.add(value.id)  # another name for a pointer, whose uses are not told apart
        for name in _names(target):
            self._made_of[name] |= names

    def _note_call(self, call: ast.Call) -> None:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        if name == "device_assert":
            self._needed |= {one for value in given for one in _names(value)}
        elif name in _MEMORY or name.startswith(_ATOMIC):
            self._note_access(call, name)
        elif any(isinstance(value, ast.Name) and value.id in self._parameters for value in given):
            self._needed |= {one for value in given for one in _names(value)}

    def _note_access(self, call: ast.Call, name: str) -> None:
        if not call.args:
            self.is_foreign = True
            return
        address = call.args[0]
        bases = {one.id for one in _terms(address) if isinstance(one, ast.Name)} & self._parameters
        stored = [] if name == "load" else call.args[1:2]
        masks = [*call.args[1 + len(stored) :], *(keyword.value for keyword in call.keywords)]
        inner = [part for part in ast.walk(address) if isinstance(part, ast.Call)]
        self._needed |= _names(address) - bases
        self._needed |= {one for part in (*inner, *masks) for one in _names(part)}
        for value in stored:
            self.is_foreign |= not bases
            for base in bases:
                self._stored[base] |= _names(value)


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _terms(address: ast.expr) -> Iterator[ast.expr]:
    """The terms of an address: a pointer, and distances from it; numbers that those are products of are none."""
    if isinstance(address, ast.BinOp) and isinstance(address.op, (ast.Add, ast.Sub)):
        yield from _terms(address.left)
        yield from _terms(address.right)
    else:
        yield address
