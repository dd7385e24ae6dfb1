"""From a Python callable to a Program.

The function runs once on fake tensors while `make_fx` writes down the ATen operations below autograd, so that
``torch.func`` transforms, ``torch.autograd.grad`` and random operations inside it become plain operations. The
record still has in-place operations; a second run through ``torch.func.functionalize`` removes them and leaves
updates of inputs as explicit outputs. Aliasing is read off the first run, where storages are shared as in eager.

Numbers are traced as symbols. One whose value the function needs (an ``if``, a size) is baked in and the trace
repeated; the caller finds its leaf among `Traced.static_leaves`.
"""

# The tracer works on torch's private parts (frames, storages' identities) and on values of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
import dataclasses
import functools
import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch.utils import _pytree as pytree

from pygraph.errors import TraceError, describe
from pygraph.guards.environment import Environment
from pygraph.guards.locations import ABSENT, Location
from pygraph.ir.autocasting import without_autocast
from pygraph.ir.constants import IMMUTABLE
from pygraph.ir.leaves import is_live_number, static_leaves
from pygraph.ir.paths import flatten_with_path
from pygraph.ir.program import (
    Program,
)
from pygraph.ir.source_lines import first_line, user_line, user_lines
from pygraph.process.collection import no_collection
from pygraph.tracing.functionalize import functionalize
from pygraph.tracing.interruptions import uninterrupted
from pygraph.tracing.leaks import leaving_nothing
from pygraph.tracing.recording import Recording, record
from pygraph.tracing.turn import turn

P = ParamSpec("P")

R = TypeVar("R")

aten = torch.ops.aten

