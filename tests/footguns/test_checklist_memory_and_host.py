"""NVIDIA's checklist of CUDA Graphs for PyTorch: side streams, what the host does, and the memory of graphs."""

# Functions are called on whatever torch gives them.
from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

import pygraph
from pygraph.errors import FallbackError
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

# ---- Side streams ----------------------------------------------------------------------------------------------


def test_a_stream_that_is_entered(device: torch.device) -> None:
    """On every device there are streams; the work in one is not recorded without the user's knowledge."""
    side = torch.Stream(device=device)

    def function(x: torch.Tensor) -> torch.Tensor:
        with side:
            y = x * 2
        return y

    fast = pygraph.jit(function, strict=True)
    with pytest.raises(FallbackError, match=r"torch\.Stream"):
        fast(ones(device, 3))


@pytest.mark.gpu
def test_side_streams_that_fork_and_join() -> None:
    """They run as in eager: outside of graphs, on their own streams."""
    side, device = torch.cuda.Stream(), torch.device("cuda", 0)

    def function(x: torch.Tensor) -> torch.Tensor:
        ours = torch.cuda.current_stream()
        side.wait_stream(ours)
        with torch.cuda.stream(side):
            y = torch.relu(x)
        z = x * 2
        ours.wait_stream(side)
        return y + z

    fast = as_eager(lambda: function, counted(device, 1 << 16))
    assert "torch.cuda.Stream.wait_stream()" in said(fast)


# ---- Work outside ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_an_event_from_outside_that_the_function_waits_for() -> None:
    device = torch.device("cuda", 0)
    side, ready = torch.cuda.Stream(), torch.cuda.Event()

    def function(x: torch.Tensor) -> torch.Tensor:
        ready.wait()
        return x * 2

    fast = pygraph.jit(function)
    for number in range(5):
        with torch.cuda.stream(side):
            torch.cuda._sleep(10_000_000)  # some milliseconds
            x = torch.full((1 << 16,), float(number), device=device)
            ready.record()
        assert fast(x)[0].item() == 2 * number
    assert "torch.cuda.Event.wait()" in said(fast)


# ---- State of the host -----------------------------------------------------------------------------------------


def test_a_counter_in_a_list(device: torch.device) -> None:
    """Code after the call finds it counted."""

    def make() -> tuple[list[int], Function]:
        state = [0]

        def function(x: torch.Tensor) -> torch.Tensor:
            y = x * 1
            state[0] = state[0] + 1
            return y

        return state, function

    (counter, function), (its_counter, eager) = make(), make()
    fast = pygraph.jit(function)
    for (x,) in counted(device, 3, calls=6):
        close(fast(x), eager(x))
        assert counter == its_counter
    assert counter == [6]


# ---- Code that runs at every call ------------------------------------------------------------------------------


