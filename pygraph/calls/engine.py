"""A compiled function: finds out what kind of call a call is, compiles each kind once, and runs it.

One call goes this way: its key, the entry of the key or a new one, a native plan for later calls, the entry's run.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pygraph.calls import profiling, retries, surroundings
from pygraph.calls.as_it_is import AsItIs
from pygraph.calls.cache import Cache, CacheInfo, Shared
from pygraph.calls.compilation import Compiler
from pygraph.calls.entries import Differentiated, Entry, Evaluated, Recorded, Refused, Stateful
from pygraph.calls.function import Call, Function
from pygraph.calls.inner_modules import InnerModules, WithModules
from pygraph.calls.keys import Key, Keys, UnhashableError, flatten_call
from pygraph.calls.new_kinds import Waiting
from pygraph.calls.object_calls import Closed, ObjectCalls
from pygraph.calls.options import Options
from pygraph.calls.plans import Planned
from pygraph.calls.policy import Composition, CompositionFactory, Policy, Runners
from pygraph.calls.recording import Recorder
from pygraph.calls.reports import report_of, totals_of
from pygraph.calls.requirements import Requirements
from pygraph.calls.retries import look_of
from pygraph.calls.surroundings import InlineError, UntraceableError
from pygraph.calls.unhashable import refusal
from pygraph.ir.descriptors import Fallback
from pygraph.ir.evaluate import evaluate_leaves
from pygraph.ir.program import Program
from pygraph.process.reentrancy import INSIDE_CALL, here, reason_inside, register
from pygraph.report.explain import Explanation
from pygraph.tracing.function_kinds import Traced
from pygraph.transforms.passes import Pass, records

_BLOCKED = Fallback("the call", "the stream of the last replay is being captured, and cannot be waited for")
_SHARED = Fallback("the call", "an argument shares memory with a captured tensor, and one is written")

# Reasons for which ``strict`` does not raise: the work becomes part of something larger.
_EXPECTED = surroundings.EXPECTED | {INSIDE_CALL}


class Engine:
    """Compiles and runs the calls of one function; call it as the function itself.

    Args:
        fn: The function or module.
        passes: The passes, in the order in which they are applied.
        options: How arguments and the cache are treated.
        parent: The engine that this one is derived from, with which it shares memory and turns.
        policy: What calls may do; by default what those of derived functions may.
        composition: Makes what runs calls inside transforms of ``torch.func`` and under autograd.
        is_called: Whether users call it, and not its parent, so that its calls count.

    Attributes:
        function: The function with its passes and options.
        shared: What it shares with its parent.
        modules: What runs modules where a function that calls them runs as it is; the same for all derived from one.
        cache: Its entries.
        objects: What runs calls with arguments that are taken apart.
        composition: What runs calls inside transforms and under autograd; None if it is never called there.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        passes: tuple[Pass, ...],
        options: Options,
        parent: Engine | None = None,
        policy: Policy | None = None,
        composition: CompositionFactory | None = None,
        *,
        is_called: bool = True,
    ) -> None:
        self.fn = fn
        self.policy = Policy() if policy is None else policy
        self.is_root, self._is_called = parent is None, is_called
        self.shared = Shared() if parent is None else parent.shared
        self.modules = InnerModules(self) if parent is None else parent.modules
        serves = self.policy.is_users and self.policy.carries_state and records(passes)
        self.function = Function(fn, passes, options, WithModules(fn, self.modules) if serves else fn)
        limits = options.max_graphs, self.shared, self.policy.seldom, self.policy.single_kinds
        self.cache = Cache(self.function.name, *limits, is_users=is_called, is_patient=self.policy.is_patient)
        static_leaves = functools.partial(self.policy.static_leaves, self.function)
        self.keys = Keys(static_leaves, self.cache.baked, self.shared.pools)
        self.recorder = Recorder(self.function, self.shared)
        self.compiler = Compiler(self.function, self.cache, self.shared, self.policy, self.keys, self.recorder)
        self._composition_factory = composition
        self._runners = Runners(self.policy, self)
        self._native = self.cache.native
        self.objects = ObjectCalls(self)
        self.composition: Composition | None = None
        if composition is not None:
            self.composition = composition(options.max_graphs, self._native.tick)
        self._lock = self.shared.lock
        self._clears_first = False
        register(self)

    @property
    def name(self) -> str:
        """The function's name, for reports and errors."""
        return self.function.name

    def derive(self, fn: Callable[..., Any], policy: Policy | None = None, options: Options | None = None) -> Engine:
        """The engine of a function that is made from this one, transformed in the same way.

        Args:
            fn: The function.
            policy: What its calls may do.
            options: Its options, if it has the arguments of this one.
        """
        composes = policy is not None and policy.composes
        factory = self._composition_factory if composes else None
        options = self.function.options.of_derived() if options is None else options
        return Engine(fn, self.function.passes, options, self, policy, factory, is_called=False)

    # -- calling --------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function."""
        native = self._native
        if native.dispatch is not None and not torch.compiler.is_compiling():
            result = native.dispatch(args, kwargs)
            if result is not native.miss:
                return result
        return self.call(args, kwargs)

    def replay(self, *args: Any) -> Any:
        """The result of a call that a native plan takes; None if there is no such plan."""
        result = self._native.miss if self._native.dispatch is None else self._native.dispatch(args, {})
        return None if result is self._native.miss else result

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, again: bool = False) -> Any:
        """Run a call for which there is no native plan; ``again`` if it is counted already."""
        if self._is_called and not again and not here.inside:
            self.shared.counts.calls += 1
        looks, look = self.cache.looks, None
        if looks.known:
            look = look_of(args, kwargs)
            if self.cache.is_skipped(look):
                return self.function.as_it_is(*args, **kwargs)
        reason = surroundings.inline_reason()
        if reason is not None:
            return self.run_inline(Fallback("the call", reason), args, kwargs)
        begin = retries.clock()
        found = self.objects.serve(self._served, args, kwargs)
        if type(found) is not AsItIs:
            if look is not None:
                looks.served(look)
            return found
        is_noted, calls = found.note is not None or found.entry is not None, 1
        if found.program is None and is_noted and not self.function.options.strict:
            seconds = retries.clock() - begin
            calls = looks.as_it_is(look or look_of(args, kwargs), found.note, found.entry, seconds)
        return self._run_as_it_is(found, args, kwargs, calls)

    def _served(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call, or that it runs as it is."""
        leaves, structure = flatten_call(args, kwargs)
        call = Call(args, kwargs, leaves, structure)
        special = surroundings.special_tensor(leaves)
        if special is not None:
            return AsItIs(Fallback("the call", special))
        closed = self.objects.call(call)
        if type(closed) is not Closed:
            return closed
        if self.policy.is_users and surroundings.is_transformed(leaves):
            return self._composed(call, None)
        if here.inside:
            return self._inside(leaves)
        try:
            key = self.keys.of(call)
        except UnhashableError as error:
            return AsItIs(Fallback("the call", closed.reason or refusal(args, kwargs, error.leaf)))
        # Replays of one function share memory, so threads take turns; what runs as it is needs no turn.
        with self._lock:
            here.inside = True
            try:
                entry, is_hit = self._entry(key, call)
                if entry is None:
                    return AsItIs(_BLOCKED)
                shared = entry.requirements.owned_memory_meets(leaves)
                # A plan would not match if memory is shared. The next calls of a new graph might not be looked up.
                if not shared and (is_hit or (self.cache.looks.known and entry.executable is not None)):
                    self._plan(entry, call)
                if entry.executable is not None and not shared:
                    return entry.executable(leaves)
            finally:
                here.inside = False
        return self._outside_turn(entry, call, shared)

    def _entry(self, key: Key, call: Call) -> tuple[Entry | None, bool]:
        """The entry of a call, and whether there was one; None if memory cannot be used now."""
        if self._clears_first:
            self._clear()
        if any(pool.is_blocked() for pool in self.shared.pools.values()):
            return None, False
        entry = self.cache.entries.find(key)
        if isinstance(entry, Refused) and entry.until is not None:
            self.cache.settle()
            if entry.until.allow_another():
                self.cache.entries.drop(entry)
                entry = None
        if entry is None:
            return self.compiler.compile(key, call, self._runners), False
        self.cache.count_hit(entry)
        if isinstance(entry, Recorded) and entry.wants_profile:
            self.compiler.profile(call, entry)
        if isinstance(entry, Recorded) and entry.reviews is not None:
            self.cache.settle()
            if entry.reviews.is_due(entry.calls):
                return self.compiler.review(key, call, entry), True
        return entry, True

    def _outside_turn(self, entry: Entry, call: Call, shared: bool) -> Any:
        """Serve a call that replays no graph of this engine."""
        if isinstance(entry, Differentiated):
            return self._composed(call, entry)
        if isinstance(entry, Stateful):
            refusal = entry.runner.refusal()
            return entry.runner(call.args, call.kwargs) if refusal is None else AsItIs(refusal)
        if shared:
            return AsItIs(_SHARED)
        if self.function.records and not (isinstance(entry, Refused) and entry.for_one_call):
            self.compiler.check_strict(entry.fallbacks)
        if isinstance(entry, Evaluated):
            return AsItIs(None, entry, entry.program)
        note = entry.fallbacks[0] if entry.fallbacks else None
        waiting = entry if isinstance(entry, Waiting) else None
        return AsItIs(note, entry if entry.plan is not None else None, waiting=waiting)

    def _run_as_it_is(self, found: AsItIs, args: Any, kwargs: Any, calls: int) -> Any:
        if found.program is not None:
            return evaluate_leaves(found.program, pytree.tree_leaves((args, kwargs)))
        if found.entry is None and found.note is not None:
            with contextlib.nullcontext() if found.waiting is None else found.waiting.running(calls):
                return self.run_inline(found.note, args, kwargs)
        return self.function.as_it_is(*args, **kwargs)

    def run_inline(self, fallback: Fallback, args: Any, kwargs: Any, *, once: bool = False) -> Any:
        """Run the function itself, and count why; ``strict`` raises it, but not if it holds only ``once``."""
        self.cache.inlined[fallback] += 1
        if fallback.reason not in _EXPECTED:
            self.shared.counts.note_as_it_is()
        if not once and fallback.reason not in _EXPECTED:
            self.compiler.check_strict([fallback])
        return (self.fn if once or fallback.reason in _EXPECTED else self.function.as_it_is)(*args, **kwargs)

    def _inside(self, leaves: Sequence[Any]) -> AsItIs:
        return AsItIs(Fallback("the call", reason_inside(self.name, leaves)))

    def _composed(self, call: Call, entry: Entry | None) -> Any:
        """The result of a call that is differentiated or batched from outside, or that it runs as it is.

        Args:
            call: The call.
            entry: The entry that says so, if it is not ``torch.func`` that does.
        """
        if here.inside:
            return self._inside(pytree.tree_leaves((call.args, call.kwargs)))
        if torch.is_inference_mode_enabled():
            return AsItIs(Fallback("the call", surroundings.INFERENCE))
        assert self.composition is not None
        try:
            return self.composition.call(self, call, entry)
        except UntraceableError as error:
            if entry is None or entry.calls == 1:
                return AsItIs(Fallback("the call", str(error)))
            with self._lock:  # it was found before other threads had their turns
                if entry in self.cache.entries:
                    self.cache.entries.drop(entry)  # it may leave something behind now, as calls before did not
            return self._served(call.args, call.kwargs)
        except InlineError as error:
            return AsItIs(Fallback("the call", str(error)))

    # -- native plans -----------------------------------------------------------------------------------------------

    def _plan(self, entry: Entry, call: Call) -> None:
        """Have calls like this one take the native path from now on, where that can do what is done here."""
        # A clearing may have been asked for during this call, which the native path would pass by.
        if self._clears_first or not entry.may_be_planned(strict=self.function.options.strict):
            return
        plan = entry.plan
        assert plan is not None
        if isinstance(entry, Stateful):
            plan = dataclasses.replace(plan, target=functools.partial(self.objects.run_planned, entry.runner))
        self._native.plan(plan, entry, call)

    def plan_composed(
        self,
        entry: Entry,
        call: Call,
        run: Callable[..., Any],
        requirements: Requirements,
        baked: Sequence[int],
    ) -> Planned | None:
        """Have calls like this one go to ``run`` natively from now on; None if they cannot.

        Args:
            entry: The entry of the call.
            call: The call.
            run: Called as the function is.
            requirements: State that such calls depend on.
            baked: Leaves whose numbers are not read at every call.
        """
        assert entry.plan is not None
        live = entry.plan.live.difference(baked)
        plan = dataclasses.replace(entry.plan, live=live, requirements=requirements, target=run, is_eager=False)
        return self._native.plan(plan, entry, call)

    def discard_plans(self, plans: Sequence[Planned]) -> None:
        """Have calls not come by these plans any more."""
        with self._lock:
            for plan in plans:
                self._native.discard(plan)

    @property
    def may_plan(self) -> bool:
        """Whether plans can be made now: the cache is not about to be cleared."""
        return not self._clears_first

    # -- the end ----------------------------------------------------------------------------------------------------

    def release(self, *, wait: bool = True) -> None:
        """Give back every graph of a derived function that no call will find again.

        Args:
            wait: Whether for another thread's turn. A finalizer must not: it may run under a lock that the other thread
                waits for, as Dynamo's. The next compilation of a function with the same memory gives them back then.
        """
        if not self._lock.acquire(blocking=wait):
            self.shared.releases.append(self._clear)
            return
        try:
            self._clear()
        finally:
            self._lock.release()

    def release_soon(self) -> None:
        """Give back every graph now, or before the next call if one is going on, here or in another thread."""
        if here.inside or not self._lock.acquire(blocking=False):
            self._clear_before_next_call()
            return
        try:
            self._clear()
        finally:
            self._lock.release()

    def cache_clear(self) -> None:
        """Forget every trace and give back every graph; from inside a call, before this function's next one."""
        if here.inside:
            self._clear_before_next_call()  # the call that is going on may be one of this function's graphs
            return
        with self._lock:
            self._clear()

    def _clear_before_next_call(self) -> None:
        self._clears_first = True
        self._native.clear()

    def _clear(self) -> None:
        self._clears_first = False
        self.cache.clear()
        if self.composition is not None:
            self.composition.clear()
        self.objects.clear()
        if self.is_root:
            self.modules.clear()
            self.shared.forget_graphs()
            self.shared.counts.reset()

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
            self._clear_before_next_call()

    # -- looking inside ---------------------------------------------------------------------------------------------

    def programs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Traced, Program]:
        """The trace of a call, and what the passes make of it; nothing is recorded."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        return self.compiler.programs(Call(args, kwargs, leaves, structure), self.keys.static_leaves(args, kwargs))

    def cache_info(self) -> CacheInfo:
        """Hits, misses, graphs captured, evictions, and kinds of calls held."""
        counts, size = self.shared.counts, sum(len(engine.cache) for engine in self.family())
        calls = counts.of_calls()
        return CacheInfo(calls.hits, calls.misses, counts.captures, counts.evictions, size)

    def explain(self, profile: bool = False) -> Explanation:
        """How every kind of call so far runs, with the reason for everything that is not a graph, and kernel times."""
        with self._lock if not here.inside else contextlib.nullcontext():
            self.cache.settle()
            if profile and not here.inside:
                profiling.ask_for_all(self.cache)
            if self.composition is not None:
                self.composition.settle()
            inlined: collections.Counter[Fallback] = collections.Counter(self.cache.inlined)
            if self.recorder.reused is not None:
                inlined += self.recorder.reused.notes
            report = report_of(self.name, self.cache.entries, inlined, profile=profile)
            report = report.with_derived(engine.explain(profile) for engine in self.derived())
            totals = totals_of(self.shared.counts, (one.cache for one in self.family())) if self.is_root else None
            return dataclasses.replace(report, totals=totals)

    def derived(self) -> Iterator[Engine]:
        """The engines that are derived from this one and run calls of it."""
        yield from self.objects.engines()
        if self.composition is not None:
            yield from self.composition.functions()
        if self.is_root:
            yield from self.modules.engines()
        seen: set[int] = set()
        for entry in self.cache.entries:
            if isinstance(entry, Stateful):
                for engine in entry.runner.engines():
                    if id(engine) not in seen:  # kinds of calls may share them
                        seen.add(id(engine))
                        yield engine

    def family(self) -> Iterator[Engine]:
        """The engine and all that are derived from it, step by step."""
        yield self
        for engine in self.derived():
            yield from engine.family()