# Each round bakes in at least one more number, so this is only reached by calls with many that matter in turn.
_MAX_SPECIALIZATIONS = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A Program with what its validity depends on.

    Attributes:
        program: The Program.
        static_leaves: Number leaves that were baked in because the trace needed their values.
        environment: What the function could reach when it was traced.
    """

    program: Program
    static_leaves: frozenset[int]
    environment: Environment


class SelfTracing:
    """A function that is traced as part of something else."""

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], static: frozenset[int], name: str) -> Traced:
        """Its Program for these arguments."""
        raise NotImplementedError


class Rebinding:
    """A function that puts other tensors in the place of some that it closes over, which are no part of its trace.

    Attributes:
        __wrapped__: The function that closes over them.
    """

    __wrapped__: Any

    def rebound(self) -> Iterable[torch.Tensor]:
        """What is in those locations now."""
        raise NotImplementedError

    def check(self, program: Program) -> None:
        """Look at the trace.

        Raises:
            TraceError: It reads what is in those locations all the same.
        """


@dataclasses.dataclass(frozen=True)
class Passed:
    """What calls are passed besides their arguments, as they change it.

    Attributes:
        gradients: Whether the gradients of all that is closed over are passed.
        rates: Whether learning rates are.
        locations: Attributes and variables.
    """

    gradients: bool = False
    rates: bool = False
    locations: tuple[Location, ...] = ()

    def __or__(self, other: Passed) -> Passed:
        new = [location for location in other.locations if not any(location.is_same(known) for known in self.locations)]
        return Passed(self.gradients or other.gradients, self.rates or other.rates, (*self.locations, *new))


class Passing:
    """A function that is passed what another one finds for itself, and puts it there while that one is traced.

    Attributes:
        differentiated: The tensors whose gradients are passed.
        groups: The parameter groups whose learning rates are passed.
        locations: Attributes and variables that are passed.
    """

    differentiated: Sequence[torch.Tensor]
    groups: Sequence[dict[str, Any]]
    locations: Sequence[Location]

    @contextlib.contextmanager
    def emptied(self) -> Generator[None, None, None]:
        """Have nothing found in these locations; one that is not there stays so."""
        before = [location.get() for location in self.locations]
        try:
            for location, value in zip(self.locations, before, strict=True):
                if value is not ABSENT:
                    location.put(None)
            yield
        finally:
            for location, value in zip(self.locations, before, strict=True):
                location.put(value)

    def path(self, path: str) -> str:
        """What reports call an argument or a result, in terms of the other function."""
        raise NotImplementedError


def trace(
    fn: Callable[P, Any], *, static_argnums: Sequence[int] = (), static_argnames: Sequence[str] = ()
) -> Callable[P, Program]:
    """Return a function that traces ``fn`` on its arguments and returns the Program, like ``jax.make_jaxpr``.

    Args:
        fn: A function or module over pytrees of tensors, numbers, ``None`` and static values.
        static_argnums: Positions of arguments that are baked in as they are.
        static_argnames: The same for keyword arguments.

    Returns:
        A function with the signature of ``fn`` that returns a `Program` at stage ``aten``.

    Raises:
        TraceError: The function cannot be written down; the message says why and where.

    Example:
        >>> import torch, pygraph
        >>> print(pygraph.trace(lambda x, k: x * k + 1)(torch.ones(3), 2.0), end="")  # doctest: +ELLIPSIS
        # <lambda> (aten): trace
        def program(
            args_0: "float32[3] cpu",  # args[0]
            args_1: "float",  # args[1], live
        ):
            mul: "float32[3] cpu" = aten.mul.Tensor(args_0, args_1)  # ...:1
            add: "float32[3] cpu" = aten.add.Tensor(mul, 1)  # ...:1
            return (
                add,  # result
            )
    """

    @functools.wraps(fn, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    def traced(*args: P.args, **kwargs: P.kwargs) -> Program:
        static = static_leaves(args, kwargs, static_argnums, static_argnames)
        return trace_call(fn, args, kwargs, static=static).program

    return traced


def trace_call(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    static: frozenset[int] = frozenset(),
    name: str | None = None,
) -> Traced:
    """Trace one call; numbers at the leaves in ``static`` are baked in from the start."""
    name = str(name or getattr(fn, "__name__", type(fn).__name__))
    if isinstance(fn, SelfTracing):
        return fn.trace(args, kwargs, static, name)
    # Handlers of signals wait until nothing of the trace is left.
    return uninterrupted(
        lambda: leaving_nothing(f"trace({name})(…)", lambda: _trace_call(fn, args, kwargs, static, name))
    )


def _trace_call(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], static: frozenset[int], name: str
) -> Traced:
    with turn(), no_collection(), _dispatch_kept():
        recording, static = _record_call(fn, args, kwargs, static, name)
        passing = _passing(fn)
        passed = {id(tensor) for tensor in passing.differentiated} if passing is not None else set[int]()
        read = [tensor for tensor in recording.gradients if id(tensor) not in passed]
        now = reached_besides(fn, args, kwargs, read)
        program = _functional(recording)
        if isinstance(fn, Passing):
            program = _with_paths(program, fn.path)
        if isinstance(fn, Rebinding):
            now.release(fn.rebound())
            fn.check(program)
        return Traced(program, static, now)


def reached_besides(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], read: Sequence[torch.Tensor] = ()
) -> Environment:
    """What a call depends on besides what it is passed; ``read`` are tensors of which it reads gradients."""
    passing = _passing(fn)
    with contextlib.nullcontext() if passing is None else passing.emptied():
        environment = Environment(fn, objects_among(args, kwargs), read)
    if passing is not None:
        environment.release_rates(passing.groups)
        environment.release_locations(passing.locations)
    environment.forget_copies()
    return environment


def _passing(fn: Any) -> Passing | None:
    """The function that puts what it is passed in its locations, behind one that is made from it."""
    behind = fn.__wrapped__ if isinstance(fn, Rebinding) else fn
    return behind if isinstance(behind, Passing) else None


def _with_paths(program: Program, path: Callable[[str], str]) -> Program:
    """The same Program with other names for arguments and results."""

    def renamed(descriptor: Any) -> Any:
        named = hasattr(descriptor, "path") and descriptor.path.startswith(("args", "result"))
        return dataclasses.replace(descriptor, path=path(descriptor.path)) if named else descriptor

    fields = ("inputs", "outputs", "aliases", "statics", "baked")
    return program.replace(**{field: tuple(map(renamed, getattr(program, field))) for field in fields})


def record_call(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], static: frozenset[int], name: str
) -> tuple[Recording, frozenset[int]]:
    """The first run of `trace_call`, and the leaves that were baked in for it."""
    return uninterrupted(lambda: _record_call(fn, args, kwargs, static, name))


def _record_call(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], static: frozenset[int], name: str
) -> tuple[Recording, frozenset[int]]:
    with turn(), no_collection(), _saved_tensors_unseen(), _dispatch_kept():
        for _ in range(_MAX_SPECIALIZATIONS):
            environment = Environment(fn, {"args": args, "kwargs": kwargs})
            asked: set[int] = set()
            try:
                recording = record(fn, args, kwargs, static, name, environment, asked)
            except TraceError as error:
                numbers = {i: leaf for i, leaf in enumerate(pytree.tree_leaves((args, kwargs))) if is_live_number(leaf)}
                if any(text in str(error) for text in _WANTS_INTEGERS):
                    integers = {index for index, leaf in numbers.items() if isinstance(leaf, (int, np.integer))}
                    asked |= numbers.keys() if integers <= static else integers
                elif asked <= static and _may_be_for_a_symbol(error.__cause__):
                    asked |= numbers.keys()
                if asked <= static:
                    raise
                static |= asked  # it may have failed because the answer was not a number's
                continue
            if recording.specialize <= static:
                return recording, static
            static |= recording.specialize
    raise TraceError(describe(f"trace({name})", "its arguments' values decide its operations without end"))


@contextlib.contextmanager
def _saved_tensors_unseen() -> Generator[None, None, None]:
    """Keep what autograd saves while tracing from hooks around the call, as a checkpoint's, which counts it."""
    hooks = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]  # checked with torch 2.11 and 2.13
    if hooks._top_saved_tensors_default_hooks(True) is None:
        yield  # functions of torch.func refuse any hooks
        return
    with torch.autograd.graph.saved_tensors_hooks(_without_graph, lambda tensor: tensor):
        yield


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """What a node may hold of a tensor; of the node's own result, that is not to be the node again."""
    return tensor if tensor.grad_fn is None else tensor.detach()


