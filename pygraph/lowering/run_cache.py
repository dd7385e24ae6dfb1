"""Recipes of fused runs in Inductor's cache directory, so that a second process need not take them apart again.

Inductor's own cache has the code of each graph that it has compiled, under a key of that graph. A run has to be
decomposed and partitioned before that key is known. A *recipe*, found under a key of the run as it is, names the graphs
that it became and says how they exchange values. It is plain text; code comes from Inductor's cache alone.
"""

# Inductor's cache of graphs is private. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false
from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Collection, Generator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode

from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.dispatch_modes import no_dispatch_modes
from pygraph.lowering.inductor import start_workers
from pygraph.lowering.joint import Value
from pygraph.process.cache import source_hash
from pygraph.process.log import log

_KEY = re.compile(r"[a-z0-9]+")
_SOURCES = ("input", "forward", "backward")
_OURS = frozenset({"spec", "source", "backward_of", "scopes", "order", "from", "val"})
"""Notes of nodes that are pygraph's own, or made for this compilation: torch's compilers read none of them."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the kernels of a run are put together.

    Attributes:
        parts: Forward and backward, or the forward alone: the key of its code in Inductor's cache, and what it takes.
        results: The results of the run, in order.
    """

    parts: tuple[tuple[str, tuple[Value, ...]], ...]
    results: tuple[Value, ...]


class RunCache:
    """The recipe of one run on disk, and the code of its graphs.

    Args:
        module: The graph of ATen operations, before decomposition; its inputs have fake tensors.
        mode: Their mode.
        specs: Its inputs.
        begins: Positions of the inputs that backwards begin with.
        static: Positions of the inputs that are there before and after.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        mode: FakeTensorMode,
        specs: Sequence[TensorSpec],
        begins: Collection[int],
        static: Collection[int],
    ) -> None:
        self._mode = mode
        self._key = self._key_of(module, specs, begins, static) if _is_enabled() else None

    def _key_of(
        self, module: fx.GraphModule, specs: Sequence[TensorSpec], begins: Collection[int], static: Collection[int]
    ) -> str | None:
        """The key: torch's own of the graph, inputs and settings of Inductor, and what torch does not know of."""
        from torch._functorch import config as functorch_config
        from torch._inductor.codecache import FxGraphCache

        notes = [
            (node.name, key, repr(value))
            for node in module.graph.nodes
            for key, value in sorted(node.meta.items())
            if key not in _OURS
        ]
        partitioner = functorch_config.save_config_portable(ignore_private_configs=False)
        modes = torch.is_inference_mode_enabled(), torch.get_default_dtype()
        about = (list(specs), sorted(begins), sorted(static), notes, sorted(partitioner.items()), modes)
        options: Any = {"pygraph": f"{source_hash()} {about}"}
        inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
        try:
            with self._context():
                found, _ = FxGraphCache.prepare_key(module, inputs, options, (), False)
        except Exception:  # whatever pickling a setting of the user's may raise: the run is compiled, and not kept
            return None
        return None if found is None else found[0]

    def recipe(self) -> Recipe | None:
        """The recipe; None if there is none, or no whole one."""
        if self._key is None:
            return None
        try:
            digest, _, text = self._path(self._key).read_text().partition("\n")
            return _parsed(text) if digest == _digest(text) else None
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def note(self, *, found: bool) -> None:
        """Count whether the run was found, where torch counts what its caches find."""
        if self._key is not None:
            _count("run_cache_hit" if found else "run_cache_miss")
            log.debug("a fused run on disk: %s (%s)", "found" if found else "none yet", self._path(self._key))

    def save(self, recipe: Recipe) -> None:
        """Keep a recipe; without effect where Inductor keeps no graphs."""
        if self._key is None:
            return
        from torch._inductor.codecache import write_atomic

        text = json.dumps(dataclasses.asdict(recipe))
        with contextlib.suppress(OSError):  # as on a full disk: the run is compiled again next time
            write_atomic(str(self._path(self._key)), f"{_digest(text)}\n{text}", make_dirs=True)
            _count("run_cache_saved")

    def code(self, key: str) -> Any:
        """The compiled graph that Inductor has kept under a key; None if it has it no longer."""
        from torch._inductor.codecache import FxGraphCache
        from torch._inductor.output_code import CompiledFxGraphConstants

        with self._context():
            code, _ = FxGraphCache.load_with_key(key, [], (), True, None, False, CompiledFxGraphConstants())
        return code

    @contextlib.contextmanager
    def _context(self) -> Generator[None, None, None]:
        """A block in which Inductor's cache finds an environment of shapes, and constants are no fake tensors."""
        with no_dispatch_modes(), tracing(TracingContext(self._mode)):
            yield

    @staticmethod
    def _path(key: str) -> Path:
        return folder() / key[1:3] / key


def folder() -> Path:
    """Where recipes are kept: in the folder of Inductor's caches, which they need."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir(), "pygraph")


def start_workers_early() -> None:
    """Start Inductor's workers before a trace, if no run at all is kept: this one is not either.

    Otherwise they start when a run has been missed, which is before its first kernel by as much as they take: a process
    that finds all of its runs has no use for them, and starting them takes a quarter of a second of it.
    """
    if not (_is_enabled() and folder().is_dir()):
        start_workers()


def _is_enabled() -> bool:
    """Whether graphs are kept on disk, and everything that they are made by has a name."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    kept = config.fx_graph_cache and not config.force_disable_caches and not functorch_config.bundled_autograd_cache
    # Torch's key of a lowered graph leaves these out, as they have run before; freezing binds weights.
    custom = config.pre_grad_custom_pass or functorch_config.joint_custom_pass or config.freezing
    return bool(kept and not custom)


def _parsed(text: str) -> Recipe:
    """The recipe that a text says; ValueError, TypeError or KeyError if it says none."""
    found = json.loads(text)
    parts = tuple((_checked_key(key), _values(values)) for key, values in found["parts"])
    if not 1 <= len(parts) <= 2:
        raise ValueError(text)
    return Recipe(parts, _values(found["results"]))


def _checked_key(key: str) -> str:
    if not _KEY.fullmatch(key):  # it becomes a path
        raise ValueError(key)
    return key


def _values(found: Any) -> tuple[Value, ...]:
    values = tuple(Value(of, int(number)) for of, number in found)
    if any(of not in _SOURCES or number < 0 for of, number in values):
        raise ValueError(found)
    return values


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _count(event: str) -> None:
    from torch._dynamo.utils import counters

    counters["pygraph"][event] += 1
