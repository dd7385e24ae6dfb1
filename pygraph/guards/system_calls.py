"""Functions that ask the system or change something there: the clock, files, processes, random bytes, streams.

What they gave to a trace is what every replay would repeat, and what they did is what no replay would do again.
"""

from __future__ import annotations

import datetime
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime")
_OPEN = frozenset({"open"})
_STREAM_FUNCTIONS = frozenset({"synchronize", "set_stream"})
_MEMORY = frozenset(
    {
        "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "mem_get_info",
        "memory_stats", "reset_peak_memory_stats", "get_memory_info",
    }
)  # fmt: skip

# By module, as functions name theirs. Python 3.12 has moved `open`.
_CALLS = {
    "time": frozenset([*_CLOCKS, *(f"{name}_ns" for name in _CLOCKS), "localtime", "gmtime", "ctime", "strftime"]),
    "io": _OPEN,
    "_io": _OPEN,
    "builtins": frozenset({"input"}),
    "posix": frozenset(
        {
            "open", "read", "write", "listdir", "scandir", "stat", "lstat", "urandom", "getrandom", "system",
            "mkdir", "remove", "unlink", "rename", "replace", "rmdir", "getloadavg", "times",
        }
    ),
    "os": frozenset({"popen", "makedirs", "walk"}),
    "genericpath": frozenset({"exists", "isfile", "isdir", "getsize", "getmtime", "getatime", "getctime"}),
    "subprocess": frozenset({"run", "call", "check_call", "check_output", "getoutput"}),
    "shutil": frozenset({"copy", "copy2", "copyfile", "copytree", "move", "rmtree", "disk_usage"}),
    "urllib.request": frozenset({"urlopen", "urlretrieve"}),
    "uuid": frozenset({"uuid1", "uuid4"}),
    "secrets": frozenset({"token_bytes", "token_hex", "token_urlsafe"}),
    "numpy": frozenset({"load", "fromfile", "loadtxt", "genfromtxt", "save", "savez", "savez_compressed", "savetxt"}),
    "torch.serialization": frozenset({"load", "save"}),
    # Checked with torch 2.11 and 2.13; `tracing.streams` sees to the methods of streams and events.
    "torch.cuda": _STREAM_FUNCTIONS,
    "torch.cuda.memory": _MEMORY,
    "torch.accelerator": frozenset({*_STREAM_FUNCTIONS, "current_stream"}),
    "torch.accelerator.memory": _MEMORY,
    "torch.emu": _STREAM_FUNCTIONS,
}  # fmt: skip

PATH_METHODS = (
    "open", "read_text", "read_bytes", "write_text", "write_bytes", "stat", "exists", "is_file", "is_dir", "iterdir",
    "glob", "rglob", "mkdir", "unlink", "touch", "rename", "replace",
)  # fmt: skip
"""Methods of `pathlib.Path` that ask the system or change something there."""

_CLOCK_METHODS = frozenset({"now", "utcnow", "today"})
"""Methods of `datetime.datetime` and `datetime.date` that read the clock."""


def is_system_call(value: object) -> bool:
    """Whether a value is a function that asks the system, or a class that can: of dates, random generators, streams.

    So is a stream or an event that is not of CUDA's own classes.

    >>> import os, time
    >>> [is_system_call(one) for one in (time.time, open, os.urandom, os.getcwd, print)]
    [True, True, True, False, False]
    """
    if type(value) in _STREAMS or any(value is one for one in (*_DATES, *_SEEDED, *_STREAMS)):
        return True
    if not issubclass(type(value), (types.BuiltinFunctionType, types.FunctionType)):
        return False
    module, name = _named(value)
    return name in _CALLS.get(module, ()) and getattr(sys.modules.get(module), name, None) is value


def asks(function: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of what `is_system_call` has found asks the system.

    >>> asks(np.random.default_rng, (), {}), asks(np.random.default_rng, (7,), {})
    (True, False)
    """
    if any(function is one for one in _SEEDED):
        return next(iter((*args, *kwargs.values())), None) is None
    return not isinstance(function, type) or any(function is one for one in _STREAMS)


_DATES = (datetime.datetime, datetime.date)

_SEEDED: tuple[object, ...] = (np.random.default_rng, np.random.RandomState)
"""Random generators that are seeded by the system, if they are not given a seed."""

_STREAMS: tuple[Any, ...] = (torch.Stream, torch.Event)
"""Streams and events of any device. They are written in C, so that no method of theirs can be watched."""


def method_asks(value: object, name: str) -> bool:
    """Whether a method of what `is_system_call` has found asks the system.

    >>> method_asks(datetime.date, "today"), method_asks(datetime.date, "fromisoformat")
    (True, False)
    """
    return name in _CLOCK_METHODS or (type(value) in _STREAMS and not name.startswith("_"))


def name_of(function: object) -> str:
    """The function's name as users write it.

    >>> import os, time
    >>> [name_of(one) for one in (time.time, open, os.urandom, os.path.exists)]
    ['time.time', 'open', 'os.urandom', 'os.path.exists']
    """
    module, name = _named(type(function) if type(function) in _STREAMS else function)
    return f"{_WRITTEN.get(module, module)}.{name}".removeprefix("builtins.")


_WRITTEN = {
    "posix": "os",
    "genericpath": "os.path",
    "_io": "builtins",
    "io": "builtins",
    "torch.serialization": "torch",
    "torch.cuda.memory": "torch.cuda",
    "torch.accelerator.memory": "torch.accelerator",
    "numpy.random.mtrand": "numpy.random",
}


def _named(value: object) -> tuple[str, str]:
    return getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "")
