"""The first run of a function: its operations in a graph, in-place ones included.

The function runs on fake tensors and symbols. Everything real that it changes meanwhile is put back, and what a
Program cannot express is refused.
"""

# Results of functions are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
from collections.abc import Callable, Collection, Generator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode  # checked with torch 2.11 and 2.13
from torch.utils import _pytree as pytree

from pygraph.errors import (
    ContainerChangeError,
    DisturbedTraceError,
    GradientError,
    StateChangeError,
    TraceError,
    UndecidedError,
    describe,
)
from pygraph.guards.environment import Environment
from pygraph.ir.descriptors import Baked, CapturedGenerator, Input
from pygraph.ir.leaves import is_live_number
from pygraph.ir.random_states import drop_idle_states
from pygraph.ir.source_lines import first_line, user_line
from pygraph.tracing.argument_changes import ArgumentChanges
from pygraph.tracing.assumptions import Assumptions
from pygraph.tracing.baked_numbers import (
    baked_leaves,
    comparisons,
    live_positions,
    needed_numbers,
    note_guards,
    numbers_of_symbols,
)
from pygraph.tracing.caught_errors import caught_by_function
from pygraph.tracing.context_variables import changed_variable
from pygraph.tracing.data_assignments import DataAssignments
from pygraph.tracing.decisions import OtherPathError, Questions
from pygraph.tracing.explicit_generators import ExplicitGenerators
from pygraph.tracing.fake_arguments import FakeArguments, fake_arguments
from pygraph.tracing.fake_tracing import fake_tracing
from pygraph.tracing.function_kinds import WithStateInputs
from pygraph.tracing.function_modes import LiveNumbersMode, MetaDeviceUses, OutsideReads
from pygraph.tracing.function_run import FunctionRun
from pygraph.tracing.generators import Generators
from pygraph.tracing.gradient_hooks import GradientHooks, UnseenHooksError
from pygraph.tracing.gradients import Accumulations, clear_unreached_gradients
from pygraph.tracing.handled_errors import HandledErrors
from pygraph.tracing.iterators import Iterators
from pygraph.tracing.leaks import remember_numbers
from pygraph.tracing.live_arrays import arrays_served
from pygraph.tracing.live_numbers import texts_noticed
from pygraph.tracing.module_moves import idle_moves_skipped
from pygraph.tracing.number_classes import reads_numbers
from pygraph.tracing.number_conditions import Comparison
from pygraph.tracing.number_uses import NumberUses, UsedNumbers
from pygraph.tracing.numpy_uses import numpy_served
from pygraph.tracing.operations_mode import OperationsMode
from pygraph.tracing.outside import CallerState, IgnoredErrors
from pygraph.tracing.outside_graphs import OutsideGraphs
from pygraph.tracing.own_errors import is_own_error
from pygraph.tracing.packed_sequences import PackedSequencesMode
from pygraph.tracing.proxy_trace import proxy_trace
from pygraph.tracing.python_draws import PythonDraws
from pygraph.tracing.recurrent import RecurrentLayersMode
from pygraph.tracing.refusals import Refusals
from pygraph.tracing.results import Results, containers_from_before, graph_values
from pygraph.tracing.samplers import samplers_served
from pygraph.tracing.settings import SettingsWatch, forget_cached_fakes
from pygraph.tracing.toggles import Toggles, flag_of
from pygraph.tracing.torch_errors import in_words, translation
from pygraph.tracing.user_scopes import scopes_noticed


@dataclasses.dataclass
class Recording:
    """The first trace of a function.

    Attributes:
        name: What errors call the function.
        mode: The mode of the fake tensors.
        module: A graph with in-place operations; tensors that the function closes over are its attributes.
        inputs: A descriptor for each placeholder.
        values: The fake tensor or symbol of each placeholder.
        out_leaves: The values that the function has returned.
        out_paths: What errors and reports call each of them.
        in_tree: The pytree of ``(args, kwargs)``.
        out_tree: The pytree of the result.
        environment: What the function can reach besides its arguments.
        gradients: Closed-over tensors whose ``.grad`` the function reads.
        toggled: Closed-over tensors of which it changes whether they require grad.
        looked_at: Closed-over tensors of which it may have read what they are like.
        specialize: Leaves of live numbers whose values the trace needs.
        baked: Leaves of the arguments that are baked in.
        positions: Leaves of live numbers that are positions of views.
        used: What the function asks of numbers; None if calls cannot compute any of it, or do so already.
        generators: The generators that are passed to operations, by the addresses by which these know them.
    """

    name: str
    mode: FakeTensorMode
    module: fx.GraphModule
    inputs: list[Input]
    values: list[Any]
    out_leaves: list[Any]
    out_paths: list[str]
    in_tree: pytree.TreeSpec
    out_tree: pytree.TreeSpec
    environment: Environment
    gradients: list[torch.Tensor]
    differentiates: bool
    toggled: list[torch.Tensor]
    looked_at: list[torch.Tensor]
    specialize: frozenset[int]
    baked: tuple[Baked, ...]
    generators: dict[int, CapturedGenerator]
    positions: frozenset[int] = frozenset()
    used: UsedNumbers | None = None