def test_what_is_written_to_a_file_at_every_call(device: torch.device, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        with open(log, "a") as file:
            file.write("call ")
        return y

    fast = as_eager(lambda: function, counted(device, 3))
    assert log.read_text().count("call") == 10
    assert "open()" in said(fast)


# ---- Functions of the host in a graph --------------------------------------------------------------------------

_noted: list[float] = []


@torch.library.custom_op("pygraph_footguns::note", mutates_args=())
def note(x: torch.Tensor) -> None:
    """Note a value on the host."""
    _noted.append(x.sum().item())


note.register_fake(lambda x: None)


def test_an_operation_that_runs_on_the_host(device: torch.device) -> None:
    """It returns nothing, so it is run for what it does: between graphs."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        note(y)
        return y + 1

    _noted.clear()
    fast = as_eager(lambda: function, counted(device, 3))
    assert _noted[:5] == _noted[5:] == [2 * x.sum().item() for (x,) in counted(device, 3)]
    assert fast.cache_info().captures > 0
    assert said(fast)


# ---- Inputs that are freed -------------------------------------------------------------------------------------


def test_inputs_and_closed_over_tensors_that_are_freed(device: torch.device) -> None:
    """What a replay would read is alive, or is not read."""

    def made() -> Any:
        scale = torch.full((64,), 2.0, device=device)
        fast = pygraph.jit(lambda x: x * scale)
        fast(ones(device, 64))
        return fast

    fast = made()
    for number in range(4):
        junk = [torch.full((64,), float("nan"), device=device) for _ in range(4)]
        assert fast(torch.full((64,), float(number), device=device)).tolist() == [2 * number] * 64
        del junk
    assert in_graphs(fast)


# ---- Host tensors that are freed -------------------------------------------------------------------------------


def test_a_host_tensor_that_lives_inside_only(device: torch.device) -> None:
    """A graph alone would copy from where it was."""
    fast = as_eager(
        lambda: lambda x, k: x * torch.tensor(k).to(device, non_blocking=True),
        [(ones(device, 3), k) for k in range(6)],
    )
    assert in_graphs(fast)
    hosts = [torch.full((3,), float(k)) for k in range(6)]
    as_eager(lambda: lambda x, h: x * h.to(device, non_blocking=True), [(ones(device, 3), host) for host in hosts])


# ---- Results of earlier calls ----------------------------------------------------------------------------------


def test_results_in_a_list(device: torch.device) -> None:
    """No call writes to them again."""
    fast = pygraph.jit(lambda x: x**2 + 1)
    results = [fast(torch.full((1,), float(number), device=device)) for number in range(5)]
    assert torch.cat(results).tolist() == [1, 2, 5, 10, 17]


# ---- Shared pools ----------------------------------------------------------------------------------------------


def test_results_of_graphs_that_share_a_pool(device: torch.device) -> None:
    """All kinds of calls of a function share one; results and saved tensors are not overwritten by other graphs."""
    fast = pygraph.jit(lambda x: (x * 3 + 5) ** 2)
    held: list[tuple[int, torch.Tensor]] = []
    for number, size in enumerate((4, 2, 4, 3, 2, 4)):
        held.append((number, fast(torch.full((size,), float(number), device=device))))
    for number, result in held:
        assert set(result.tolist()) == {(3 * number + 5) ** 2}
    assert fast.cache_info().captures == 3


# ---- The order of replays --------------------------------------------------------------------------------------


def test_backwards_in_another_order_than_they_were_recorded(device: torch.device) -> None:
    """As in pipelines: forwards of other parts come between a forward and its backward."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x**2 + 2 * x + 1).sum()

    def leaves() -> list[torch.Tensor]:
        return [torch.full((1,), float(n), device=device, requires_grad=True) for n in (1, 2, 3)]

    parts = pygraph.make_graphed_callables((function,) * 3, tuple((x,) for x in leaves()))
    one = pygraph.jit(function)
    for fast in (parts, (one,) * 3):
        for _ in range(2):
            xs = leaves()
            first, second = fast[0](xs[0]), fast[1](xs[1])
            first.backward()
            third = fast[2](xs[2])
            second.backward()
            third.backward()
            assert [x.grad.item() for x in xs if x.grad is not None] == [4, 6, 8]


# ---- Replays at the same time ----------------------------------------------------------------------------------


def test_one_function_in_several_threads(device: torch.device) -> None:
    """Its graphs share memory, so its calls take turns; on CUDA each thread has a stream of its own."""
    fast, wrong = pygraph.jit(lambda x: ((x * 3 + 5) ** 2).cumsum(0)), list[float]()
    fast(torch.zeros(256, device=device))

    def work(number: int) -> None:
        for _ in range(8):
            x = torch.full((256,), float(number), device=device)
            last = fast(x)[-1].item()
            if last != 256 * (3 * number + 5) ** 2:
                wrong.append(last)

    def run(number: int) -> None:
        if device.type != "cuda":
            work(number)
        else:
            with torch.cuda.stream(torch.cuda.Stream()):
                work(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# ---- Memory of graphs ------------------------------------------------------------------------------------------


def test_a_chain_of_functions_holds_no_inputs(device: torch.device) -> None:
    """Results are inputs of the next one, nothing is copied, and nothing of a call stays alive."""
    first, second = pygraph.jit(lambda x: x * 2), pygraph.jit(lambda x: x + 1)
    for number in range(4):
        x = torch.full((3,), float(number), device=device)
        middle = first(x)
        assert second(middle).tolist() == [2 * number + 1] * 3
    gone = [weakref.ref(x), weakref.ref(middle)]
    del x, middle
    gc.collect()
    assert [one() for one in gone] == [None, None]
    assert second.explain().to_dict()["bytes_copied_per_replay"] == 0
    second.cache_clear()
    assert second.cache_info().size == 0


# ---- Warm-up ---------------------------------------------------------------------------------------------------


def test_no_call_is_lost_for_warming_up(device: torch.device) -> None:
    """What runs before a graph is recorded is undone: state is as after one call, with eager's random numbers."""

    def make() -> Function:
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)).to(device)

        def function(x: torch.Tensor) -> tuple[Any, ...]:
            return model(x), model[0].running_mean.clone(), model[0].num_batches_tracked.clone()

        return function

    with torch.no_grad():
        assert in_graphs(as_eager(make, counted(device, 3, 4)))


