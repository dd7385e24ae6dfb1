"""Calls of a function whose statements are cut into parts: those that compute tensors are graphs, others run as Python.

A number that changes at every call, and decides what a function does, cannot be live in a graph. Where the statements
that compute such numbers compute no tensors, as ``schedule.step()`` at the end of a training step, they run as they
are, before or after the graph. What they leave behind is there for the part that finds it, as if the user had written
them outside of the function.
"""

# Functions here are of any type, and so is what they are called with; an engine is part of what it is made from.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import itertools
import os
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from pygraph.calls import limits
from pygraph.calls.comparing import Comparison
from pygraph.calls.cuts import (
    Piece,
    computing_statements,
    parts_of_pieces,
    parts_of_way,
    pieces_around_failure,
    ways_inside,
    ways_outside,
)
from pygraph.calls.engine import Engine
from pygraph.calls.inner_modules import Inner, WithModules
from pygraph.calls.policy import Policy
from pygraph.guards.walk import code_names
from pygraph.guards.walk.functions import PART_OF
from pygraph.tracing.computing_lines import ComputingLines, computing_lines
from pygraph.tracing.function_parts import Body, CutError, Part, calls_forward_alone, plain_function
from pygraph.tracing.loop_parts import Outline

PartPolicy = Callable[..., Policy]
"""Makes the rules of a part, of what is called with the reason when its calls are all unlike each other, and of what is
called with its engine and the arguments of a call that cannot be traced, if anything is."""