def record(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    static: frozenset[int],
    name: str,
    environment: Environment,
    uses: NumberUses | None = None,
    unclear: _Unclear | None = None,
) -> Recording:
    """Run ``fn`` once on fakes of its arguments.

    Args:
        fn: The function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        static: Leaves of numbers that are baked in.
        name: What errors call the function.
        environment: What the function can reach besides; put back afterwards.
        uses: Gets what the function asks of numbers, also if it fails.
        unclear: What it is not known of, after a run, who has changed it.

    Raises:
        TraceError: The function fails, or does what a Program cannot express.
        DisturbedTraceError: A setting has changed meanwhile, perhaps by another thread.
        MissingNumbersError: The function may be given more of what it asks of numbers.
    """
    call = f"trace({name})(…)"
    uses = NumberUses() if uses is None else uses
    leaves = pytree.tree_leaves((args, kwargs))
    numbers = any(is_live_number(leaf) and index not in static for index, leaf in enumerate(leaves))
    numbers = numbers or reads_numbers(environment)
    iterators = Iterators(environment, numbers=numbers)
    arguments = fake_arguments(call, (args, kwargs), static, uses, iterators.substitute)
    fake_args, fake_kwargs = arguments.unflatten()
    changes = ArgumentChanges(arguments, fake_args, fake_kwargs)
    inference = torch.is_inference_mode_enabled()
    if inference and environment.has_code_for("is_inference_mode_enabled"):
        raise TraceError(
            describe(
                call, "it asks for inference mode, which is off in a trace", remedy="Call it under torch.no_grad()."
            )
        )
    watches = _Watches(arguments, environment, iterators, unclear or _Unclear())
    with containers_from_before(lambda value: changes.has_container(value) or environment.reaches(value)):
        carries = _carries(fn)
        run = _run(lambda: fn(*fake_args, **fake_kwargs), arguments, environment, watches, changes, carries=carries)
    again = watches.unclear()
    if again is not None:
        return record(fn, args, kwargs, static, name, environment, uses, again)
    if watches.hooks.unseen:
        raise UnseenHooksError(describe(call, "tensors that it closes over have hooks on their gradients"))
    _check_run(call, run, watches, environment)
    changes.check(call)
    assert run.module is not None
    assert run.results is not None
    changes.check_results(call, run.results.leaves)
    note_guards(arguments, run.module)
    uses.of_symbols = numbers_of_symbols(arguments, run.module, run.results.leaves)
    uses.check_missing()
    try:
        run.results.check(call, arguments.fakes.values(), inference=inference)
    except GradientError as error:
        error.needs_sizes = watches.operations.has_unknown_sizes
        raise
    taken: Collection[Comparison] = ()
    if isinstance(fn, WithStateInputs):
        found = comparisons(arguments)
        needed = needed_numbers(arguments, run.module, found)
        taken = fn.taken(found, [arguments.paths[leaf] for leaf in needed], watches.gradients())
    return Recording(
        name, arguments.mode, run.module, arguments.inputs, arguments.values, run.results.leaves, run.results.paths,
        arguments.tree, run.results.tree, environment, watches.gradients(), watches.hooks.may_be_called,
        watches.toggles.tensors, watches.reads.looked_at(), needed_numbers(arguments, run.module, taken),
        baked_leaves(arguments), watches.explicit.found, live_positions(arguments, run.module),
    )  # fmt: skip


def _carries(fn: Any) -> bool:
    """Whether a function takes and returns attributes and variables, so that changes of these are none of its run."""
    return isinstance(fn, WithStateInputs) and bool(fn.locations)


# ---- watches -------------------------------------------------------------------------------------------------------


class _Unclear(NamedTuple):
    """The watches that in a first run have seen a change which may be another thread's."""

    settings: SettingsWatch | None = None
    generators: Generators | None = None


