"""Compiling ahead of a call, step by step, like ``jax.stages``."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pygraph.calls import profiling
from pygraph.calls.donation import Donation
from pygraph.calls.engine import Engine
from pygraph.calls.entries import Entry, Evaluated, Recorded
from pygraph.calls.keys import overlap_key
from pygraph.calls.options import check_flag
from pygraph.calls.reports import report_of
from pygraph.calls.requirements import Requirements
from pygraph.errors import ArgumentError, describe
from pygraph.guards.torch_settings import KEY_TITLES, mode_key
from pygraph.ir.evaluate import check_call, evaluate_leaves
from pygraph.ir.gradients import check_gradients
from pygraph.ir.program import Program
from pygraph.ir.structures import unflatten
from pygraph.process import progress
from pygraph.process.reentrancy import reason_inside
from pygraph.report.explain import Explanation
from pygraph.runtime.alignment import WIDEST_LOAD, alignment_of, is_aligned
from pygraph.runtime.devices import default_device
from pygraph.tracing.function_kinds import Traced

# A Program computes the same in all of them.
_OF_CALLS = ("grad mode", "inference mode")


class Lowered:
    """A transformed Program for one kind of call, not yet recorded.

    Attributes:
        program: The Program after all passes.
    """

    def __init__(
        self, engine: Engine, donation: Donation | None, traced: Traced, program: Program, leaves: list[Any]
    ) -> None:
        self._engine, self._donation = engine, donation
        self._traced = traced
        self.program = program
        self._leaves = leaves
        self._requirements = Requirements.of(program, traced.environment)
        self._settings = mode_key(program.device.type)

    def as_text(self) -> str:
        """The Program as Python source."""
        return str(self.program)

    def compile(self) -> Compiled:
        """Record the graphs, with the arguments given to ``lower`` as examples.

        Raises:
            ArgumentError: What the function reads besides its arguments, or a setting of torch's, has changed since.
            FallbackError: With ``strict``: something would not run as a graph.
        """
        recorder = self._engine.recorder
        requirements = self._requirements
        _check_unchanged(self.program, self._settings, requirements, requirements.hold_anywhere(same_offsets=True))
        with self._engine.turn() as mine, progress.compiling(self._engine.name):
            executable = recorder.record(self.program, self._leaves) if mine else None
        fallbacks = recorder.reasons(self.program) if executable is None else executable.fallbacks
        if self._engine.function.records:
            self._engine.compiler.check_recorded(fallbacks, executable)
        entry: Entry
        if executable is None:
            entry = Evaluated(traced=self._traced, evaluated=self.program, fallbacks=fallbacks)
        else:
            entry = Recorded(traced=self._traced, graphs=executable, recordable=self.program, fallbacks=fallbacks)
        return Compiled(self._engine, entry, self._leaves, self._settings, self._donation)


class Compiled:
    """An executable for one kind of call; calls of other kinds raise ArgumentError.

    Attributes:
        program: The Program as it runs.
    """

    def __init__(
        self,
        engine: Engine,
        entry: Entry,
        leaves: list[Any],
        settings: tuple[Hashable, ...],
        donation: Donation | None = None,
    ) -> None:
        self._donation = donation
        self._settings = settings
        assert entry.program is not None
        self._engine = engine
        self._name = entry.program.name
        self._entry = entry
        self.program = entry.program
        self._placements = [(index, _placement(leaf)) for index, leaf in enumerate(leaves) if _placement(leaf)]
        self._overlap = overlap_key(leaves)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on arguments like those it was compiled for.

        Raises:
            ArgumentError: They differ in structure, shape, strides, dtype, device, static values, or in how they lie
                in memory: less aligned, or sharing memory otherwise, also with what the function closes over and one
                of them is written. Or the function would read something else now: a number or tensor that it closes
                over is another, a tensor has other memory, or a setting of torch's has changed that operations depend
                on. Or gradients are to be taken through the call: gradients are on, and something requires grad now
                that did not when it was lowered. Nothing has been changed.
        """
        if self._donation is not None:
            return self._donation.around(self._call, args, kwargs)
        return self._call(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        check_call(self.program, leaves, tree)
        check_gradients(self.program, leaves)
        for index, needed in self._placements:
            if not is_aligned(leaves[index].data_ptr(), needed):
                problem = f"tensor number {index} is not aligned as when it was compiled"
                multiple = f"{needed} more than a multiple of {WIDEST_LOAD}"
                wanted = "an address that is " + (f"a multiple of {needed}" if needed >= WIDEST_LOAD else multiple)
                raise ArgumentError(describe(f"{self._name}(…)", problem, expected=wanted, remedy="Clone it."))
        if overlap_key(leaves) != self._overlap:
            raise ArgumentError(describe(f"{self._name}(…)", "the arguments share memory otherwise than when compiled"))
        _check_unchanged(self.program, self._settings, self._entry.requirements, self._entry.is_valid())
        if self._entry.requirements.owned_memory_meets(leaves):
            problem = "an argument shares memory with a captured tensor, and one is written"
            raise ArgumentError(describe(f"{self._name}(…)", problem, remedy="Clone it."))
        with self._engine.turn() as mine:
            self._entry.calls += 1
            if mine and isinstance(self._entry, Recorded) and self._entry.wants_profile:
                profiling.measure(self._entry, leaves)
            if self._entry.executable is not None and mine:
                return self._entry.executable(leaves)
        if not mine:
            reason_inside(self._name, leaves)  # raises where the device cannot be used at all
        return evaluate_leaves(self.program, leaves)

    def explain(self, *, profile: bool = False) -> Explanation:
        """The report of how it runs, and why; with kernel times as of `Transformed.explain`."""
        check_flag(f"{self._name}.explain(…)", "profile", profile)
        if profile and isinstance(self._entry, Recorded):
            profiling.ask(self._entry)
        return report_of(self._name, [self._entry], {}, profile=profile)


def _check_unchanged(program: Program, settings: tuple[Hashable, ...], requirements: Requirements, hold: bool) -> None:
    """Refuse what would read something else than was traced, or read where a tensor no longer is."""
    now = mode_key(program.device.type)
    titles = [t for t, one, other in zip(KEY_TITLES, settings, now, strict=True) if one != other and t not in _OF_CALLS]
    if not titles and hold:
        return
    changed = titles[0] if titles else requirements.changed() or "something that the function reads"
    problem = f"{changed} is another than when it was lowered, or elsewhere"
    raise ArgumentError(describe(f"{program.name}(…)", problem, remedy="Lower it again, or call the function itself."))


def _placement(leaf: Any) -> int:
    """How a tensor's address must lie; 0 for what graphs do not read there."""
    return alignment_of(leaf.data_ptr()) if isinstance(leaf, torch.Tensor) and not leaf.is_cpu and leaf.numel() else 0


def _with_memory(tensor: Any) -> Any:
    """The leaf, or zeros in its place if it is a tensor on the device ``meta``."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_meta:
        return tensor
    found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=default_device())
    return found.zero_().requires_grad_(tensor.requires_grad)


def lower(engine: Engine, donation: Donation | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lowered:
    """Trace and transform a function for one kind of call.

    Args:
        engine: What compiles the function.
        donation: The arguments that its calls consume.
        args: Positional arguments; tensors on the device ``meta`` stand for zeros on the default device.
        kwargs: Keyword arguments likewise.

    Raises:
        TraceError: The function cannot be traced with these arguments.
    """
    if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in pytree.tree_leaves((args, kwargs))):
        leaves, tree = pytree.tree_flatten((args, kwargs))
        args, kwargs = unflatten([_with_memory(leaf) for leaf in leaves], tree)
    with progress.compiling(engine.name):
        traced, program = engine.programs(args, kwargs)
    return Lowered(engine, donation, traced, program, pytree.tree_leaves((args, kwargs)))
