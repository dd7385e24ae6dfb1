"""Discovery of sites: runs of a function on fake tensors that show which tensors it reads, writes and returns."""

# Arguments are of any type, and fakes and torch.func's stack have no public names. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from pygraph.autograd.flat_function import Lookup
from pygraph.autograd.levels import is_active, is_tracked, plain_of
from pygraph.autograd.preserved_state import Effects
from pygraph.autograd.primal import Primal
from pygraph.autograd.probe import Probe
from pygraph.autograd.recorded_effects import RecordedEffects
from pygraph.autograd.settings import Settings
from pygraph.autograd.site import Site, active_among, describe_tensor
from pygraph.calls import limits
from pygraph.calls.engine import Engine
from pygraph.errors import TraceError
from pygraph.guards.environment import Environment
from pygraph.ir.leaves import is_live_number
from pygraph.ir.structures import unflatten
from pygraph.tracing.call_environment import reached_besides
from pygraph.tracing.recording import Recording
from pygraph.tracing.specialization import record_call


def discover(
    function: Engine, leaves: Sequence[Any], tree: pytree.TreeSpec, static: frozenset[int], settings: Settings
) -> tuple[Site, tuple[int, ...]]:
    """Run a function on fake tensors, and return its site.

    Args:
        function: The engine of the function.
        leaves: The leaves of ``(args, kwargs)``.
        tree: The structure of ``(args, kwargs)``.
        static: The leaves that are static arguments.
        settings: The settings under which it is called.

    Returns:
        The site, and the leaves whose numbers decide which operations the function runs.

    Raises:
        TraceError: Calls like this cannot be made one operation of their tensors.
    """
    args, kwargs = unflatten(list(leaves), tree)
    function.policy.check_arguments(args, kwargs)
    environment = reached_besides(function.fn, args, kwargs)
    lifted = [tensor for tensor in environment.tensors if is_active(tensor)]
    probe, recording, decisive = _probe_closure(function, leaves, tree, static, settings, lifted)
    effects = RecordedEffects(recording, len(leaves))
    used = [t for i, t in enumerate(lifted) if i in effects.used or id(t) in probe.returned]
    lookups = [_lookups(environment, tensor) for tensor in used]
    environment.release(used)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    numbers = [i for i, leaf in enumerate(leaves) if i not in static and is_live_number(leaf)]
    primal = Primal(function, tree, leaves, tensors, numbers, lookups, settings)
    row = [*tensors, *(len(leaves) + next(i for i, t in enumerate(lifted) if t is tensor) for tensor in used)]
    _describe_results(primal, probe, effects, row)
    if not probe.differentiable:
        raise TraceError(f"{function.name} returns no tensor")
    everything = [*leaves, *lifted]
    reason = probe.why_not_an_operation(any(map(is_tracked, (everything[leaf] for leaf in row))))
    if reason is not None:
        raise TraceError(f"{function.name} {reason}")
    tracked = any(is_tracked(everything[leaf]) for leaf in effects.written)
    described = tuple(map(describe_tensor, used))
    site = Site(
        primal, environment, described, active_among(environment), effects.draws, effects.writes, tracked,
        probe.differentiates,
    )  # fmt: skip
    return site, tuple(index for index in numbers if index in decisive)


def _probe_closure(
    function: Engine,
    leaves: Sequence[Any],
    tree: pytree.TreeSpec,
    static: frozenset[int],
    settings: Settings,
    lifted: list[torch.Tensor],
) -> tuple[Probe, Recording, Set[int]]:
    """Run a function until all active tensors that it closes over are lifted, to which they are added.

    Returns:
        The last run, its recording, and the leaves whose numbers decide which operations it runs.
    """
    before: set[int] = set()
    for _ in range(limits.LIMITS.discovery_rounds):
        probe = Probe(function, lifted, settings)
        count = len(leaves)
        row = _fake_leaves([*leaves, *lifted])
        given = (*unflatten(row[:count], tree), row[count:])
        with temporarily_clear_interpreter_stack():
            recording, decisive = record_call(probe, given, {}, static, function.name)
        if not probe.found:
            return probe, recording, decisive
        lifted += probe.found
        plain = {id(plain_of(tensor)) for tensor in probe.found}
        if plain == before:
            raise TraceError(f"{function.name} wraps what it closes over anew each time")
        before = plain
    raise TraceError(f"{function.name} closes over ever more tensors")


def _describe_results(primal: Primal, probe: Probe, effects: RecordedEffects, row: Sequence[int]) -> None:
    """Set which results of a function have gradients or are inputs, and its effects.

    Args:
        primal: The function.
        probe: The run on fake tensors.
        effects: The effects of the run.
        row: For each tensor of the function, its number among the run's leaves and lifted tensors.
    """
    primal.differentiable = probe.differentiable
    for index, alias in probe.input_aliases().items():
        if alias.operand in row:
            primal.aliases[index] = dataclasses.replace(alias, operand=row.index(alias.operand))
    if effects.draws or effects.writes:
        written = {index: effects.written[leaf] for index, leaf in enumerate(row) if leaf in effects.written}
        primal.effects = Effects(effects.draws, written, effects.captured, effects.generators)


def _lookups(environment: Environment, tensor: torch.Tensor) -> tuple[Lookup, ...]:
    return tuple(environment.guards.locations(tensor)) or (functools.partial(_itself, tensor),)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _fake_leaves(leaves: Sequence[Any]) -> list[Any]:
    """Return fake tensors for tensors, as they are at the current level, and other leaves unchanged."""
    made: dict[int, torch.Tensor] = {}
    mode = FakeTensorMode()
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and id(leaf) not in made:
            made[id(leaf)] = _fake(leaf, mode)
    return [made[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    tracked = is_tracked(tensor)
    shape, stride = tuple(tensor.shape), tensor.stride()
    with temporarily_clear_interpreter_stack(), mode:
        fake: Any = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
        fake.requires_grad_(tracked)
    if isinstance(tensor, torch.nn.Parameter):
        fake._is_param = True
    return fake
