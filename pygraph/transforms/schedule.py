"""Schedule of nodes: those for a graph and the others in alternating runs, in an order that effects allow."""

from __future__ import annotations

from typing import TypeAlias

from torch import fx

from pygraph.errors import TraceError, describe
from pygraph.ir.attention_states import is_state_on_device
from pygraph.ir.decisions import NO_QUESTION, SIZED, decisions_among, is_question
from pygraph.ir.effects import (
    KNOWN_NAMESPACES,
    asked_failures,
    is_action,
    is_load,
    is_operation,
    is_selection,
    is_view,
    is_work,
    may_raise,
    root,
    sources,
    written_arguments,
)
from pygraph.ir.printing import target_text
from pygraph.ir.python_draws import PYTHON_DRAW
from pygraph.ir.random_draws import is_draw

Schedule: TypeAlias = list[tuple[bool, list[fx.Node]]]
"""Runs of nodes, each with whether they are for a graph."""


def alternating_runs(graph: fx.Graph, reasons: dict[fx.Node, str]) -> Schedule:
    """Order nodes in alternating runs: those that are not for a graph, those that are, and so on.

    Args:
        graph: The graph; it is not changed.
        reasons: By node that is not for a graph, the reason. Views without a reason are no part of the schedule.

    Raises:
        TraceError: There is no such order.
    """
    work = [node for node in graph.nodes if is_work(node) or node in reasons]
    needs = _dependencies(graph, work)
    _keep_decisions_in_order(work, needs)
    # A decision is no error: where it is another one, generators are put back.
    failing = [node for node in work if _leader(node) in reasons and may_raise(node) and not is_question(node)]
    _keep_errors_in_order(work, needs, failing)
    waiting = dict.fromkeys(work)
    done: set[fx.Node] = set()
    runs: Schedule = []
    recordable = is_stuck = False
    while waiting:
        run: list[fx.Node] = []
        for node in list(waiting):
            if (_leader(node) not in reasons) == recordable and needs[node] <= done:
                run.append(node)
                done.add(node)
                del waiting[node]
        if run:
            runs.append((recordable, run))
        elif is_stuck:
            text = f"each of these waits for another one: {', '.join(target_text(node.target) for node in waiting)}"
            raise TraceError(describe("graphify", text, remedy="This is a mistake of pygraph's; please report it."))
        is_stuck = not run
        recordable = not recordable
    return runs


def _leader(node: fx.Node) -> fx.Node:
    """The node that decides where this one runs: a selection follows its source, and so does a state that is kept."""
    while is_selection(node) or is_state_on_device(node):
        node = node.args[0]  # pyright: ignore[reportAssignmentType]
    return node


