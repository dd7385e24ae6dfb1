"""The environment of a function: all that it can reach besides its arguments, as it was when a trace was made.

A trace bakes in what it read of closures, globals, modules, and the objects behind them. One walk (`walk.rules`) finds
it, and serves three ends: *guards* (`guard_set`) tell whether anything has changed since the trace; a *snapshot*
(`snapshot`) puts back what tracing changed; and *names* say where a closed-over tensor was found.
"""

# Objects of any type are reached.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor  # checked with torch 2.11 and 2.13

from pygraph.errors import TraceError
from pygraph.guards.contents import flags_of, gradients_of, layouts_of
from pygraph.guards.growth import growth_of
from pygraph.guards.locations import Item, Location, RequiresGrad
from pygraph.guards.packages import is_library
from pygraph.guards.values import same
from pygraph.guards.walk.code_names import variables_of
from pygraph.guards.walk.rules import walk_from

# What the code of a training step calls, of tensors and of optimizers.
_OF_STEP = ("zero_grad", "backward", "step")


class Environment:
    """The mutable state reachable from a callable, as it is now.

    Args:
        fn: A function, method, partial, or callable object (an ``nn.Module``).
        roots: Further objects to include, by name.
        gradients: Tensors whose ``.grad`` the callable reads; a gradient that nobody reads is not guarded.
        toggled: Tensors of which the callable changes whether they require grad.
        hooks: Whether it has autograd call hooks of tensors.

    Attributes:
        guards: Where values were read, and whether they are still there.
        snapshot: Copies of what may change in a trace.
        names: Names of tensors and of closed-over variables in reports, by id.
        kinds: Whether tensors are a ``parameter``, a ``buffer`` or ``closed-over``, by id.
        tensors: The tensors that can be reached.
        differentiable: The tensors whose ``.grad`` a backward may set.
        follows_hooks: Whether the hooks of tensors count as reached.
        unseen: The name of something that was not looked at, since there is too much that deep; None if all was.
        is_current: ``is_current()`` tells whether everything that was reached still has the same value.
    """

    def __init__(
        self,
        fn: Any,
        roots: dict[str, Any] | None = None,
        gradients: Sequence[torch.Tensor] = (),
        toggled: Sequence[torch.Tensor] = (),
        *,
        hooks: bool = False,
    ) -> None:
        walk = walk_from(fn, roots or {}, hooks=hooks)
        self.follows_hooks = hooks
        self.guards, self.snapshot = walk.guards, walk.snapshot
        self.names, self.kinds, self.tensors, self.unseen = walk.names, walk.kinds, walk.tensors, walk.unseen
        self._objects, self._seen, self._weakly = walk.objects, walk.seen, walk.weakly
        self._code_names, self._readers, self._optimizers = walk.code.names, walk.code.readers, walk.optimizers
        self._compares_identities = walk.code.compares_identities
        self._classes = set(map(type, walk.objects))
        self._stop_holding(self._weakly)
        self._gradients = gradients_of(gradients) if gradients else None
        if self._gradients is not None:
            self.guards.add_contents(self._gradients)
        if toggled:
            self.guards.add_contents(flags_of(toggled))
        self.differentiable = [tensor for tensor in self.tensors if _is_leaf_of_autograd(tensor)]
        self.is_current: Callable[[], bool] = self.guards.hold  # without a call between: every call asks for it

    # -- what was reached ---------------------------------------------------------------------------------------------

    def objects(self) -> list[Any]:
        """All objects that can be reached."""
        return list(self._objects)

    def reaches(self, value: Any) -> bool:
        """Whether this very object was there when the walk was made."""
        return id(value) in self._seen

    def reaches_weakly(self, value: Any) -> bool:
        """Whether nothing but weak references led to an object, so that it may be gone at any time."""
        return id(value) in self._weakly

    def reaches_objects_of(self, cls: type) -> bool:
        """Whether an object of a class was there when the walk was made, also if only weak references led to it."""
        return cls in self._classes

    def has_code_for(self, name: str) -> bool:
        """Whether code of the user's has this name for anything."""
        return name in self._code_names

    def calls_builtin(self, name: str) -> bool:
        """Whether code of the user's may call a builtin function of this name."""
        return any(True for _ in self.functions_calling(name))

    def functions_calling(self, name: str) -> Iterator[types.FunctionType]:
        """The user's functions that may call a builtin function of this name."""
        if name not in self._code_names:
            return
        for value in self._objects:
            is_users = isinstance(value, types.FunctionType) and not is_library(value.__globals__.get("__name__"))
            if is_users and name in variables_of(value.__code__):
                yield value

    def has_attribute_for(self, cls: type, name: str) -> bool:
        """Whether code of the user's has this name for an attribute, or may read any of a class's objects."""
        return name in self._code_names or self._readers.may_read_all_of(cls)

    # -- what has changed ---------------------------------------------------------------------------------------------

    def changed(self) -> str | None:
        """The name of the first thing that has another value now, as a user would write it; None if it has none."""
        return self.guards.changed()

    def may_return(self) -> bool:
        """Whether all that differs now are plain values (a flag, a number), so that it may be as it was again."""
        return self.guards.may_hold_again()

    # -- what a training step changes ---------------------------------------------------------------------------------

    @property
    def rates(self) -> list[dict[str, Any]]:
        """The groups of parameters of optimizers, whose learning rates schedules change."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def differentiable_with(self, thawed: Iterable[RequiresGrad]) -> list[torch.Tensor]:
        """The tensors whose ``.grad`` a backward may set, and some for which it may once they require grad."""
        more = {id(flag.tensor()) for flag in thawed}
        return [tensor for tensor in self.tensors if id(tensor) in more or _is_leaf_of_autograd(tensor)]

    @property
    def new_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that have made no state yet, though they have parameters to update."""
        return [
            one
            for one in self._optimizers
            if not one.state and any(tensor.requires_grad for group in one.param_groups for tensor in group["params"])
        ]

    @property
    def may_train(self) -> bool:
        """Whether there is an optimizer, and code of the user's with the names of what a training step does."""
        return bool(self._optimizers) and self._code_names.issuperset(_OF_STEP)

    def step_is_current(self) -> bool:
        """Whether the gradients that the callable reads are the same tensors as then, and learning rates the same."""
        return (self._gradients is None or self._gradients[0]) and self.rates_are_current()

    def rates_are_current(self) -> bool:
        """Whether learning rates that are numbers are the same as then."""
        groups = {id(group) for group in self.rates}
        rates = [(c, value) for c, key, value in self.guards.entries if id(c) in groups and key == "lr"]
        return all(group.get("lr") is value or same(group.get("lr"), value) for group, value in rates)

    def changed_numbers(self) -> list[Location]:
        """Where there are other numbers now."""
        return self.guards.changed_numbers()

    def replaced_containers(self) -> list[Location]:
        """Where there are other lists, tuples or dicts of tensors now, if nothing asks which ones they are."""
        is_asked = self._compares_identities or self.calls_builtin("id")
        return [] if is_asked else self.guards.replaced_containers()

    def is_of_optimizer(self, location: Location) -> bool:
        """Whether a location is in a group of parameters of an optimizer."""
        return isinstance(location, Item) and any(location.container is group for group in self.rates)

    def has(self, location: Location) -> bool:
        """Whether the container of a location was reached, or its variable."""
        return self.guards.has(location)

    # -- undoing what a trace changes ---------------------------------------------------------------------------------

    def changed_locations(self) -> tuple[Location, ...] | str:
        """Where another value is stored now; or the name of something that has changed and is in no such location."""

        def grown(name: str, container: list[Any], before: list[Any]) -> Location | None:
            return growth_of(container, before, name, self.guards.locations(container), self.reaches)

        return self.snapshot.changed_locations(grown)

    def restore(self) -> str | None:
        """Undo every change since the walk but those of gradients; the name of the first thing that had changed."""
        return self.snapshot.restore()

    def forget_remembered(self, *, every: bool) -> str | None:
        """Undo that functions remember more objects since the walk, see `Snapshot.forget_remembered`."""
        return self.snapshot.forget_remembered(every=every)

    def gradients(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """All leaves with their gradients, for `restore_gradients`; an environment lasts, and does not hold them.

        A frozen tensor has one from before, which ``zero_grad()`` deletes. One into which a function writes what has a
        graph is a leaf no more.
        """
        leaves = (tensor for tensor in self.tensors if tensor.is_leaf and not is_functorch_wrapped_tensor(tensor))
        return [(tensor, tensor.grad) for tensor in leaves]

    def restore_gradients(self, before: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> list[torch.Tensor]:
        """Undo every change of gradients; the tensors whose gradients had changed."""
        changed: list[torch.Tensor] = []
        for tensor, grad in before:
            if tensor.is_leaf and tensor.grad is not grad:
                changed.append(tensor)
                tensor.grad = grad
        return changed

    # -- guarding less ------------------------------------------------------------------------------------------------

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Guard the locations of these tensors no longer, nor hold the tensors; nothing can be restored after it."""
        released = {id(tensor) for tensor in tensors}
        self.guards.release_objects(released)
        self.snapshot.clear()
        self.differentiable = [tensor for tensor in self.differentiable if id(tensor) not in released]
        self._stop_holding(released)

    def guard_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Guard what tensors are like that a function reaches, without reading what is in them."""
        reached = [tensor for tensor in tensors if self.reaches(tensor) and not self.reaches_weakly(tensor)]
        if reached:
            self.guards.add_contents(layouts_of(reached))

    def release_locations(self, locations: Iterable[Location]) -> None:
        """Guard what is stored in these locations no longer."""
        self.guards.release_locations(locations)

    def forget_copies(self) -> None:
        """Drop the snapshot, which may hold what only a weak reference leads to; nothing can be restored after it."""
        self.snapshot.clear()

    def narrow_to_modes(self) -> None:
        """Guard only which modules there are and whether they are in training; nothing can be restored after it."""
        self.guards.narrow_to_modes()
        self.snapshot.clear()
        self.differentiable.clear()
        self._objects.clear()
        self.tensors.clear()

    def _stop_holding(self, released: set[int]) -> None:
        """Keep no objects of these ids alive."""
        if released:
            self.tensors = [tensor for tensor in self.tensors if id(tensor) not in released]
            self._objects = [value for value in self._objects if id(value) not in released]
            self._seen -= released
            self.guards.stop_holding(released)


def modes_of(fn: Any, roots: dict[str, Any]) -> Environment | None:
    """The modes of modules, a change of which may end a refusal to trace a function; None if there are none to find."""
    try:
        environment = Environment(fn, roots)
    except TraceError:
        return None
    environment.narrow_to_modes()
    return None if environment.guards.are_empty() else environment


def _is_leaf_of_autograd(tensor: torch.Tensor) -> bool:
    """Whether a backward may set the tensor's gradient; those of torch.func's tensors are its own."""
    return tensor.requires_grad and not is_functorch_wrapped_tensor(tensor) and tensor.is_leaf
