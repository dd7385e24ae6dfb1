"""Results as files: one of JSON for each row, written in one step when the row is finished."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.table.workload import Workload
from pygraph.errors import PygraphError

Row = dict[str, Any]
"""The result of a row: what it is, what was measured of each way, and where."""


class ResultError(PygraphError):
    """A file of results cannot be read.

    Example: it was cut off. Remedy: delete it, and measure its row anew.
    """


def path_of(folder: Path, name: str, ablation: bool) -> Path:
    """The file of a row."""
    return folder / f"{name}{'.ablation' if ablation else ''}.json"


def write(folder: Path, name: str, row: Row, ablation: bool) -> None:
    """Write the result of a row: the whole file or none."""
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(folder, name, ablation)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(row, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def read(folder: Path, ablation: bool) -> list[Row]:
    """All results of a folder, in the order of the table.

    Raises:
        ResultError: A file is no result.
    """
    rows: list[Row] = []
    for path in sorted(folder.glob("*.json")):
        if path.name.endswith(".ablation.json") != ablation:
            continue
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
            row["ways"], row["number"]
        except (ValueError, KeyError, TypeError) as error:
            raise ResultError(f"bench: {path} is no result ({error}). Delete it and measure its row anew.") from error
        rows.append(row)
    return sorted(rows, key=lambda row: (row["number"], row["row"]))


def description(workload: Workload, number: int) -> Row:
    """The row without what is measured."""
    return {
        "row": workload.name,
        "number": number,
        "title": workload.title,
        "training": workload.training,
        "batch_size": workload.batch_size,
        "source": workload.source,
        "hard": workload.hard,
        "differs": workload.differs,
        "ways": {},
    }


def environment() -> Row:
    """Versions, the GPU, and the command."""
    import torch

    import pygraph
    from pygraph.process.cache import source_hash

    found: Row = {
        "command": command_line(sys.argv[1:]),
        "pygraph": f"{pygraph.__version__}, source {source_hash()[:12]}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "gpu": gpu(),
        "cores": len(cores()),
    }
    if torch.cuda.is_available():
        found["driver"] = _driver()
    return found


def command_line(arguments: list[str]) -> str:
    """The command that was run, without this machine's folders.

    >>> command_line(["bench", "--out", "/tmp/a/table", "--shard", "1/2"])
    'python -m pygraph bench --out table --shard 1/2'
    """
    return " ".join(["python -m pygraph", *(Path(one).name if one.startswith("/") else one for one in arguments)])


def cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def gpu() -> str:
    """The GPU's name; "emulated" where there is none, or where it is not to be used."""
    import torch

    import pygraph

    if pygraph.default_device().type != "cuda":
        return "emulated"
    return torch.cuda.get_device_name()


def _driver() -> str | None:
    try:
        from cuda.bindings import driver  # pyright: ignore

        version = driver.cuDriverGetVersion()[1]
        return f"{version // 1000}.{version % 1000 // 10}"
    except Exception:  # of no importance for the results
        return None


def folder_name(gpu: str) -> str:
    """The folder of results, by GPU.

    >>> folder_name("NVIDIA H200"), folder_name("NVIDIA H100 80GB HBM3")
    ('table-h200', 'table-h100-80gb-hbm3')
    """
    words = re.findall(r"[a-z0-9]+", gpu.lower())
    return "-".join(["table", *(word for word in words if word != "nvidia")])
