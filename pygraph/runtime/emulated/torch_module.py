"""The emulated device for torch's Python code: the module ``torch.emu``, storages, and random states.

A backend in Python cannot register all that one in C++ can; what is missing is put in by replacing names of torch,
once, when the device is registered. Each replacement behaves as the original does for every other device.
"""

# What a backend in Python is made of is private in torch, and has no types.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch._prims import rng_prims

from pygraph.runtime.emulated import generator
from pygraph.runtime.emulated.tensors import NAME


class _Device:
    """The context manager ``torch.emu.device``: there is one device, so it changes nothing."""

    def __init__(self, device: object) -> None:
        self.idx = 0

    def __enter__(self) -> None:
        return None

    def __exit__(self, *raised: object) -> None:
        return None


def device_module(synchronize: Callable[[], None], use_random_state: Callable[[], None]) -> types.ModuleType:
    """The module ``torch.emu``. The device's random numbers come from the default CPU generator.

    Args:
        synchronize: Counts that the host waits for the device.
        use_random_state: Raises where the random state cannot be read or set: while recording, as on CUDA.
    """

    def get_rng_state(device: object = NAME) -> torch.Tensor:
        use_random_state()
        return torch.get_rng_state()

    def set_rng_state(new_state: torch.Tensor, device: object = NAME) -> None:
        use_random_state()
        torch.set_rng_state(new_state)

    def wait(*device: object) -> None:
        synchronize()

    wait.__module__, wait.__qualname__ = f"torch.{NAME}", "synchronize"  # by which it is known to wait for a device

    def answer(value: object) -> Callable[..., object]:
        return lambda *args, **kwargs: value

    functions: dict[str, Callable[..., Any]] = {
        **dict.fromkeys(("is_initialized", "is_available", "is_bf16_supported"), answer(True)),
        "_is_in_bad_fork": answer(False),
        "device": _Device,
        "device_count": answer(1),
        "current_device": answer(0),
        "set_device": answer(None),
        "empty_cache": answer(None),
        "initial_seed": torch.initial_seed,
        "manual_seed": torch.manual_seed,
        "manual_seed_all": answer(None),  # torch.manual_seed, which asks for this, has seeded the CPU generator
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "synchronize": wait,
        "get_amp_supported_dtype": answer([torch.bfloat16, torch.float16]),
    }
    module = types.ModuleType(f"torch.{NAME}", "The emulated device of pygraph.")
    for name, function in functions.items():
        setattr(module, name, function)
    return module


def replace_names(use_random_state: Callable[[], None]) -> None:
    """Replace the functions of torch that do not know the device; ``use_random_state`` as for `device_module`."""
    generator.install()
    _patch_storages()
    _patch_random_states(use_random_state)


def _patch_storages() -> None:
    """Make storages of the device possible, as ``torch.load`` and ``copy.deepcopy`` need them.

    Both go through the C++ allocator of PrivateUse1; a Python backend has none, and torch (2.11 to 2.13) ends the
    process with a segmentation fault.
    """
    original_new, original_clone = torch.UntypedStorage.__new__, torch.UntypedStorage.clone

    @functools.wraps(original_new)
    def new(cls: type[torch.UntypedStorage], *args: Any, **kwargs: Any) -> torch.UntypedStorage:
        device = kwargs.get("device")
        if device is None or torch.device(device).type != NAME:
            return original_new(cls, *args, **kwargs)
        content = args[0] if args else kwargs.get("size", 0)
        if isinstance(content, int):
            return torch.empty(content, dtype=torch.uint8, device=NAME).untyped_storage()
        return torch.tensor(list(content), dtype=torch.uint8, device=NAME).untyped_storage()

    @functools.wraps(original_clone)
    def clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
        if self.device.type != NAME:
            return original_clone(self)
        old = torch.empty(0, dtype=torch.uint8, device=NAME).set_(self)  # pyright: ignore
        return old.clone().untyped_storage()

    torch.UntypedStorage.__new__ = staticmethod(new)  # pyright: ignore
    torch.UntypedStorage.clone = clone  # pyright: ignore


def _patch_random_states(use_random_state: Callable[[], None]) -> None:
    """Have a recomputation below ``torch.compile`` draw the forward's numbers: the states are the CPU generator's.

    The operators that save and put back states look the device up in a table of their own (torch 2.11 to 2.13).
    """
    original: Callable[..., Any] = rng_prims.get_device  # pyright: ignore

    @functools.wraps(original)
    def get_device(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if found != NAME:
            return found
        use_random_state()
        return "cpu"

    rng_prims.get_device = get_device
