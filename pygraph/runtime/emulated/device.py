"""A torch device ``emu`` whose memory is host memory, and which behaves as CUDA where graphs can see it.

Tensors of the device are genuine: they have storages, addresses, views, version counters and autograd. Every ATen
operation that reaches the device (views, allocation and composite operations are taken apart before) is a *launch*:
the CPU kernel runs on CPU views of the same memory. While a recorder is set, every launch is
reported to it. Nothing is registered with torch before ``register`` is called.
"""

# What a backend in Python is made of is private in torch, and has no types.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

import atexit
import functools
import time
from typing import Final

import torch

from pygraph.runtime.emulated import convolutions, launches, pinned, torch_module
from pygraph.runtime.emulated.autocast import LOWER_PRECISION, cast_and_run
from pygraph.runtime.emulated.dispatch import fallback, nested_fallback, wrapped_numbers
from pygraph.runtime.emulated.errors import Guard, replace_engine
from pygraph.runtime.emulated.special_operations import SPECIAL
from pygraph.runtime.emulated.tensors import NAME, helped

aten: Final = torch.ops.aten

_libraries: list[torch.library.Library] = []


def register() -> None:
    """Make the device known to torch; calling it again does nothing."""
    if _libraries:
        return
    wrapped_numbers()  # here, as below autograd nothing is saved
    from torch.utils.backend_registration import (
        _setup_privateuseone_for_python_backend,  # pyright: ignore  # torch 2.11 to 2.13
    )

    module = torch_module.device_module(lambda: launches.synchronize("synchronize"), launches.use_random_state)
    _setup_privateuseone_for_python_backend(NAME, backend_module=module, device_guard=Guard())
    everything, some = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(fallback, "PrivateUse1")
    everything.fallback(nested_fallback, "NestedTensorPrivateUse1")
    # A Python fallback is not found where dispatch modes are set but excluded, as in torch.tensor(..., device=...)
    # under a FakeTensorMode: what that calls gets kernels. Convolutions have kernels for all devices, which only raise,
    # and so do the last two for devices that torch does not know. Group norm's kernel for all devices takes apart
    # what is not contiguous as only the CPU may.
    for op in (
        *SPECIAL,
        *(
            aten.view.default,
            aten.as_strided.default,
            aten._reshape_alias.default,
            aten.fill_.Scalar,
            aten.zero_.default,
        ),
        *(aten.convolution_overrideable.default, aten.convolution_backward_overrideable.default),
        *(aten.conj_physical_.default, aten.mode.values, aten.native_group_norm.default),
    ):
        some.impl(op, functools.partial(fallback, op), "PrivateUse1")
    # Resolving a lazy conjugation or negation is a copy; without these, that copy would resolve it first, for ever.
    for key in ("Conjugate", "Negative"):
        some.impl("_copy_from", torch.library.fallthrough_kernel, key)
    some.impl("is_pinned", pinned.is_pinned, "CPU")
    some.impl("_pin_memory", pinned.pin_memory, "CPU")
    autocast = torch.library.Library("_", "IMPL")
    autocast.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for op in LOWER_PRECISION:
        some.impl(op, functools.partial(cast_and_run, op), "AutocastPrivateUse1")
    _libraries.extend((everything, some, autocast))
    atexit.register(_let_autograd_finish)
    torch_module.replace_names(launches.use_random_state)
    convolutions.describe()
    replace_engine()


def _let_autograd_finish() -> None:
    """Let the autograd engine's thread drop its last tensors before the interpreter ends.

    The engine reports a backward as done a little before that, and tensors over memory of Python objects need the
    interpreter's lock to die: a thread that asks for it too late ends the process with an abort.
    """
    if helped.is_set():
        time.sleep(0.05)
