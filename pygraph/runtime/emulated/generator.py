"""Random generators of the emulated device: ``torch.Generator(device="emu")``.

They hold a generator of the CPU, whose numbers the device's kernels draw. A backend in Python cannot tell torch (2.11
to 2.13) how to make generators, so the name ``torch.Generator`` is that of a class that makes those of the device as
well, and is the original class to everything that asks about types. Who imported the original by name before the
device was registered gets torch's NotImplementedError from it, and CPU operations do not refuse a generator of the
device as they refuse one of CUDA.
"""

# What a backend in Python is made of is private in torch, and has no types.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUnknownMemberType=false
# pyright: reportSelfClsParameterName=false

from __future__ import annotations

import weakref
from typing import Any, Final

import torch
from typing_extensions import override  # torch depends on it

from pygraph.runtime.emulated.tensors import NAME

_Original: Final[Any] = torch._C.Generator
_generators: Final[dict[int, object]] = {}  # by the address of the C++ generator, as operations see them


class EmulatedGenerator(_Original):
    """A generator of the device."""

    def __init__(self, device: object = None) -> None:
        _generators[self._cdata] = weakref.ref(self)
        weakref.finalize(self, _generators.pop, self._cdata, None).atexit = False

    def __new__(cls, device: object = None) -> EmulatedGenerator:  # noqa: D102
        return _Original.__new__(cls)

    @property
    def device(self) -> torch.device:
        """The device, as of a tensor."""
        return torch.device(NAME, 0)

    def clone_state(self) -> EmulatedGenerator:
        """Another generator in the same state."""
        other = EmulatedGenerator()
        other.set_state(self.get_state())
        return other

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.get_state(),)


def _restored(state: torch.Tensor) -> EmulatedGenerator:
    generator = EmulatedGenerator()
    generator.set_state(state)
    return generator


def is_emulated_generator(generator: torch.Generator) -> bool:
    """Whether a generator that an operation was called with is one of the device."""
    return generator._cdata in _generators  # pyright: ignore


class _Type(type(_Original)):  # pyright: ignore[reportUntypedBaseClass]
    """The class of ``torch.Generator``: calls make generators of any device, and types are those of the original."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        device = args[0] if args else kwargs.get("device")
        if isinstance(device, (str, torch.device)) and torch.device(device).type == NAME:
            return EmulatedGenerator()
        return _Original(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Original)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _Original)


def install() -> None:
    """Have ``torch.Generator`` make generators of the device."""
    torch.Generator = _Type("Generator", (_Original,), {"__doc__": _Original.__doc__, "__module__": "torch"})  # pyright: ignore
