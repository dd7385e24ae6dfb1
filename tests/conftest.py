"""What all tests share: hypothesis profiles, the two devices, and which tests run where."""

from __future__ import annotations

import datetime
import gc
import importlib.util
import itertools
import os
from collections import defaultdict
from collections.abc import Generator
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch._dynamo.utils import CleanupManager  # checked with torch 2.11 and 2.13

from pygraph.calls import comparing
from pygraph.process import extension
from pygraph.tracing import specialization
from tests import extent, leftovers, steady
from tests.memory import free_objects
from tests.pairwise import cover

if not torch.cuda.is_available():
    # The autograd engine counts devices when it first runs, which a test without a device may make it do.
    from pygraph.runtime.emulated import driver as emulated

    emulated.driver()

# Built before the first test, so that every run of the tests takes the same paths.
extension.start(wait=True)

if importlib.util.find_spec("triton") is None:
    collect_ignore = ["triton_kernels.py"]  # its kernels are defined when it is imported

comparing.MEASURES = False  # what calls do would depend on time

os.environ.setdefault("PYGRAPH_PROGRESS", "0")  # where standard error is a terminal

torch.set_num_threads(1)  # the workers of pytest-xdist share the cores


@pytest.fixture
def fresh_dynamo() -> Generator[None, None, None]:
    """Dynamo as if nothing had been compiled, also afterwards."""
    from pygraph.interop import live

    torch._dynamo.reset()
    live.CALLABLES.clear()  # what other tests have compiled may be alive still
    yield
    torch._dynamo.reset()


