"""The words of reports, explained."""

from __future__ import annotations

import dataclasses
import functools
import re


@dataclasses.dataclass(frozen=True)
class Term:
    """A word of reports.

    Attributes:
        name: The word.
        meaning: What it means, in a sentence or two.
        forms: Other forms of it.
    """

    name: str
    meaning: str
    forms: tuple[str, ...] = ()

    @property
    def anchor(self) -> str:
        """The word as part of an address."""
        return "term-" + self.name.replace(" ", "-")


TERMS: tuple[Term, ...] = (
    Term(
        "as it is",
        "By the function itself, as without pygraph; the reason is among the fallbacks.",
        ("run as they are", "runs as it is", "as they are"),
    ),
    Term(
        "baked value",
        "A value of an argument that the trace depends on, as a length that decides a shape. A call with "
        "another value is another kind of call.",
        ("baked values", "baked"),
    ),
    Term(
        "call",
        "One run of the function by the user.",
        ("calls",),
    ),
    Term(
        "captured",
        "A tensor that the function reaches otherwise than by its arguments, as a parameter. Graphs read it "
        "where it is.",
    ),
    Term(
        "confidence",
        "The probability that the true difference between two ways lies in the interval that is given.",
        ("sure",),
    ),
    Term(
        "copied",
        "An input whose data every replay copies to a fixed address, as its pointers could not be proven or "
        "because that was the fastest.",
        ("copy", "copies"),
    ),
    Term(
        "derived",
        "A function that is made of the reported one, as the forward and backward of its gradient, or what "
        "vmap makes of it.",
    ),
    Term(
        "device",
        "The GPU. As a way in which pointers change: a kernel at the start of the graph writes them into the "
        "others, for a constant time of the host.",
    ),
    Term(
        "donated",
        "An argument that a call consumes, so that a result may take over its memory.",
    ),
    Term(
        "eager",
        "A region with work of the device that cannot be recorded, for the reason that is given.",
    ),
    Term(
        "eviction",
        "A kind of calls that was dropped, as max_graphs others came later.",
        ("evictions", "dropped"),
    ),
    Term(
        "fallback",
        "Something that does not run in the best way. Results are right all the same; the reason and the line "
        "are given.",
        ("fallbacks",),
    ),
    Term(
        "graph",
        "A CUDA graph: work that was recorded once, and that one call of the driver launches.",
        ("graphs",),
    ),
    Term(
        "hit",
        "A call for which there was something to run already.",
        ("hits",),
    ),
    Term(
        "host",
        "The CPU. As a kind of region: Python and arithmetic without work of the device. As a way in which "
        "pointers change: the CPU sends them to the graph before a replay.",
    ),
    Term(
        "kernel",
        "One function that the device runs; most operations launch one.",
        ("kernels",),
    ),
    Term(
        "kind of call",
        "Calls with arguments of the same structure, shapes, strides and dtypes, the same baked values and "
        "the same settings of torch. Each kind is compiled once.",
        ("kinds of calls", "kind of calls"),
    ),
    Term(
        "launch",
        "To send one kernel to the device. As a way to run a region: every kernel for itself, as torch does "
        "without graphs.",
        ("launched", "launches"),
    ),
    Term(
        "load",
        "The operation that reads the address of an argument from its slot. It costs the device nothing.",
    ),
    Term(
        "margin",
        "How much faster than the default a way has to be to run in its place: 1 % of the time, and at least 1 µs.",
    ),
    Term(
        "miss",
        "A call for which nothing was there yet: it was compiled, or looked at and run as it is.",
        ("misses", "compiled or looked at"),
    ),
    Term(
        "node",
        "In a Program, one operation. In a recorded graph, one kernel, copy or fill of memory.",
        ("nodes",),
    ),
    Term(
        "patched",
        "Nodes whose pointers or numbers are changed before a replay, so that the graph reads the arguments "
        "where they are.",
        ("patch",),
    ),
    Term(
        "pointer",
        "The address of a tensor's memory, as a kernel gets it.",
        ("pointers",),
    ),
    Term(
        "pool",
        "Memory that belongs to the graphs of a function, for what is computed between their inputs and "
        "results. All its graphs share it.",
    ),
    Term(
        "Program",
        "The function as it was traced: operations in order, with a meaning for every input and output.",
    ),
    Term(
        "provisional",
        "A selection that is made anew after later calls, as its measurement was disturbed or decided nothing.",
    ),
    Term(
        "recorded",
        "Captured from the device's stream as a graph, and proven to give the results of ordinary launches.",
        ("recording", "recordings"),
    ),
    Term(
        "region",
        "A run of a Program's nodes that go to the device together: as one graph, node by node, or on the host.",
        ("regions",),
    ),
    Term(
        "replay",
        "One launch of a recorded graph.",
        ("replays", "replayed"),
    ),
    Term(
        "slot",
        "The entry of an argument or a result in the table of pointers.",
        ("slots",),
    ),
    Term(
        "staging buffers",
        "Memory at fixed addresses, to which inputs are copied that a graph cannot read where they are.",
        ("staging buffer",),
    ),
    Term(
        "store",
        "The operation that has a result written to the address in its slot. It costs the device nothing.",
    ),
    Term(
        "stream",
        "A queue of the device. Each graph is recorded from one, in which kernels run one after another.",
        ("streams",),
    ),
    Term(
        "table",
        "As a way in which pointers change: Triton kernels load them from a table, which one kernel fills.",
    ),
    Term(
        "transform",
        "A function that makes one Program of another, as devicify or graphify.",
        ("transforms",),
    ),
    Term(
        "view",
        "A tensor in the memory of another one. It costs the device nothing.",
        ("views",),
    ),
    Term(
        "way",
        "How a region runs: by launch, by patch, or by copy.",
        ("ways",),
    ),
)


@functools.cache
def by_form() -> dict[str, Term]:
    """Terms by each of their forms."""
    return {form: term for term in TERMS for form in (term.name, *term.forms)}


@functools.cache
def _pattern() -> re.Pattern[str]:
    forms = sorted(by_form(), key=len, reverse=True)
    return re.compile(rf"(?<![\w.`'\[/])({'|'.join(map(re.escape, forms))})(?![\w`'\](=])")


def pieces(text: str) -> list[tuple[str, Term | None]]:
    """A text in pieces, each with the term that it is, or None.

    >>> [(piece, term and term.name) for piece, term in pieces("2 graphs recorded")]
    [('2 ', None), ('graphs', 'graph'), (' ', None), ('recorded', 'recorded')]
    """
    found: list[tuple[str, Term | None]] = []
    end = 0
    for match in _pattern().finditer(text):
        found += [(text[end : match.start()], None), (match[0], by_form()[match[0]])]
        end = match.end()
    found.append((text[end:], None))
    return [one for one in found if one[0]]
