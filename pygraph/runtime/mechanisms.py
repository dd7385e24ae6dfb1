"""The mechanism by which each pointer of a graph changes between replays, chosen by a cost model.

The host can change parameters of nodes, at a cost for each; a node at the graph's start can change them on the device,
at a constant cost for the host and some time of the device; Triton kernels can load their pointers from a table that
such a node fills; or the data is copied. Which is cheapest depends on how many nodes there are and on whether the host
or the device is the bottleneck, which needs all that a call costs the host: allocating results as well as sending
nodes. See docs/design/0007.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pygraph.ir.selections import Mechanism
from pygraph.runtime.driver import Costs
from pygraph.runtime.pointers import Word
from pygraph.runtime.recorded_graph import NodeMechanism, Wiring


@dataclasses.dataclass(frozen=True)
class Choice:
    """How each pointer word changes, and which inputs are copied.

    Attributes:
        host: Words that the host changes.
        device: Words that a node at the graph's start changes.
        table: Words whose kernels load the pointer from a table.
        copied: Slots whose data is copied.
        host_us: Microseconds that the host needs for a replay, with the allocation of results.
        device_us: Microseconds that the device needs for it.
        replay_us: Microseconds that the device needs for what was recorded alone.
    """

    host: tuple[Word, ...]
    device: tuple[Word, ...]
    table: tuple[Word, ...]
    copied: frozenset[int]
    host_us: float = 0.0
    device_us: float = 0.0
    replay_us: float = 0.0

    @property
    def only_host(self) -> bool:
        """Whether the graph runs as it was recorded, with changed parameters."""
        return not (self.device or self.table or self.copied)

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism by which pointers change wherever a node allows it."""
        return "table" if self.table else "device" if self.device else "host"

    def counts(self) -> dict[str, int]:
        """Nodes per mechanism, and how many slots are copied."""
        nodes = {name: len({word.node for word in getattr(self, name)}) for name in ("host", "device", "table")}
        return {**nodes, "copy": len(self.copied)}


@dataclasses.dataclass(frozen=True)
class Question:
    """A graph's pointers and times, on which the choice depends.

    Attributes:
        words: The pointer words of every slot.
        mechanisms: Per node, how its pointers can be changed.
        pinned: Nodes that the host must send anyway, because they hold a number.
        must_copy: Slots whose pointers were not proven.
        inputs: Bytes of each slot that is an input; the slots after these are outputs, which need not be copied.
        replay_us: Microseconds that the device needs for a replay without any change.
        allocations: How many results every replay allocates.
    """

    words: Sequence[Word]
    mechanisms: Sequence[frozenset[NodeMechanism]]
    pinned: frozenset[int]
    must_copy: frozenset[int]
    inputs: Sequence[int]
    replay_us: float
    allocations: int = 0


def choose(question: Question, costs: Costs, request: Mechanism) -> Choice:
    """Choose how every pointer changes.

    Args:
        question: The graph's pointers.
        costs: The times of the mechanisms on this device.
        request: ``auto`` for the cheapest, or one mechanism wherever a node allows it; the host does the rest.

    Example:
        >>> costs = Costs(2.0, 0.4, 12.0, 0.02, 4.0, 0.1, 3.0, 1e6)
        >>> words = [Word(node, 0, 0, 0) for node in range(100)]
        >>> either = frozenset({"host", "device"})
        >>> q = Question(words, [either] * 100, frozenset(), frozenset(), [1 << 24], replay_us=20.0)
        >>> choose(q, costs, "auto").counts()
        {'host': 0, 'device': 100, 'table': 0, 'copy': 0}
    """
    if request != "auto":
        copied = frozenset(range(len(question.inputs))) if request == "copy" else frozenset[int]()
        return _plan(question, costs, request, question.must_copy | copied)
    # Copying what could be patched gains next to nothing beside these, even for tiny inputs. A kernel that loads its
    # pointers from a table has to be compiled, so it comes last.
    best, *others = (_plan(question, costs, way, question.must_copy) for way in ("host", "device", "table"))
    for other in others:
        if _cost(other) < _GAIN * _cost(best):
            best = other
    return best


_GAIN = 0.97
"""The share of a mechanism's cost that another must be below to be chosen instead: less of a gain is lost in noise."""


