"""Selections that outlive a process: measured once, and whatever the files hold, nothing breaks."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

import pygraph
from pygraph.calls.remembered import Remembered
from pygraph.ir.selections import Candidate, Compared, Selection
from pygraph.runtime.devices import driver_for
from pygraph.runtime.samples import Sample


class Device:
    """How a device samples here: launches are slow, replays fast; and how often it was asked."""

    def __init__(self) -> None:
        self.asked, self.times = 0, {"launch": 50.0}

    def sample(self, driver: Any, run: Any, *, latency: bool = False) -> Sample:
        run()
        self.asked += 1
        time = self.times.get(run.way, 10.0)
        return Sample(time, time)

    def replay_time(self, driver: Any, graph: Any, restore: Any = None) -> float:
        self.asked += 1
        return 5.0


@pytest.fixture
def measured(device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Generator[Device, None, None]:
    """A device that remembers what it has measured, in a folder of the test's."""
    monkeypatch.setenv("PYGRAPH_CACHE_DIR", str(tmp_path))
    found = Device()
    driver = driver_for(device)
    assert driver is not None
    for name in ("sample", "replay_time"):
        original = getattr(found, name)
        monkeypatch.setattr(
            type(driver), name, lambda driver, *args, original=original, **options: original(driver, *args, **options)
        )
    monkeypatch.setattr(type(driver), "identity", lambda driver: ("a GPU", "driver 1"))
    monkeypatch.setattr(type(driver), "is_exact", False)
    monkeypatch.setattr(type(driver), "others", lambda driver: None)  # not even other tests
    return found


def step(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x * 2) + 1


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("selections/*/*.json"))


def run(x: torch.Tensor, **options: Any) -> dict[str, Any]:
    """What a new function, as in a new process, selects."""
    fn = pygraph.select(pygraph.graphify(pygraph.indirect(pygraph.devicify(step))), **options)
    for n in range(3):
        torch.testing.assert_close(fn(x + n), step(x + n))
    (region,) = fn.explain().to_dict()["regions"]
    assert region["selection"]["chosen"]["way"] == region["way"]
    return region["selection"]


@pytest.mark.parametrize("way", ["launch", "patch"])
def test_a_second_process_measures_nothing(measured: Device, device: torch.device, tmp_path: Path, way: str) -> None:
    measured.times = {"launch": 50.0 if way == "patch" else 1.0}
    x = torch.ones(4, device=device)
    first = run(x)
    assert first["chosen"]["way"] == way
    assert measured.asked > 0
    measured.asked = 0
    assert run(x) == first
    assert measured.asked == 0
    assert len(files(tmp_path)) == 1


