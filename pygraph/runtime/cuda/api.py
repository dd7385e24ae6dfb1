"""The CUDA driver API as cuda-bindings gives it, with errors as exceptions; nothing else imports cuda-bindings."""

from __future__ import annotations

import functools
from typing import Any

from pygraph.errors import CaptureError, DeviceError, describe

cu: Any  # the driver, whose bindings have no type stubs
try:
    from cuda.bindings import driver as cu  # pyright: ignore
except ImportError as error:  # the extra `cuda` is not installed
    raise DeviceError(
        describe("import cuda.bindings", "cuda-bindings is not installed", remedy="pip install 'torch-pygraph[cuda]'.")
    ) from error


def check(result: tuple[Any, ...]) -> Any:
    """The values of a driver call; CaptureError if it failed."""
    if result[0] != cu.CUresult.CUDA_SUCCESS:
        raise CaptureError(f"CUDA driver call failed: {result[0].name}")
    return result[1] if len(result) == 2 else result[1:]


@functools.cache
def function_pointer(name: str) -> int:
    """The address of a function of the driver, as of CUDA 12, for native code to call."""
    pointer, _status = check(cu.cuGetProcAddress(name.encode(), 12000, 0))
    return int(pointer)
