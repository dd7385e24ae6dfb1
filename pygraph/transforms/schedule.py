"""In which order nodes can run, so that those of a kind come together."""

from __future__ import annotations

from torch import fx

from pygraph.ir.effects import (
    is_action,
    is_load,
    is_random,
    is_selection,
    is_view,
    is_work,
    may_raise,
    root,
    sources,
    written_arguments,
)


def note_order(graph: fx.Graph) -> None:
    """Write on all nodes in which order the function has called for them, if that is not there yet."""
    if not any("order" in node.meta for node in graph.nodes):
        for order, node in enumerate(graph.nodes):
            node.meta["order"] = order


def alternating_runs(graph: fx.Graph, reasons: dict[fx.Node, str]) -> list[tuple[bool, list[fx.Node]]]:
    """Order nodes in alternating runs of those without a reason and the others, starting with the others.

    These are all work nodes, and views that have a reason.
    """
    work = [node for node in graph.nodes if is_work(node) or node in reasons]
    needs = _dependencies(graph, work)
    _keep_errors_in_order(work, needs, [node for node in work if _leader(node) in reasons and may_raise(node)])
    waiting = dict.fromkeys(work)
    done: set[fx.Node] = set()
    runs: list[tuple[bool, list[fx.Node]]] = []
    recordable = False
    while waiting:
        run: list[fx.Node] = []
        for node in list(waiting):
            if (_leader(node) not in reasons) == recordable and needs[node] <= done:
                run.append(node)
                done.add(node)
                del waiting[node]
        if run:
            runs.append((recordable, run))
        recordable = not recordable
    return runs


def _leader(node: fx.Node) -> fx.Node:
    """The node that decides where this one runs: a selection follows its source."""
    while is_selection(node):
        node = node.args[0]  # pyright: ignore[reportAssignmentType]
    return node


def _dependencies(graph: fx.Graph, work: list[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """What must have run before each work node: its data; random draws, assertions and writes in order."""
    needs: dict[fx.Node, set[fx.Node]] = {node: set() for node in work}
    last_effect: fx.Node | None = None
    readers: dict[fx.Node, list[fx.Node]] = {}
    writer: dict[fx.Node, fx.Node] = {}
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
        if is_random(node) or is_action(node):
            if last_effect is not None:
                needs[node].add(last_effect)
            last_effect = node
        needs[node].discard(node)
    return needs


def _keep_errors_in_order(work: list[fx.Node], needs: dict[fx.Node, set[fx.Node]], raising: list[fx.Node]) -> None:
    """Add to ``needs`` that an error leaves what it leaves in eager: what was updated and drawn before, and no more.

    An update of which the error needs another step, or that runs with a later one, stays where it has to be.
    """
    effects = [node for node in work if node.meta.get("order") is not None and (is_random(node) or _shows(node))]
    for error in raising if effects else []:
        # A view by a number that is out of range is where eager raises, whoever makes it here.
        orders = [node.meta.get("order") for node in (error, *_views_of(error))]
        at = min((order for order in orders if order is not None), default=None)
        if at is None:
            continue
        users: dict[fx.Node, set[fx.Node]] = {node: set() for node in work}
        for node in work:
            for need in needs[node]:
                users[need].add(node)
        before, after = _reached(error, needs), _reached(error, users)
        for effect in effects:
            if effect.meta["order"] > at and effect not in before:
                needs[effect].add(error)
            elif effect.meta["order"] < at and effect not in after:
                needs[error].add(effect)


def _views_of(node: fx.Node) -> list[fx.Node]:
    """The views that a node takes, and those that they are views of."""
    found = [argument for argument in node.all_input_nodes if is_view(argument)]
    for view in found:
        found += [argument for argument in view.all_input_nodes if is_view(argument)]
    return found


def _shows(node: fx.Node) -> bool:
    """Whether a node writes to memory that is there before and after the call."""
    origins = map(root, written_arguments(node))
    return any(origin.op == "placeholder" or is_load(origin) for origin in origins)


def _reached(node: fx.Node, edges: dict[fx.Node, set[fx.Node]]) -> set[fx.Node]:
    """A node and all that edges lead to from there."""
    found, waiting = {node}, [node]
    while waiting:
        new = edges[waiting.pop()] - found
        found |= new
        waiting += new
    return found
