"""Where the statements of a function are cut into parts, by what a trace says of their lines."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pygraph.tracing.computing_lines import ComputingLines
from pygraph.tracing.function_parts import Body, CutError, Part, parts_of


class Piece(NamedTuple):
    """Statements of a function that follow each other.

    Attributes:
        first: The position of the first of them.
        end: The position behind the last.
        computes: Whether they compute tensors, so that they are tried as a graph.
    """

    first: int
    end: int
    computes: bool


def pieces_around_failure(body: Body, piece: Piece, lines: ComputingLines) -> list[Piece]:
    """The pieces of one whose trace has failed: those before, the statement that fails, and those behind.

        y = encoder(x)           graph
        n = y.cpu().numpy()      Python
        z = y * n.mean()         tried as a graph
        return z.relu()

    Args:
        body: The function's statements.
        piece: The piece.
        lines: What the trace of it tells of its lines.
    """
    first, end, _ = piece
    failed = next((at for at in range(first, end) if _is_among(body.statements[at], {lines.failed or 0})), None)
    if failed is None:
        return [piece]
    computing = [at for at in range(first, failed) if _is_among(body.statements[at], lines.kernels)]
    going_on = [at for at in computing if not _waits(body.statements[at], lines)]
    found: list[Piece] = []
    begin = first
    if going_on:
        if _decide(body.statements[first : computing[0]]):
            found.append(Piece(first, begin := computing[0], False))
        found.append(Piece(begin, begin := going_on[-1] + 1, True))
    is_behind = _decide(body.statements[failed + 1 : end])
    found.append(Piece(begin, failed + 1 if is_behind else end, False))
    return [*found, Piece(failed + 1, end, True)] if is_behind else found


def parts_of_pieces(body: Body, pieces: Sequence[Piece]) -> list[tuple[Part, bool]]:
    """The parts that pieces are, and whether each computes tensors.

    Raises:
        CutError: The function cannot be cut there.
    """
    parts = parts_of(body, [piece.first for piece in pieces[1:]])
    return [(part, piece.computes) for part, piece in zip(parts, pieces, strict=True)]


def computing_statements(body: Body, lines: ComputingLines) -> list[bool]:
    """Whether each statement computes tensors; of those behind the failure of a trace that is not known.

    At the end, those count that do not wait for the device, as they may be part of a graph in any case.
    """
    computing = [_is_among(statement, lines.lines) for statement in body.statements]
    going_on = [index for index, one in enumerate(body.statements) if computing[index] and not _waits(one, lines)]
    if going_on:
        computing[going_on[-1] + 1 :] = [False] * (len(computing) - going_on[-1] - 1)
    if lines.failed is None:
        return computing
    failed = next((index for index, one in enumerate(body.statements) if _is_among(one, {lines.failed})), 0)
    before = computing[:failed]
    is_worth_it = any(_is_among(one, lines.kernels) for one in body.statements[:failed])
    return [*(before if is_worth_it else [False] * failed), *([False] * (len(computing) - failed))]


def ways_outside(body: Body, computing: list[bool], *, surely: bool) -> Iterator[list[int]]:
    """The statements with which parts begin: the first that computes, and the first behind all that do.

    Args:
        body: The function's statements.
        computing: Whether each computes tensors in the call that was traced.
        surely: Whether the others have to compute none in any call, as far as can be told.
    """
    if any(computing):
        before, behind = body.statements[: computing.index(True)], body.statements[_last(computing) + 1 :]
        if (_decide(before) or _decide(behind)) and not (surely and _may_compute([*before, *behind])):
            yield _outer(body, computing)


def ways_inside(body: Body, lines: ComputingLines, computing: list[bool]) -> Iterator[list[int]]:
    """In between, too: there a cut costs a launch, and is made where no graph of autograd would be cut as well."""
    if not any(computing):
        return
    inner: list[int] = []
    begin, last = computing.index(True), _last(computing)
    while begin < last:
        if computing[begin]:
            begin += 1
            continue
        end = computing.index(True, begin)
        if _decide(body.statements[begin:end]) and not _is_among(body.statements[end], lines.open):
            inner += [begin, end]
        begin = end
    if inner:
        yield sorted((*_outer(body, computing), *inner))


def _outer(body: Body, computing: list[bool]) -> list[int]:
    first, behind = computing.index(True), _last(computing) + 1
    begins = [first] if _decide(body.statements[:first]) else []
    return [*begins, behind] if behind < len(computing) else begins


def _last(computing: list[bool]) -> int:
    return len(computing) - 1 - computing[::-1].index(True)


def parts_of_way(body: Body, cuts: list[int], computing: list[bool]) -> list[tuple[Part, bool]]:
    """The parts, and whether each computes tensors; none if the function cannot be cut there."""
    try:
        parts = parts_of(body, cuts)
    except CutError:
        return []
    bounds = [0, *cuts, len(computing)]
    runs = [computing[first:last] for first, last in itertools.pairwise(bounds)]
    return [(part, any(run)) for part, run in zip(parts, runs, strict=True)]


def _is_among(statement: ast.stmt, lines: set[int]) -> bool:
    return not lines.isdisjoint(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))


def _waits(statement: ast.stmt, lines: ComputingLines) -> bool:
    """Whether a statement reads a value from the device, and is no block (`with no_grad():`) that computes as well."""
    computes = isinstance(statement, ast.With) and _is_among(statement, lines.kernels - lines.waiting)
    return _is_among(statement, lines.waiting) and not computes


def _may_compute(statements: Sequence[ast.stmt]) -> bool:
    """Whether statements call something in a branch, which another call may take: `if step % 4 == 0: opt.step()`."""
    branches = [node for one in statements for node in ast.walk(one) if isinstance(node, (ast.If, ast.While))]
    inside = [one for branch in branches for one in (*branch.body, *branch.orelse)]
    calls = [node.func for one in inside for node in ast.walk(one) if isinstance(node, ast.Call)]
    return any(isinstance(called, ast.Attribute) for called in calls)


def _decide(statements: Sequence[ast.stmt]) -> bool:
    """Whether statements call or compare something, or compute with it."""
    telling = (ast.Call, ast.BinOp, ast.AugAssign, ast.Compare, ast.BoolOp, ast.IfExp, ast.If, ast.Subscript)
    return any(isinstance(node, telling) for statement in statements for node in ast.walk(statement))
