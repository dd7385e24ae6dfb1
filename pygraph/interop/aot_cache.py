"""What AOTAutograd keeps on disk of graphs that are replayed, so that a second process need not trace them again.

AOTAutograd keeps, per graph of Dynamo's, how its forward and backward are called, and under which name Inductor's cache
has the code of each: a `CompiledFxGraph`, which it loads and calls. A graph that is replayed is one of a class of its
own there, under a name of its own, which becomes a replayed graph again when it is loaded. Plain ``torch.compile`` has
other keys, and finds none of this.
"""

# AOTAutograd's and Inductor's caches are private. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false
from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import pickle
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.output_code import CompiledFxGraph
from torch.compiler import config

import pygraph
from pygraph.lowering.inductor import FusedGraph

Replay = Callable[[FusedGraph, "Sequence[int] | None", str], Callable[[list[Any]], Sequence[Any]]]
"""Makes a graph one that is replayed: the graph, positions of its static inputs, and its kind."""

_patch: Any = config.patch  # pyright: ignore[reportAttributeAccessIssue]  # there at run time
_REPLAY: contextvars.ContextVar[Replay] = contextvars.ContextVar("replay")
_TAG: contextvars.ContextVar[str] = contextvars.ContextVar("tag")  # the user's own


@contextlib.contextmanager
def looked_up(replay: Replay, *key: str) -> Generator[None, None, None]:
    """Have AOTAutograd look for graphs that it has kept before it compiles one.

    Args:
        replay: What a graph that it finds is replayed by.
        *key: What the graphs depend on that torch does not know of.
    """
    user = _TAG.get(config.cache_key_tag)
    digest = hashlib.sha256("\0".join((_code(), *key)).encode()).hexdigest()
    replaying, tagged = _REPLAY.set(replay), _TAG.set(user)
    try:
        with _patch(cache_key_tag=f"{user} pygraph {digest}"):
            yield
    finally:
        _REPLAY.reset(replaying)
        _TAG.reset(tagged)


@contextlib.contextmanager
def inside() -> Generator[None, None, None]:
    """Look in Inductor's cache as without `looked_up`: code does not depend on what replays it."""
    with _patch(cache_key_tag=_TAG.get(config.cache_key_tag)):
        yield


@functools.cache
def _code() -> str:
    """Names this version of the library."""
    digest = hashlib.sha256()
    root = Path(pygraph.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


class ReplayedGraph(CompiledFxGraph):
    """A graph of Inductor's that AOTAutograd calls, and that is replayed.

    Attributes:
        known: What is known of the graph, but for its code, its name and what replays it.
        static: Positions of the inputs that are expected to be the same tensors at every call.
        kind: What AOTAutograd uses it for.
        replayed: What runs it; None on disk.
    """

    known: dict[str, Any]
    static: Sequence[int] | None
    kind: str
    replayed: Callable[[list[Any]], Sequence[Any]] | None

    @classmethod
    def of(
        cls,
        graph: FusedGraph,
        static: Sequence[int] | None,
        kind: str,
        replayed: Callable[[list[Any]], Sequence[Any]],
        inputs: Sequence[Any],
    ) -> Callable[[list[Any]], Sequence[Any]]:
        """What AOTAutograd shall call, and keep if Inductor has kept the code; else what replays it alone.

        Args:
            graph: The graph.
            static: Positions of the inputs that are expected to be the same tensors at every call.
            kind: What AOTAutograd uses it for.
            replayed: What runs it.
            inputs: What it was compiled for.
        """
        from torch._inductor.codecache import FxGraphCache

        code: Any = graph.code
        kept = functorch_config.enable_autograd_cache and inductor_config.fx_graph_cache
        if not kept or not isinstance(code, CompiledFxGraph) or code._fx_graph_cache_key is None:
            return replayed
        made = _retyped(code, cls)
        fields = (field.name for field in dataclasses.fields(graph))
        made.known = {name: getattr(graph, name) for name in fields if name not in ("code", "name")}
        made.static, made.kind, made.replayed = (None if static is None else tuple(static)), kind, replayed
        about = pickle.dumps((code._fx_graph_cache_key, sorted(made.known.items()), made.static, kind))
        made._fx_graph_cache_key = f"pygraph{hashlib.sha256(about).hexdigest()}"
        made.compiled_fn_runner = None  # what is left to the original when this one goes
        FxGraphCache._save_graph(made._fx_graph_cache_key, made, inputs, True, None)
        return made

    def __call__(self, inputs: Any) -> Any:
        """Run."""
        assert self.replayed is not None
        return self.replayed(inputs)

    def prepare_for_serialization(self) -> None:
        """Leave out what runs it."""
        super().prepare_for_serialization()
        self.replayed = None

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Have it replayed again; torch calls this of what it has loaded."""
        super().post_compile(example_inputs, constants, graph_kwargs)
        code = _retyped(self, CompiledFxGraph)
        for name in ("known", "static", "kind", "replayed"):
            del code.__dict__[name]
        self.compiled_fn_runner = None
        self.replayed = _REPLAY.get()(FusedGraph(code=code, name="", **self.known), self.static, self.kind)


def _retyped(graph: CompiledFxGraph, cls: type[Any]) -> Any:
    """The same as an instance of another class."""
    made = object.__new__(cls)
    made.__dict__.update(graph.__dict__)
    return made