# What torch says where an operation takes sizes as plain integers only (torch 2.11 to 2.13).
_WANTS_INTEGERS = ("SymIntArrayRef expected to contain", "dispatch_on_subclass called with NO overloaded args")


def _may_be_for_a_symbol(error: BaseException | None) -> bool:
    """Whether code may have failed as it was given a symbol for a number, as ``decimal.Decimal(k)`` does."""
    if isinstance(error, NotImplementedError):
        return True
    return isinstance(error, Exception) and not isinstance(error, (TraceError, RuntimeError))


def objects_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments that have attributes of their own, which a trace bakes in; tensors and containers are in the key."""
    keyed = flatten_with_path((args, kwargs))[0]
    return {pytree.keystr(path): leaf for path, leaf in keyed if not isinstance(leaf, (torch.Tensor, *IMMUTABLE))}


@contextlib.contextmanager
def _dispatch_kept() -> Generator[None, None, None]:
    """Let no error outlive this block with guards of torch's dispatcher in its frames, which would undo later ones.

    Torch has such guards in the variables of functions. Private; checked with torch 2.11 and 2.13.
    """
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        try:
            yield
        except BaseException as error:
            _clear_frames(error)
            raise


def _clear_frames(error: BaseException) -> None:
    """Free what an error's frames hold; those of its causes, whose functions hold more, become a note."""
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        link = chain.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            traceback.clear_frames(link.__traceback__)
            chain += [link.__cause__, link.__context__]
            lines = [] if link is error else user_lines(link)
            if lines:
                link.add_note("In the function that was traced:\n" + "".join(lines).rstrip())
            if link is not error:
                link.__traceback__ = None


def _functional(recording: Recording) -> Program:
    """The second run, with torch's errors as TraceErrors."""
    try:
        with without_autocast():
            return functionalize(recording)
    except TraceError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {first_line(error)}"
        raise TraceError(describe(f"trace({recording.name})(…)", problem, source=user_line(error))) from error
