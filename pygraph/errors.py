"""Every exception of pygraph.

A message has five parts, in this order: the call, the argument by path, expected and got, the user's source
line, and the remedy. `describe` builds it, so that all errors read alike.

Example:
    >>> describe("indirect(p)", "stage 'regions'", expected="'aten' or 'kernels'", remedy="Apply it first.")
    "indirect(p): stage 'regions'; expected 'aten' or 'kernels'. Apply it first."
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ArgumentError", "CaptureError", "ContainerChangeError", "DeviceError", "DisturbedTraceError", "DonatedError",
    "FallbackError", "GradientChangeError", "GradientError", "ProgramError", "PygraphError", "RecompilationWarning",
    "SpentGraphError", "StageError", "StateChangeError", "TraceError", "UndecidedError",
]  # fmt: skip


def describe(
    call: str,
    problem: str,
    *,
    expected: str | None = None,
    source: str | None = None,
    remedy: str | None = None,
) -> str:
    """Compose an error message from its five parts."""
    text = f"{call}: {problem}"
    if expected is not None:
        text += f"; expected {expected}"
    text += "."
    if source is not None:
        text += f" From {source}."
    if remedy is not None:
        text += f" {remedy}"
    return text


def with_article(kind: type) -> str:
    """The name of a class with its article.

    >>> with_article(list), with_article(int)
    ('a list', 'an int')
    """
    return f"{'an' if kind.__name__[0].lower() in 'aeio' else 'a'} {kind.__name__}"


class PygraphError(Exception):
    """Base class of every error that pygraph raises itself."""


class TraceError(PygraphError):
    """A function cannot be written down as a Program.

    Example: a Python ``if`` on a tensor's value. Remedy: ``torch.where``, or mark the argument static.

    Attributes:
        may_pass: Whether it may hold for the first call alone, as a message does that is logged once.
        raised: The exception that ends the function in eager too, as its own code raises it; None if tracing is in the
            way. With ``strict=True`` it is what a call raises.
        is_own: Whether the function's own code raises such an exception, be it for values of the device.
        used: What the function asks of numbers, as `pygraph.tracing.number_uses.UsedNumbers`; None if it is nothing
            that calls can compute.
    """

    may_pass: bool = False
    raised: Exception | None = None
    is_own: bool = False
    used: Any = None


class StateChangeError(TraceError):
    """A function changes Python state that outlasts the call.

    Example: ``self.count += 1``. Remedy: return the new value; a jitted function is passed what lies in attributes and
    variables, and stores what it returns. One that changes them in its first call only, as one that fills a cache, is
    traced again in the second.

    Attributes:
        locations: Where all that changes is stored, as `pygraph.guards.locations.Location`; None if some of it is
            stored elsewhere, as in a list.
        gradients: Whether it leaves other gradients behind, too.
        fills: Whether it only adds to what there was, as a function does that remembers its results: once such a call
            has run as it is, one like it finds what it has added.
        thawed: Flags (`pygraph.guards.locations.RequiresGrad`) of tensors to which it gives gradients, though they do
            not require grad before.
    """

    locations: tuple[Any, ...] | None = None
    gradients: bool = False
    fills: bool = False
    thawed: tuple[Any, ...] = ()

    def worded(self, text: str) -> StateChangeError:
        """Return this error in other words."""
        error = StateChangeError(text)
        vars(error).update(vars(self))
        return error


class ContainerChangeError(TraceError):
    """A function changes a list, a dict or a deque that it is passed.

    Example: ``pygraph.trace(f)(x, log)`` of a function with ``log.append(x.sum())``. Remedy: return a new one; a jitted
    function takes what it finds in such a container, and stores in it what a trace has found to be stored.

    Attributes:
        containers: The containers by name, as ``args[1]``, and `pygraph.guards.argument_containers.Change` of each.
    """

    containers: dict[str, Any]

    def __init__(self, text: str, containers: dict[str, Any]) -> None:
        super().__init__(text)
        self.containers = containers

    def worded(self, text: str) -> ContainerChangeError:
        """Return this error in other words."""
        return ContainerChangeError(text, self.containers)


class UndecidedError(TraceError):
    """A function decides by a value on the device, which a trace does not know.

    Example: ``pygraph.trace(f)(x)`` of a function with ``if x.sum() > 0``. Remedy: ``torch.where``; a
    jitted function is traced for each outcome, reads the value between graphs, and takes the trace that is right.

    Attributes:
        needs_number: Whether it needs a number, as a size or an index, and not only the outcome of a condition.
        needs_float: Whether that is no integer, which seldom comes again.
    """

    needs_number: bool = False
    needs_float: bool = False


class DisturbedTraceError(TraceError):
    """A setting of torch's has changed while a function was traced, perhaps by another thread.

    Example: ``torch.export`` switches cuDNN off for a while, for the whole process. A jitted function runs that call as
    it is and traces the next one. Remedy, where it is traced by itself: trace it again.
    """


class GradientChangeError(StateChangeError):
    """A function leaves other gradients behind than there were, and changes nothing else.

    Example: ``pygraph.trace(step)(x)`` of a step with ``zero_grad()`` and ``backward()``. Remedy: return the gradients;
    a jitted function is passed them and sets what it returns.
    """


class GradientError(TraceError):
    """A function that is traced by itself returns a tensor that requires grad.

    Example: ``pygraph.trace(f)(x)`` with parameters in ``f``. Remedy: ``torch.no_grad()``; a call of a transformed
    function is traced together with its gradient.

    Attributes:
        needs_sizes: Whether sizes of its tensors depend on data, which a gradient needs to know.
    """

    needs_sizes: bool = False


class SpentGraphError(GradientError):
    """A function returns tensors that require grad, and has itself used up what their gradients need.

    Example: ``pygraph.trace(step)(x)`` of a step that returns the loss of which it took the ``backward()``. Remedy:
    return ``loss.detach()``; a jitted function does so by itself.
    """


class RecompilationWarning(UserWarning):
    """A function is compiled again and again, as a value or state that decides what it does is another one each time.

    Example: ``jit(lambda cache, pos: cache[:, :pos])`` in a loop over positions. Remedy: pass the value as a tensor, or
    let it take few values; keep state that it does not need where it does not read it.
    """


class StageError(PygraphError):
    """A transform was applied to a Program, or a stack, in the wrong order.

    Example: ``indirect(graphify(f))``. Remedy: ``graphify(indirect(f))``.
    """


class ProgramError(PygraphError):
    """A Program breaks a rule of its stage; raised by ``check_program``.

    Example: an operation in place in an ``aten`` Program. It is a bug of the pass that made the Program.
    """


class ArgumentError(PygraphError, TypeError):
    """A call does not fit what was traced, or an option has a wrong value.

    Example: calling ``compiled(x)`` with another shape than it was compiled for.
    """


class CaptureError(PygraphError):
    """The device refused to record a piece of a Program as a graph.

    Example: an operation that synchronises with the host while it is recorded.
    """


class FallbackError(PygraphError):
    """``strict=True`` and some part of a call would not have run as a graph."""


class DonatedError(PygraphError, RuntimeError):
    """A tensor was used after a call had consumed it.

    Example: ``x + 1`` after ``jit(f, donate_argnums=0)(x)``. Remedy: use the result, or donate a clone.
    """


class DeviceError(PygraphError):
    """The device that was asked for is not there, or cannot do what was asked.

    Example: ``PYGRAPH_DEVICE=cuda`` on a machine without a GPU.
    """