def alternatives(question: Question, costs: Costs, choice: Choice) -> tuple[Mechanism, ...]:
    """Mechanisms besides the chosen one that may be as cheap as that, by what the model knows.

    Args:
        question: The graph's pointers.
        costs: The times of the mechanisms on this device.
        choice: The plan that was chosen for them.

    Example:
        >>> costs = Costs(2.0, 0.4, 12.0, 0.02, 4.0, 0.1, 3.0, 1e6)
        >>> words = [Word(node, 0, 0, 0) for node in range(32)]
        >>> either = frozenset({"host", "device"})
        >>> q = Question(words, [either] * 32, frozenset(), frozenset(), [1 << 24], replay_us=1.0)
        >>> alternatives(q, costs, choose(q, costs, "host"))
        ('device',)
    """
    found: list[Mechanism] = []
    for one in ("host", "device", "table"):
        plan = _plan(question, costs, one, choice.copied)
        is_other = (plan.host, plan.device, plan.table) != (choice.host, choice.device, choice.table)
        if is_other and _cost(plan) < _WORTH_A_TRY * _cost(choice):
            found.append(one)
    return tuple(found)


_WORTH_A_TRY = 1.25
"""The multiple of the chosen mechanism's cost up to which the model may be wrong about another one."""


def _plan(question: Question, costs: Costs, mechanism: Mechanism, copied: frozenset[int]) -> Choice:
    """Every word by one mechanism where its node allows it, else by the host."""
    by_node: dict[int, list[Word]] = {}
    for word in question.words:
        if word.slot not in copied:
            by_node.setdefault(word.node, []).append(word)
    host: list[Word] = []
    device: list[Word] = []
    table: list[Word] = []
    for node, words in by_node.items():
        allowed = question.mechanisms[node] if node not in question.pinned else frozenset[NodeMechanism]({"host"})
        # A node that the device updates must not be sent by the host as well, so all its words go one way.
        if mechanism == "table" and "table" in allowed:
            table += words
        elif mechanism == "device" and "device" in allowed:
            device += words
        else:
            host += words
    sent = len({word.node for word in host}) + bool(device or table) + bool(copied)
    host_us = costs.replay + costs.allocation * question.allocations + costs.host_node * sent
    device_us = question.replay_us + costs.upload * sent
    if device or table:
        device_us += costs.update if device else costs.table
        device_us += costs.update_word * len(device) + costs.load * len(table)
    if copied:
        nbytes = sum(question.inputs[slot] for slot in copied if slot < len(question.inputs))
        device_us += costs.copy + nbytes / costs.copy_rate
    return Choice(tuple(host), tuple(device), tuple(table), copied, host_us, device_us, question.replay_us)


def _cost(choice: Choice) -> float:
    """The time of a call in a row of calls, where host and device overlap, with some weight on a call on its own."""
    return max(choice.host_us, choice.device_us) + 0.25 * (choice.host_us + choice.device_us)


def wiring(
    choice: Choice, inputs: Sequence[tuple[int, int]], outputs: Sequence[tuple[int, int]], written: frozenset[int]
) -> tuple[Wiring, list[tuple[int, int]]]:
    """The nodes to add to a graph for a choice.

    Args:
        choice: The choice.
        inputs: Per input slot, the fixed address where its copy goes and its bytes.
        outputs: Per slot after those, the fixed address from which its data is copied out, and its bytes.
        written: Input slots that the graph writes to: their copies are brought back.

    Returns:
        The wiring, and per value of it the slot and the bytes to add to the slot's address.
    """
    values: dict[tuple[int, int], int] = {}

    def value(slot: int, delta: int) -> int:
        return values.setdefault((slot, delta), len(values))

    updates = tuple((value(word.slot, word.delta), word.node, word.offset) for word in choice.device)
    loads = tuple((value(word.slot, word.delta), word.node, word.offset) for word in choice.table)
    copied = sorted(choice.copied)
    copies_in = tuple((value(s, 0), *inputs[s]) for s in copied if s < len(inputs))
    copies_out = [(value(s, 0), *inputs[s]) for s in copied if s < len(inputs) and s in written]
    copies_out += [(value(s, 0), *outputs[s - len(inputs)]) for s in copied if s >= len(inputs)]
    return Wiring(len(values), updates, loads, copies_in, tuple(copies_out)), list(values)
