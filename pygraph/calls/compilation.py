"""Compiling one kind of call: its entry from a trace, or from the reason why there is none."""

from __future__ import annotations

import torch

from pygraph.calls import profiling, retries
from pygraph.calls.cache import Cache, Shared
from pygraph.calls.call_plan import CallPlan
from pygraph.calls.entries import Differentiated, Entry, Evaluated, Launched, Recorded, Refused, Stateful, StateRunner
from pygraph.calls.failed_traces import adds_again, changed_objects, failure_of, of_users
from pygraph.calls.found_answers import TracedProgram
from pygraph.calls.function import Call, Function
from pygraph.calls.keys import Key, Keys, form_of, objects_by_value
from pygraph.calls.memory import check_disjoint, check_updatable
from pygraph.calls.other_objects import compares_by_value, lists_of_others, to_be_opened
from pygraph.calls.outdated_state import outdated_inputs
from pygraph.calls.own_errors import raise_refused, reason_of_failure
from pygraph.calls.past_calls import PastCalls
from pygraph.calls.pipeline import transformed_program, with_unguarded_state
from pygraph.calls.policy import Policy, Runners
from pygraph.calls.recompilations import Recompilations
from pygraph.calls.recording import Recorder
from pygraph.calls.reviews import Reviews
from pygraph.errors import (
    ContainerChangeError,
    DisturbedTraceError,
    FallbackError,
    GradientError,
    SpentGraphError,
    StateChangeError,
    TraceError,
    UndecidedError,
    describe,
)
from pygraph.guards.environment import modes_of
from pygraph.guards.locations import are_same, filled_locations
from pygraph.ir.descriptors import Fallback
from pygraph.ir.leaves import is_live_number
from pygraph.ir.program import Program
from pygraph.lowering.run_cache import start_workers_early
from pygraph.process import extension, progress
from pygraph.report.remedies import remedy_of
from pygraph.runtime.executable import Executable
from pygraph.tracing.call_environment import objects_among
from pygraph.tracing.function_kinds import StateInputs, Traced, WithStateInputs
from pygraph.tracing.number_uses import UsedNumbers
from pygraph.transforms.passes import FUSE


