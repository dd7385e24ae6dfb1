"""Runs of statements in the loops of a part that runs as Python: functions of their own, which the loop calls.

    for i in range(n):            for i in range(n):
        x = f(x, i)       ─▶          x = run(x, i)
        if x.sum() < 0:               if x.sum() < 0:
            break                         break

How often a loop turns, values on the device decide; what it does in a turn may be a graph all the same.
"""

# Nodes of trees have values of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import ast
import builtins
import collections
import copy
import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from pygraph.process.syntax_trees import syntax_tree
from pygraph.tracing.function_parts import PICK, RUN, Body, CutError, Part, assigned_first, names_in, plain_function

# Statements of these go where they are; a jump out of a run, and a variable that it deletes, would be lost.
_ALONE = (
    ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Await, ast.Delete, ast.Global, ast.Nonlocal,
    ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.Try,
)  # fmt: skip
_PLAIN = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.If, ast.With)
# Functions and methods whose results are on the host, and methods that are called for what they do there. Tensors have
# methods of such names as well (`x.float()`, `x.log()`).
_FUNCTIONS_OF_THE_HOST = frozenset({"int", "float", "bool", "print", "range", "enumerate", "zip", "next", "open"})
_METHODS_OF_THE_HOST = frozenset({"item", "tolist", "cpu", "numpy"})
_ACTIONS = frozenset({"append", "extend", "write", "log", "info", "debug", "warning", "update", "set_postfix"})
# Those of them that only keep numbers, which a graph may do as well where it goes on behind them.
_KEEPING = frozenset({"int", "float", "bool", "item", "tolist", "append", "extend", "update"})
_CONTEXTS = frozenset({"no_grad", "enable_grad", "inference_mode", "set_grad_enabled", "autocast"})


def may_be_in_a_loop(fn: Any, asking: Collection[str]) -> bool:
    """Whether none of some lines is one of a function outside of its loops; those of functions that it calls are none.

    Args:
        fn: The function, method or module; what has no source has no loops.
        asking: The lines, as ``train.py:7``.
    """
    try:
        plain, _ = plain_function(fn)
        body = Body.of(plain)
    except CutError:
        return False
    file = os.path.basename(plain.__code__.co_filename)
    nodes = [node for statement in body.statements for node in ast.walk(statement)]
    loops = {line for node in nodes if isinstance(node, (ast.For, ast.While)) for line in _lines_of(node)}
    own = {line for statement in body.statements for line in _lines_of(statement)}
    return not any(f"{file}:{line}" in asking for line in own - loops)


