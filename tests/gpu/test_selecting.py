"""Selections by a GPU's own times: alone, beside processes that keep it busy, and in a second process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pygraph
from pygraph.runtime.cuda.timing import sample
from pygraph.runtime.cuda.utilization import busy_processes
from pygraph.runtime.driver import Run

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def own_times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The driver's own samples, not those of the other tests, and a cache directory of the test's."""
    monkeypatch.undo()
    monkeypatch.setenv("PYGRAPH_CACHE_DIR", str(tmp_path))


def layers(count: int) -> nn.Module:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(count):
        parts += [nn.Linear(64, 64), nn.ReLU()]
    return nn.Sequential(*parts).cuda().eval()


def selections(fn: Any) -> list[dict[str, Any]]:
    return [{"way": region["way"], **(region["selection"] or {})} for region in fn.explain().to_dict()["regions"]]


def test_a_sample_has_times_of_host_and_device_apart() -> None:
    x = torch.zeros(1 << 26, device="cuda")
    long = sample(Run(lambda: [x.add_(1) for _ in range(4)]), DEVICE, latency=True)
    assert long.host < long.device  # a few launches, and about half a gigabyte each
    assert long.latency is not None
    assert long.latency > 0.8 * long.device
    assert long.clock is not None
    assert 100 < long.clock < 10_000  # MHz
    small = torch.zeros(4, device="cuda")
    shorts = [sample(Run(lambda: [small.add_(1) for _ in range(5)]), DEVICE) for _ in range(5)]
    # On a busy host, launches may take longer than the longest sleep of the device: some times are those of the host.
    assert min(short.device for short in shorts) < long.device
    assert all(short.latency is None for short in shorts)


def test_many_kernels_are_a_graph() -> None:
    net, x = layers(20), torch.randn(4, 64, device="cuda")
    fast = pygraph.jit(net)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), net(x))
    (found,) = selections(fast)
    assert found["way"] == "patch"
    assert {one["candidate"]["way"] for one in found["compared"]} >= {"launch", "patch"}


_BUSY = """
import sys, time, torch
x = torch.randn(4096, 4096, device="cuda")
y = torch.empty_like(x)
torch.mm(x, x, out=y)
torch.cuda.synchronize()
print("busy", flush=True)
end = time.time() + float(sys.argv[1])
while time.time() < end:
    for _ in range(20):
        torch.mm(x, x, out=y)
    torch.cuda.synchronize()
"""


@contextlib.contextmanager
def company(count: int, seconds: float = 60.0) -> Generator[None, None, None]:
    """Processes that keep the device busy."""
    command = [sys.executable, "-c", _BUSY, str(seconds)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "busy\n"
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("count", [1, 3])
def test_beside_processes_that_keep_it_busy(count: int) -> None:
    """Graphs stay graphs, and say that they will be measured again unless the difference was beyond doubt."""
    x = torch.randn(4, 64, device="cuda")
    with company(count), torch.no_grad():
        time.sleep(1.5)  # for samples of who uses the device
        print("seen:", busy_processes(DEVICE))
        for size in (2, 8, 40):
            net = layers(size)
            fast = pygraph.jit(net)
            for _ in range(3):
                torch.testing.assert_close(fast(x), net(x))
            (found,) = selections(fast)
            print(size, fast.explain())
            assert found["way"] == "patch"


_SECOND = """
import torch, pygraph
from pygraph.runtime.cuda.driver import CudaDriver
from tests.gpu.test_selecting import layers, selections

taken = 0
for name in ("sample", "replay_time"):
    original = getattr(CudaDriver, name)

    def counted(*args, original=original, **options):
        global taken
        taken += 1
        return original(*args, **options)

    setattr(CudaDriver, name, counted)
net = pygraph.jit(layers(8))
with torch.no_grad():
    for _ in range(3):
        net(torch.randn(4, 64, device="cuda"))
(found,) = selections(net)
print(taken, found["way"], found["provisional"] is None, found["when"])
"""


def test_a_second_process_measures_nothing(tmp_path: Path) -> None:
    env = {**os.environ, "PYGRAPH_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}

    def run() -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", _SECOND], env=env, capture_output=True, text=True, check=False, timeout=240
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    for _ in range(5):  # other tests may keep the device busy, and then nothing is remembered
        taken, way, is_final, when = run()
        assert int(taken) > 0
        if is_final == "True":
            break
    else:
        pytest.skip("the device was busy all the time")
    assert run() == ["0", way, "True", when]
