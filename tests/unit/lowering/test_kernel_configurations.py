"""Kernels that Triton's optimizer fails at in one of the configurations that Inductor chooses from."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch._inductor.async_compile as async_compile
import torch._inductor.codecache as codecache
from torch._inductor.codecache import LambdaFuture
from torch._inductor.compile_worker.subproc_pool import SubprocException

from pygraph.lowering import kernel_configurations
from pygraph.lowering.inductor import settings
from pygraph.lowering.kernel_configurations import other_configurations_tried

FAILURE = "PassManager::run failed"


@dataclasses.dataclass
class Configuration:
    block: int
    num_warps: int = 4


@dataclasses.dataclass
class Kernel:
    """A kernel of Inductor's that compiles where an element is left to a thread, or fails in another way."""

    configs: list[Configuration] | None
    fails: Callable[[Configuration], Exception | None]
    compile_results: list[Configuration] = dataclasses.field(default_factory=list[Configuration])
    tried: list[tuple[int, int]] = dataclasses.field(default_factory=list[tuple[int, int]])
    is_ready: bool = False
    fails_elsewhere: bool = False

    def _precompile_config(self, configuration: Configuration) -> Configuration:
        self.tried.append((configuration.block, configuration.num_warps))
        error = self.fails(configuration)
        if error is not None:
            raise error
        return configuration

    def precompile(self, warm_cache_only: bool, static_triton_bundle_key: str) -> None:
        self.is_ready = True


def many_elements(configuration: Configuration) -> Exception | None:
    """What Triton's optimizer says of more than four elements for each thread."""
    return RuntimeError(FAILURE) if configuration.block > 4 * 32 * configuration.num_warps else None


Compile = Callable[[Kernel, bool], Any]


@pytest.fixture
def compile_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compile]:
    """A function that compiles a kernel as Inductor does, in this process or in another one."""
    kernels: list[Kernel] = []
    removed: list[str] = []

    def in_a_row(kernel: Kernel) -> Kernel:
        for configuration in kernel.configs or ():
            kernel._precompile_config(configuration)  # pyright: ignore[reportPrivateUsage]
        kernel.precompile(False, "")
        return kernel

    def in_a_process(kernel: Kernel) -> Kernel:
        if kernel.fails_elsewhere:
            raise SubprocException(f"RuntimeError: {FAILURE}")
        try:
            return in_a_row(kernel)
        except Exception as error:
            raise SubprocException(f"Traceback …\n{type(error).__name__}: {error}") from None

    def triton(self: Any, kernel_name: str, source_code: str, device_str: str = "cuda") -> Any:
        (kernel,) = kernels
        if source_code == "of a process":
            return LambdaFuture(functools.partial(in_a_process, kernel))
        return in_a_row(kernel)

    monkeypatch.setattr(async_compile.AsyncCompile, "triton", triton)
    monkeypatch.setattr(codecache, "_load_triton_kernel_from_source", lambda name, source: kernels[0])
    monkeypatch.setattr(async_compile.CompiledTritonKernels, "remove_future", removed.append)
    kernel_configurations._install.cache_clear()  # pyright: ignore[reportPrivateUsage]

    def compile_(kernel: Kernel, by_a_process: bool) -> Any:
        kernels[:] = [kernel]
        source = "of a process" if by_a_process else "of this one"
        made: Any = async_compile.AsyncCompile.triton(None, "triton_poi_fused_sin_0", source)  # pyright: ignore
        made = made.result() if by_a_process else made
        assert made is kernel
        return made

    yield compile_
    kernel_configurations._install.cache_clear()  # pyright: ignore[reportPrivateUsage]


by_a_process = pytest.mark.parametrize("by_a_process", [True, False])


@by_a_process
def test_others_are_compiled_and_one_with_more_warps(compile_kernel: Compile, by_a_process: bool) -> None:
    kernel = Kernel([Configuration(1024), Configuration(512, 8)], many_elements)
    with other_configurations_tried():
        compile_kernel(kernel, by_a_process)
    assert kernel.is_ready
    assert kernel.configs is None
    assert kernel.compile_results == [Configuration(1024, 8), Configuration(512, 8)]


def test_a_kernel_of_two_graphs(compile_kernel: Compile) -> None:
    """Whoever compiles the same source again in another process gets the kernel that was compiled in this one."""
    kernel = Kernel([Configuration(1024), Configuration(512, 8)], many_elements)
    with other_configurations_tried():
        compile_kernel(kernel, True)
        tried, kernel.fails_elsewhere = list(kernel.tried), True
        compile_kernel(kernel, True)
    assert kernel.tried == tried
    assert kernel.compile_results == [Configuration(1024, 8), Configuration(512, 8)]


@by_a_process
def test_one_that_is_the_only_one(compile_kernel: Compile, by_a_process: bool) -> None:
    kernel = Kernel([Configuration(4096)], many_elements)
    with settings():  # as wherever kernels are compiled
        compile_kernel(kernel, by_a_process)
    assert kernel.compile_results == [Configuration(4096, 32)]


@by_a_process
def test_configurations_that_inductor_drops_too_are_dropped(compile_kernel: Compile, by_a_process: bool) -> None:
    class OutOfResources(Exception):
        pass

    def fails(configuration: Configuration) -> Exception | None:
        return OutOfResources("shared memory") if configuration.block == 2048 else many_elements(configuration)

    kernel = Kernel([Configuration(1024), Configuration(2048), Configuration(256)], fails)
    with other_configurations_tried():
        compile_kernel(kernel, by_a_process)
    assert kernel.compile_results == [Configuration(1024, 8), Configuration(256)]
    assert kernel.tried[-4:] == [(1024, 4), (1024, 8), (2048, 4), (256, 4)]


@by_a_process
def test_a_kernel_that_fails_in_all_of_them(compile_kernel: Compile, by_a_process: bool) -> None:
    kernel = Kernel([Configuration(1 << 20), Configuration(1 << 21)], many_elements)
    with other_configurations_tried(), pytest.raises(RuntimeError, match=FAILURE):
        compile_kernel(kernel, by_a_process)
    assert not kernel.is_ready


@by_a_process
@pytest.mark.parametrize("error", [ValueError("no"), TypeError("no")])
def test_other_errors_are_raised(compile_kernel: Compile, by_a_process: bool, error: Exception) -> None:
    kernel = Kernel([Configuration(1024), Configuration(256)], lambda configuration: error)
    with other_configurations_tried(), pytest.raises((SubprocException, type(error)), match="no"):
        compile_kernel(kernel, by_a_process)
    assert kernel.tried == [(1024, 4)]

    second = Kernel(
        [Configuration(1024), Configuration(256)], lambda one: error if one.block == 256 else many_elements(one)
    )
    with other_configurations_tried(), pytest.raises(type(error), match="no"):
        compile_kernel(second, by_a_process)


@by_a_process
def test_compilations_of_others_are_left_alone(compile_kernel: Compile, by_a_process: bool) -> None:
    with other_configurations_tried():
        pass
    kernel = Kernel([Configuration(1024)], many_elements)
    with pytest.raises((SubprocException, RuntimeError), match=FAILURE):
        compile_kernel(kernel, by_a_process)
    assert kernel.tried == [(1024, 4)]