# ---- The mode of capture ---------------------------------------------------------------------------------------


def test_memory_is_freed_while_another_thread_records(device: torch.device) -> None:
    """There is no mode to choose: other threads go on, and a garbage collection may run at any time."""
    done, errors = threading.Event(), list[BaseException]()

    def work() -> None:
        try:
            while not done.wait(0.001):
                torch.full((256,), 1.0, device=device)
                gc.collect(0)
                if device.type == "cuda":
                    torch.cuda.empty_cache()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for number in range(4):
            as_eager(lambda number=number: lambda x: torch.tanh(x) * number, counted(device, 3, calls=3))
    finally:
        done.set()
        thread.join()
    assert errors == []


# ---- Hooks of modules ------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("graphed", [True, False])
def test_hooks_of_every_module_are_called(device: torch.device, graphed: bool) -> None:
    """Also those that are added after the first call, to modules inside."""
    model = nn.Sequential(linear(device), nn.ReLU(), linear(device))
    called = list[nn.Module]()
    fast = pygraph.make_graphed_callables(model, (ones(device, 2, 4),)) if graphed else pygraph.jit(model)
    fast(ones(device, 2, 4))
    for module in model.modules():
        module.register_forward_hook(lambda module, args, result: called.append(module))
    for number in range(1, 4):
        fast(ones(device, 2, 4))
        assert len(called) == 4 * number
    assert set(called) == set(model.modules())


# ---- Hooks of gradients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [True, False])
def test_hooks_of_gradients_are_called(device: torch.device, inside: bool) -> None:
    """Once for each parameter and backward, whether the backward is part of the function or not."""
    model, called = linear(device), list[str]()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: called.append(name))
    if inside:
        fast = pygraph.jit(lambda x: model(x).sum().backward())
    else:
        forward = pygraph.jit(model)
        fast = lambda x: forward(x).sum().backward()  # noqa: E731
    for number in range(1, 4):
        fast(ones(device, 2, 4))
        assert sorted(called) == ["bias"] * number + ["weight"] * number
    assert model.bias.grad is not None
    assert model.bias.grad.tolist() == [6.0] * 4


# ---- NCCL ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_process")
def test_a_collective_inside(device: torch.device) -> None:
    """It is in no graph, so that no graph has to go before the communicator."""
    place = device if device.type == "cuda" else torch.device("cpu")

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        distributed.all_reduce(y)
        return y + 1

    fast = as_eager(lambda: function, counted(place, 3))
    assert said(fast)


# ---- Writes to pinned memory -----------------------------------------------------------------------------------


def test_pinned_memory_that_is_written_after_the_call(device: torch.device) -> None:
    """The host must wait before it writes, as in eager: an event after the call says when."""
    host = torch.ones(3).pin_memory()
    fast, results = pygraph.jit(lambda h: h.to(device, non_blocking=True) ** 2), list[torch.Tensor]()
    for number in range(5):
        host.fill_(number)
        results.append(fast(host))
        event = torch.Event(device=device)
        event.record()
        if device.type == "cuda":
            event.synchronize()
    assert [result[0].item() for result in results] == [0, 1, 4, 9, 16]


# ---- The number of streams -------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_many_streams_take_turns() -> None:
    """A graph runs on the stream of its call, and makes none of its own."""
    fast, device = pygraph.jit(lambda x: torch.relu(x) + 1), torch.device("cuda", 0)
    x = torch.ones(1 << 16, device=device)
    fast(x)
    results: list[torch.Tensor] = []
    for _ in range(40):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            results.append(fast(x))
        torch.cuda.current_stream().wait_stream(side)
    assert all(torch.equal(result, x + 1) for result in results)
    assert fast.cache_info().captures == 1
