"""Parts of a function: runs of its statements, as functions of their own that are called one after the other.

    def step(x):          def step(x):                        def step(loss):
        loss = f(x)   ─▶      loss = f(x)                         schedule.step()
        schedule.step()       return False, {"loss": loss}        return True, loss
        return loss

Each is compiled from the statements in the source, with their lines, and shares closure and globals with the function.
Local variables that later parts need are returned, and are arguments of these.
"""

# Nodes of trees have values of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportPrivateUsage=false
from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import inspect
import itertools
import linecache
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.modules.module as of_modules

from pygraph.guards.walk.objects import GLOBAL_HOOKS, HOOKS
from pygraph.process.syntax_trees import syntax_tree


class CutError(Exception):
    """A function cannot be cut into parts, for the reason that the message gives."""


def plain_function(fn: Any) -> tuple[types.FunctionType, Any]:
    """The function that a callable runs, and the instance that it is a method of, or None.

    Args:
        fn: A function, a method, or a module without hooks, which runs its ``forward``.

    Raises:
        CutError: It is something else.
    """
    if isinstance(fn, torch.nn.Module):
        if not calls_forward_alone(fn):
            raise CutError("it is a module with hooks")
        fn = fn.forward
    plain: Any = fn.__func__ if isinstance(fn, types.MethodType) else fn
    if not isinstance(plain, types.FunctionType):
        raise CutError("it is no function")
    return plain, fn.__self__ if isinstance(fn, types.MethodType) else None


