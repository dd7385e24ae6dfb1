"""Triton kernels that a function launches directly: operations of the Program, never run while it is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import pygraph
from pygraph.ir.launches import Launch, launch_of, register
from pygraph.lowering.aten import lower


class Doubler:
    """Stands in for a Triton kernel: doubles ``x`` into ``out``, adds ``k`` and the grid's size."""

    __name__ = "doubler"

    def run(self, x: Tensor, out: Tensor, k: float, *, grid: Callable[..., Any], warmup: bool, shift: int) -> None:
        assert not warmup
        out.copy_(x * 2 + k + grid({"BLOCK": 4})[0] + shift)


def a_launch(shift: int = 0) -> str:
    arguments = (("x", "read", 0), ("out", "written", 0), ("k", "number", 0))
    return register(Launch(KERNEL, arguments, {"shift": shift}, ("BLOCK",), {(4,): (1000,)}))  # pyright: ignore


KERNEL = Doubler()


def test_the_same_launch_has_the_same_name() -> None:
    assert a_launch() == a_launch(0)
    assert a_launch(1) not in (a_launch(), a_launch(True))
    assert launch_of(a_launch()).kernel is KERNEL


def test_a_launch_is_an_operation_that_graphs_hold(device: torch.device) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.ops.pygraph.launch(a_launch(), [out], [x], [0.5])
        torch.ops.pygraph.launch(a_launch(1), [y], [out], [0.5])
        return out

    fast = pygraph.jit(fn, strict=True)
    for number in range(3):
        x = torch.full((5,), float(number), device=device)
        ours, theirs = torch.zeros(5, device=device), torch.zeros(5, device=device)
        torch.testing.assert_close(fast(x, ours), fn(x, theirs))
        torch.testing.assert_close(ours, theirs)
        assert ours.tolist() == [number * 4 + 3002.5] * 5


def test_a_number_that_changes_is_not_baked_in_for_good(device: torch.device) -> None:
    def fn(x: Tensor, k: float) -> Tensor:
        out = torch.empty_like(x)
        torch.ops.pygraph.launch(a_launch(), [out], [x], [k])
        return out

    fast = pygraph.jit(fn)
    x = torch.ones(5, device=device)
    assert [fast(x, k).tolist()[0] for k in (0.5, 1.5, 2.5)] == [1002.5, 1003.5, 1004.5]


# ---- with Triton: what is traced, on a machine without a GPU --------------------------------------------------


@pytest.fixture
def kernels() -> Iterator[SimpleNamespace]:
    """Triton kernels, and a driver that can compile for a GPU that is not there."""
    pytest.importorskip("triton")
    from tests.triton_kernels import KERNELS, compile_only

    with compile_only():
        yield KERNELS


def launches(fn: Callable[..., Any], *args: Any) -> list[tuple[str, int, int, list[Any]]]:
    """The launches in the lowered Program: the kernel, how much it writes and reads, and its numbers."""
    program = pygraph.check_program(lower(pygraph.trace(fn)(*args)))
    nodes = [node for node in program.nodes if node.target is torch.ops.pygraph.launch.default]
    return [
        (str(node.args[0]).partition("#")[0], len(node.args[1]), len(node.args[2]), list(node.args[3]))  # pyright: ignore
        for node in nodes
    ]


def test_a_launch_writes_what_the_kernel_stores_to(kernels: Any) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernels.add[(2,)](x, y, out, x.numel(), BLOCK=64)
        torch.library.wrap_triton(kernels.add)[lambda meta: (128 // meta["BLOCK"],)](out, out, y, 100, BLOCK=64)
        return out

    x = torch.ones(100)
    assert launches(fn, x, x.clone()) == [("add", 1, 2, []), ("add", 1, 1, [])]
    program = pygraph.trace(fn)(x, x.clone())
    assert "test_launches.py" in str(program)
    assert {node.meta["source"].partition(":")[0] for node in program.nodes if node.op == "call_function"} == {
        "test_launches.py"
    }


def test_pointers_to_the_same_tensor_are_one_argument(kernels: Any) -> None:
    def fn(x: Tensor) -> None:
        kernels.add[(1,)](x, x, x, x.numel(), BLOCK=64)

    assert launches(fn, torch.ones(10)) == [("add", 1, 0, [])]


def test_a_live_number_stays_live_and_a_constexpr_is_baked_in(kernels: Any) -> None:
    def fn(x: Tensor, k: float, block: int, n: int) -> None:
        kernels.scale[lambda meta: (n // meta["BLOCK"],)](x, n, k, BLOCK=block)

    ((name, written, read, numbers),) = launches(fn, torch.ones(100), 2.5, 32, 100)
    assert (name, written, read, len(numbers)) == ("scale", 1, 0, 1)
    program = pygraph.trace(fn)(torch.ones(100), 2.5, 32, 100)
    assert [baked.value for baked in program.baked] == [32, 100]


def test_an_autotuned_kernel_has_a_grid_for_every_choice(kernels: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernels.tuned[lambda meta: (meta["n"] // meta["BLOCK"], 2 if meta["EVEN"] else 1)](x, out, 128, 2.0)
        return out

    assert launches(fn, torch.ones(128)) == [("tuned", 1, 1, [])]
    nodes = pygraph.trace(fn)(torch.ones(128)).nodes
    launch = next(launch_of(str(node.args[0])) for node in nodes if "launch" in str(node.target))
    assert launch.choices == ("BLOCK",)
    assert dict(launch.grids) == {(64,): (2, 2), (96,): (1, 1)}


def test_a_kernel_with_a_hook_may_write_everything(kernels: Any) -> None:
    def fn(x: Tensor, y: Tensor, out: Tensor) -> None:
        kernels.hooked[(1,)](x, y, out, 10)

    assert launches(fn, torch.ones(10), torch.ones(10), torch.ones(10)) == [("add", 3, 0, [])]


def test_no_launch_reaches_the_device_while_tracing(kernels: Any) -> None:
    """Inside an operation that is traced as a whole, a launch on fakes is nothing at all."""

    @torch.library.triton_op("test_launches::add", mutates_args={})
    def add(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernels.add[(1,)](x, x, out, x.numel(), BLOCK=64)
        torch.library.wrap_triton(kernels.tuned)[(1,)](x, out, x.numel(), 2.0)
        return out

    program = pygraph.trace(lambda x: add(x))(torch.ones(5))
    assert [str(node.target) for node in program.nodes if node.op == "call_function"] == ["test_launches.add.default"]


def test_what_cannot_be_written_down_is_refused_with_its_line(kernels: Any) -> None:
    def through_vmap(x: Tensor) -> Tensor:
        def row(r: Tensor) -> Tensor:
            kernels.add[(1,)](r, r, r, 3, BLOCK=64)
            return r

        return torch.func.vmap(row)(x)

    def a_pair(x: Tensor) -> None:
        kernels.add[(1,)]((x, x), x, x, 3, BLOCK=64)

    def overlapping(x: Tensor) -> None:
        kernels.add[(1,)](x[:2], x[1:3], x[2:4], 2, BLOCK=64)

    for fn, problem in ((through_vmap, "torch.func transform"), (a_pair, "passes a tuple"), (overlapping, "shares")):
        with pytest.raises(pygraph.errors.TraceError, match=f"{problem}.*test_launches.py"):
            pygraph.trace(fn)(torch.ones(5, 5))


def test_launches_are_as_ever_afterwards(kernels: Any) -> None:
    run = type(kernels.add).run
    pygraph.trace(lambda x: kernels.add[(1,)](x, x, x, 3, BLOCK=64))(torch.ones(5))
    assert type(kernels.add).run is run
