"""Inductor's kernels as Triton's, as far as that can be tested without a GPU: nothing is loaded."""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from typing import Any

import pytest

from pygraph.runtime.launched_kernels import (
    holder_of,
    kernel_of,
    launched_kernels,
    rebuilt_kernel_of,
    why_not_loaded,
)
from pygraph.runtime.trampoline import compile_trampoline, parameter_sizes, runtime_parameters
from pygraph.runtime.tuned_kernels import _assemblers, autotuner, compiled_kernel, loaded

pytest.importorskip("triton")


class Loaded:
    """What Inductor launches, without a device."""

    def __init__(self, hash: str, function: int) -> None:
        self.hash, self.function = hash, function

    def run(self, *args: Any) -> None:
        pass


def launch(x: Any, out: Any, n: int, *, stream: int) -> None:
    pass


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An autotuner that has chosen its first configuration, whose kernel has the handle 4711."""
    from torch._inductor.runtime import triton_helpers

    from tests.triton_kernels import compile_only, make_inductor_kernel

    monkeypatch.setattr(triton_helpers, "set_driver_to_gpu", lambda: None)
    with compile_only():
        tuner = make_inductor_kernel()
        kernel = Loaded(tuner._precompile_config(tuner.configs[0]).kernel.hash, 4711)
        launcher: Any = types.FunctionType(launch.__code__, {"runner": kernel.run})
        launcher.config = tuner.configs[0]
        tuner.launchers = [launcher]
        yield tuner


def test_triton_makes_the_same_kernel_again(tuner: Any) -> None:
    kernel = compiled_kernel(tuner)
    assert runtime_parameters(kernel) == ["in_ptr0", "out_ptr0", "xnumel"]
    built = compile_trampoline(kernel, [0, 1])
    assert parameter_sizes(built) == parameter_sizes(kernel)
    assert built.metadata.num_warps == kernel.metadata.num_warps


def test_another_kernel_than_the_one_that_is_launched_is_none(tuner: Any) -> None:
    tuner.launchers[0].config = tuner.configs[1]
    assert compiled_kernel(tuner) is None
    tuner.launchers.append(tuner.launchers[0])  # not chosen yet
    assert compiled_kernel(tuner) is None


@pytest.mark.parametrize("remembered", [0, 1], ids=["torchs", "tritons"])
@pytest.mark.parametrize("used", [0, 1], ids=["by torchs", "by tritons"])
def test_whatever_ptxas_was_used_and_is_remembered(
    tuner: Any, used: int, remembered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor's workers have torch's; this process has what it asked for first, with or without a path set since."""
    from triton.backends.nvidia.compiler import get_ptxas_version

    assemblers = _assemblers()
    if len(assemblers) < 2:
        pytest.skip("torch comes without a ptxas")

    def remember(ptxas: str) -> None:
        monkeypatch.setenv("TRITON_PTXAS_PATH", ptxas)
        get_ptxas_version.cache_clear()
        get_ptxas_version(90)

    with monkeypatch.context() as patch:
        patch.setenv("TRITON_PTXAS_PATH", assemblers[used])
        get_ptxas_version.cache_clear()
        loaded(tuner).hash = tuner._precompile_config(tuner.configs[0]).kernel.hash
    for path in (*assemblers, None):  # which is set, when the version is known already
        remember(assemblers[remembered])
        if path is None:
            monkeypatch.delenv("TRITON_PTXAS_PATH")
        else:
            monkeypatch.setenv("TRITON_PTXAS_PATH", path)
        assert compiled_kernel(tuner) is not None
        assert os.environ.get("TRITON_PTXAS_PATH") == path
    get_ptxas_version.cache_clear()


def test_launches_are_noted_and_found_by_their_handle(tuner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: Any, *args: Any, stream: int) -> None:
        self.launchers[0](*args, stream=stream)

    monkeypatch.setattr(autotuner(), "run", run)
    assert holder_of(4711) is None
    with launched_kernels():
        type(tuner).run(tuner, None, None, 0, stream=0)
    assert autotuner().run is run  # pyright: ignore
    assert holder_of(4711) is tuner
    assert kernel_of(4711) is None
    kernel = rebuilt_kernel_of(4711)
    assert runtime_parameters(kernel) == ["in_ptr0", "out_ptr0", "xnumel"]
    assert rebuilt_kernel_of(4711) is kernel
    assert why_not_loaded(4711, "triton_poi_0") is None
    tuner.launchers[0].__globals__["runner"].__self__.function = 4712  # unloaded; the handle is another kernel's now
    assert holder_of(4711) is None
    assert rebuilt_kernel_of(4711) is None
    assert kernel_of(4712) is None
    assert why_not_loaded(4711, "triton_poi_0") == "its launch was not seen"
    assert why_not_loaded(4711, "sgemm") is None


def test_a_kernel_that_triton_does_not_make_again_has_a_reason(tuner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotuner(), "run", lambda self, stream: None)
    tuner.launchers[0].config = tuner.configs[1]
    with launched_kernels():
        type(tuner).run(tuner, stream=0)
    assert why_not_loaded(4711, "triton_poi_0") == "Triton makes another kernel of its source than Inductor has"