class Compiler:
    """Compiles calls of one function.

    Args:
        function: The function.
        cache: Where entries are kept.
        shared: What the function shares with those that are derived from it.
        policy: What its calls may do.
        keys: The keys of its calls.
        recorder: Records its Programs.

    Attributes:
        recompilations: What has been said of compilations.
    """

    def __init__(
        self, function: Function, cache: Cache, shared: Shared, policy: Policy, keys: Keys, recorder: Recorder
    ) -> None:
        self._function, self._cache, self._shared = function, cache, shared
        self._policy, self._keys, self._recorder = policy, keys, recorder
        # What is derived from a function with state takes its leaves, each an argument, and has no names for these.
        path_of = function.fn.path if isinstance(function.fn, WithStateInputs) else str
        self.recompilations = Recompilations(function.name, path_of)

    def compile(self, key: Key, call: Call, runners: Runners) -> Entry:
        """The entry for a call, made and kept.

        Args:
            key: The key of the call.
            call: The call.
            runners: Makes what runs calls that leave state behind, or are no whole graphs.

        Raises:
            FallbackError: Calls are to be graphs, by ``strict``, and this one cannot be one.
        """
        begin = retries.clock()
        last = next(iter(self._cache.entries.of(key)), None)
        kinds = self._cache.new_kinds
        if last is None and kinds.is_patient and (waiting := kinds.wait(key, self._cache.entries)) is not None:
            return waiting
        try:
            self._policy.before_compilation(key, call, self._cache)
            with progress.compiling(self._function.name):
                entry = self._compile(key, call, runners)
            self._policy.after_compilation(key, call, self._cache)
        finally:
            seconds = retries.clock() - begin
            self._cache.seconds += seconds
        is_awaiting = isinstance(entry, Refused) and entry.until is not None
        if entry.traces is not None and not is_awaiting:
            entry.traces.note_made(seconds)
        entry.seconds = seconds
        if entry.plan is not None:
            self._cache.new_kinds.note_compiled(key, seconds)
        if entry.executable is None:
            extension.start()  # for what runs as it is there is a native path, too
        self.recompilations.note(call, entry, None if last is None else last.requirements, seconds)
        return entry

    def _compile(self, key: Key, call: Call, runners: Runners) -> Entry:
        self._cache.settle()
        while self._shared.releases:
            self._shared.releases.popleft()()
        self._shared.counts.note_compilation()
        past = self._past(key)
        if past.has_other_objects and self._tells_by_value(key, call, past):
            key = self._keys.of(call)
            past = self._past(key)
        if past.state != StateInputs():
            self._cache.entries.drop_all(key)
            return self._add_stateful(key, call, runners, past.state)
        if (refused := self._over_budget(key, call, past)) is not None:
            return refused
        if past.last_refusal is not None and past.last_refusal.sets_gradients:
            return self._add_stateful(key, call, runners, StateInputs(gradients=True))
        if self._cache.is_past_budget(key):
            note = Fallback("the call", f"past the budget of {self._function.options.max_graphs} graphs")
            return Refused(fallbacks=[note])
        if past.last is None and key.numbers and (lists := lists_of_others(key, self._known_keys(), call)):
            self._policy.containers_changed(of_users(lists, self._function.fn))
        if past.last is None and (numbered := self._numbered(key, call, runners)) is not None:
            return numbered
        is_new = past.is_of_new_form(key) and not self._function.options.strict
        if is_new and (waiting := self._cache.new_kinds.wait(key, self._cache.entries)) is not None:
            return waiting
        first = runners.of_first_step(call.args, call.kwargs)
        if first is not None:
            if FUSE in self._function.passes:
                start_workers_early()  # they get ready while it runs
            return self.add_runner(key, call, first)
        if past.last is None and (way := runners.of_other_ways(call.args, call.kwargs)) is not None:
            runner, is_kept = way
            return self.add_runner(key, call, runner) if is_kept else Stateful(fallbacks=[], runner=runner)
        began, found = retries.clock(), self._policy.found_answers
        outcome = self._outcome(key, call, past)
        try:
            if found is not None:
                found.keep(self._function.fn, call, outcome)
            if isinstance(outcome, TraceError):
                return self._of_failure(key, call, runners, past, outcome, retries.clock() - began)
            return self._from_trace(key, call, *outcome)
        finally:
            del outcome  # the frames of an error lead to this one, and hold what the caller has

    def _of_failure(
        self, key: Key, call: Call, runners: Runners, past: PastCalls, error: TraceError, seconds: float
    ) -> Entry:
        """The entry of a call whose trace has failed, after so many seconds."""
        if isinstance(error, ContainerChangeError):
            self._policy.containers_changed(of_users(error.containers, self._function.fn))
        if past.has_other_objects and (objects := changed_objects(error, call)):
            self._policy.containers_changed(of_users(objects, self._function.fn))
        if self._is_differentiated(error) and not self._needs_numbers(error):
            key = self._with_used_numbers(key, call, error.used)
            return self._keep(key, call, Differentiated(fallbacks=[]))
        state = self._state_left_behind(past, error)
        decorated = runners.of_decorated() if state is None or state.decisions else None
        if decorated is not None:  # of which only the function inside can be cut
            return self._keep(key, call, Stateful(fallbacks=[], runner=decorated))
        if state is not None:
            return self._add_stateful(key, call, runners, state)
        first = runners.of_first_step(call.args, call.kwargs, error) if self._function.options.strict else None
        if first is not None:
            return self.add_runner(key, call, first)
        needs_numbers = self._needs_numbers(error)
        # An integer, as a length, may come again. Where it does not, the function is cut later.
        is_float = isinstance(error, UndecidedError) and error.needs_float and not self._policy.asks_before_cutting
        parts = self._parts(past, call, runners, error) if is_float or not needs_numbers else None
        if parts is not None:
            return self._keep(key, call, Stateful(fallbacks=[], runner=parts))
        if needs_numbers:
            return self._add_stateful(key, call, runners, self._policy.numbers_left())
        return self._without_trace(key, call, past, error, seconds)

    def _past(self, key: Key) -> PastCalls:
        """Look back at calls of a key, and drop its entries that no call will run again."""
        entries, form = self._cache.entries.of(key), form_of(key.kind)
        last = entries[0] if entries else None
        state = self._outdated_state(entries)
        wasted = last is not None and last.calls == 1
        traces, moved = self._cache.traces.get(form), self._cache.make_room(key)
        if traces is not None and (last is not None or form is not key.kind):
            traces.note_outdated(wasted=wasted)
        return PastCalls(last, form, traces, state, moved)

    def _tells_by_value(self, key: Key, call: Call, past: PastCalls) -> bool:
        """Whether a call has another key from now on, as objects are told by what they hold.

        Raises:
            ReopenedError: Objects are taken apart from now on.
        """
        earlier = next((one for one in reversed(self._known_keys()) if form_of(one.kind) == past.form), None)
        if earlier is None:
            return False
        if objects := to_be_opened(key, earlier, call):
            self._policy.containers_changed(of_users(objects, self._function.fn))
        return compares_by_value(self._function.fn, self._keys, key, earlier, call)

    def _known_keys(self) -> list[Key]:
        """The keys of the calls that there are entries for, the last one used last."""
        return [entry.plan.key for entry in self._cache.entries if entry.plan is not None]

    def _outdated_state(self, entries: list[Entry]) -> StateInputs:
        """The state that is another one now than in traces, so that calls are to take it."""
        if not self._policy.carries_state:
            return StateInputs()
        return outdated_inputs([e.traced.environment for e in entries if isinstance(e, (Recorded, Evaluated))])

    def _over_budget(self, key: Key, call: Call, past: PastCalls) -> Entry | None:
        """The entry for a call that is not traced, as traces of calls like it come to nothing; None if it is."""
        if past.traces is None or past.traces.allow_another():
            return None
        self._cache.entries.drop_all(key)
        if past.form is not key.kind and past.last is None:  # an entry would push out others
            note = Fallback("the call", "an object that it is passed is another one at every call")
            return Refused(fallbacks=[note])
        changed = None if past.last is None else past.last.requirements.changed()
        note = Fallback("the call", f"{changed or 'something that the function closes over'} changes at every call")
        return self._keep(key, call, Refused(fallbacks=[note], until=past.traces))

    def _keep(self, key: Key, call: Call, entry: Entry) -> Entry:
        """Keep the entry of a call for calls like it, with a plan for these."""
        keys, fn = self._keys, self._function.as_it_is
        target = entry.target(fn)
        released = tuple(self._policy.released_items(entry, call.args))
        plan = CallPlan(
            key, keys.live_numbers(key, call), keys.device_type(call.leaves), entry.requirements, target,
            is_eager=target is fn, released=released,
        )  # fmt: skip
        return self._cache.add(plan, entry)

    # -- with a trace -----------------------------------------------------------------------------------------------

    def _outcome(self, key: Key, call: Call, past: PastCalls) -> TracedProgram | TraceError:
        """The trace of a call, and what the passes make of it, or why there is none."""
        function, answers = self._function, self._policy.found_answers
        static = self._keys.leaves_by_value(key, call)
        found = None if answers is None else answers.take(function.fn, call, static)
        if isinstance(found, TraceError):
            return found
        try:
            if found is None:
                self._shared.counts.traces += 1
            if found is None and past.moved is not None:
                found = past.moved.traced, past.moved.recordable
            traced, program = found or self._with_another_look(key, call) or self.programs(call, static)
            check_disjoint(program, call.leaves, function.name)
            check_updatable(traced.program, call.leaves, function.name)
        except TraceError as error:
            return error
        return traced, program

    def _with_another_look(self, key: Key, call: Call) -> tuple[Traced, Program] | None:
        """The trace of a call with another number than one that needed it, which may be on a path that does not.

        Returns:
            The trace, and what the passes make of it; None if calls have been looked at again, or nothing is new.
        """
        own = self._static(call)
        baked = {index for index in self._cache.baked.get(key.kind, ()) if is_live_number(call.leaves[index])} - own
        if not baked or not self._cache.may_look_again(key.kind):
            return None
        traced, program = self.programs(call, own)
        return (traced, program) if traced.used is not None and baked <= traced.static_leaves else None

    def programs(self, call: Call, static: frozenset[int]) -> tuple[Traced, Program]:
        """The trace of a call, and what the passes make of it."""
        function = self._function
        args, kwargs, passes = call.args, call.kwargs, function.passes
        name, options = function.name, function.options
        needed = self._policy.needed_values
        traced, program = transformed_program(function.fn, args, kwargs, static, name, passes, options, needed)
        return traced, with_unguarded_state(program, traced.environment)

    def _static(self, call: Call) -> frozenset[int]:
        return self._keys.static_leaves(call.args, call.kwargs)

    def _from_trace(self, key: Key, call: Call, traced: Traced, program: Program) -> Entry:
        found = traced.static_leaves - self._static(call)
        if found:
            # Also when all were known: another thread may have found them after this call's key was made.
            self._cache.bake(key.kind, found)
            if traced.used is not None:
                self._cache.used_numbers.setdefault(key.kind, traced.used)
            key = self._keys.of(call)
            self._cache.make_room(key)
        try:
            executable = self._recorder.record(program, call.leaves)
        except Exception as error:
            note = Fallback("the call", reason_of_failure(error, strict=self._function.options.strict))
            self.check_strict([note])
            return self._keep(key, call, Refused(fallbacks=[note]))
        fallbacks = self._recorder.reasons(program) if executable is None else executable.fallbacks
        if self._function.records:
            self.check_recorded(fallbacks, executable)
        entry: Entry
        if executable is not None and executable.graphs:
            entry = Recorded(traced=traced, graphs=executable, recordable=program, fallbacks=fallbacks)
            entry.reviews = Reviews.of(executable)
        elif self._function.records:
            entry = Launched(fallbacks=fallbacks, described=program if executable is None else executable.program)
        else:
            entry = Evaluated(traced=traced, evaluated=program, fallbacks=fallbacks)
        return self._keep(key, call, entry)

    def _with_used_numbers(self, key: Key, call: Call, used: UsedNumbers | None) -> Key:
        """The key of a call that autograd differentiates, with the numbers by which it decides.

        Its compiled functions would each find these out; so the call's own key tells when there is another number.
        """
        if used is None:
            return key
        self._cache.used_numbers.setdefault(key.kind, used)
        self._cache.bake(key.kind, used.explained)
        return self._keys.of(call)

    def _numbered(self, key: Key, call: Call, runners: Runners) -> Entry | None:
        """The entry of calls whose numbers change, if what they ask of these can be computed before; None if not."""
        used = self._cache.used_numbers.get(key.kind)
        if used is None:
            return None
        runner = runners.of_numbers(call.args, call.kwargs, used.uses)
        if runner is None:
            del self._cache.used_numbers[key.kind]
            return None
        self._cache.unbake(key.kind, used.explained)
        return self.add_runner(self._keys.of(call), call, runner)

    def review(self, key: Key, call: Call, entry: Recorded) -> Entry:
        """Measure provisional selections once more before a call; the entry that serves it."""
        self._cache.native.renew(entry)
        self._recorder.review(entry, call.leaves)
        if entry.graphs.graphs:
            return entry
        described, fallbacks = entry.graphs.program, entry.graphs.fallbacks
        self._cache.entries.drop(entry)
        return self._keep(key, call, Launched(fallbacks=fallbacks, described=described))

    def profile(self, call: Call, entry: Recorded) -> None:
        """Measure the kernels of a call before it runs."""
        profiling.measure(entry, call.leaves)
        self._cache.native.renew(entry)

    def check_recorded(self, fallbacks: list[Fallback], executable: Executable | None) -> None:
        """Refuse fallbacks as options say; what has been recorded is given back then."""
        try:
            self.check_strict(fallbacks)
        except FallbackError:
            if executable is not None:
                executable.release()
            raise

    def check_strict(self, fallbacks: list[Fallback]) -> None:
        """Raise FallbackError if there is a fallback and options do not allow any."""
        if self._function.options.strict and fallbacks:
            first = fallbacks[0]
            refused = "strict=True refuses what does not run as a graph; explain() lists all reasons."
            remedy = " ".join(filter(None, [remedy_of(first), refused]))
            text = first.reason if first.what == "the call" else f"{first.what}: {first.reason}"
            text = text.removeprefix(f"trace({self._function.name})(…): ").removesuffix(".")  # of an error
            raise FallbackError(describe(f"{self._function.name}(…)", text, source=first.source, remedy=remedy))

    # -- without one ------------------------------------------------------------------------------------------------

    def _without_trace(self, key: Key, call: Call, past: PastCalls, error: TraceError, seconds: float) -> Entry:
        """The entry for a call whose trace has failed."""
        if self._function.options.strict and not adds_again(error, was_once=past.was_once):
            raise_refused(error, self._function.name)
        note = Fallback("the call", str(error))
        if isinstance(error, DisturbedTraceError):
            return Refused(fallbacks=[note])
        failure = failure_of(error, is_first=past.last is None, was_once=past.was_once)
        if failure.is_unsteady:
            traces = self._cache.traces.of(past.form)
            traces.note_unsteady(seconds)
            return self._keep(key, call, Refused(fallbacks=[note], until=traces, filled=failure.filled))
        modes = None if failure.once else modes_of(self._function.fn, objects_among(call.args, call.kwargs))
        sets_gradients = failure.once and failure.gradients and self._policy.carries_state
        entry = Refused(
            fallbacks=[note], modes=modes, for_one_call=failure.once, filled=failure.filled,
            sets_gradients=sets_gradients,
        )  # fmt: skip
        return self._keep(key, call, entry)

    def _state_left_behind(self, past: PastCalls, error: TraceError) -> StateInputs | None:
        """The state that calls are to take and return, if that is all that is in the way of a trace."""
        last, filled = past.last_refusal, filled_locations(error)
        # One that fills another location than the last time fills a memo, for another key.
        if last is not None and last.filled and filled and not are_same(filled, last.filled):
            return None
        is_repeated = past.last is not None and not adds_again(error, was_once=past.was_once)
        return self._policy.state_left_behind(error, is_known=is_repeated or self._function.options.strict)

    def _parts(self, past: PastCalls, call: Call, runners: Runners, error: TraceError) -> StateRunner | None:
        """The runner of a call whose trace has failed, if part of it can be traced."""
        # Calls with an error of their own end in that, and others are graphs as they are.
        if self._function.options.strict or error.is_own or isinstance(error, (DisturbedTraceError, GradientError)):
            return None
        if isinstance(error, StateChangeError) and (past.last is None or adds_again(error, was_once=past.was_once)):
            return None  # the next call may leave it as it is
        return runners.of_parts(call.args, call.kwargs, str(error))

    def _is_differentiated(self, error: TraceError) -> bool:
        """Whether all that is in the way of a trace is that autograd differentiates the call."""
        if not isinstance(error, GradientError) or isinstance(error, SpentGraphError):
            return False
        return self._policy.composes and torch.is_grad_enabled() and not self._function.options.donates

    def _needs_numbers(self, error: TraceError) -> bool:
        """Whether what is in the way of a trace is a number or a size that only a run knows, and may be asked for."""
        if isinstance(error, UndecidedError) and error.needs_number:
            return self._policy.asks_for_numbers
        return self._policy.asks_for_sizes and isinstance(error, GradientError) and error.needs_sizes

    def _add_stateful(self, key: Key, call: Call, runners: Runners, state: StateInputs) -> Entry:
        """An entry for calls that leave other state behind than there was, or find another learning rate."""
        objects = objects_by_value(key.kind) if state.locations or state.numbers else None
        if objects:  # the state may be theirs, and calls with equal objects leave it behind in these
            self._cache.bake(key.kind, objects)
            key = self._keys.of(call)
        return self.add_runner(key, call, runners.of_state(call.args, call.kwargs, state))

    def add_runner(self, key: Key, call: Call, runner: StateRunner) -> Entry:
        """An entry whose calls the runner answers; its traces come out of the budget of calls of their form."""
        entry = self._keep(key, call, Stateful(fallbacks=[], runner=runner))
        runner.traces = entry.traces
        return entry