def _dependencies(graph: fx.Graph, work: list[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """The nodes that must run before each: those of its data, and earlier draws, assertions and writes.

    A decision needs no draws, which are put back where a call begins anew; and they may stand before it by now, though
    the function makes them behind it. Python's and NumPy's generators are none of torch's: their draws keep their own
    order, so that what is decided by one is known before the device has worked.
    """
    needs: dict[fx.Node, set[fx.Node]] = {node: set() for node in work}
    last: dict[str, list[fx.Node]] = {"torch": [], "python": []}  # the last draw of each kind, or the last action
    readers: dict[fx.Node, list[fx.Node]] = {}
    writer: dict[fx.Node, fx.Node] = {}
    decisions = {*decisions_among(work)}
    actions = [node for node in work if is_action(node) and node not in decisions]
    failing = asked_failures(work)
    latest: dict[fx.Node, int] = {}  # what it needs of all that the function does
    for node in work:
        memory = [root(argument) for argument in node.all_input_nodes]
        needs[node].update(s for argument in node.all_input_nodes for s in sources(argument) if s in needs)
        for origin in memory:
            if origin in writer:
                needs[node].add(writer[origin])
        for written in written_arguments(node):
            origin = root(written)
            needs[node].update(reader for reader in readers.get(origin, ()) if reader is not node)
            writer[origin] = node
            readers[origin] = []
        for origin in memory:
            readers.setdefault(origin, []).append(node)
        if node in decisions:
            asks, at = node.args[2] != NO_QUESTION, node.meta["order"]
            candidates = actions if asks else [*actions, *failing]
            earlier = [one for one in candidates if one.meta.get("order", -1) < at]
            if asks:  # an assertion that has come to stand behind later draws is no reason to ask behind these
                earlier = [one for one in earlier if one in latest and latest[one] <= at]
            needs[node].update(earlier)
        elif is_draw(node) or is_action(node):
            kinds = [kind for kind in last if is_action(node) or (kind == "python") == (node.target is PYTHON_DRAW)]
            needs[node].update(one for kind in kinds for one in last[kind])
            last |= {kind: [node] for kind in kinds}
        needs[node].discard(node)
        latest[node] = max([node.meta.get("order", -1), *(latest.get(need, -1) for need in needs[node])])
    return needs


def _keep_errors_in_order(work: list[fx.Node], needs: dict[fx.Node, set[fx.Node]], raising: list[fx.Node]) -> None:
    """Order updates and random draws around nodes that may raise, so that an error leaves the state that eager leaves.

    Where dependencies demand another order, it stays.

    Args:
        work: The nodes that are scheduled.
        needs: The nodes that must run before each; it is extended.
        raising: The nodes that may raise.
    """
    effects = [node for node in work if node.meta.get("order") is not None and (is_draw(node) or _writes_outside(node))]
    for error in raising if effects else []:
        # Eager raises at a view by a number that is out of range, and here the node that takes the view does.
        orders = [node.meta.get("order") for node in (error, *_views_of(error))]
        at = min((order for order in orders if order is not None), default=None)
        if at is None:
            continue
        users: dict[fx.Node, set[fx.Node]] = {node: set() for node in work}
        for node in work:
            for need in needs[node]:
                users[need].add(node)
        before, after = _reached(error, needs), _reached(error, users)
        for effect in effects:  # each may have others before or after the error, by what it needs itself
            if effect.meta["order"] > at and effect not in before:
                needs[effect].add(error)
                users[error].add(effect)
                after |= _reached(effect, users)
            elif effect.meta["order"] < at and effect not in after:
                needs[error].add(effect)
                users[effect].add(error)
                before |= _reached(effect, needs)


def _keep_decisions_in_order(work: list[fx.Node], needs: dict[fx.Node, set[fx.Node]]) -> None:
    """Order what comes after a decision behind it, and all updates: a call that decides otherwise begins anew.

    Args:
        work: The nodes that are scheduled.
        needs: The nodes that must run before each; it is extended.

    Raises:
        TraceError: Something that a decision depends on must not be done twice, or fails where it is another one.
    """
    for decision in decisions_among(work):
        before, at = _reached(decision, needs), decision.meta["order"]
        once = next((node for node in work if node in before and _is_done_once(node)), None)
        if once is not None and decision.args[2] != NO_QUESTION:
            what, where = target_text(once.target), decision.meta.get("source")
            raise TraceError(
                describe("graphify", f"it decides by a value after {what}, not to be repeated", source=where)
            )
        if any(node.target is SIZED and node.meta.get("order", -1) > at for node in before):
            raise TraceError("it decides by a size after it takes the size for granted")
        for node in work:
            order = node.meta.get("order")
            if node in before or _leader(node) is not node:
                continue  # a result is there when its operation has run
            if _writes_outside(node) or (order is not None and order > at):
                needs[node].add(decision)


def _is_done_once(node: fx.Node) -> bool:
    """Whether a node must not run again in the same call: it updates something, or others take part in it."""
    if _writes_outside(node):
        return True
    namespace = node.target.namespace if is_operation(node) else ""  # pyright: ignore
    return "c10d" in namespace or (is_action(node) and namespace not in KNOWN_NAMESPACES)


def _views_of(node: fx.Node) -> list[fx.Node]:
    """The views that a node takes, and the views that these are taken of."""
    found = [argument for argument in node.all_input_nodes if is_view(argument)]
    for view in found:
        found += [argument for argument in view.all_input_nodes if is_view(argument)]
    return found


def _writes_outside(node: fx.Node) -> bool:
    """Whether a node writes to memory that is there before and after the call."""
    origins = map(root, written_arguments(node))
    return any(origin.op == "placeholder" or is_load(origin) for origin in origins)


def _reached(node: fx.Node, edges: dict[fx.Node, set[fx.Node]]) -> set[fx.Node]:
    """A node and all nodes that edges lead to from it."""
    found, waiting = {node}, [node]
    while waiting:
        new = edges[waiting.pop()] - found
        found |= new
        waiting += new
    return found