class PartedCalls:
    """Runs calls of a function part by part.

    Args:
        function: The function's engine.
        args: The arguments of a call.
        kwargs: Its keyword arguments.
        make_policy: Makes the rules of a part.
        outside_alone: Whether it is only to be cut before and behind all that computes tensors.

    Attributes:
        why_useless: Why the parts do not serve; None if they do.

    Raises:
        CutError: The function has no parts that would help.
    """

    def __init__(
        self,
        function: Engine,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        make_policy: PartPolicy,
        *,
        outside_alone: bool = False,
    ) -> None:
        self._function, self._make_policy = function, make_policy
        self._comparison = Comparison(function)
        self._between: dict[Part, frozenset[int]] = {}  # the lines of runs that keep numbers on the host
        self._left_out = frozenset[int]()  # the lines that go into no run
        self._is_outdated = False  # whether some of them are new
        fn = function.fn
        plain, self._instance = plain_function(fn)
        self._module = fn if isinstance(fn, torch.nn.Module) else None
        self._plain, self._code, self._defaults = plain, plain.__code__, (plain.__defaults__, plain.__kwdefaults__)
        self._signature = _own_signature(plain)
        body = Body.of(plain)
        self._own = self._instance_name(body) if self._instance is not None else None
        lines = computing_lines(fn, self._code, args, kwargs, function.name)
        if lines is None:
            raise CutError("it cannot be traced")
        self._failures = [lines]
        self._body, self._has_failed = body, not outside_alone and lines.failed is not None
        if self._has_failed:
            self._ways = self._ways_around_failure(lines)
        else:
            self._ways = self._ways_at_numbers(lines, outside_alone=outside_alone)
        self._failed: dict[Part, ComputingLines | None] = {}
        self._functions: dict[tuple[Part, tuple[str, ...]], Callable[..., Any]] = {}
        self.why_useless: str | None = None
        self._next_way()

    def _instance_name(self, body: Body) -> str:
        """The name that a method has for its instance."""
        arguments = [*body.definition.args.posonlyargs, *body.definition.args.args]
        if not arguments or any(_assigns(statement, arguments[0].arg) for statement in body.statements):
            raise CutError("it is a method that assigns to its first argument")
        return arguments[0].arg

    def _outline(self, part: Part) -> Outline:
        """The statements of a part that is Python, and the runs among them, by the last failure inside of it."""
        first, last = part.lines
        inside = (lines for lines in reversed(self._failures) if first <= (lines.failed or 0) <= last)
        lines = next(inside, self._failures[0])
        return Outline(
            part, lines.failed, lines.lines, self._left_out, is_in_a_call=lines.failed_in is not None,
            decides=lines.asks_in_torch,
        )  # fmt: skip

    def _ways_at_numbers(self, lines: ComputingLines, *, outside_alone: bool) -> list[list[tuple[Part, bool]]]:
        """The parts of a function that are cut at statements which compute numbers alone, the better ones first."""
        computing = computing_statements(self._body, lines)
        ways = ways_outside(self._body, computing, surely=outside_alone)
        if not outside_alone:
            ways = itertools.chain(ways, ways_inside(self._body, lines, computing))
        found = [parts for cuts in ways if (parts := parts_of_way(self._body, cuts, computing))]
        if self._module is not None:  # which is cut where it cannot be a graph, and for loops
            found = [way for way in found if self._has_runs(way)]
        return found

    def _ways_around_failure(self, lines: ComputingLines) -> list[list[tuple[Part, bool]]]:
        """The parts of a function whose trace fails at a statement, if any of them may be a graph."""
        pieces = pieces_around_failure(self._body, Piece(0, len(self._body.statements), True), lines)
        with contextlib.suppress(CutError):
            parts = parts_of_pieces(self._body, pieces)
            if any(computes for _, computes in parts) or any(map(self._is_of_use, parts)):
                return [parts]
        return []

    def _cut_failed(self) -> None:
        """Cut parts where their traces have failed."""
        failed, self._failed = self._failed, {}
        pieces: list[Piece] = []
        for part, computes in self._parts:
            first = self._body.statements.index(part.statements[0])
            piece = Piece(first, first + len(part.statements), computes)
            lines = failed.get(part)
            if lines is not None:
                pieces += pieces_around_failure(self._body, piece, lines)
            else:  # there is a trace of it, or its calls are all unlike each other
                pieces.append(piece._replace(computes=computes and part not in failed))
        try:
            parts = parts_of_pieces(self._body, pieces)
        except CutError:  # they stay as they are
            return
        self._failures += [lines for lines in failed.values() if lines is not None]
        before = {part.statements: part for part, _ in self._parts if part not in failed}
        self._parts = [(before.get(part.statements, part), computes) for part, computes in parts]
        self._has_failed = True
        self._drop(lambda part: part in failed)

    def _note_failed(self, part: Part, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that there is no trace of a part, and where it has failed."""
        fn: Any = engine.fn
        lines = computing_lines(fn, fn.__code__, args, kwargs, engine.name)
        if lines is not None and lines.failed is not None:
            self._failed[part] = lines

    def _next_way(self) -> None:
        self.release()
        self._functions.clear()
        if not self._ways:
            raise CutError("none of its statements compute numbers alone")
        self._parts = self._ways.pop(0)
        self.why_useless = None

    # -- calls ----------------------------------------------------------------------------------------------------

    def is_current(self) -> bool:
        """Whether the parts are of the code and the default values that the function has now, and serve their calls."""
        if self.why_useless is not None:
            if not self._ways:
                return False
            self._next_way()
        if self._module is not None and not self._is_the_modules():
            return False
        plain, defaults = self._plain, self._defaults
        if plain.__defaults__ is not defaults[0] or plain.__kwdefaults__ is not defaults[1]:
            return False
        return plain.__code__ is self._code

    def _is_the_modules(self) -> bool:
        """Whether a call of the module is still one of the function alone."""
        module: Any = self._module
        forward = module.forward
        return calls_forward_alone(module) and getattr(forward, "__func__", forward) is self._plain

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call."""
        return self._comparison.run(self._by_parts, args, kwargs)

    def _by_parts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._failed:
            self._cut_failed()
        if self._is_outdated:
            self._forget_outlines()
        variables = self._bound(args if self._instance is None else (self._instance, *args), kwargs)
        for part, computes in self._parts:
            if part.is_first:
                names, (taken, by_name) = (), self._named_in(part, args, kwargs)
            else:
                names = tuple(sorted(part.read & variables.keys() - {self._own}))
                taken, by_name = [variables[name] for name in names], {}
            is_returned, found = self._run(part, computes, names)(*taken, **by_name)
            if is_returned:
                return found
            for name in part.assigned:
                variables.pop(name, None)
            variables.update(found)
        return None

    def _named_in(self, part: Part, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], Any]:
        """The arguments of a call with None for those that the first part does not name: another one is no new kind."""
        code = self._code
        own = code.co_varnames[0 if self._instance is None else 1 : code.co_argcount]
        others = {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]} - part.named
        if others.isdisjoint(own[: len(args)]) and others.isdisjoint(kwargs):
            return args, kwargs
        taken = [None if name in others else value for name, value in zip(own, args, strict=False)]
        return taken, {name: None if name in others else value for name, value in kwargs.items()}

    def _run(self, part: Part, computes: bool, names: tuple[str, ...]) -> Callable[..., Any]:
        """The function or the engine of a part, which is called as a method of the instance if there is one."""
        run = self._functions.get((part, names))
        if run is None:
            with self._function.shared.lock:
                run = self._functions.get((part, names)) or self._make(part, computes, names)
                self._functions[part, names] = run
        return run

    def _make(self, part: Part, computes: bool, names: tuple[str, ...]) -> Callable[..., Any]:
        taken = names if self._own is None else (self._own, *names)
        outline = None if computes else self._outline(part)
        if outline is not None and (outline.runs or outline.picks):
            run = functools.partial(self._run_in_loop, outline.runs)
            self._between.update(zip(outline.runs, outline.between, strict=True))
            made = part.function(taken, outline.statements, run, self._pick)
        else:
            made = part.function(taken)
        if self._own is not None and not code_names.asks_of(self._code, self._own, self._plain.__name__):
            setattr(made, PART_OF, self._plain)  # else parts may call the whole again
        bound = made if self._own is None else types.MethodType(made, self._instance)
        if not computes:
            return WithModules(bound, self._function.modules)
        if not any(part is one for one, _ in self._parts):
            between = self._between.get(part)
            if not between:
                return self._inner(bound, _ignore)
            note = functools.partial(self._note_left_out, between)
            return self._inner(bound, note, note)
        note_failed = functools.partial(self._note_failed, part)
        if not self._has_failed:
            return self._function.derive(bound, self._make_policy(self._note_useless, note_failed))
        return self._inner(bound, functools.partial(self._note_unsteady, part), note_failed)

    def _inner(self, fn: Callable[..., Any], *notes: Callable[..., None]) -> Inner:
        """Make what runs a part, as long as not each of its calls is compiled anew."""
        return Inner(self._function.derive(fn, self._make_policy(*notes)), limits.LIMITS.wasted_traces)

    def _note_left_out(self, lines: frozenset[int], *about: Any) -> None:
        """Note that a run has no trace, which may be for statements in it that keep numbers on the host."""
        del about
        self._left_out |= lines
        self._is_outdated = True

    def _forget_outlines(self) -> None:
        """Forget parts that are Python, and the runs in them, which are other ones now."""
        self._is_outdated = False
        computing = [part for part, computes in self._parts if computes]
        self._drop(lambda part: not any(part is one for one in computing))

    def _drop(self, is_dropped: Callable[[Part], bool]) -> None:
        """Give the functions of some parts back."""
        for key in [one for one in self._functions if is_dropped(one[0])]:
            run: Any = self._functions.pop(key)
            if isinstance(run, (Engine, Inner)):
                (run.engine if isinstance(run, Inner) else run).release()

    def _pick(self, fn: Any) -> Any:
        """Give a statement what it calls: instead of a function in which a trace has failed, what cuts that one."""
        code = getattr(getattr(fn, "__func__", fn), "__code__", None)
        failed = any(code is lines.failed_in for lines in self._failures)
        return self._function.modules.picked(fn) if failed and code is not None else fn

    def _run_in_loop(self, runs: Sequence[Part], number: int, given: dict[str, Any]) -> dict[str, Any]:
        """Run statements of a loop on the variables that they name and that have values; returns those they assign."""
        names = tuple(sorted(given.keys() - {self._own}))
        _, found = self._run(runs[number], True, names)(*[given[name] for name in names])
        return found

    def _is_of_use(self, part: tuple[Part, bool]) -> bool:
        """Whether something inside a part that is Python may be a graph."""
        outline = self._outline(part[0])
        return bool(outline.runs) or outline.picks

    def _has_runs(self, parts: list[tuple[Part, bool]]) -> bool:
        return any(self._outline(part).runs for part, _ in parts)

    def _bound(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The function's arguments by name; a call that does not fit ends in Python's own error."""
        code = self._code
        is_plain = not code.co_kwonlyargcount and not code.co_flags & _VARIADIC
        if is_plain and not kwargs and len(args) == code.co_argcount:
            return dict(zip(code.co_varnames, args, strict=False))
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError:
            self._plain(*args, **kwargs)  # which has Python's own words for it
            raise
        bound.apply_defaults()
        return dict(bound.arguments)

    def _note_useless(self, reason: str) -> None:
        self.why_useless = reason

    def _note_unsteady(self, part: Part, reason: str) -> None:
        """Note of a part that its calls are all unlike each other: it is Python from now on."""
        del reason
        self._failed.setdefault(part, None)

    # -- looking inside -------------------------------------------------------------------------------------------

    def engines(self) -> Iterator[Engine]:
        """The engines of the parts that compute tensors."""
        runs = list(self._functions.values())
        yield from (run for run in runs if isinstance(run, Engine))
        yield from (run.engine for run in runs if isinstance(run, Inner))

    def described(self) -> str:
        """The lines that run as Python."""
        file = os.path.basename(self._code.co_filename)
        spans: list[tuple[int, int]] = []
        for part in (part for part, computes in self._parts if not computes):
            inner = [run.lines for run in self._outline(part).runs]
            spans += _without(part.lines, inner)
        return ", ".join(f"{file}:{first}" if first == last else f"{file}:{first}-{last}" for first, last in spans)

    def release(self) -> None:
        """Give back all graphs."""
        for engine in self.engines():
            engine.release()


def _ignore(reason: str) -> None:
    """Nothing: it runs as it is, and the others as graphs."""
    del reason


def _without(span: tuple[int, int], inner: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The lines of a span that are in none of others inside it, which are in order.

    >>> _without((3, 9), [(4, 5), (8, 9)])
    [(3, 3), (6, 7)]
    """
    found: list[tuple[int, int]] = []
    begin = span[0]
    for first, last in inner:
        if begin < first:
            found.append((begin, first - 1))
        begin = last + 1
    return [*found, (begin, span[1])] if begin <= span[1] else found


_VARIADIC = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


def _assigns(statement: ast.stmt, name: str) -> bool:
    return any(
        isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load)
        for node in ast.walk(statement)
    )


def _own_signature(fn: types.FunctionType) -> inspect.Signature:
    """The signature by the function's code; a decorator may say that it has that of what it has decorated."""
    bare = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    bare.__kwdefaults__ = fn.__kwdefaults__
    return inspect.signature(bare)