class Outline:
    """The statements of a part, with calls in place of runs in its loops.

    Args:
        part: The part.
        failed: The line at which a trace of the function has failed; None if it has not, and then there are no runs.
        computing: The lines before it that compute tensors.
        left_out: Lines of statements that are in no run, as one with them has no trace.
        is_in_a_call: Whether the trace has failed in a function that this line calls.
        decides: Whether it has failed as something that the line calls decides by a value on the device, as runs may.

    Attributes:
        runs: The runs, by the numbers that they are called by.
        picks: Whether any of the statements calls what `PICK` gives.
        between: The lines of statements in runs that keep numbers on the host, or decide, by the numbers of the runs.
        statements: The statements.
    """

    def __init__(
        self, part: Part, failed: int | None, computing: Collection[int], left_out: Collection[int] = (), *,
        is_in_a_call: bool = False, decides: bool = False,
    ) -> None:  # fmt: skip
        self._body, self._failed, self._computing = part.body, failed, frozenset(computing)
        self._left_out, self._decides = frozenset(left_out), decides
        self.between: list[frozenset[int]] = []
        self._shared = frozenset(part.body.fn.__code__.co_cellvars)
        self._is_in_a_call, self.picks = is_in_a_call, False
        self.runs: list[Part] = []
        self.statements = [*part.statements]
        if failed is not None:
            self.statements = self._replaced(part.statements, is_inside=False)

    def _replaced(self, statements: Sequence[ast.stmt], *, is_inside: bool) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        run: list[ast.stmt] = []
        keeping: list[ast.stmt] = []  # behind a run, and part of it if that goes on
        for statement in statements:
            if is_inside and self._may_be_in_a_run(statement):
                run += [*keeping, statement]
                keeping = []
            elif run and self._may_be_in_a_run(statement, keeps=True):
                keeping.append(statement)
            else:
                found += self._called(run)
                found += [self._with_inner(one, is_inside=is_inside) for one in (*keeping, statement)]
                run, keeping = [], []
        return [*found, *self._called(run), *(self._with_inner(one, is_inside=is_inside) for one in keeping)]

    def _with_inner(self, statement: ast.stmt, *, is_inside: bool) -> ast.stmt:
        """A statement with calls inside it: of a loop, and of one that is Python as something inside of it fails."""
        if not isinstance(statement, (ast.For, ast.While, ast.If, ast.With)):
            return self._picked(statement)
        changed: Any = copy.copy(statement)
        if not isinstance(statement, ast.With):
            self._pick_in(changed, "iter" if isinstance(statement, ast.For) else "test")
        is_inside = is_inside or self._failed in _lines_of(statement)
        if isinstance(statement, ast.With):
            changed.body = self._replaced(statement.body, is_inside=is_inside and _are_of_torch(statement.items))
            return changed
        changed.body = self._replaced(statement.body, is_inside=is_inside or not isinstance(statement, ast.If))
        changed.orelse = self._replaced(statement.orelse, is_inside=is_inside)
        return changed

    def _pick_in(self, statement: ast.stmt, name: str) -> None:
        """Replace an expression of a statement by the same with `PICK` around what it calls."""
        setattr(statement, name, self._picked(getattr(statement, name)))

    def _picked(self, node: Any) -> Any:
        """A statement or an expression, with `PICK` around what it calls if it is where the trace has failed."""
        if not self._is_in_a_call or self._failed not in _lines_of(node):
            return node
        visitor = _Picked()
        changed = visitor.visit(copy.deepcopy(node))
        self.picks = self.picks or visitor.any
        return changed

    def _may_be_in_a_run(self, statement: ast.stmt, *, keeps: bool = False) -> bool:
        """Whether a statement may be in a run; with ``keeps``, if something that computes tensors follows."""
        lines = _lines_of(statement)
        if (keeps or self._failed in lines) and not self._left_out.isdisjoint(lines):
            return False
        is_plain = isinstance(statement, _PLAIN) or _goes_through_parameters(statement)
        if not is_plain or self._failed is None or (self._failed in lines and not self._decides):
            return False
        if lines[-1] < self._failed and self._computing.isdisjoint(lines) and not keeps:
            return False
        nodes = [*_nodes_in(statement)]
        of_the_host = {name for node in nodes if (name := _name_of_the_host(node)) is not None}
        return not any(isinstance(node, _ALONE) for node in nodes) and of_the_host <= (_KEEPING if keeps else set())

    def _called(self, run: list[ast.stmt]) -> list[ast.stmt]:
        """A call of a run; the statements themselves where that cannot be, or would be of no use."""
        names, variables = names_in(run, assigned=False), self._body.variables
        if not _computes(run) or "super" in names or names & self._shared:
            return run
        named, assigned = names & variables, names_in(run, assigned=True) & variables
        number = len(self.runs)
        of_host = [one for one in run if self._failed in _lines_of(one) or not self._may_be_in_a_run(one)]
        self.between.append(frozenset(line for one in of_host for line in _lines_of(one)))
        first = assigned_first(run) | _variables_of_loops(run)
        known = sorted(assigned - (first - self._read_outside(run)))
        self.runs.append(Part(self._body, tuple(run), False, named, assigned, tuple(known)))
        lines = [f"{_GIVEN} = {{}}"]
        for name in sorted(named - first):
            lines += ["try:", f"    {_GIVEN}[{name!r}] = {name}", "except UnboundLocalError:", "    pass"]
        lines.append(f"{_GIVEN} = {RUN}({number}, {_GIVEN})")
        for name in known:
            lines += [f"if {name!r} in {_GIVEN}:", f"    {name} = {_GIVEN}[{name!r}]"]
        lines.append(f"{_GIVEN} = None")  # which would keep its tensors for longer than the function does
        called = syntax_tree("\n".join(lines)).body
        for statement in called:
            for node in ast.walk(statement):
                if hasattr(node, "lineno"):
                    node.lineno = node.end_lineno = run[0].lineno  # pyright: ignore[reportAttributeAccessIssue]
        return called

    def _read_outside(self, run: Sequence[ast.stmt]) -> frozenset[str]:
        """The names that the function reads outside of a run, also in earlier statements of a loop around it."""
        return frozenset(_read_in(self._body.statements) - _read_in(run))