class _Watches:
    """The watches of one run: each notes or refuses one kind of effect of the function.

    Args:
        arguments: The function's arguments.
        environment: What it can reach besides.
        iterators: The iterators among both.
        unclear: See `record`.
    """

    def __init__(
        self, arguments: FakeArguments, environment: Environment, iterators: Iterators, unclear: _Unclear
    ) -> None:
        fakes, self.iterators = arguments.fakes, iterators
        self.caller, self.ignored = CallerState(), IgnoredErrors()
        self.generators, self.explicit = Generators(unclear.generators), ExplicitGenerators(iterators.generators)
        self.meta, self.assumptions = MetaDeviceUses(), Assumptions(arguments.shapes)
        self.data, self.graphs = DataAssignments(environment), OutsideGraphs(environment)
        outside = self.meta, self.assumptions, self.data, self.graphs
        self.operations = OperationsMode(self.generators.moved, self.explicit.check, fakes.values(), *outside)
        self._accumulations = Accumulations()
        self.toggles = Toggles(environment, self._accumulations)
        self.hooks = GradientHooks(environment, dict(zip(arguments.paths, arguments.leaves, strict=True)))
        self.refusals = Refusals(fakes.values(), self.toggles, self.data, self.hooks, self.operations.used)
        self.questions = Questions(arguments)
        self.settings = SettingsWatch({fake.device.type for fake in fakes.values()}, unclear.settings)
        self.reads = OutsideReads({id(fake): arguments.paths[index] for index, fake in fakes.items()})
        self._arguments, self._environment, self._unclear = arguments, environment, unclear
        self.handled = HandledErrors(environment)

    def unclear(self) -> _Unclear | None:
        """The argument of another run, which tells who has changed something; None if it is known."""
        settings, generators = self.settings, self.generators
        if settings.unclear is None and generators.unclear is None:
            return None
        return _Unclear(
            self._unclear.settings if settings.unclear is None else settings,
            self._unclear.generators if generators.unclear is None else generators,
        )

    @contextlib.contextmanager
    def around_trace(self) -> Generator[None, None, None]:
        """Start the watches of the whole trace, and the trace's state of torch."""
        grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        arguments = self._arguments
        with (
            self._accumulations.watched(self._environment.differentiable), fake_tracing(arguments.mode),
            torch.inference_mode(False), torch.set_grad_enabled(grad),
            texts_noticed(arguments.uses), numpy_served(), arrays_served(), samplers_served(), PythonDraws().served(),
            idle_moves_skipped(), self.generators.watched(), self.iterators.hidden(), self.questions.noticed(),
        ):  # fmt: skip
            yield

    @contextlib.contextmanager
    def around_function(self) -> Generator[None, None, None]:
        """Start the watches of the function's own calls, while nothing but the function runs."""
        with (
            self.caller.restored_for_callbacks(), self.ignored.watched(), scopes_noticed(), self.operations, self.meta,
            LiveNumbersMode(), RecurrentLayersMode(), PackedSequencesMode(), self.questions, self.reads, self.refusals,
            self.settings.watch(), self.handled.noticed(),
        ):  # fmt: skip
            yield

    def problem(self) -> str | None:
        """The first refusal, also if the function has caught the error; None if there was none."""
        changed = self.operations.reshaped.problem()
        return self.operations.problem or changed or self.refusals.problem or self.ignored.problem

    def caught(self) -> str | None:
        """The error of a trace that the function has caught, in words; errors are forgotten, as they hold frames."""
        shapes = self._arguments.shapes
        all_raised = shapes.raised, self.refusals.raised, self.handled.raised
        found = caught_by_function(itertools.chain(*all_raised), has_numbers=bool(shapes.var_to_range))
        for raised in all_raised:
            raised.clear()
        return found

    def forget(self) -> None:
        """Leave nothing of the run in tensors from outside, nor in what torch remembers."""
        self.operations.restore_versions()
        forget_cached_fakes()

    def gradients(self) -> list[torch.Tensor]:
        """The closed-over tensors whose ``.grad`` the function, or autograd for it, has read; each once."""
        read = (*self.reads.tensors, *self._accumulations.tensors)
        return list({id(tensor): tensor for tensor in read}.values())


# ---- the run -------------------------------------------------------------------------------------------------------