def test_the_key_has_all_that_it_depends_on(
    measured: Device, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(4, device=device)
    run(x)
    run(torch.ones(5, device=device))
    assert len(files(tmp_path)) == 2
    run(x, objective="cpu")
    assert len(files(tmp_path)) == 3
    driver = driver_for(device)
    monkeypatch.setattr(type(driver), "identity", lambda driver: ("a GPU", "driver 2"))
    run(x)
    assert len(files(tmp_path)) == 4


def test_a_timer_of_the_caller_is_not_remembered(measured: Device, device: torch.device, tmp_path: Path) -> None:
    run(torch.ones(4, device=device), timer=lambda run: 10.0 if run.way == "patch" else 20.0)
    run(torch.ones(4, device=device), mode="heuristic")
    assert files(tmp_path) == []


DAMAGED = [
    b"", b"{", b"[]", b"null", b"3", b"\xff\xfe", b'{"format": 1}', b"[" * 100_000,
    b'{"format": 1, "key": 3, "selections": {}}',
    json.dumps({"format": 99, "key": "", "regions": 1, "selections": {}}).encode(),
]  # fmt: skip


@pytest.mark.parametrize("damage", range(len(DAMAGED)))
def test_a_damaged_file_is_measured_anew(measured: Device, device: torch.device, tmp_path: Path, damage: int) -> None:
    x = torch.ones(4, device=device)
    expected = run(x)
    (path,) = files(tmp_path)
    path.write_bytes(DAMAGED[damage])
    measured.asked = 0
    assert run(x)["chosen"] == expected["chosen"]
    assert measured.asked > 0
    assert json.loads(path.read_text())["format"] == 1  # it is written again


@pytest.mark.rotates
@pytest.mark.parametrize("field", ["chosen", "compared", "lead", "reason", "confidence", "when", "mechanism"])
@pytest.mark.parametrize("value", [None, 3, "no", [], {"way": "fly", "mechanism": "auto"}, [[1]], True])
def test_a_file_with_a_wrong_field(
    measured: Device, device: torch.device, tmp_path: Path, field: str, value: Any
) -> None:
    x = torch.ones(4, device=device)
    if not files(tmp_path):
        run(x)
    (path,) = files(tmp_path)
    data = json.loads(path.read_text())
    data["selections"]["0"][field] = value
    path.write_text(json.dumps(data))
    assert run(x)["chosen"]["way"] == "patch"


def test_a_file_of_another_program(measured: Device, device: torch.device, tmp_path: Path) -> None:
    run(torch.ones(4, device=device))
    run(torch.ones(5, device=device))
    one, other = files(tmp_path)
    one.write_text(other.read_text())
    measured.asked = 0
    run(torch.ones(4, device=device))
    run(torch.ones(5, device=device))
    assert measured.asked > 0


def test_a_file_with_regions_that_are_not_there(measured: Device, device: torch.device, tmp_path: Path) -> None:
    x = torch.ones(4, device=device)
    run(x)
    (path,) = files(tmp_path)
    data = json.loads(path.read_text())
    data["selections"]["7"] = data["selections"].pop("0")
    path.write_text(json.dumps(data))
    run(x)


def test_a_folder_that_is_a_file(
    measured: Device, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("PYGRAPH_CACHE_DIR", str(blocked))
    run(torch.ones(4, device=device))


@pytest.fixture
def program(device: torch.device) -> pygraph.Program:
    return pygraph.graphify(pygraph.indirect(pygraph.trace(step)(torch.ones(4, device=device))))


def test_writers_at_the_same_time(program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers see a whole file of one of them, or none."""
    monkeypatch.setenv("PYGRAPH_CACHE_DIR", str(tmp_path))
    store = Remembered("ab" * 32)
    patch = Candidate("patch")
    written = [{0: Selection(patch, str(n), (Compared(patch, n, n, n, 7),) * 20)} for n in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for selections in written:
            pool.submit(store.write, program, selections)
        found = [pool.submit(store.read) for _ in range(50)]
    for one in found:
        assert one.result()[1] in [{}, *written]


def test_old_files_make_room(program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGRAPH_CACHE_DIR", str(tmp_path))
    selections = {0: Selection(Candidate("patch"), "it was the fastest")}
    for n in range(80):
        Remembered(f"ab{n:062x}").write(program, selections)
    assert len(files(tmp_path)) == 64
    assert Remembered(f"ab{79:062x}").read() == (1, selections)


def test_what_is_provisional_is_not_remembered(program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGRAPH_CACHE_DIR", str(tmp_path))
    Remembered("ab" * 32).write(program, {0: Selection(Candidate("patch"), "for now", provisional="it was busy")})
    assert files(tmp_path) == []


@pytest.mark.parametrize("way", ["launch", "patch"])
def test_nodes_that_the_device_refuses(measured: Device, device: torch.device, tmp_path: Path, way: str) -> None:
    """They are cut out again by the second process, and the regions between them are those of the first one."""
    measured.times = {
        "launch": 50.0 if way == "patch" else 1.0,
        "the whole by graphs": 10.0,
        "the whole by launch": 90.0,
    }

    def parted(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.pygraph_tests.refused(x * 2 + 1) * 3 + 1

    _define_refused()
    x = torch.ones(4, device=device)
    ways = []
    for _ in range(2):
        measured.asked = 0
        fn = pygraph.select(pygraph.graphify(pygraph.indirect(parted)))
        torch.testing.assert_close(fn(x), parted(x))
        ways.append([(region["kind"], region["way"]) for region in fn.explain().to_dict()["regions"]])
    assert measured.asked == 0
    assert ways[0] == ways[1]
    assert ("graph", way) in ways[0]


def _define_refused() -> None:
    """Define an operation that waits for the device, which no graph may."""
    if hasattr(torch.ops.pygraph_tests, "refused"):
        return

    @torch.library.custom_op("pygraph_tests::refused", mutates_args=())
    def refused(x: torch.Tensor) -> torch.Tensor:
        return x + x.sum().item()

    refused.register_fake(torch.empty_like)
