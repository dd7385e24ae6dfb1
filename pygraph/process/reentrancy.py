"""Calls that may not run as graphs now: those inside of another call, and those in a forked process.

Replays of one function share memory and a graph's parameters, so its calls run one at a time, under its own lock.
A thread that is inside such a call already may be asked for another: a custom operation, a hook, a signal handler or a
finalizer that the garbage collector runs calls the same function or another one. It must not wait for a lock (it would
wait for itself, or for a thread that waits for it), nor touch the parameters of a replay that is half prepared; so
calls there run without graphs.

CUDA does not work in a child of a process that has used it. There everything counts as inside a call.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch

from pygraph.errors import DeviceError, describe

T = TypeVar("T")

INSIDE_CALL = "it is inside a call of a transformed function, by an operation, a hook or a finalizer"
FORKED = "this process was forked from one that uses CUDA, so that graphs cannot run here"


class _Here(threading.local):
    inside: bool = False


here = _Here()
"""Of the current thread: ``here.inside`` is whether it is inside a call."""

_forked = False


class Locked(Protocol):
    """An owner of a lock, and of the state that the lock protects."""

    def after_fork(self) -> None:
        """Make the lock free again in a child process, where the thread that held it does not exist."""


_holders: weakref.WeakSet[Any] = weakref.WeakSet()


def members(group: weakref.WeakSet[T]) -> list[T]:
    """The members of a set at this time; other threads may add to it meanwhile."""
    while True:
        try:
            return list(group)
        except RuntimeError:  # its size changed during the iteration; no lock, which a fork could leave taken
            continue


def register(holder: Locked) -> None:
    """Have ``holder.after_fork()`` called in every child process; ``holder`` is referred to weakly."""
    _holders.add(holder)


def reason_inside(name: str, leaves: Sequence[Any]) -> str:
    """The reason why a call with these arguments runs without graphs when ``here.inside`` is true.

    Raises:
        DeviceError: The process cannot use the arguments' device at all.
    """
    if not _forked:
        return INSIDE_CALL
    if any(isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in leaves):
        raise forked_error(name)
    return FORKED


def forked_error(name: str) -> DeviceError:
    """The error for a call on CUDA in a forked process."""
    return DeviceError(
        describe(
            f"{name}(…)", "CUDA cannot be used in a forked process",
            remedy="Start processes with multiprocessing.get_context('spawn').",
        )
    )  # fmt: skip


def _after_fork() -> None:
    global _forked
    for holder in members(_holders):
        holder.after_fork()
    if torch.cuda._is_in_bad_fork():  # pyright: ignore[reportPrivateUsage]  # checked with torch 2.11 and 2.13
        _forked = True
        here.__dict__.clear()
        _Here.inside = True  # for all threads of this process


os.register_at_fork(after_in_child=_after_fork)
