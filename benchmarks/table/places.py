"""Places where rows run side by side: GPUs of one machine, each with a share of its cores."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.table import results
from benchmarks.table.rows import BenchError

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@dataclasses.dataclass(frozen=True)
class Place:
    """A GPU with a share of the cores.

    Attributes:
        gpu: The GPU, as ``CUDA_VISIBLE_DEVICES`` has it.
        cores: The numbers of the cores.
    """

    gpu: str
    cores: tuple[int, ...]


def places(count: int) -> list[Place]:
    """The first GPUs of the machine, with equal shares of the cores that this process may use.

    Raises:
        BenchError: There are not so many GPUs.
    """
    gpus = _gpus()
    if count > len(gpus):
        raise BenchError(f"bench --devices {count}: there are {len(gpus)} GPUs. Name as many or fewer.")
    return [Place(gpu, cores) for gpu, cores in zip(gpus, shares(_threads_of_cores(), count), strict=False)]


def shares(threads: Sequence[Sequence[int]], count: int) -> list[tuple[int, ...]]:
    """Share cores out; threads of one core stay together, as they slow each other down.

    Args:
        threads: The threads of each core.
        count: The number of shares.

    >>> shares([(0, 4), (1, 5), (2, 6), (3, 7)], 2)
    [(0, 4, 1, 5), (2, 6, 3, 7)]
    >>> shares([(0, 1)], 2)  # there are too few
    [(0, 1), (0, 1)]
    """
    if len(threads) < count:
        return [tuple(one for core in threads for one in core)] * count
    ends = [round(len(threads) * number / count) for number in range(count + 1)]
    return [tuple(one for core in threads[begin:end] for one in core) for begin, end in itertools.pairwise(ends)]


def _gpus() -> list[str]:
    """The GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` has them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [one for one in named.split(",") if one.strip()]
    return [str(number) for number in range(torch.cuda.device_count())]


def _threads_of_cores() -> list[tuple[int, ...]]:
    """The threads of each core that this process may use."""
    cores: dict[str, list[int]] = {}
    for number in results.cores():
        path = Path(_TOPOLOGY.format(number))
        cores.setdefault(path.read_text() if path.exists() else str(number), []).append(number)
    return [tuple(core) for core in cores.values()]
