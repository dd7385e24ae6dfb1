"""NVIDIA's checklist of CUDA Graphs for PyTorch: waits, streams and threads that would end a capture."""

# Functions are called on whatever torch gives them.
from __future__ import annotations

import copy
import threading
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

import pygraph
from tests.footguns.checklist import (
    Function,
    as_eager,
    close,
    counted,
    in_graphs,
    linear,
    ones,
    said,
)

# ---- Explicit waits --------------------------------------------------------------------------------------------


def test_a_wait_in_the_middle(device: torch.device) -> None:
    """The host waits at every call, so the statement runs as Python."""
    owner = torch.cuda if device.type == "cuda" else torch.emu  # type: ignore[attr-defined]

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        owner.synchronize()
        return y + 1

    fast = as_eager(lambda: function, counted(device, 3))
    assert "synchronize()" in said(fast)


@pytest.mark.gpu
def test_waits_for_streams_and_events_of_cuda() -> None:
    device = torch.device("cuda", 0)

    def function(x: torch.Tensor) -> torch.Tensor:
        host = (x * 2).to("cpu", non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return host + 1

    fast = as_eager(lambda: function, counted(device, 1 << 20))
    assert "Stream.synchronize()" in said(fast)


# ---- Values read by the host -----------------------------------------------------------------------------------

READS: dict[str, Function] = {
    "item": lambda x: (x * 2, x.sum().item()),
    "cpu": lambda x: (x * 2).cpu(),
    "numpy": lambda x: (x * 2).cpu().numpy() + 1,
    "tolist": lambda x: (x * 2, x.tolist()),
    "print": lambda x: (print(x), x * 2)[1],
}


@pytest.mark.parametrize("name", READS)
def test_a_value_that_the_host_reads(name: str, device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    """It is fresh at every call, and printed at every call."""
    fast = as_eager(lambda: READS[name], counted(device, 3))
    assert said(fast)
    printed = capsys.readouterr().out
    assert printed.count("tensor(") == (10 if name == "print" else 0)


# ---- Tensors made of Python objects ----------------------------------------------------------------------------


def test_a_tensor_made_of_a_list(device: torch.device) -> None:
    """A constant is made once, and is part of the graph; so is one that is made of a number on the host."""
    fast = as_eager(lambda: lambda x: x * torch.tensor([1.0, 2.0, 3.0], device=device), counted(device, 3))
    assert in_graphs(fast)
    fast = as_eager(
        lambda: lambda x, k: x * torch.tensor(k, device=device), [(ones(device, 3), k / 2) for k in range(5)]
    )
    assert in_graphs(fast)
    assert fast.cache_info().captures == 1


# ---- Decisions by values ---------------------------------------------------------------------------------------


def test_a_decision_by_a_value(device: torch.device) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1

    fast = as_eager(lambda: function, [(ones(device, 3) * sign,) for sign in (1, -1, 1, 1, -1)])
    assert said(fast)
    fast = as_eager(lambda: lambda x: torch.where(x.sum() > 0, x + 1, x - 1), counted(device, 3))
    assert in_graphs(fast)


# ---- Indices from the host -------------------------------------------------------------------------------------


def test_an_index_that_is_a_list_or_a_tensor_of_the_host(device: torch.device) -> None:
    fast = as_eager(lambda: lambda x: x[[0, 2]] * 2, counted(device, 3))
    assert in_graphs(fast)
    indices = [torch.tensor([number % 3, 0]) for number in range(5)]
    as_eager(lambda: lambda x, i: x[i] * 2, [(ones(device, 3), index) for index in indices])
    fast = as_eager(lambda: lambda x, i: x[i] * 2, [(ones(device, 3), index.to(device)) for index in indices])
    assert in_graphs(fast)


# ---- Slices between values -------------------------------------------------------------------------------------


def test_a_slice_whose_bounds_are_on_the_device(device: torch.device) -> None:
    bounds = [(torch.tensor(number % 3, device=device), torch.tensor(4, device=device)) for number in range(5)]
    fast = as_eager(lambda: lambda x, i, j: x[i:j] * 2, [(ones(device, 6), *pair) for pair in bounds])
    assert said(fast)


# ---- The default stream ----------------------------------------------------------------------------------------


def test_eager_backwards_before_the_first_call(device: torch.device) -> None:
    """Nodes that accumulate gradients are made on the stream of eager, and a graph alone cannot use them."""
    model, twin = linear(device), linear(device)
    for one in (model, twin):
        loss = one(ones(device, 2, 4)).sum()  # whose graph is alive, with the nodes of all parameters
        loss.backward(retain_graph=True)

    def step(one: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        loss = (one(x) ** 2).mean()
        loss.backward()
        return loss.detach()

    fast = pygraph.jit(step)
    for (x,) in counted(device, 2, 4):
        close(fast(model, x), step(twin, x))
    close(model.weight.grad, twin.weight.grad)
    assert in_graphs(fast)


# ---- DDP and FSDP ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_process")
def test_a_module_of_ddp(device: torch.device) -> None:
    """No backend takes tensors of the emulated device, so that there is nothing to record but the reason."""
    place = device if device.type == "cuda" else torch.device("cpu")
    ids = [0] if device.type == "cuda" else None
    model = nn.parallel.DistributedDataParallel(linear(place), device_ids=ids)
    twin = copy.deepcopy(model.module)
    fast = pygraph.jit(model)
    for (x,) in counted(place, 2, 4):
        fast(x).sum().backward()
        twin(x).sum().backward()
    close(model.module.weight.grad, twin.weight.grad)
    assert said(fast)


# ---- Streams of libraries --------------------------------------------------------------------------------------


@torch.library.custom_op("pygraph_footguns::on_a_stream_of_its_own", mutates_args=())
def on_a_stream_of_its_own(x: torch.Tensor) -> torch.Tensor:
    """Twice ``x``, by a kernel on another stream, which waits for ours before and is waited for after it."""
    if x.device.type != "cuda":
        return x * 2
    ours, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(ours)
    with torch.cuda.stream(side):
        result = x * 2
    ours.wait_stream(side)
    result.record_stream(ours)
    return result


on_a_stream_of_its_own.register_fake(torch.empty_like)


def test_an_operation_on_a_stream_of_its_own(device: torch.device) -> None:
    """What a capture does not see would be missing in a replay, whose results are compared before it is used."""
    as_eager(lambda: lambda x: on_a_stream_of_its_own(x) + 1, counted(device, 3))


# ---- Queries ---------------------------------------------------------------------------------------------------


def test_an_event_inside(device: torch.device) -> None:
    """Others may wait for it, so it is recorded at every call."""
    event = torch.Event(device=device)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        event.record()
        return y

    fast = as_eager(lambda: function, counted(device, 3))
    assert "Event.record()" in said(fast)


@pytest.mark.gpu
def test_times_of_events_are_those_of_the_call() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, float]:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        y = x @ x
        last.record()
        last.synchronize()
        return y, first.elapsed_time(last)

    fast = pygraph.jit(function)
    x = torch.eye(64, device="cuda")
    times = set[float]()
    for _ in range(8):
        y, time = fast(x)
        assert torch.equal(y, x)
        times.add(time)
    assert len(times) > 1
    assert "torch.cuda.Event" in said(fast)


# ---- Threads that query ----------------------------------------------------------------------------------------


def test_another_thread_works_during_first_calls(device: torch.device) -> None:
    """It allocates pinned memory, copies, and asks for its results; nobody gets an error."""
    done, errors = threading.Event(), list[BaseException]()

    def work() -> None:
        try:
            while not done.wait(0.001):
                pinned = torch.full((64,), 2.0).pin_memory()
                assert pinned.to(device, non_blocking=True).sum().item() == 128
                if device.type == "cuda":
                    torch.cuda.current_stream().query()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for number in range(4):
            as_eager(lambda number=number: lambda x: torch.relu(x) + number, counted(device, 3, calls=3))
    finally:
        done.set()
        thread.join()
    assert errors == []


# ---- Pinned memory inside --------------------------------------------------------------------------------------


def test_pinned_memory_is_made_inside(device: torch.device) -> None:
    def function(x: torch.Tensor, k: float) -> torch.Tensor:
        pinned = torch.full((3,), k).pin_memory()
        return x * pinned.to(device, non_blocking=True)

    fast = as_eager(lambda: function, [(ones(device, 3), float(k)) for k in range(5)])
    assert said(fast)


# ---- DataLoader and pin_memory ---------------------------------------------------------------------------------


def test_a_loader_with_pinned_memory(device: torch.device) -> None:
    """Its thread queries events while the first batch is recorded."""
    data = TensorDataset(torch.arange(64.0).view(16, 4))
    fast, total = pygraph.jit(lambda x: torch.relu(x) * 2), 0.0
    for (x,) in DataLoader(data, batch_size=2, pin_memory=device.type == "cuda"):
        total += fast(x.to(device, non_blocking=True)).sum().item()
    assert total == 2 * sum(range(64))
    assert fast.cache_info().captures == 1


# ---- NCCL's watchdog -------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_first_call_after_a_collective(tmp_path: Path) -> None:
    """The watchdog queries the collective's event in a thread of its own."""
    distributed.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        x = torch.ones(1 << 20, device="cuda")
        for number in range(4):
            distributed.all_reduce(x)
            fast = as_eager(lambda number=number: lambda x: torch.relu(x) + number, [(x,)] * 3)
            assert in_graphs(fast)
    finally:
        distributed.destroy_process_group()
