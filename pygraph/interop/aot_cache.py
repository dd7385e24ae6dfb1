"""Replayed graphs in AOTAutograd's cache on disk, so that a second process need not trace them again.

An entry of that cache says, per graph of Dynamo's, how its forward and backward are called, and under which key
Inductor's cache has the code of each: a `CompiledFxGraph`, which AOTAutograd loads and calls. A replayed graph is saved
there as an instance of a subclass, `ReplayedGraph`, under a key of its own; when it is loaded, it is replayed again.
Plain ``torch.compile`` looks for other keys, and finds no graph of ours.
"""

# AOTAutograd's and Inductor's caches are private. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false
from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import hashlib
import pickle
from collections.abc import Callable, Generator, Sequence
from typing import Any

from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.output_code import CompiledFxGraph
from torch.compiler import config

from pygraph.lowering.inductor import FusedGraph
from pygraph.process.cache import source_hash

Replay = Callable[[FusedGraph, "Sequence[int] | None", str], Callable[[list[Any]], Sequence[Any]]]
"""Makes the callable that replays a graph: of the graph, positions of its static inputs, and its kind."""

_patch: Any = config.patch  # pyright: ignore[reportAttributeAccessIssue]  # there at run time
_REPLAY: contextvars.ContextVar[Replay] = contextvars.ContextVar("replay")
_TAG: contextvars.ContextVar[str] = contextvars.ContextVar("tag")  # the user's own


@contextlib.contextmanager
def lookup(replay: Replay, *key: str) -> Generator[None, None, None]:
    """Let AOTAutograd look for saved replayed graphs before it compiles one.

    Args:
        replay: Makes the callable that replays a graph that was found.
        *key: Parts of the key that torch does not know of.
    """
    user = _TAG.get(config.cache_key_tag)
    digest = hashlib.sha256("\0".join((source_hash(), *key)).encode()).hexdigest()
    replaying, tagged = _REPLAY.set(replay), _TAG.set(user)
    try:
        with _patch(cache_key_tag=f"{user} pygraph {digest}"):
            yield
    finally:
        _REPLAY.reset(replaying)
        _TAG.reset(tagged)


@contextlib.contextmanager
def users_tag() -> Generator[None, None, None]:
    """Look in Inductor's cache under the user's own tag within `lookup`: code does not depend on what replays it."""
    with _patch(cache_key_tag=_TAG.get(config.cache_key_tag)):
        yield


class ReplayedGraph(CompiledFxGraph):
    """A graph of Inductor's that AOTAutograd calls, and that is replayed.

    Attributes:
        fields: The fields of its `FusedGraph`, without code and name.
        static: Positions of the inputs that are expected to be the same tensors at every call.
        kind: ``inference``, ``forward`` or ``backward``.
        replayed: The callable that replays it; None on disk.
    """

    fields: dict[str, Any]
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
        """Save a replayed graph if Inductor's cache has its code.

        Args:
            graph: The graph.
            static: Positions of the inputs that are expected to be the same tensors at every call.
            kind: ``inference``, ``forward`` or ``backward``.
            replayed: The callable that replays it.
            inputs: The example inputs that it was compiled for.

        Returns:
            The callable for AOTAutograd: the saved graph, or ``replayed`` if none was saved.
        """
        from torch._inductor.codecache import FxGraphCache

        code: Any = graph.code
        cached = functorch_config.enable_autograd_cache and inductor_config.fx_graph_cache
        if not cached or not isinstance(code, CompiledFxGraph) or code._fx_graph_cache_key is None:
            return replayed
        made = _retyped(code, cls)
        names = (field.name for field in dataclasses.fields(graph))
        made.fields = {name: getattr(graph, name) for name in names if name not in ("code", "name")}
        made.static, made.kind, made.replayed = (None if static is None else tuple(static)), kind, replayed
        about = pickle.dumps((code._fx_graph_cache_key, sorted(made.fields.items()), made.static, kind))
        made._fx_graph_cache_key = f"pygraph{hashlib.sha256(about).hexdigest()}"
        made.compiled_fn_runner = None  # the original frees it, and would do so before time if both had it
        made._triton_bundle = _without_loaded_kernels(made._triton_bundle)
        FxGraphCache._save_graph(made._fx_graph_cache_key, made, inputs, True, None)
        return made

    def __call__(self, inputs: Any) -> Any:
        """Run."""
        assert self.replayed is not None
        return self.replayed(inputs)

    def prepare_for_serialization(self) -> None:
        """Leave out the callable that replays it."""
        super().prepare_for_serialization()
        self.replayed = None

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Make the callable that replays it; torch calls this method of every graph that it has loaded."""
        super().post_compile(example_inputs, constants, graph_kwargs)
        code = _retyped(self, CompiledFxGraph)
        for name in ("fields", "static", "kind", "replayed"):
            del code.__dict__[name]
        self.compiled_fn_runner = None
        self.replayed = _REPLAY.get()(FusedGraph(code=code, name="", **self.fields), self.static, self.kind)


def _without_loaded_kernels(bundle: Any) -> Any:
    """The kernels that are stored with a graph, less those that cannot be stored.

    Those are of a graph that came from Inductor's cache itself: they have been loaded and can be launched. A process
    that loads the graph finds them in Triton's cache.
    """
    if bundle is None:
        return None
    kernels = [one for one in bundle.static_autotuners if not one.kernel.launchers]
    return dataclasses.replace(bundle, static_autotuners=kernels)


def _retyped(graph: CompiledFxGraph, cls: type[Any]) -> Any:
    """Copy a graph as an instance of another class, with the same attributes."""
    made = object.__new__(cls)
    made.__dict__.update(graph.__dict__)
    return made