def calls_forward_alone(module: torch.nn.Module) -> bool:
    """Whether a call of a module is one of its ``forward``: it has no hooks, and its class no call of its own."""
    # As torch asks in `Module._call_impl`; private, checked with torch 2.11 and 2.13.
    call: Any = type(module).__call__
    of_all = (getattr(of_modules, name) for name in GLOBAL_HOOKS)
    return (
        call is torch.nn.Module.__call__
        and module._compiled_call_impl is None
        and not any(getattr(module, name) for name in HOOKS)
        and not any(of_all)
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """The statements of a function.

    Attributes:
        fn: The function.
        definition: Its definition in the source.
        statements: Its statements, but for declarations.
        declarations: Its declarations of global and nonlocal variables.
        variables: Its local variables.
    """

    fn: types.FunctionType
    definition: ast.FunctionDef
    statements: tuple[ast.stmt, ...]
    declarations: tuple[ast.stmt, ...]
    variables: frozenset[str]

    @classmethod
    def of(cls, fn: types.FunctionType) -> Body:
        """Read a function's statements from its source.

        Raises:
            CutError: There is no source of just this code, or it looks at its own variables.
        """
        code = fn.__code__
        if code.co_flags & _RESUMED:
            raise CutError("it is a generator or a coroutine")
        definition = _definition(fn)
        for node in ast.walk(definition):
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            if name in _LOOKS_AT_VARIABLES and isinstance(node, ast.Name):
                raise CutError(f"it calls {name}(), which sees its variables")
            if name.startswith("__") and not name.endswith("__"):
                raise CutError(f"{name} has another name in its class")
        own = _without_declarations(definition)
        declarations = [node for node in _own_nodes(definition) if isinstance(node, (ast.Global, ast.Nonlocal))]
        variables = _own_names(definition) & {*code.co_varnames, *code.co_cellvars}
        return cls(fn, definition, tuple(own.body), tuple(declarations), variables)

    @property
    def first_argument(self) -> frozenset[str]:
        """The name of its first argument, which ``super()`` takes."""
        arguments = [*self.definition.args.posonlyargs, *self.definition.args.args]
        return frozenset(one.arg for one in arguments[:1])

    @property
    def arguments(self) -> frozenset[str]:
        """The names of all its arguments."""
        return frozenset(node.arg for node in ast.walk(self.definition.args) if isinstance(node, ast.arg))

    def check_closures(self, parts: Sequence[Part]) -> None:
        """Check that a variable which inner functions see is assigned to only in the first part that has it.

        It is the same variable in later parts then, though each has its own.

        Raises:
            CutError: One is not.
        """
        inner = {name for node in ast.walk(self.definition) if isinstance(node, ast.Nonlocal) for name in node.names}
        for name in self.fn.__code__.co_cellvars:
            if sum(name in part.named for part in parts) < 2:
                continue
            is_given = name in self.arguments
            having = [part for part in parts if name in part.named or (part.is_first and is_given)]
            assigning = [part for part in parts if name in part.assigned or (part.is_first and is_given)]
            if name in inner or assigning != having[:1]:
                raise CutError(f"an inner function shares the variable {name}")


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Some statements of a function that follow each other.

    Attributes:
        body: The function's.
        statements: The statements.
        is_first: Whether they take the arguments of the function as they are passed, and not by name.
        named: The local variables that they name.
        assigned: The local variables that they may assign to, or delete.
        returned: The local variables among these that later parts name.
    """

    body: Body
    statements: tuple[ast.stmt, ...]
    is_first: bool
    named: frozenset[str]
    assigned: frozenset[str]
    returned: tuple[str, ...]

    @property
    def lines(self) -> tuple[int, int]:
        """The first and the last line of its source."""
        last = self.statements[-1]
        return self.statements[0].lineno, last.end_lineno or last.lineno

    @functools.cached_property
    def read(self) -> frozenset[str]:
        """The local variables whose values of before it may read."""
        return self.named - assigned_first(self.statements)

    def function(
        self,
        bound: Iterable[str],
        statements: Sequence[ast.stmt] | None = None,
        run: Callable[[int, dict[str, Any]], dict[str, Any]] | None = None,
        pick: Callable[[Any], Any] | None = None,
    ) -> types.FunctionType:
        """The part as a function.

        Args:
            bound: The local variables that have a value when it begins, which are its arguments in this order. The
                first part takes those of the function itself.
            statements: Statements that do the same as its own; some of them call ``run``.
            run: What they call, by the name `RUN`.
            pick: Gives what they call instead of a function, by the name `PICK`.

        Returns:
            A function that returns whether the function returns here, and what it does; or else its variables that
            later parts name, by name.
        """
        bound = list(bound)
        fn: Any = self.body.fn
        statements = [_Returns().visit(copy.deepcopy(one)) for one in statements or self.statements]
        given = self.body.arguments if self.is_first else set(bound)
        unbound = sorted((self.named | self.assigned) - given)  # of a comprehension alone, it would be a global one
        prologue = syntax_tree("".join(f"if False: {name} = None\n" for name in unbound)).body
        arguments = _without_values(self.body.definition.args) if self.is_first else _plain_arguments(bound)
        inner = _definition_of(  # by no name of a user's, which may be that of something that it calls
            _INNER, arguments, [*self.body.declarations, *prologue, *statements, *self._epilogue()]
        )
        outer = _definition_of(_OUTER, _plain_arguments([*fn.__code__.co_freevars, RUN, PICK]), [inner])
        ast.copy_location(inner, self.statements[0])
        module = ast.fix_missing_locations(ast.Module([outer], []))
        flags = fn.__code__.co_flags & _FUTURE
        compiled: Any = compile(module, fn.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
        code = _code_in(_code_in(compiled, _OUTER), _INNER)
        code = code.replace(co_name=fn.__code__.co_name, co_qualname=fn.__code__.co_qualname)
        cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
        cells |= {RUN: types.CellType(run), PICK: types.CellType(pick)}
        made = types.FunctionType(
            code, fn.__globals__, fn.__name__, None, tuple(cells[name] for name in code.co_freevars)
        )
        made.__qualname__ = fn.__qualname__
        if self.is_first:
            made.__defaults__, made.__kwdefaults__ = fn.__defaults__, fn.__kwdefaults__
        return made

    def _epilogue(self) -> list[ast.stmt]:
        """The return of the variables that later parts name; one that has no value is not there."""
        lines = [f"{_FOUND} = {{}}"] if self.returned else []
        for name in self.returned:
            lines += ["try:", f"    {_FOUND}[{name!r}] = {name}", "except UnboundLocalError:", "    pass"]
        lines.append(f"return False, {_FOUND if self.returned else '{}'}")
        statements = syntax_tree("\n".join(lines)).body
        for statement in statements:
            for node in ast.walk(statement):
                if hasattr(node, "lineno"):
                    node.lineno = node.end_lineno = self.lines[1]  # pyright: ignore[reportAttributeAccessIssue]
        return statements


def parts_of(body: Body, cuts: Sequence[int]) -> list[Part]:
    """A function's parts.

    Args:
        body: Its body.
        cuts: The positions of the statements with which parts but the first begin, in order.

    Raises:
        CutError: They would not do what the function does.
    """
    bounds = [0, *cuts, len(body.statements)]
    runs = [body.statements[first:last] for first, last in itertools.pairwise(bounds)]
    parts: list[Part] = []
    named: set[str] = set()
    for index, run in reversed(list(enumerate(runs))):
        here = names_in(run, assigned=False)
        here = (here | body.first_argument if "super" in here else here) & body.variables
        assigned = names_in(run, assigned=True) & body.variables
        is_first = index == 0 and not body.fn.__code__.co_flags & _VARIADIC  # whose parts share a dict of keywords
        parts.insert(0, Part(body, run, is_first, here, assigned, tuple(sorted(assigned & named))))
        named |= here
    body.check_closures(parts)
    return parts


# ---- the source ----------------------------------------------------------------------------------------------------

_RESUMED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_VARIADIC = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
_FUTURE = 0x1FE0000  # what ``from __future__`` sets, see CPython's Include/cpython/code.h, 3.11 to 3.14
_LOOKS_AT_VARIABLES = ("locals", "vars", "dir", "eval", "exec")
_OUTER, _INNER, _FOUND = "_outer_of_part", "_part", "_found_in_part"
RUN, PICK = "_run_in_loop", "_picked"
"""The names by which statements of a part call others, and find what is to be called instead of a function."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_SCOPES = (*_DEFINITIONS, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _definition(fn: types.FunctionType) -> ast.FunctionDef:
    """The definition of a function, if its source is that of its code.

    Raises:
        CutError: It is not.
    """
    code = fn.__code__
    source = "".join(linecache.getlines(code.co_filename, fn.__globals__))
    try:
        tree = syntax_tree(source)
        compiled = compile(source, code.co_filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise CutError("its source cannot be read") from error
    if not any(_are_same(code, other) for other in _codes_in(compiled)):
        raise CutError("it has no source, or another one by now")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min(node.lineno, *(one.lineno for one in node.decorator_list), node.lineno)
            if first == code.co_firstlineno:
                return node
    raise CutError("it is not made by a def")


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes_in(constant)


def _code_in(code: types.CodeType, name: str) -> types.CodeType:
    return next(one for one in code.co_consts if isinstance(one, types.CodeType) and one.co_name == name)


_COMPARED = (
    "co_name", "co_firstlineno", "co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags",
    "co_argcount", "co_kwonlyargcount", "co_posonlyargcount",
)  # fmt: skip


def _are_same(one: types.CodeType, other: types.CodeType) -> bool:
    """Whether two pieces of code do the same; where they were read from, and what they have run, is left aside."""
    if any(getattr(one, name) != getattr(other, name) for name in _COMPARED):
        return False
    if len(one.co_consts) != len(other.co_consts):
        return False
    for mine, theirs in zip(one.co_consts, other.co_consts, strict=True):
        if isinstance(mine, types.CodeType) and isinstance(theirs, types.CodeType):
            if not _are_same(mine, theirs):
                return False
        elif type(mine) is not type(theirs) or repr(mine) != repr(theirs):
            return False
    return True


# ---- names ---------------------------------------------------------------------------------------------------------


def names_in(statements: Iterable[ast.stmt], *, assigned: bool) -> frozenset[str]:
    """The names in statements and in the functions inside them: all, or those that are assigned to or deleted."""
    found: set[str] = set()
    for statement in statements:
        for node in ast.walk(statement):
            found |= _assigned_by(node)
            if isinstance(node, ast.Name) and not assigned:
                found.add(node.id)
    return frozenset(found)


def assigned_first(statements: Iterable[ast.stmt]) -> frozenset[str]:
    """The names that are assigned to in any case before anything reads them."""
    found, read = set[str](), set[str]()
    for statement in statements:
        if not isinstance(statement, ast.Assign):
            read |= names_in([statement], assigned=False)
            continue
        names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and type(node.ctx) is ast.Load}
        read |= names | names_in([ast.Expr(statement.value)], assigned=True)
        found |= names_in([statement], assigned=True) - read
    return frozenset(found)


def _assigned_by(node: ast.AST) -> set[str]:
    """The names that a node itself assigns to, deletes, or declares nonlocal."""
    found: list[str | None] = []
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        found = [node.id]
    elif isinstance(node, ast.alias):
        found = [(node.asname or node.name).partition(".")[0]]
    elif isinstance(node, ast.MatchMapping):
        found = [node.rest]
    elif isinstance(node, ast.Nonlocal):
        found = [*node.names]
    elif isinstance(node, (*_DEFINITIONS, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
        found = [node.name]
    return set(filter(None, found))


def _own_names(definition: ast.FunctionDef) -> frozenset[str]:
    """The names that a function's own statements may assign to, and its arguments."""
    found = {node.arg for node in ast.walk(definition.args) if isinstance(node, ast.arg)}
    for node in _own_nodes(definition):
        if isinstance(node, _COMPREHENSIONS):  # whose variables are their own, but for those of ``:=``
            inner = [one.target for one in ast.walk(node) if isinstance(one, ast.NamedExpr)]
            found |= {name.id for name in inner}
        else:
            found |= _assigned_by(node)
    return frozenset(found)


def _own_nodes(definition: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes in a function's body, but for those in functions and classes inside it."""
    queue: list[ast.AST] = list(definition.body)
    while queue:
        node = queue.pop()
        yield node
        if not isinstance(node, (*_SCOPES, *_COMPREHENSIONS)):
            queue += ast.iter_child_nodes(node)


# ---- changes of the tree -------------------------------------------------------------------------------------------


class _OwnStatements(ast.NodeTransformer):
    """A change of a function's own statements, not of those in functions and classes inside it."""

    def _alone(self, node: Any) -> Any:
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = visit_ClassDef = _alone


class _Returns(_OwnStatements):
    """``return value`` becomes ``return True, value``."""

    def visit_Return(self, node: ast.Return) -> ast.Return:
        value = ast.Constant(None) if node.value is None else node.value
        return ast.copy_location(ast.Return(ast.Tuple([ast.Constant(True), value], ast.Load())), node)


class _Declarations(_OwnStatements):
    """``global x`` becomes ``pass``: it is said at the beginning of each part."""

    def _nothing(self, node: Any) -> ast.Pass:
        return ast.copy_location(ast.Pass(), node)

    visit_Global = visit_Nonlocal = _nothing


def _without_declarations(definition: ast.FunctionDef) -> ast.FunctionDef:
    copied = copy.deepcopy(definition)
    copied.body = [_Declarations().visit(statement) for statement in copied.body]
    return copied


def _without_values(arguments: ast.arguments) -> ast.arguments:
    """Arguments with None for their default values, and no annotations."""
    copied = copy.deepcopy(arguments)
    copied.defaults = [ast.Constant(None) for _ in copied.defaults]
    copied.kw_defaults = [None if value is None else ast.Constant(None) for value in copied.kw_defaults]
    for node in ast.walk(copied):
        if isinstance(node, ast.arg):
            node.annotation = None
    return copied


def _plain_arguments(names: Iterable[str]) -> ast.arguments:
    return ast.arguments(
        posonlyargs=[], args=[ast.arg(name) for name in names], kwonlyargs=[], kw_defaults=[], defaults=[]
    )


def _definition_of(name: str, arguments: ast.arguments, body: list[ast.stmt]) -> ast.FunctionDef:
    definition = syntax_tree(f"def {name}(): pass").body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.args, definition.body = arguments, body
    return definition
