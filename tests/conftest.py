"""What all tests share: hypothesis profiles, the two devices, and which tests run where."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import os
from collections.abc import Generator

import pytest
import torch

from pygraph.process import extension
from tests import leftovers, steady

try:
    import hypothesis
except ModuleNotFoundError:  # property tests need it and say so themselves
    pass
else:
    hypothesis.settings.register_profile("dev", deadline=None)
    hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
    hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")

if not torch.cuda.is_available():
    # The autograd engine counts devices when it first runs, which a test without a device may make it do.
    from pygraph.runtime.emulated import driver as emulated

    emulated.driver()

# Built before the first test, so that every run of the tests takes the same paths.
extension.start(wait=True)

if importlib.util.find_spec("triton") is None:
    collect_ignore = ["triton_kernels.py"]  # its kernels are defined when it is imported

torch.set_num_threads(1)  # the workers of pytest-xdist share the cores


def pytest_addoption(parser: pytest.Parser) -> None:
    """How much of `tests/conformance` to run."""
    parser.addoption(
        "--conformance-samples",
        type=int,
        metavar="N",
        help="run N samples of each operator, dtype and kind; default: all",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the GPU tests to runs that ask for them: one process never uses both devices."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is False"))
    elif "gpu" not in config.option.markexpr:
        items[:] = [item for item in items if item not in marked]
        config.hook.pytest_deselected(items=marked)


_TESTS = itertools.count()


@pytest.fixture(autouse=True)
def small_collections() -> None:
    """Let collections look only at what the last tests have made.

    By the end of a run a worker holds a gigabyte of traces and compiled code, and tests that look for leaks collect
    thousands of times.
    """
    if next(_TESTS) % 50 == 0:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def steady_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `select` choose the same way in every run: on CUDA, where it would measure, patched graphs win."""
    if not torch.cuda.is_available():
        return
    from pygraph.runtime.cuda.driver import CudaDriver

    monkeypatch.setattr(CudaDriver, "measure", steady.measure)


@pytest.fixture(autouse=True)
def same_stream() -> Generator[None, None, None]:
    """Notice what leaves another CUDA stream or device the current one: the next test would race with other threads."""
    before = _current_stream()
    yield
    assert _current_stream() == before, "the current CUDA stream or device is another one than before the test"


@pytest.fixture(autouse=True)
def nothing_left() -> Generator[None, None, None]:
    """Notice modes, patches and settings that a trace leaves in the process or in this thread."""
    before = leftovers.state()
    yield
    assert leftovers.changed(before) == []


def _current_stream() -> tuple[int, int]:
    if not torch.cuda.is_initialized():
        return 0, 0
    return torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream


@pytest.fixture(params=["emu", pytest.param("cuda", marks=pytest.mark.gpu)], scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The emulated device, and the first GPU in runs with ``-m gpu``."""
    if request.param == "emu":
        from pygraph.runtime.emulated import driver as emulated

        emulated.driver()  # registers the torch device
    return torch.device(request.param, 0)


@pytest.fixture(params=[True, False], ids=["native", "python"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether calls may take the path in C++; without a compiler, both ways take the one in Python."""
    monkeypatch.setenv("PYGRAPH_NATIVE", str(int(request.param)))
    return request.param
