"""``python -m pygraph info`` and ``build``: versions, the device, how calls are recognised, and what is on disk."""

from __future__ import annotations

import platform
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import pygraph
from pygraph.errors import PygraphError
from pygraph.lowering import run_cache
from pygraph.process import cache, extension, progress
from pygraph.runtime.devices import default_device, driver_for

_PACKAGES = ("torch", "triton", "cuda-bindings", "cuda-core", "numpy")


def info(console: Console, clear: bool = False) -> int:
    """Print what there is.

    Args:
        console: Where.
        clear: Whether to remove what is kept on disk first.

    Returns:
        The exit code.
    """
    if clear:
        removed = sum(cache.remove(path) for paths in _stored().values() for path in paths)
        console.print(f"removed: {cache.readable(removed)}", highlight=False)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in _facts():
        table.add_row(name, value)
    console.print(table)
    console.print(_caches())
    return 0


def build(console: Console) -> int:
    """Build the path in C++ now, and wait for it.

    Returns:
        The exit code: 2 if it cannot be built.
    """
    start = time.perf_counter()
    with progress.compiling("the path in C++"):
        found = extension.start(wait=True)
    if found is None:
        console.print(f"calls are recognised in Python: {extension.reason()}", highlight=False, soft_wrap=True)
        return 2
    console.print(f"{found.__file__} is ready, after {time.perf_counter() - start:.1f} s", soft_wrap=True)
    return 0


def _facts() -> list[tuple[str, str]]:
    """Names and values of all that is no cache."""
    found = [
        ("pygraph", f"{pygraph.__version__}, {Path(pygraph.__file__).parent}"),
        ("Python", platform.python_version()),
    ]
    found += [(name, cache.installed_version(name)) for name in _PACKAGES]
    return [*found, ("device", _device()), ("calls", extension.state())]


def _device() -> str:
    try:
        device = default_device()
        driver = driver_for(device)
    except (PygraphError, ImportError) as error:
        return str(error)
    if device.type == "cuda":
        count, identity = torch.cuda.device_count(), None if driver is None else driver.identity()
        return ", ".join([str(device) if count == 1 else f"{device} of {count}", *(identity or ())[:2]])
    return f"{device.type}: PYGRAPH_DEVICE asks for it, or torch sees no CUDA device"


def _stored() -> dict[str, list[Path]]:
    """Files and folders that outlive processes, by what they are."""
    return {**cache.stored(), "fused code": [folder] if (folder := run_cache.folder()).is_dir() else []}


def _caches() -> Table:
    table = Table(title="on disk", title_justify="left")
    for column in ("what", "files", "size", "where"):
        table.add_column(column, overflow="fold", justify="left" if column in ("what", "where") else "right")
    for what, paths in _stored().items():
        files = [file for path in paths for file in cache.files(path)]
        where = str(run_cache.folder() if what == "fused code" else cache.cache_directory())
        table.add_row(what, str(len(files)), cache.readable(sum(file.stat().st_size for file in files)), where)
    return table
