"""The ways in which a row is run: eager, ``torch.compile``, pygraph, and captures by torch itself as the limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

import pygraph
from benchmarks.table.capture import captured
from benchmarks.table.setting import Iteration, Setting
from benchmarks.table.workload import Batch


@dataclasses.dataclass
class Way:
    """A row run in one way.

    Attributes:
        run: One iteration.
        report: pygraph's report, where it has a part.
        is_limit: Whether it replays one batch whatever it is given, so that results mean nothing.
        owned: Objects that must live as long, such as a model whose parameters a graph reads.
    """

    run: Iteration
    report: Callable[[], Any] | None = None
    is_limit: bool = False
    owned: Any = None


_COMPILED: dict[str, dict[str, Any]] = {
    "compile": {},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "max-autotune": {"mode": "max-autotune"},
    "backend": {"backend": pygraph.backend},
    "backend max-autotune": {"backend": pygraph.backend, "mode": "max-autotune"},
}

_TRANSFORMED: dict[str, Callable[[Any], Any]] = {
    "jit": pygraph.jit,
    "jit fused": lambda fn: pygraph.jit(fn, fuse=True),
    "graphs": lambda fn: pygraph.graphify(pygraph.indirect(fn, mechanism="copy")),
    "+ devicify": lambda fn: pygraph.graphify(pygraph.indirect(pygraph.devicify(fn), mechanism="copy")),
    "+ indirect": lambda fn: pygraph.graphify(pygraph.indirect(pygraph.devicify(fn))),
    "+ select": lambda fn: pygraph.select(pygraph.graphify(pygraph.indirect(pygraph.devicify(fn)))),
    "+ fuse": lambda fn: pygraph.select(pygraph.graphify(pygraph.indirect(pygraph.fuse(pygraph.devicify(fn))))),
}

_LIMITS = {"limit of compile": "compile", "limit of eager": "eager"}
"""Captures by torch, and the way whose launches they hold."""

WAYS = (
    "eager", "compile", "reduce-overhead", "max-autotune",
    "backend", "backend max-autotune", "jit", "jit fused", "limit",
)  # fmt: skip
"""The columns of the table."""

MODES = ("compile", "reduce-overhead", "max-autotune")
"""The modes of ``torch.compile``."""

OURS = ("backend", "jit", "jit fused")
"""The ways of pygraph, in its own settings."""

STACKS = ("graphs", "+ devicify", "+ indirect", "+ select", "+ fuse")
"""The ablation: CUDA graphs of the function as it is, with copies, and what each transform adds."""

ABLATION = ("eager", "compile", *STACKS)

DRAWS_OTHERWISE = MODES
"""Ways whose random numbers are not those of eager with the same seed."""

_AUTOTUNED = ("max-autotune", "backend max-autotune")
"""Ways that compile every matrix product in dozens of configurations, which takes minutes."""

_LAST = ("limit of compile", "limit of eager", *_AUTOTUNED)
"""Ways built after all others: a capture that fails may harm what follows."""


def in_order(names: tuple[str, ...]) -> tuple[str, ...]:
    """The ways to build for the columns that are wanted, in the order in which they are built.

    >>> in_order(("limit", "max-autotune", "jit"))
    ('jit', 'limit of compile', 'limit of eager', 'max-autotune')
    """
    found = [name for name in names if name != "limit" and name not in _LAST]
    found += [name for name in _LAST if name in names or ("limit" in names and name in _LIMITS)]
    return tuple(found)


def processes(names: Sequence[str]) -> list[tuple[str, ...]]:
    """The ways that share a process: a capture and the way that it holds; every other way has one of its own.

    >>> processes(("eager", "compile", "jit", "limit of compile", "limit of eager"))
    [('eager', 'limit of eager'), ('compile', 'limit of compile'), ('jit',)]
    >>> processes(("limit of eager", "limit of compile"))
    [('limit of eager',), ('limit of compile',)]
    """
    alone = [name for name in names if _LIMITS.get(name) not in names]
    return [(name, *(one for one in names if _LIMITS.get(one) == name)) for name in alone]


def threads(names: Sequence[str], cores: int, processes: int) -> int:
    """Threads that the process of some ways may compile with: its share; all where it goes on when others are done.

    >>> threads(("compile", "limit of compile"), 16, 8), threads(("max-autotune",), 16, 8)
    (2, 16)
    """
    return cores if set(names) & set(_AUTOTUNED) else max(2, cores // max(processes, 1))


def cache_of(name: str) -> str:
    """The way whose caches on disk this one uses: its own, or those of the way that a capture holds.

    >>> cache_of("jit fused"), cache_of("limit of compile")
    ('jit fused', 'compile')
    """
    return _LIMITS.get(name, name)


def build(name: str, setting: Setting) -> Way:
    """A way of running a row, with a copy of the model of its own; nothing has been compiled yet.

    Raises:
        KeyError: There is no such way.
        Exception: Whatever stands in the way of a capture.
    """
    if name in _LIMITS:
        way = build(_LIMITS[name], setting)
        return Way(captured(way.run, setting), is_limit=True, owned=way)
    model = setting.model()
    if name in _TRANSFORMED:
        if setting.training:
            run = made = _TRANSFORMED[name](setting.iteration(model))
        else:
            made = _TRANSFORMED[name](model)
            run = setting.iteration(model, made)
        return Way(run, made.explain, owned=model)
    call = None if name == "eager" else torch.compile(model, **_COMPILED[name])
    run = setting.iteration(model, call)
    report = None if name in MODES or name == "eager" else pygraph.explain
    return Way(_marked(run) if name in MODES else run, report, owned=model)


def _marked(run: Iteration) -> Iteration:
    """Iterations that tell the CUDA-graph trees of torch that results of the one before are not needed any more."""
    mark = torch.compiler.cudagraph_mark_step_begin

    def marked(batch: Batch) -> Any:
        mark()
        return run(batch)

    return marked