def _read_in(statements: Iterable[ast.AST]) -> collections.Counter[str]:
    """The names that statements read, and how often."""
    found: collections.Counter[str] = collections.Counter()
    for node in itertools.chain.from_iterable(map(ast.walk, statements)):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
            found[node.id] += 1
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] += 1
    return found


def _variables_of_loops(run: Sequence[ast.stmt]) -> frozenset[str]:
    """The variables of loops through parameters that nothing reads but these loops."""
    inside: collections.Counter[str] = collections.Counter()
    for node in itertools.chain.from_iterable(map(ast.walk, run)):
        if isinstance(node, ast.For) and _goes_through_parameters(node):
            own = {one.id for one in ast.walk(node.target) if isinstance(one, ast.Name)}
            inside += collections.Counter({name: n for name, n in _read_in(node.body).items() if name in own})
    whole = _read_in(run)
    return frozenset(name for name, count in inside.items() if count == whole[name])


_GIVEN = "_given_to_run"


class _Picked(ast.NodeTransformer):
    """``f(x)`` becomes ``picked(f)(x)``; ``super`` and a name of Python's own are what they are."""

    any = False

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        is_pythons = isinstance(node.func, ast.Name) and hasattr(builtins, node.func.id)
        if isinstance(node.func, (ast.Name, ast.Attribute)) and not is_pythons:
            self.any = True
            picked = ast.Call(ast.Name(PICK, ast.Load()), [node.func], [])
            node.func = ast.fix_missing_locations(ast.copy_location(picked, node.func))
        return node


def _lines_of(node: ast.stmt | ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _are_of_torch(items: Sequence[ast.withitem]) -> bool:
    """Whether contexts are some of torch's; others may end an error, after which variables of a run were lost."""
    calls = [item.context_expr for item in items]
    return all(isinstance(call, ast.Call) and _name_of(call) in _CONTEXTS for call in calls)


def _goes_through_parameters(statement: ast.stmt) -> bool:
    """Whether a loop goes through parts of a model or of an optimizer, which are the same at every call."""
    if not isinstance(statement, ast.For) or statement.orelse:
        return False
    return any(isinstance(node, ast.Attribute) and node.attr in _PARAMETERS for node in ast.walk(statement.iter))


def _nodes_in(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement, but for what loops through parameters go through."""
    pending: list[ast.AST] = [statement]
    while pending:
        node = pending.pop()
        yield node
        is_loop = isinstance(node, ast.For) and _goes_through_parameters(node)
        pending += node.body if is_loop else ast.iter_child_nodes(node)  # pyright: ignore[reportAttributeAccessIssue]


_PARAMETERS = frozenset(
    {"parameters", "named_parameters", "buffers", "named_buffers", "modules", "named_modules", "children",
     "param_groups"}
)  # fmt: skip


def _name_of_the_host(node: ast.AST) -> str | None:
    """The name of what is called, if something inside a statement is a call that is for the host."""
    call, names = node, _METHODS_OF_THE_HOST
    if isinstance(node, ast.Expr):
        call = node.value  # without arguments, as `scaler.update()`, it keeps nothing of the host's
        names = _ACTIONS if isinstance(call, ast.Call) and (call.args or call.keywords) else frozenset[str]()
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        names = _FUNCTIONS_OF_THE_HOST
    return name if isinstance(call, ast.Call) and (name := _name_of(call)) in names else None


def _name_of(call: ast.Call) -> str:
    """The name of the function or the method that is called."""
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _computes(run: Sequence[ast.stmt]) -> bool:
    """Whether statements may compute tensors: they call something, or do more than to count."""
    return any(_may_compute(node) for statement in run for node in ast.walk(statement))


def _may_compute(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        parts = [node.left, node.right]
    elif isinstance(node, ast.AugAssign):
        parts = [node.target, node.value]
    else:
        return isinstance(node, ast.Call)
    counts = isinstance(node.op, (ast.Add, ast.Sub))
    return not (counts and any(isinstance(part, ast.Constant) for part in parts))
