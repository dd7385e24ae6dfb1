"""Launches on the emulated device: counted, or reported to the recorder that is set."""

# What a backend in Python is made of is private in torch, and has no types.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch
from torch.utils import _pytree as pytree  # checked with torch 2.11 and 2.13; public as torch.utils._pytree

from pygraph.runtime.driver import Counters
from pygraph.runtime.emulated.kernels import Kernel

counters: Final = Counters()


class Recorder(Protocol):
    """Records launches, which are not counted then."""

    def before(self, tensors: Sequence[torch.Tensor]) -> None:
        """Called before a launch, with the tensors of the device that it reads or writes."""
        ...

    def after(self, launch: Launch) -> None:
        """Called after a launch has run."""
        ...

    def check_generator(self, generator: torch.Generator) -> None:
        """Refuse to draw from a generator of which the recording does not know."""
        ...

    def refuse(self, op: str) -> RuntimeError:
        """The error for an operation that cannot be recorded."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Launch:
    """One execution of a kernel.

    Attributes:
        name: The operation's name, e.g. ``aten::add.out``.
        kernel: The function that runs on CPU tensors; ``aten.copy_`` for copies.
        leaves: The flattened arguments, of ``spec``; tensors are those of the device.
        outputs: Fresh tensors for the results of ``kernel``, None for those that it writes by itself.
    """

    name: str
    kernel: Kernel
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    outputs: tuple[torch.Tensor | None, ...] = ()


recorder: Recorder | None = None


def set_recorder(value: Recorder | None) -> None:
    """Set the recorder to which all launches are reported from now on; None for none."""
    global recorder
    recorder = value


observer: Callable[[str], None] | None = None


def set_observer(value: Callable[[str], None] | None) -> None:
    """Set what is called with the name of each launch that has run and is counted; None for nothing."""
    global observer
    observer = value


def count_launch(launch: Launch) -> None:
    """Record a launch that has run, or count it."""
    if recorder is not None:
        recorder.after(launch)
        return
    counters.launches += 1
    if observer is not None:
        observer(launch.name)


def synchronize(what: str) -> None:
    """Count that the host waits for the device; refuse it while recording."""
    if recorder is not None:
        raise recorder.refuse(what)
    counters.synchronizations += 1


def use_random_state() -> None:
    """Refuse what reads or sets the state of the random generator while recording, as CUDA does."""
    if recorder is not None:
        raise recorder.refuse("the state of the random generator")


def count_copy(what: str, tensor: torch.Tensor) -> None:
    """Count a copy between the host and the device; refuse it while recording."""
    if recorder is not None:
        raise recorder.refuse(what)
    counters.copies += 1
    counters.copied_bytes += tensor.numel() * tensor.element_size()
    if observer is not None:
        observer(what)