def _run(
    call: Callable[[], Any],
    arguments: FakeArguments,
    environment: Environment,
    watches: _Watches,
    changes: ArgumentChanges,
    *,
    carries: bool,
) -> FunctionRun:
    """Trace a call, and put back what it has changed, but for what it ``carries`` as inputs and results."""
    context = contextvars.copy_context()  # in which the function's own variables change
    returned: list[Results] = []

    def body(*placeholders: Any) -> list[Any]:
        del placeholders  # the same objects as in the call, where they are in the function's Python containers
        with watches.around_function():
            result = context.run(call)
            remember_numbers()
        returned.append(Results.of(result, arguments.uses.leaves.keys()))
        return graph_values(returned[0].leaves)

    gradients_before = environment.gradients()
    failure: Exception | SystemExit | None = None
    other: tuple[str, ...] | None = None
    module: fx.GraphModule | None = None
    try:
        with watches.around_trace():
            module = proxy_trace(body, arguments.values)
            watches.assumptions.write(module.graph)
            drop_idle_states(module.graph)
    except OtherPathError as error:
        other = error.path
    except (Exception, SystemExit) as error:  # it exits where it may not come to in eager
        failure = error
    finally:
        found = environment.changed_locations()
        locations, culprit = (None, found) if isinstance(found, str) else (found, None)
        changed = environment.restore()
        if changed is not None and culprit is not None:
            changed = culprit
        of_tensors = (*watches.toggles.restore(), *watches.data.locations())
        gradients = environment.restore_gradients(gradients_before)
        graph, unreached = watches.graphs.restore(), clear_unreached_gradients(watches.operations.used.values())
        is_lost = failure is not None or other is not None or changed is not None or bool(of_tensors)
        remembered = environment.forget_remembered(every=is_lost or carries)
        elsewhere = remembered or graph or changes.changed_attribute() or unreached
        seeded = watches.generators.restore()
        watches.forget()
        caught = watches.caught()
    if other is not None:
        raise OtherPathError(other)  # another one, without the frames of the trace
    if failure is None:
        elsewhere = elsewhere or watches.settings.changed or changed_variable(context)
    if locations is not None and elsewhere is not None:
        locations, changed = None, elsewhere  # all else could be passed
    elif locations is not None:
        locations = (*locations, *of_tensors)
    changed = changed or elsewhere or next((location.name for location in of_tensors), None)
    gradient = next((f"{environment.names.get(id(tensor), 'a tensor')}.grad" for tensor in gradients), None)
    thawed = tuple(flag_of(tensor, environment) for tensor in gradients if not tensor.requires_grad)
    return FunctionRun(
        module, returned[0] if returned else None, failure, changed, locations, remembered is not None, gradient,
        thawed, seeded, caught,
    )  # fmt: skip


def _check_run(call: str, run: FunctionRun, watches: _Watches, environment: Environment) -> None:
    """Raise the error of a run that has failed, or that did what a Program cannot express."""
    settings, iterators = watches.settings, watches.iterators
    if settings.others is not None:
        raise DisturbedTraceError(
            describe(call, f"another thread changes {settings.others} meanwhile", remedy="Trace it again.")
        )
    undecided = watches.questions.undecided
    if iterators.problem is not None:
        text = describe(call, iterators.problem, source=iterators.source, remedy=iterators.remedy)
        error = _undecided(text, watches) if undecided else TraceError(text)
        error.may_pass = True  # some messages are shown once, some files are read once
        raise error from run.failure
    if run.failure is not None:
        raise _failure_error(call, run.failure, watches) from run.failure
    problem = watches.problem() or run.caught
    if problem is not None:  # the function has caught the error
        text = describe(call, problem)
        raise _undecided(text, watches) if undecided else TraceError(text)
    weakly_held = next(filter(environment.reaches_weakly, watches.operations.used.values()), None)
    if weakly_held is not None:
        name = environment.names.get(id(weakly_held)) or "a tensor"
        raise TraceError(
            describe(call, f"only a weak reference leads to {name}, which a graph would keep alive",
                     remedy="Hold the tensor, or pass it as an argument.")
        )  # fmt: skip
    if run.changed is not None or run.gradient is not None:
        raise run.state_change_error(call)
    if run.seeded is not None:
        raise TraceError(
            describe(call, f"it seeds or draws from {run.seeded}, whose numbers would be baked in",
                     remedy="Draw with torch on the device, and seed before the call.")
        )  # fmt: skip


def _failure_error(call: str, failure: BaseException, watches: _Watches) -> TraceError:
    problem, remedy = in_words(failure)
    text = describe(call, problem, source=user_line(failure), remedy=remedy)
    if isinstance(failure, (ContainerChangeError, StateChangeError)):
        return failure.worded(text)
    error = _undecided(text, watches) if watches.questions.undecided else TraceError(text)
    if isinstance(failure, Exception) and watches.problem() is None and is_own_error(failure):
        error.is_own = True
        error.raised = None if watches.operations.depends_on_data else failure
    if translation(failure) is not None:  # torch's own words for it take ten lines
        failure.args = (first_line(failure), *failure.args[1:])
    return error


def _undecided(text: str, watches: _Watches) -> UndecidedError:
    error = UndecidedError(text)
    error.needs_number, error.needs_float = watches.questions.needs_number, watches.questions.needs_float
    return error