def pytest_addoption(parser: pytest.Parser) -> None:
    """How much to run."""
    parser.addoption(
        "--long",
        action="store_true",
        help="run everything: slow tests, whole products, all of tests/conformance, random examples",
    )
    parser.addoption(
        "--conformance-samples",
        type=int,
        metavar="N",
        help="run N samples of each operator, dtype and kind; default: 1, with --long all",
    )
    parser.addoption(
        "--day",
        type=int,
        default=datetime.date.today().toordinal(),
        help="the number of the day, by which a short run takes a third of what rotates; default: today's",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Settle what this run does, before its workers are started and its modules imported."""
    extent.CHOSEN = extent.Extent(config.option.long, config.option.day)
    if config.option.long and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(config))
    if not config.option.long:
        if config.option.conformance_samples is None:
            config.option.conformance_samples = 1
        # Inductor tries what the processor can do in half a dozen processes, here and in those that tests start.
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
        torch._inductor.config.cpp.vec_isa_ok = False  # checked with torch 2.11 and 2.13
    try:
        import hypothesis
    except ModuleNotFoundError:  # property tests need it and say so themselves
        return
    # The same examples in every short run, so that a failure is a failure everywhere; a long run looks for new ones.
    hypothesis.settings.register_profile("short", deadline=None, derandomize=True, print_blob=True, database=None)
    hypothesis.settings.register_profile("long", deadline=None, print_blob=True)
    hypothesis.settings.load_profile("long" if config.option.long else "short")


class FailuresAtOnce:
    """Failures of a long run, told when they happen: such a run takes hours, and may be cut off before its end."""

    def __init__(self, config: pytest.Config) -> None:
        self._plugins = config.pluginmanager

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the end of a failure."""
        terminal = self._plugins.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\n{report.nodeid} failed:\n{report.longreprtext[-4000:]}")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """What this run leaves out."""
    lines = ["pygraph: no CUDA device, so that no GPU test is run"] if not torch.cuda.is_available() else []
    if config.option.long:
        return [*lines, "pygraph: the long run, with all tests"]
    return [*lines, f"pygraph: the short run, with what rotates as on --day {config.option.day}"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is for a GPU, unless it is asked for, and what a short run leaves out."""
    left_out: set[pytest.Item] = set()
    # One process never uses both devices.
    if not torch.cuda.is_available() or "gpu" not in config.option.markexpr:
        left_out.update(item for item in items if item.get_closest_marker("gpu"))
    if not config.option.long:
        if "slow" not in config.option.markexpr:
            left_out.update(item for item in items if item.get_closest_marker("slow"))
        left_out |= _left_out_of_products([item for item in items if item not in left_out])
        left_out |= _left_out_today([item for item in items if item not in left_out])
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))
    given: dict[str, Any] = getattr(config, "workerinput", {})
    items[:] = _heap_first(items, given.get("workercount", 1))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse modules that register the emulated device in a run for a GPU: no backward on the GPU works afterwards."""
    if any(item.get_closest_marker("gpu") for item in session.items):
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or accelerator.type != "cuda":
            raise pytest.UsageError(f"a test module made {accelerator} torch's accelerator while it was imported")


def _heap_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """The items, with those marked ``heap`` at the beginning of the parts that xdist gives to workers at first."""
    early = [item for item in items if item.get_closest_marker("heap")]
    others = (item for item in items if not item.get_closest_marker("heap"))
    ordered: list[pytest.Item] = []
    for number in range(workers):
        size = (len(items) - len(ordered)) // (workers - number)
        part = early[number::workers]
        ordered += [*part, *itertools.islice(others, max(size - len(part), 0))]
    return [*ordered, *others]


def _left_out_of_products(items: list[pytest.Item]) -> set[pytest.Item]:
    """The cases of tests marked ``pairwise`` without which every two values still occur together."""
    products: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("pairwise") and hasattr(item, "callspec"):
            products[item.nodeid.partition("[")[0]].append(item)
    left_out: set[pytest.Item] = set()
    for cases in products.values():
        strength = cases[0].get_closest_marker("pairwise").kwargs.get("strength", 2)  # type: ignore[union-attr]
        # A product has the very same objects in its cases, whatever they are equal to.
        values = [{name: id(value) for name, value in case.callspec.params.items()} for case in cases]  # type: ignore[attr-defined]
        chosen = set(cover(values, strength))
        left_out.update(case for position, case in enumerate(cases) if position not in chosen)
    return left_out


def _left_out_today(items: list[pytest.Item]) -> set[pytest.Item]:
    """Of the items marked ``rotates``, two thirds of each module, where a whole module is collected."""
    modules: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("rotates"):
            modules[item.nodeid.partition("::")[0]].append(item)
    left_out: set[pytest.Item] = set()
    for found in modules.values():
        if len(found) >= 3:  # else somebody asks for a test
            left_out.update(set(found).difference(extent.third(found)))
    return left_out


def pytest_unconfigure() -> None:
    """Have Dynamo take nothing out of modules any more: at the end of a process their names are gone before code is."""
    CleanupManager.instance.clear()


_TESTS = itertools.count()


@pytest.fixture(autouse=True)
def small_collections() -> None:
    """Let collections look only at what a test makes.

    By the end of a run a worker holds a gigabyte of traces and compiled code, and tests that look for leaks collect
    thousands of times.
    """
    if next(_TESTS) % 150 == 0:
        free_objects()
    gc.freeze()


@pytest.fixture(autouse=True)
def steady_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `select` choose the same way in every run: on CUDA, where it would measure, patched graphs win."""
    if torch.cuda.is_available():
        steady.install(monkeypatch.setattr)


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


_DEVICES = ["emu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=_DEVICES if torch.cuda.is_available() else ["emu"], scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The emulated device, and the first GPU in runs with ``-m gpu``."""
    if request.param == "emu":
        from pygraph.runtime.emulated import driver as emulated

        emulated.driver()  # registers the torch device
    return torch.device(request.param, 0)


@pytest.fixture
def empty_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding that names an argument in both recordings counts as a pointer to it: here it starts without addresses."""
    from pygraph.runtime.emulated import parameters

    monkeypatch.setattr(parameters, "stale_words", parameters.StaleWords())


@pytest.fixture(params=[True, False], ids=["native", "python"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether calls may take the path in C++; without a compiler, both ways take the one in Python."""
    monkeypatch.setenv("PYGRAPH_NATIVE", str(int(request.param)))
    return request.param


@pytest.fixture(params=[None, 1], ids=["small", "large"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a first call as they are, and as if all of them were large: copies on the host, shared memory."""
    if request.param is not None:
        from pygraph.runtime import host_copies

        monkeypatch.setattr(host_copies, "LARGE", request.param)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes of the functions that are traced from now on, in order."""
    found: list[str] = []
    record = specialization.record

    def noted(*args: Any) -> Any:
        found.append(type(args[0]).__name__)
        return record(*args)

    monkeypatch.setattr(specialization, "record", noted)
    return found
