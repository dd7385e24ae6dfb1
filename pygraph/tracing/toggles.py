"""Changes of whether tensors require grad: a discriminator that is frozen while its generator is updated.

Autograd looks at the tensors themselves while a function is traced, so they are changed for real, and put back. A
tensor that is at the end of the call as it was before needs nothing; another one is state that the call leaves behind.
"""

# Gradients and flags are read off tensors, of which torch says little.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import weakref

import torch
from torch._C._functorch import is_functorch_wrapped_tensor  # checked with torch 2.11 and 2.13

from pygraph.guards.environment import Environment
from pygraph.guards.locations import RequiresGrad
from pygraph.ir.dispatch_modes import no_dispatch_modes
from pygraph.tracing.gradients import Accumulations


class Toggles:
    """The tensors of which a function changes whether they require grad.

    Args:
        environment: What the function can reach besides its arguments.
        accumulations: Gets to know the leaves of autograd's graph that come to be.

    """

    def __init__(self, environment: Environment, accumulations: Accumulations) -> None:
        self._environment, self._accumulations = environment, accumulations
        self._before: dict[int, tuple[torch.Tensor, bool]] = {}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors."""
        return [tensor for tensor, _ in self._before.values()]

    def toggle(self, tensor: torch.Tensor) -> bool:
        """Change the flag of a tensor that the function closes over; whether that can be put back."""
        environment = self._environment
        if not tensor.is_leaf or is_functorch_wrapped_tensor(tensor) or torch.is_inference(tensor):
            return False
        if not environment.reaches(tensor) or environment.reaches_weakly(tensor):
            return False
        is_new = id(tensor) not in self._before
        if is_new:
            self._before[id(tensor)] = tensor, tensor.requires_grad
        tensor.requires_grad_(not tensor.requires_grad)
        if is_new and tensor.requires_grad and not torch.is_inference_mode_enabled():
            with no_dispatch_modes():
                self._accumulations.watch(tensor)
        return True

    def restore(self) -> tuple[RequiresGrad, ...]:
        """Put the flags back; those that had changed."""
        changed = [(tensor, before) for tensor, before in self._before.values() if tensor.requires_grad != before]
        for tensor, before in changed:
            tensor.requires_grad_(before)
        return tuple(flag_of(tensor, self._environment) for tensor, _ in changed)


def flag_of(tensor: torch.Tensor, environment: Environment) -> RequiresGrad:
    """The flag of a tensor that an environment reaches."""
    return RequiresGrad(weakref.ref(tensor), f"{environment.names.get(id(tensor), 'a tensor')}.requires_grad")
