"""The live callables that ``torch.compile(backend="pygraph")`` has made, their report, and their reset."""

from __future__ import annotations

import functools
import weakref

from pygraph.calls.engine import Engine
from pygraph.calls.options import Options, check_flag
from pygraph.interop.boxed import BoxedReplay
from pygraph.process.reentrancy import members
from pygraph.report.explain import Explanation
from pygraph.transforms.passes import UNFUSED

CALLABLES: weakref.WeakSet[BoxedReplay] = weakref.WeakSet()
"""All that are alive, of all compilations."""


@functools.cache
def pool_owner() -> Engine:
    """The function whose memory pools all graphs share: they are replayed in turn, and return no memory of a pool."""
    return Engine(_nothing, UNFUSED, Options())


def _nothing() -> None:
    return None


def reset() -> None:
    """Free all graphs: ``torch._dynamo.reset()`` calls this function of every backend that it knows.

    Dynamo drops its own caches, but not code that was compiled before a graph break (seen with torch 2.13).
    """
    for replay in members(CALLABLES):
        replay.reset()
    pool_owner().release_soon()


def explain(*, profile: bool = False) -> Explanation:
    """Report how everything runs that ``torch.compile(backend="pygraph")`` has compiled and that is still alive.

    Args:
        profile: Whether to include kernel times by source line, as in a jitted function's ``explain``.

    Raises:
        ArgumentError: ``profile`` is neither True nor False.

    Returns:
        A report like that of a jitted function, with one entry per graph and kind of call.

    Example:
        >>> import pygraph
        >>> isinstance(str(pygraph.explain()), str)
        True
    """
    check_flag("pygraph.explain(…)", "profile", profile)
    reports = [function.explain(profile) for replay in members(CALLABLES) for function in replay.functions()]
    return Explanation("torch.compile", (), {}).with_derived(sorted(reports, key=lambda report: report.name))
