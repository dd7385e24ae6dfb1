"""Settings of torch's that change while a function is traced: by it, or by another thread, whose they stay."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
import torch.__future__
from torch import _tensor_str

import pygraph
from pygraph.errors import DisturbedTraceError, TraceError
from tests.leftovers import all_restored

SETTERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {
    "dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "cudnn": (
        lambda: torch.backends.cudnn.enabled,
        lambda on: torch.backends.cudnn.set_flags(on),
        not torch.backends.cudnn.enabled,
    ),
    "flash attention": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
    "precision": (
        lambda: torch.backends.cuda.matmul.fp32_precision,
        lambda value: setattr(torch.backends.cuda.matmul, "fp32_precision", value),
        "tf32",
    ),
    "precision of all": (
        lambda: torch._C._get_fp32_precision_getter("generic", "all"),
        # What torch.backends.fp32_precision is: that may be locked, as by torch's own test helpers.
        lambda value: torch._C._set_fp32_precision_setter("generic", "all", value),
        "tf32",
    ),
    "older precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    "anomaly detection": (torch.is_anomaly_enabled, torch.set_anomaly_enabled, True),
    "printing": (lambda: _tensor_str.PRINT_OPTS.precision, lambda value: torch.set_printoptions(precision=value), 2),
    "oneDNN": (
        lambda: torch.backends.mkldnn.enabled,
        lambda on: torch.backends.mkldnn.set_flags(on),
        not torch.backends.mkldnn.enabled,
    ),
    "warnings": (torch.is_warn_always_enabled, torch.set_warn_always, True),
    "fast paths": (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False),
    "checks of sparse tensors": (
        torch.sparse.check_sparse_tensor_invariants.is_enabled,
        torch._C._set_check_sparse_tensor_invariants,
        True,
    ),
    "conversions": (
        torch.__future__.get_swap_module_params_on_conversion,
        torch.__future__.set_swap_module_params_on_conversion,
        True,
    ),
    "order of attentions": (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order, [2, 1, 0, 3, 4]),
    "uninitialised memory": (
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
        lambda on: setattr(torch.utils.deterministic, "fill_uninitialized_memory", on),
        False,
    ),
}


@contextlib.contextmanager
def restored(setting: str) -> Generator[tuple[Any, Any], None, None]:
    getter, _, other = SETTERS[setting]
    with all_restored():
        yield getter(), other


@contextlib.contextmanager
def another_thread() -> Generator[Callable[[Callable[[], Any]], None], None, None]:
    """Another thread, and what runs something in it and waits for that."""
    work: list[Callable[[], Any]] = []
    asked, done, ended = threading.Semaphore(0), threading.Semaphore(0), threading.Event()

    def serve() -> None:
        while asked.acquire() and not ended.is_set():
            work.pop()()
            done.release()

    def run(what: Callable[[], Any]) -> None:
        work.append(what)
        asked.release()
        assert done.acquire(timeout=60)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield run
    finally:
        ended.set()
        asked.release()
        thread.join(60)


@pytest.mark.parametrize("setting", SETTERS)
@pytest.mark.parametrize("profiled", [False, True])
def test_what_another_thread_changes_stays(setting: str, profiled: bool) -> None:
    getter, setter, _ = SETTERS[setting]
    with another_thread() as there, restored(setting) as (_, other):

        def fn(x: torch.Tensor) -> torch.Tensor:
            there(lambda: setter(other))
            return x + 1

        before = sys.getprofile()
        if profiled:
            sys.setprofile(lambda *_: None)
        try:
            with pytest.raises(DisturbedTraceError, match="another thread changes"):
                pygraph.trace(fn)(torch.ones(3))
        finally:
            sys.setprofile(before)
        assert getter() == other


def test_a_call_that_is_disturbed_runs_as_it_is_and_the_next_one_is_a_graph(device: torch.device) -> None:
    with another_thread() as there, restored("cudnn") as (_, other):

        @pygraph.jit
        def fn(x: torch.Tensor) -> torch.Tensor:
            if flags:
                there(lambda: torch.backends.cudnn.set_flags(flags.pop()))
            return x + 1

        flags = [other]
        x = torch.ones(3, device=device)
        assert torch.equal(fn(x), x + 1)
        assert torch.backends.cudnn.enabled == other
        for _ in range(3):
            assert torch.equal(fn(x), x + 1)
        assert fn.cache_info().hits >= 1


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("setting", SETTERS)
def test_what_the_function_turns_over_is_put_back_also_beside_another_thread(setting: str, fails: bool) -> None:
    getter, setter, _ = SETTERS[setting]
    with another_thread(), restored(setting) as (before, other):

        def fn(x: torch.Tensor) -> torch.Tensor:
            setter(before if getter() == other else other)
            return {}[3] if fails else x + 1

        with pytest.raises(TraceError, match="KeyError" if fails else "it changes") as raised:
            pygraph.trace(fn)(torch.ones(3))
        assert not isinstance(raised.value, DisturbedTraceError)
        assert getter() == before


@pytest.mark.parametrize("setting", SETTERS)
def test_what_the_function_sets_is_set_beside_another_thread(setting: str, device: torch.device) -> None:
    getter, setter, _ = SETTERS[setting]
    with another_thread(), restored(setting) as (before, other):

        def fn(x: torch.Tensor) -> torch.Tensor:
            setter(other)
            return x + torch.ones(3, device=device)

        jitted = pygraph.jit(fn)
        x = torch.ones(3, device=device)
        for value in (before, before, other, before):
            setter(value)
            got = jitted(x)
            assert getter() == other
            setter(value)
            expected = fn(x)
            assert torch.equal(got, expected)
            assert got.dtype == expected.dtype


@pytest.mark.parametrize("setting", ["precision", "precision of all"])
def test_the_newer_switches_of_precision_do_not_forbid_a_graph(setting: str, device: torch.device) -> None:
    """PyTorch then refuses to say what the older one is set to."""
    _, setter, _ = SETTERS[setting]
    with all_restored():
        setter("tf32")
        jitted = pygraph.jit(lambda x: x @ x + 1)
        x = torch.ones(3, 3, device=device)
        assert jitted(x).tolist() == [[4.0] * 3] * 3
        assert jitted.explain().to_dict()["fallbacks"] == []


def test_a_function_that_puts_a_setting_back_itself_is_not_taken_for_the_one_that_changed_it() -> None:
    getter, _, _ = SETTERS["cudnn"]
    with another_thread() as there, restored("cudnn") as (before, other):

        def fn(x: torch.Tensor) -> torch.Tensor:
            with torch.backends.cudnn.flags(enabled=other):
                x = x + 1
            there(lambda: torch.backends.cudnn.set_flags(other))
            return x

        with pytest.raises(DisturbedTraceError, match="another thread changes"):
            pygraph.trace(fn)(torch.ones(3))
        assert getter() == other != before
