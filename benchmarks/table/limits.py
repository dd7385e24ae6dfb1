"""A worker's bounds: seconds of compiling, memory of the device, caches on disk, and what is said of an error."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any


class OutOfTimeError(BaseException):
    """The seconds for compiling are over. No Exception: a compiler must not catch it and go on in another way."""


@contextlib.contextmanager
def alarm(seconds: float) -> Generator[None, None, None]:
    """Raise OutOfTimeError in a block that takes too long, at the next line of Python."""
    if seconds <= 0:
        raise OutOfTimeError

    def ring(signum: int, frame: Any) -> None:
        raise OutOfTimeError

    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def use_caches(folder: Path) -> None:
    """Have compilers use caches on disk in a folder, and forget what they remember of others."""
    for variable, name in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton"),
                           ("PYGRAPH_CACHE_DIR", "pygraph")):  # fmt: skip
        (folder / name).mkdir(parents=True, exist_ok=True)
        os.environ[variable] = str(folder / name)
    if "torch._inductor" not in sys.modules:
        return  # it has not been loaded, and remembers nothing
    import torch._dynamo.pgo
    import torch._inductor.utils

    with contextlib.suppress(AttributeError):  # private; checked with torch 2.11 and 2.13
        torch._inductor.utils.clear_caches()
        torch._dynamo.pgo.reset_code_state()


def clean(device: Any) -> int:
    """Free what can be freed, begin a new peak, and return the bytes that stay reserved."""
    import torch

    gc.collect()
    give_back(device)
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_reserved()


def give_back(device: Any) -> None:
    """Leave memory of the device that nothing is in to other processes."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def most_reserved(device: Any, before: int) -> int | None:
    """Bytes reserved at most since the last cleaning, beyond what was reserved before; null without CUDA."""
    import torch

    return torch.cuda.max_memory_reserved() - before if device.type == "cuda" else None


def described(error: BaseException) -> str:
    """The kind of an error and the beginning of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)}"[:600].strip()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, is about memory of the device."""
    while error is not None:
        if type(error).__name__ == "OutOfMemoryError" or "out of memory" in str(error).lower():
            return True
        error = error.__cause__
    return False
