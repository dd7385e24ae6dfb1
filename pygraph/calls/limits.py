"""Limits of what calls may cost before something that came to nothing is not tried again, and of what is kept."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Limits:
    """All limits in one place; `LIMITS` holds those that apply.

    Attributes:
        trace_share: The share of the time that traces may take, once they have come to nothing a few times.
        lookup_share: The share of the time that lookups may take, once such calls have run as they are a few times.
        repeated_share: The share of the time that calls may take which begin anew, as they decide by values on the
            device otherwise than the last call.
        review_share: The share of the time that rounds may take in which provisional selections are measured again.
        restless_share: The share of the time that calls may take for which something is compiled again and again, where
            the function is faster as it is.
        late_kind_share: The share of the time that compiling may take of kinds of calls beyond a function's first few.
        single_kinds: Kinds of calls of a function that are compiled in any case; beyond these, so many that came but
            once make a new one wait until it comes again.
        single_kinds_of_modules: The same of each module inside a function that runs as it is.
        recompilations: Kinds of calls that differ in values of arguments only, after which a warning says so.
        wasted_traces: Traces in a row of one kind of call that may each be used once only, as of a schedule that sets a
            number at every step.
        outdated_traces: Traces that may be outdated by changes in what the function closes over before any has been
            used often enough, or be made for an object that is another one each time.
        settled_calls: Calls of one trace after which what it closes over does not change at every call.
        lookups: Calls in a row that look alike and run as they are, before the next ones are not looked up.
        longest_lookup: Seconds that a lookup counts as at most, so that calls are looked up again within a second.
        looks: Ways that calls look which are told apart.
        variants: Entries of one key, which differ in what the function reads besides its arguments.
        plans: Native plans of one entry; they are stricter than keys.
        forms: Forms of calls of which it is remembered that they came, or what their traces have cost.
        state_shapes: Kinds of calls in a row that are unlike each one before, after which what they leave behind is
            taken to change shape at every call, as a cache that grows.
        filled_lists: The same before calls run as they are while a list has another number of items each time.
        filling_calls: How many such calls there may be in a row.
        conditions: Comparisons of numbers that decide what calls of one kind do, and are made before these.
        asked_numbers: The same of comparisons and of computed numbers, of each, once calls are those of what is asked.
        wasted_of_modules: Calls in a row that may be compiled, of a module inside a function that runs as it is.
        wasted_of_functions: The same of a function in which a trace has failed, so that it may be cut.
        calls_of_inner: Calls in which such a module or function comes before it is compiled.
        changing_containers: Containers among the arguments of which it is noted that calls change them.
        inner_modules: Modules that get graphs of their own where the function that calls them runs as it is.
        calls_before_comparing: Calls without a compilation before it is found out whether they are faster as they are.
        calls_between_comparisons: Calls after which that is found out again.
        few_paths: Ways of a function that decides; one with more of them is cut, where calls go another way than
            expected too often.
        paths: Ways of a function that decides by values on the device that are remembered.
        new_numbers: Calls in a row for each of which such a function is traced, as a number that it needs on the host
            is another one.
        long_trace: Seconds of a call that is traced for nothing, which count as one more such call, but for the first.
        missed_values: Calls that begin anew, as a trace lacks values with which another one could go on, before it is
            made again with these.
        renewals: Times that the trace of one way is made again for that.
        turns: Numbers of turns of a loop for each of which such a function is traced. After one more, the loop is run
            by Python, and a turn is a graph.
        number_looks: Further values of a number that a trace has needed for which one finds out again whether it does.
        replans: Times that other tensors may be where those were that a plan of a site guards.
        native_tries: Times that a call or a backward under autograd is looked at for whether it can run natively.
        discovery_rounds: Rounds in which a function's closed-over tensors are found; one is usual.
    """

    trace_share: float = 0.01
    lookup_share: float = 0.001
    repeated_share: float = 0.1
    review_share: float = 0.001
    restless_share: float = 0.05
    late_kind_share: float = 0.02
    single_kinds: int = 8
    single_kinds_of_modules: int = 2
    recompilations: int = 8
    wasted_traces: int = 8
    outdated_traces: int = 32
    settled_calls: int = 4
    lookups: int = 32
    longest_lookup: float = 0.001
    looks: int = 64
    variants: int = 8
    plans: int = 8
    forms: int = 4096
    state_shapes: int = 4
    filled_lists: int = 2
    filling_calls: int = 16
    conditions: int = 8
    asked_numbers: int = 16
    wasted_of_modules: int = 3
    wasted_of_functions: int = 1
    calls_of_inner: int = 2
    changing_containers: int = 100
    inner_modules: int = 256
    calls_before_comparing: int = 16
    calls_between_comparisons: int = 4096
    few_paths: int = 4
    paths: int = 64
    new_numbers: int = 3
    long_trace: float = 2.0
    missed_values: int = 2
    renewals: int = 2
    turns: int = 1
    number_looks: int = 4
    replans: int = 8
    native_tries: int = 16
    discovery_rounds: int = 100


LIMITS = Limits()
"""The limits that apply."""
