"""A function with a stack of transforms, and the cache of what they made of it for each kind of call.

`Transformed` is what every transform returns. Calling it traces on the first call of a kind, applies its passes, and
from then on runs the result.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch.utils import _pytree as pytree

from pygraph.autograd.sites_cache import Sites
from pygraph.calls import retries, surroundings
from pygraph.calls.entries import MOST_VARIANTS, Entries, Entry
from pygraph.calls.keys import Key, UnhashableError, flatten_call, form_of, leaf_keys, overlap_key, static_key
from pygraph.calls.plans import CallPath, Reached, live_numbers
from pygraph.calls.recording import record_program
from pygraph.calls.retries import SETTLED, TRACES, Budget, Looks, Traces, look_of
from pygraph.errors import (
    DisturbedTraceError,
    FallbackError,
    GradientChangeError,
    GradientError,
    SpentGraphError,
    StateChangeError,
    TraceError,
    describe,
)
from pygraph.guards.environment import Environment, modes_of
from pygraph.guards.locations import are_same
from pygraph.guards.torch_settings import mode_key
from pygraph.ir.check import check_program
from pygraph.ir.descriptors import Argument, Base, Captured, Fallback, Mechanism
from pygraph.ir.effects import writes_memory
from pygraph.ir.evaluate import evaluate
from pygraph.ir.leaves import static_leaves
from pygraph.ir.paths import flatten_with_path
from pygraph.ir.program import Program
from pygraph.ir.ranges import Ranges, share_memory, sharing
from pygraph.lowering.aten import lower, written_inputs
from pygraph.lowering.inductor import ALIGNED
from pygraph.process import extension
from pygraph.process.turns import INSIDE_CALL, here, reason_inside, register
from pygraph.report.explain import Explanation, explain
from pygraph.runtime.devices import driver_for
from pygraph.runtime.driver import Pool
from pygraph.runtime.executable import Executable
from pygraph.runtime.reuse import ReusedMemory
from pygraph.tracing.call_environment import objects_among
from pygraph.tracing.function_kinds import Passed, Traced
from pygraph.tracing.interruptions import uninterrupted
from pygraph.tracing.trace import trace_call
from pygraph.transforms.devicify import devicify_program, undevicified_scalars
from pygraph.transforms.fuse import fuse_program
from pygraph.transforms.graphify import graphify_program
from pygraph.transforms.indirect import indirect_program

if TYPE_CHECKING:
    from pygraph.autograd.sites import Site

P = ParamSpec("P")
R = TypeVar("R")
PASSES = ("devicify", "fuse", "indirect", "graphify", "select")
"""The transforms in the order in which they are applied."""

UNFUSED = tuple(name for name in PASSES if name != "fuse")
"""Those that leave the kernels as they are."""

_BLOCKED = Fallback("the call", "the stream of the last replay is being captured, and cannot be waited for")
_SHARED = Fallback("the call", "an argument shares memory with a captured tensor, and one is written")


class CacheInfo(NamedTuple):
    """Statistics of a transformed function, as of ``functools.lru_cache``."""

    hits: int
    misses: int
    captures: int
    evictions: int
    size: int


@dataclasses.dataclass(frozen=True)
class Options:
    """How a transformed function treats its arguments and its cache."""

    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    max_graphs: int = 64
    strict: bool = False
    timer: Callable[[Callable[[], object]], float] | None = None
    mechanism: Mechanism = "auto"
    reuse_outputs: bool = False
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()

    @property
    def donates(self) -> bool:
        """Whether calls consume arguments."""
        return bool(self.donate_argnums or self.donate_argnames)


@dataclasses.dataclass(frozen=True)
class _AsItIs:
    """A call that is to run as it is.

    Attributes:
        note: Why; None if that is no fallback.
        entry: What says so, if it is kept and counts its calls.
        program: A Program that is evaluated instead.
    """

    note: Fallback | None
    entry: Entry | None = None
    program: Program | None = None


@dataclasses.dataclass
class _Counts:
    """What `CacheInfo` reports of a function and all that is derived from it."""

    hits: int = 0
    misses: int = 0
    captures: int = 0
    evictions: int = 0

    def reset(self) -> None:
        self.hits = self.misses = self.captures = self.evictions = 0


class Transformed(Generic[P, R]):
    """A function with a stack of transforms; call it as the function itself.

    Args:
        fn: The function or module.
        passes: Names of transforms, in the order of `PASSES`.
        options: How arguments and the cache are treated.
        parent: The function that this one is derived from, by ``vmap``, ``grad`` or ``jvp``.

    Attributes:
        sites: What is known of calls inside such transforms.
    """

    def __init__(
        self,
        fn: Callable[P, R],
        passes: tuple[str, ...],
        options: Options,
        parent: Transformed[..., Any] | None = None,
    ) -> None:
        self.fn: Callable[..., R] = fn
        self.passes = passes
        self.options = options
        self._is_root = parent is None
        # What is derived from a function shares its memory, and so its turns.
        self._lock: threading.RLock = threading.RLock() if parent is None else parent._lock
        self.sites: Sites = Sites(options.max_graphs)
        self._entries = Entries()
        self._needed: dict[Hashable, frozenset[int]] = {}
        self._traces: dict[Hashable, Traces] = {}
        # Traces of kinds of calls that were pushed out by others before they had been used a few times.
        self._turnover = Budget(2 * options.max_graphs, TRACES)
        self._looks = Looks[Entry]()
        self._seen: set[Key] = set()
        self._streak = 0
        #: What all traces and recordings have taken.
        self.seconds = 0.0
        self._counts: _Counts = _Counts() if parent is None else parent._counts
        self._pools: dict[torch.device, Pool] = {} if parent is None else parent._pools
        self._forgotten: collections.deque[Transformed[..., Any]] = (
            collections.deque() if parent is None else parent._forgotten
        )
        self._inlined: collections.Counter[Fallback] = collections.Counter()
        self._clear_first = False
        self._native = CallPath(self._lock)
        register(self)
        self._reused = ReusedMemory() if options.reuse_outputs else None
        functools.update_wrapper(self, fn, updated=())

    # -- calling --------------------------------------------------------------------------------------------------

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function."""
        if torch.compiler.is_dynamo_compiling():  # known to Dynamo, which sees the function and nothing else
            return self.fn(*args, **kwargs)
        native = self._native
        if native.dispatch is not None and not torch.compiler.is_compiling():
            result = native.dispatch(args, kwargs)
            if result is not native.miss:
                return result
        looks, look = self._looks, None
        if looks:
            look = look_of(args, kwargs)
            if looks.is_skipped(look):
                return self.fn(*args, **kwargs)
        reason = surroundings.inline_reason()
        if reason is not None:
            return self._run_inline(Fallback("the call", reason), args, kwargs)
        begin = retries.clock()
        found = self._looked_at(args, kwargs)
        if type(found) is not _AsItIs:
            if look is not None:
                looks.served(look)
            return found
        if found.program is None and (found.note is not None or found.entry is not None) and not self.options.strict:
            seconds = retries.clock() - begin
            looks.as_it_is(look or look_of(args, kwargs), found.note, found.entry, seconds)
        return self._run_as_it_is(found, args, kwargs)

    def _looked_at(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call returns, or that it runs as it is."""
        leaves, structure = flatten_call(args, kwargs)
        special = surroundings.special_tensor(leaves)
        if special is not None:
            return _AsItIs(Fallback("the call", special))
        if self._is_root and surroundings.is_transformed(leaves):
            return self._compose(args, kwargs)
        if here.inside:
            return _AsItIs(Fallback("the call", reason_inside(self.function_name, leaves)))
        try:
            key = self._key(leaves, structure, args, kwargs)
        except UnhashableError as error:
            where = pytree.keystr(flatten_with_path((args, kwargs))[0][error.leaf][0][1:])
            kind = type(leaves[error.leaf]).__name__
            return _AsItIs(Fallback("the call", f"argument {where} is a {kind}, which cannot be part of a cache key"))
        # Replays of one function share memory, so threads take turns; what runs as it is needs no turn.
        with self._lock:
            here.inside = True
            try:
                if self._clear_first:
                    self._clear()
                if any(pool.is_blocked() for pool in self._pools.values()):
                    return _AsItIs(_BLOCKED)
                entry = self._entries.find(key)
                if entry is not None and entry.until is not None:
                    self._settle()
                    if entry.until.allow_another():
                        self._drop(entry)
                        entry = None
                is_hit = entry is not None
                if entry is not None:
                    self._count_hit(key, entry)
                else:
                    entry = self._timed_compile(key, leaves, structure, args, kwargs)
                shared = entry.shares_memory(leaves)
                if is_hit and not shared:  # a plan would not match, and every further call would compare it
                    self._plan(key, entry, leaves, args, kwargs)
                if entry.executable is not None and not shared:
                    return entry.executable(leaves)
            finally:
                here.inside = False
        if entry.differentiated:
            return self._compose(args, kwargs, (key, entry))
        if entry.steps is not None:
            refusal = entry.steps.refusal()
            return entry.steps(args, kwargs) if refusal is None else _AsItIs(refusal)
        if shared:
            return _AsItIs(_SHARED)
        if self.options.strict and entry.fallbacks and "graphify" in self.passes:
            raise self._strict_error(entry.fallbacks)
        note = entry.fallbacks[0] if entry.fallbacks and entry.program is None else None
        return _AsItIs(note, entry if entry.is_kept else None, entry.program)

    def _run_as_it_is(self, found: _AsItIs, args: Any, kwargs: Any) -> Any:
        if found.program is not None:
            return evaluate(found.program, *args, **kwargs)
        if found.entry is None and found.note is not None:
            return self._run_inline(found.note, args, kwargs)
        return self.fn(*args, **kwargs)

    def _compose(self, args: Any, kwargs: Any, found: tuple[Key, Entry] | None = None) -> Any:
        """What a call returns that is differentiated or batched from outside, or that it runs as it is.

        Args:
            args: Its arguments.
            kwargs: Its keyword arguments.
            found: The entry that says so, with its key, if it is not torch.func that does.
        """
        from pygraph.autograd.shell import compose
        from pygraph.autograd.sites import InlineError, UntraceableError, find_site

        if here.inside:
            leaves = pytree.tree_leaves((args, kwargs))
            return _AsItIs(Fallback("the call", reason_inside(self.function_name, leaves)))
        if torch.is_inference_mode_enabled():
            return _AsItIs(Fallback("the call", surroundings.INFERENCE))
        leaves, structure = pytree.tree_flatten((args, kwargs))
        try:
            site = find_site(self, leaves, structure, self.static_leaves(args, kwargs))
            result = compose(site, leaves)
        except UntraceableError as error:
            if found is None or found[1].calls == 1:
                return _AsItIs(Fallback("the call", str(error)))
            self._drop_outdated(found[1])  # it may leave something behind now, as calls before did not
            return self._looked_at(args, kwargs)
        except InlineError as error:
            return _AsItIs(Fallback("the call", str(error)))
        if found is not None:
            self._plan_composed(*found, site, leaves, args, kwargs)
        return result

    def _composed(self, site: Site, lifted: Sequence[torch.Tensor] | None, /, *args: Any, **kwargs: Any) -> Any:
        """The same, when it is known what the function closes over."""
        from pygraph.autograd.shell import compose
        from pygraph.autograd.sites import InlineError

        site.serves()
        try:
            return compose(site, pytree.tree_leaves((args, kwargs)), lifted)
        except InlineError as error:
            reason = str(error)
        site.discard_plans()  # the next call is noted where those are skipped that run as they are
        return self._run_inline(Fallback("the call", reason), args, kwargs)

    def _plan_composed(self, key: Key, entry: Entry, site: Site, leaves: list[Any], args: Any, kwargs: Any) -> None:
        """Have calls like this one find their site natively from now on."""
        if extension.loaded() is None or not site.may_be_planned:
            return
        if any(isinstance(leaves[index], torch.Tensor) for index in site.baked):
            return
        with self._lock:
            reached = site.reached()
            plans = None if self._clear_first else site.plans_for(reached)
            if plans is None:
                return
            live = self._live_numbers(key, leaves, args, kwargs) - set(site.baked)
            run = functools.partial(self._composed, site, reached.tensors[: len(site.primal.lifted)])
            device_type = self._device_type(leaves)
            plan = self._native.plan(key, entry, live, leaves, args, kwargs, run, device_type, reached=reached)
            if plan is not None:
                plans.append(plan)

    def discard_plans(self, plans: Sequence[object]) -> None:
        """Have calls not come by these plans any more."""
        with self._lock:
            for plan in plans:
                self._native.discard(plan)

    def derived(self, fn: Callable[..., Any]) -> Transformed[..., Any]:
        """A function made from this one by ``vmap``, ``grad`` or ``jvp``, transformed in the same way."""
        return Transformed(fn, self.passes, self.derived_options(), self)

    def derived_options(self) -> Options:
        """The options of what is derived from this function, whose arguments are others."""
        return dataclasses.replace(
            self.options, static_argnums=(), static_argnames=(), donate_argnums=(), donate_argnames=(),
            reuse_outputs=False,
        )  # fmt: skip

    def marks(self) -> Iterator[Any]:
        """What the Programs of its calls return that is made of nothing that a call passes."""
        for entry in self._entries:
            program = entry.program or entry.described
            yield from (static.value for static in program.statics) if program is not None else ()

    def forget(self, *, wait: bool = True) -> None:
        """Give back every graph of a derived function that no call will find again.

        Args:
            wait: Whether for another thread's turn. A finalizer must not: it may run under a lock that the other thread
                waits for, as Dynamo's. The next compilation of a function with the same memory gives them back then.
        """
        if not self._lock.acquire(blocking=wait):
            self._forgotten.append(self)
            return
        try:
            self._clear()
        finally:
            self._lock.release()

    def forget_soon(self) -> None:
        """Give back every graph now, or before the next call if one is going on, here or in another thread."""
        if here.inside or not self._lock.acquire(blocking=False):
            self._clear_first = True
            self._native.clear()
            return
        try:
            self._clear()
        finally:
            self._lock.release()

    def _count_hit(self, key: Key, entry: Entry) -> None:
        self._counts.hits += entry.steps is None  # which counts for itself
        entry.calls += 1
        self._is_used(entry)
        entry.stamp = self._native.tick()
        self._entries.touch(entry)

    def _is_used(self, entry: Entry) -> None:
        """Note that traces are used again."""
        if entry.traces is not None and entry.steps is None:
            entry.traces.is_used(entry.calls)
        if self._streak:
            self._streak = 0
            self._seen.clear()

    def _plan(self, key: Key, entry: Entry, leaves: list[Any], args: Any, kwargs: Any) -> None:
        """Have calls like this one take the native path from now on, where that can do what is done here."""
        if entry.executable is None and (entry.program is not None or (self.options.strict and entry.fallbacks)):
            return
        if entry.differentiated or entry.until is not None:
            return
        if self._clear_first:  # asked for during this call; the native path would pass it by
            return
        live = self._live_numbers(key, leaves, args, kwargs)
        run, reached = self.fn, None
        if entry.steps is not None:  # which finds out for itself what else has changed
            run, reached = entry.steps.run, Reached(Environment(None), (), (), ())
        device_type, given_up = self._device_type(leaves), self.given_up(entry, args)
        self._native.plan(key, entry, live, leaves, args, kwargs, run, device_type, given_up, reached)

    def _live_numbers(self, key: Key, leaves: list[Any], args: Any, kwargs: Any) -> frozenset[int]:
        """Positions of the leaves that a call of this kind reads as numbers."""
        return live_numbers(leaves, self.static_leaves(args, kwargs) | self._needed.get(key[0], frozenset()))

    def given_up(self, entry: Entry, args: tuple[Any, ...]) -> Sequence[int]:
        """Which items of a list that is the first argument calls by this entry let go of; see `CallPath.plan`."""
        del entry, args
        return ()

    def _settle(self) -> None:
        """Count what the native path has served, as if it had been served here."""
        for note, entry, calls in self._looks.take_skipped():
            if entry is not None:
                entry.calls += calls
                self._counts.hits += calls
            elif note is not None:
                self._inlined[note] += calls
        served = self._native.served()
        for calls in served:
            self._counts.hits += calls.hits if calls.entry.steps is None else 0
            calls.entry.calls += calls.hits
            calls.entry.stamp = max(calls.entry.stamp, calls.stamp)
            self._is_used(calls.entry)
        if served:
            self._entries.order()

    def _run_inline(self, fallback: Fallback, args: Any, kwargs: Any) -> Any:
        self._inlined[fallback] += 1
        if self.options.strict and fallback.reason not in _EXPECTED:
            raise self._strict_error([fallback])
        return self.fn(*args, **kwargs)

    def _strict_error(self, fallbacks: Sequence[Fallback]) -> FallbackError:
        first = fallbacks[0]
        return FallbackError(
            describe(
                f"{self.function_name}(…)", f"{first.what}: {first.reason}", source=first.source,
                remedy="strict=True refuses what does not run as a graph; explain() lists all reasons.",
            )
        )  # fmt: skip

    @property
    def function_name(self) -> str:
        """The function's name, for reports and errors."""
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    # -- the cache ------------------------------------------------------------------------------------------------

    def _key(self, leaves: list[Any], structure: Hashable, args: Any, kwargs: Any) -> Key:
        static = self.static_leaves(args, kwargs)
        base = (structure, static, leaf_keys(leaves, static), overlap_key(leaves), mode_key(self._device_type(leaves)))
        needed = self._needed.get(base, frozenset())
        return (base, tuple((index, static_key(leaves[index], index)) for index in sorted(needed)))

    def static_leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
        """Leaf positions of a call's arguments that the options make static."""
        return static_leaves(args, kwargs, self.options.static_argnums, self.options.static_argnames)

    def _device_type(self, leaves: list[Any]) -> str:
        """The accelerator whose autocast setting matters: that of the first tensor, or of what is closed over."""
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu":
                return leaf.device.type
        pools = tuple(self._pools)  # at once: another thread may clear the cache
        return pools[0].type if pools else default_accelerator()

    def _timed_compile(self, key: Key, leaves: list[Any], structure: Hashable, args: Any, kwargs: Any) -> Entry:
        begin = retries.clock()
        try:
            entry = self._compile(key, leaves, structure, args, kwargs)
        finally:
            seconds = retries.clock() - begin
            self.seconds += seconds
        if entry.traces is not None and entry.until is None:
            entry.traces.is_made(seconds)
        entry.seconds = seconds
        if entry.executable is None:
            extension.start()  # for what runs as it is there is a native path, too
        return entry

    def _compile(self, key: Key, leaves: list[Any], structure: Hashable, args: Any, kwargs: Any) -> Entry:
        self._settle()
        while self._forgotten:
            self._forgotten.popleft()._clear()
        self._counts.misses += 1
        base = key[0]
        entries = self._entries.of(key)
        is_known = bool(entries)
        outdated = self._outdated_step(key)
        wasted = is_known and entries[0].calls == 1
        form = form_of(key)
        traces = self._traces.get(form)
        moved = self._make_room(key)
        if traces is not None and (is_known or form is not base):
            traces.is_outdated(wasted=wasted)
        if outdated is not None:
            self._drop_all(key)
            passed = Passed(gradients=True, rates=not outdated.rates_are_current())
            return self._keep_steps(key, args, kwargs, passed)
        if traces is not None and not traces.allow_another():
            self._drop_all(key)
            if form is not base and not is_known:  # an entry would push out others
                note = Fallback("the call", "an object that it is passed is another one at every call")
                return Entry(None, None, None, [note], is_kept=False)
            changed = entries[0].changed() if entries else None
            note = Fallback("the call", f"{changed or 'something that the function closes over'} changes at every call")
            return self._keep(key, Entry(None, None, None, [note], until=traces))
        if is_known and entries[0].sets_gradients:
            return self._keep_steps(key, args, kwargs, Passed(gradients=True))
        if self._past_budget() and (key not in self._seen or not self._turnover.allows()):
            if len(self._seen) < _MAX_SEEN:
                self._seen.add(key)
            note = Fallback("the call", f"past the budget of {self.options.max_graphs} graphs")
            return Entry(None, None, None, [note], is_kept=False)
        static = self.static_leaves(args, kwargs)
        began = retries.clock()
        try:
            traced, program = moved or self.make_programs(args, kwargs, static | self._needed.get(base, frozenset()))
            _check_disjoint(program, leaves, self.function_name)
            _check_updatable(traced.program, leaves, self.function_name)
        except TraceError as error:
            if (
                isinstance(error, GradientError)
                and not isinstance(error, SpentGraphError)
                and self._composes
                and torch.is_grad_enabled()
                and not self.options.donates
            ):
                return self._keep(key, Entry(None, None, None, [], differentiated=True))
            # A function that remembers its results may do so for a call of a known kind, as with another attribute.
            adds = isinstance(error, StateChangeError) and error.fills and not (is_known and entries[0].once)
            filled = error.locations or () if isinstance(error, StateChangeError) and error.fills else ()
            # One that fills another location than the last time fills a memo, for another key.
            fills_another = is_known and bool(entries[0].filled and filled) and not are_same(filled, entries[0].filled)
            passed = None if fills_another else self._left_behind(error, is_known and not adds)
            if passed is not None:
                return self._keep_steps(key, args, kwargs, passed)
            note = Fallback("the call", str(error), None)
            if self.options.strict:
                raise FallbackError(str(error)) from error
            if isinstance(error, DisturbedTraceError):
                return Entry(None, None, None, [note], is_kept=False)
            # What a first call changes (a cache that it fills), a second one may leave as it is.
            once = isinstance(error, StateChangeError) and (not is_known or adds)
            if isinstance(error, StateChangeError) and error.fills and not once:  # twice in a row
                lost = self._traces.setdefault(form, Traces())
                lost.is_unsteady(retries.clock() - began)
                return self._keep(key, Entry(None, None, None, [note], until=lost, filled=filled))
            modes = None if once else modes_of(self.fn, objects_among(args, kwargs))
            is_step = isinstance(error, StateChangeError) and once and error.gradients and self._may_step()
            entry = Entry(
                None, None, None, [note], once=once, filled=filled, sets_gradients=is_step, refused_in=modes
            )  # fmt: skip
            return self._keep(key, entry)
        found = traced.static_leaves - static
        if found:
            # Also when all were known: another thread may have found them after this call's key was made.
            self._needed[base] = self._needed.get(base, frozenset()) | found
            key = self._key(leaves, structure, args, kwargs)
            self._make_room(key)
        program = _with_unseen(program, traced.environment)
        try:
            executable = self.make_executable(program, leaves)
        except torch.OutOfMemoryError:  # recording and proving needs copies of arguments and results
            note = Fallback("the call", "there is not enough memory to record its graphs and to prove them")
            if self.options.strict:
                raise self._strict_error([note]) from None
            return self._keep(key, Entry(None, None, None, [note]))
        fallbacks = self.reasons(program) if executable is None else executable.fallbacks
        if self.options.strict and fallbacks and "graphify" in self.passes:
            if executable is not None:
                executable.release()
            raise self._strict_error(fallbacks)
        if executable is not None and executable.graphs:
            entry = Entry(traced, executable.program, executable, fallbacks, recordable=program)
        elif "graphify" in self.passes:
            # Nothing to replay: the function itself is the fastest way to launch its kernels.
            described = program if executable is None else executable.program
            entry = Entry(None, None, None, fallbacks, described=described)
        else:
            entry = Entry(traced, program, None, fallbacks)
        return self._keep(key, entry)

    def _outdated_step(self, key: Key) -> Environment | None:
        """What the function read when it was traced, if gradients or learning rates are others now."""
        found = (entry.traced.environment for entry in self._entries.of(key) if entry.traced is not None)
        return next((one for one in found if not one.step_is_current()), None) if self._may_step() else None

    @property
    def _composes(self) -> bool:
        """Whether calls that are differentiated from outside have compiled functions of their own."""
        return self._is_root

    def _may_step(self) -> bool:
        return self._is_root and not self.options.donates

    def _left_behind(self, error: TraceError, is_known: bool) -> Passed | None:
        """What calls are to be passed and to return, if that is all that is in the way of a trace."""
        return left_behind(error, is_known or self.options.strict) if self._may_step() else None

    def _keep_steps(self, key: Key, args: Any, kwargs: Any, passed: Passed) -> Entry:
        """An entry for calls that leave something else behind than there was, or find another learning rate."""
        from pygraph.calls.steps import Steps

        return self._keep(key, Entry(None, None, None, [], steps=Steps(self, args, kwargs, passed)))

    def make_programs(self, args: Any, kwargs: Any, static: frozenset[int]) -> tuple[Traced, Program]:
        """Trace and apply the passes; numbers that a device operation takes by value are baked in."""
        while True:
            traced = trace_call(self.fn, args, kwargs, static=static, name=self.function_name)
            program = check_program(traced.program)
            if "devicify" in self.passes:
                program = check_program(devicify_program(program))
                stuck = _leaves_of(program, undevicified_scalars(program))
                if stuck and "graphify" in self.passes:
                    static = traced.static_leaves | stuck
                    continue
            if "fuse" in self.passes and program.stage == "aten":
                program = check_program(_fused(program, args, kwargs))
            if "indirect" in self.passes:
                program = check_program(indirect_program(program, self.options.mechanism))
            if "graphify" in self.passes:
                program = check_program(graphify_program(program))
            return traced, program

    def make_executable(self, program: Program, leaves: list[Any]) -> Executable | None:
        """Record the graphs of a Program that `make_programs` made; None where nothing can be recorded."""
        if "graphify" not in self.passes or program.device.type == "cpu" or len(program.devices) > 1:
            return None
        driver = driver_for(program.device)
        if driver is None or driver.refusal() is not None:
            return None
        if program.device not in self._pools:
            self._pools[program.device] = driver.new_pool()
        timer = (self.options.timer or driver.measure) if "select" in self.passes else None
        pool, made = self._pools[program.device], list[Executable]()
        try:
            with driver.unwatched():
                uninterrupted(
                    lambda: made.append(record_program(program, driver, pool, leaves, self._reused, timer)),
                    recording=True,
                )
        except BaseException:
            for executable in made:  # what raises is a signal's handler that has waited
                executable.release()
            raise
        (executable,) = made
        extension.start()
        self._counts.captures += executable.recorded
        return executable

    def reasons(self, program: Program) -> list[Fallback]:
        """Why nothing of a Program was recorded."""
        driver = driver_for(program.device) if "graphify" in self.passes else None
        refusal = None if driver is None else driver.refusal()
        return [*program.fallbacks, *([] if refusal is None else [Fallback("the whole program", refusal)])]

    def _make_room(self, key: Key) -> tuple[Traced, Program] | None:
        """Drop the entries of a key that no call will run again; what was traced of one whose tensors have moved."""
        moved: tuple[Traced, Program] | None = None
        kept = 0
        for entry in self._entries.of(key):
            if kept < MOST_VARIANTS - 1 and not entry.is_current() and entry.may_return():
                kept += 1
                continue
            if entry.has_only_moved() and entry.traced is not None and entry.recordable is not None:
                moved = entry.traced, entry.recordable
            self._drop(entry)
        return moved

    def _keep(self, key: Key, entry: Entry) -> Entry:
        self._entries.add(key, entry)
        entry.calls = 1
        if len(self._traces) > _MAX_SEEN:
            self._traces.clear()
        entry.traces = self._traces.setdefault(form_of(key), Traces())
        if entry.steps is not None:
            entry.steps.traces = entry.traces
        entry.stamp = self._native.tick()
        while len(self._entries) > self.options.max_graphs:
            oldest = self._entries.oldest()
            if oldest.calls < SETTLED:
                self._turnover.lose(oldest.seconds)
            else:
                self._turnover.renew()
            self._drop(oldest)
            self._counts.evictions += 1
            self._streak += 1
        return entry

    def _past_budget(self) -> bool:
        """Whether the cache only turns over: new kinds of calls push out others before they are used again."""
        if len(self._entries) < self.options.max_graphs:
            return False
        return self._streak >= 2 * self.options.max_graphs or not self._turnover.allows()

    def _drop_all(self, key: Key) -> None:
        for entry in self._entries.of(key):
            self._drop(entry)

    def _drop_outdated(self, entry: Entry) -> None:
        """Drop one that was found before other threads had their turns."""
        with self._lock:
            if entry in self._entries:
                self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        self._entries.remove(entry)
        self._native.drop(entry)
        self._looks.forget(entry)
        if entry.steps is not None:
            entry.steps.forget()
        if entry.executable is not None:
            entry.executable.release()

    # -- looking inside -------------------------------------------------------------------------------------------

    def cache_info(self) -> CacheInfo:
        """Hits, misses, graphs captured, evictions, and kinds of calls held."""
        engines = [self, *self._engines()]
        counts = self._counts
        hits = counts.hits + sum(engine._native.unsettled + engine._looks.unsettled for engine in engines)
        size = sum(entry.steps is None for engine in engines for entry in engine._entries)
        return CacheInfo(hits, counts.misses, counts.captures, counts.evictions, size)

    def cache_clear(self) -> None:
        """Forget every trace and give back every graph; from inside a call, before this function's next one."""
        if here.inside:
            self._clear_first = True  # the call that is going on may be one of this function's graphs
            self._native.clear()
            return
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        self._clear_first = False
        for entry in self._entries:
            self._drop(entry)
        self._native.clear()
        self._looks.clear()
        self._settle()
        self._needed.clear()
        self._traces.clear()
        self._turnover.renew()
        self._seen.clear()
        self._inlined.clear()
        self.sites.clear()
        if self._is_root:
            self._pools.clear()
        self._streak = 0
        if self._is_root:
            self._counts.reset()

    @contextlib.contextmanager
    def turn(self) -> Generator[bool, None, None]:
        """Hold the function's graphs for this thread; False if it is inside a call and must do without them."""
        if here.inside:
            yield False
            return
        with self._lock:
            here.inside = True
            try:
                yield True
            finally:
                here.inside = False

    def after_fork(self) -> None:
        """Free the lock in a child process; a call that another thread had begun is forgotten with all graphs."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock._at_fork_reinit()  # pyright: ignore  # as CPython does for its own locks, 3.11 to 3.14
            self._clear_first = True
            self._native.clear()

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Trace and transform for these arguments without recording; see `pygraph.calls.stages.Lowered`."""
        from pygraph.calls.stages import lower

        return lower(self, args, kwargs)

    def explain(self) -> Explanation:
        """What runs how, for every kind of call so far, with the reason for everything that is not a graph."""
        with self._lock if not here.inside else contextlib.nullcontext():
            self._settle()
            inline = self._inlined
            if self._reused is not None:
                inline = inline + self._reused.notes
            entries = [entry for entry in self._entries if entry.steps is None]  # whose engines say more
            report = explain(self.function_name, entries, dict(inline))
            return report.with_derived(engine.explain() for engine in self._engines())

    def _engines(self) -> Iterator[Transformed[..., Any]]:
        """The functions that are derived from this one and run calls of it."""
        yield from self.sites.engines()
        yield from (entry.steps.engine for entry in self._entries if entry.steps is not None)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind as a method does, so that methods can be decorated; the instance is a static argument."""
        return self if instance is None else functools.partial(self, instance)

    def __reduce__(self) -> str | tuple[Any, ...]:
        # For pickles and copies: what a module has a name for goes by that name, as functions do; anything else as
        # the function and its options, without graphs.
        module, path = getattr(self, "__module__", None), getattr(self, "__qualname__", None)
        if module is not None and path is not None and _lookup(module, path) is self:
            return path
        return type(self), (self.fn, self.passes, self.options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "fn" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.fn, name)

    def __repr__(self) -> str:
        inner = self.function_name
        for name in self.passes:
            inner = f"{name}({inner})"
        return f"<pygraph {inner}>"


# Kinds of calls of which it is remembered that they came once, while there are too many, or what their traces cost.
_MAX_SEEN = 4096

_EXPECTED = surroundings.EXPECTED | {INSIDE_CALL}


def left_behind(error: TraceError, is_known: bool) -> Passed | None:
    """What a call is to be passed and to return, if that is all that is in the way of its trace.

    Args:
        error: What is in the way.
        is_known: Whether there was a call like this: a first one may fill attributes that later ones only read.
    """
    if isinstance(error, (GradientChangeError, SpentGraphError)):
        return Passed(gradients=True)
    if isinstance(error, StateChangeError) and error.locations and is_known:
        return Passed(locations=error.locations)
    return None


def _with_unseen(program: Program, environment: Environment) -> Program:
    """The Program, with a note of what the function reaches and is not guarded."""
    if environment.unseen is None:
        return program
    reason = f"what lies in {environment.unseen} is too much to be looked at; changes there would be missed"
    note = Fallback("state", reason)
    return program if note in program.fallbacks else program.replace(fallbacks=(*program.fallbacks, note))


def _lookup(module: str, path: str) -> Any:
    """What a name says now; None if nothing."""
    value: Any = sys.modules.get(module)
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def default_accelerator() -> str:
    """The type of the machine's accelerator, or of the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _fused(program: Program, args: Any, kwargs: Any) -> Program:
    """The Program with fused kernels, which read tensors where their offset in their storage says that they are."""
    leaves = pytree.tree_leaves((args, kwargs))
    tensors = [(d.path, d.spec, leaves[d.leaf]) for d in program.inputs if isinstance(d, Argument)]
    tensors += [(d.path, d.spec, leaves[d.start]) for d in program.inputs if isinstance(d, Base)]
    tensors += [(d.name, d.spec, d.value) for d in program.inputs if isinstance(d, Captured)]
    for path, spec, tensor in tensors:
        first = tensor.data_ptr() - spec.offset * tensor.element_size() if tensor.is_cuda and tensor.numel() else 0
        if first % ALIGNED:
            note = Fallback("fusion", f"the storage of {path} does not begin at a multiple of {ALIGNED} bytes")
            return lower(program.replace(fallbacks=(*program.fallbacks, note)))
    return fuse_program(program)


def _leaves_of(program: Program, inputs: set[int]) -> frozenset[int]:
    return frozenset(program.inputs[index].leaf for index in inputs)  # pyright: ignore


def _check_disjoint(program: Program, leaves: Sequence[Any], name: str) -> None:
    """Refuse a Program that writes where a captured tensor shares memory with an argument or another one."""
    captured = [(d.name, d.value) for d in program.inputs if isinstance(d, Captured) and d.value.numel()]
    if not captured or not (written_inputs(program) or writes_memory(program.nodes)):
        return
    for first, second, *_ in sharing((index, value) for index, (_, value) in enumerate(captured)):
        both = f"{captured[second][0]} and {captured[first][0]}"
        raise TraceError(describe(f"{name}(…)", f"{both} share memory, and one is written"))
    owned = Ranges(value for _, value in captured)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and owned.meet(leaf):
            owner = next(owner for owner, value in captured if share_memory(value, leaf))
            raise TraceError(describe(f"{name}(…)", f"an argument shares memory with {owner}, and one is written"))


def _check_updatable(program: Program, leaves: Sequence[Any], name: str) -> None:
    """Refuse a Program that writes to inference tensors outside inference mode, where eager raises."""
    if torch.is_inference_mode_enabled():
        return
    for index in written_inputs(program):
        descriptor = program.inputs[index]
        written = [leaves[descriptor.leaf]] if isinstance(descriptor, Argument) else []
        written += [leaves[leaf] for leaf in descriptor.leaves] if isinstance(descriptor, Base) else []
        written += [descriptor.value] if isinstance(descriptor, Captured) else []
        if any(tensor.is_inference() for tensor in written):
            raise TraceError(describe(f"{name}(…)", "it updates an inference tensor outside inference mode"))
