"""Wrappers of Inductor's as graphs: written by hand here, so that no GPU and no Triton is needed."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.launches import launch_of
from pygraph.ir.result_layouts import expected_layouts
from pygraph.ir.scopes import Origin, scopes_of
from pygraph.lowering.kernel_recorder import KernelGraph, UntraceableError
from pygraph.lowering.wrapper import kernel_graph

CPU = torch.device("cpu")
MATRIX = TensorSpec((2, 2), (2, 1), torch.float32, CPU)


class Tuner:
    """Looks like one of Inductor's kernels, and adds 1 to what it writes."""

    triton_meta: dict[str, Any] = {}  # noqa: RUF012  # how kernels are told from other globals
    mutated_arg_names = ("in_out_ptr0",)
    fn = SimpleNamespace(arg_names=["in_out_ptr0", "in_ptr0", "out_ptr0", "xnumel", "XBLOCK"], fn=None)

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def run(self, *args: Any, stream: int) -> None:
        self.launched.append((*args, stream))


def wrapper(body: Callable[..., Any], **names: Any) -> Callable[[list[Any]], Sequence[Any]]:
    """A function with globals of its own, as those that Inductor writes."""
    return type(body)(body.__code__, {"__builtins__": builtins, "torch": torch, **names}, "call")


def text(found: KernelGraph) -> list[str]:
    return [f"{node.target}" for node in found.module.graph.nodes if node.op == "call_function"]


def test_writes_are_to_the_nodes_that_were_allocated() -> None:
    tuner = Tuner()

    def call(args: list[Any]) -> Any:
        x, y = args
        args.clear()
        assert_size_stride(x, (2, 2), (2, 1))  # noqa: F821
        buf0 = torch.empty_strided((2, 2), (2, 1))
        torch.mm(x, y, out=buf0)
        buf1 = torch.empty_strided((2, 2), (2, 1))
        kernel.run(buf0, x, buf1, 4, stream=get_raw_stream(0))  # noqa: F821
        buf2 = buf0
        del buf0
        return (buf2, reinterpret_tensor(buf1, (2,), (1,), 2), None, x)  # noqa: F821

    names = {"assert_size_stride": None, "get_raw_stream": None, "reinterpret_tensor": None, "kernel": tuner}
    found = kernel_graph(wrapper(call, **names), [MATRIX, MATRIX])
    assert text(found) == [
        "aten.empty_strided.default", "aten.mm.out", "aten.empty_strided.default", "pygraph.launch.default",
        "pygraph.reinterpret.default",
    ]  # fmt: skip
    nodes = list(found.module.graph.nodes)
    x, _, first, product, second, launch, view, output = nodes
    assert product.kwargs == {"out": first}
    assert launch.args[1:] == ([first, second], [x], [])
    assert view.args == (second, [2], [1], 2)
    assert output.args == ((first, view, None, x),)
    assert view.meta["spec"] == TensorSpec((2,), (1,), torch.float32, CPU, 2)
    launch_of(str(launch.args[0]))
    assert not tuner.launched


@pytest.mark.parametrize("kind", [(), ("input",)])
def test_an_input_that_kernels_were_not_compiled_for_is_refused(kind: tuple[str, ...]) -> None:
    """They would read it wrongly; Inductor's own wrapper raises an error then."""

    def call(args: list[Any]) -> Any:
        (x,) = args
        args.clear()
        assert_size_stride(x, (1, 3, 2, 2), (12, 1, 6, 3), *said)  # noqa: F821
        buf0 = torch.empty_strided((2, 2), (2, 1))
        kernel.run(buf0, x, buf0, 4, stream=0)  # noqa: F821
        return (buf0,)

    made = wrapper(call, assert_size_stride=None, kernel=Tuner(), said=kind)
    for stride in ((12, 1, 6, 3), (1, 1, 6, 3)):
        kernel_graph(made, [TensorSpec((1, 3, 2, 2), stride, torch.float32, CPU)])
    with pytest.raises(UntraceableError, match=r"in strides \(12, 4, 2, 1\), and kernels were compiled for"):
        kernel_graph(made, [TensorSpec((1, 3, 2, 2), (12, 4, 2, 1), torch.float32, CPU)])


def test_results_are_read_in_the_strides_that_kernels_were_compiled_for() -> None:
    """Not in those of the fake result, which may be wrong about the device."""

    def call(args: list[Any]) -> Any:
        (x,) = args
        args.clear()
        buf0 = torch.sin(x)
        assert_size_stride(buf0, (2, 2), said, "torch.ops.aten.sin.default")  # noqa: F821
        pair = torch.std_mean(x, 1, keepdim=True)
        assert_size_stride(pair[1], (2, 1), (1, 5), "torch.ops.aten.std_mean.correction")  # noqa: F821
        kernel.run(buf0, pair[1], buf0, 4, stream=0)  # noqa: F821
        return (buf0,)

    for stride in ((2, 1), (1, 2)):
        found = kernel_graph(wrapper(call, assert_size_stride=None, kernel=Tuner(), said=stride), [MATRIX])
        first, mean = TensorSpec((2, 2), stride, torch.float32, CPU), TensorSpec((2, 1), (1, 1), torch.float32, CPU)
        layouts = expected_layouts(found.module.graph.nodes)
        assert {str(node.target): layout for node, layout in layouts.items()} == {
            "aten.sin.default": first, "aten.std_mean.correction": (None, mean)
        }  # fmt: skip


def test_a_result_of_another_size_is_refused() -> None:
    def call(args: list[Any]) -> Any:
        (x,) = args
        buf0 = torch.sin(x)
        assert_size_stride(buf0, (2, 3), (3, 1), "torch.ops.aten.sin.default")  # noqa: F821
        return (buf0,)

    with pytest.raises(UntraceableError, match=r"a result of torch.ops.aten.sin.default is \(2, 2\) in strides"):
        kernel_graph(wrapper(call, assert_size_stride=None), [MATRIX])


def test_the_same_launch_is_registered_once() -> None:
    tuner = Tuner()

    def call(args: list[Any]) -> Any:
        (x,) = args
        kernel.run(x, x, x, 4, stream=0)  # noqa: F821
        kernel.run(x, x, x, 4, stream=0)  # noqa: F821
        kernel.run(x, x, x, 5, stream=0)  # noqa: F821
        return ()

    found = kernel_graph(wrapper(call, kernel=tuner), [MATRIX])
    names = [node.args[0] for node in found.module.graph.nodes if node.op == "call_function"]
    assert names[0] == names[1] != names[2]
    assert all(node.args[1:3] == ([x], []) for x, *nodes in [list(found.module.graph.nodes)] for node in nodes[:-1])


def test_constants_are_inputs_of_their_own() -> None:
    constant = torch.arange(2.0)

    def call(args: list[Any]) -> Any:
        (x,) = args
        return (torch.add(x, constant0),)  # noqa: F821

    found = kernel_graph(wrapper(call, constant0=constant), [MATRIX])
    assert found.constants == (constant,)
    assert [node.op for node in found.module.graph.nodes] == ["placeholder", "placeholder", "call_function", "output"]
    x = torch.ones(2, 2)
    assert torch.equal(found.module(x, constant)[0], x + constant)


def test_sizes_are_numbers() -> None:
    def call(args: list[Any]) -> Any:
        n, x = args
        return (torch.empty_strided((n, 3), (3, 1)), x)

    found = kernel_graph(wrapper(call), [5, MATRIX])
    assert list(found.module.graph.nodes)[1].args[0] == [5, 3]
    assert len(found.module.graph.find_nodes(op="placeholder")) == 1


def test_what_is_not_known_is_refused() -> None:
    def calls_something(args: list[Any]) -> Any:
        return (something(args[0]),)  # noqa: F821

    def computes_on_the_host(args: list[Any]) -> Any:
        return (empty_strided_cpu((2,), (1,), torch.float32),)  # noqa: F821

    def fails(args: list[Any]) -> Any:
        raise KeyError("x")

    def with_options(args: list[Any]) -> Any:
        kernel.run(args[0], 4, stream=0, warmup=True)  # noqa: F821

    for body, names, reason in (
        (calls_something, {"something": SimpleNamespace()}, "it calls something, a SimpleNamespace"),
        (computes_on_the_host, {}, "it computes on the cpu"),
        (fails, {}, "KeyError: 'x'"),
        (with_options, {"kernel": Tuner()}, "a launch has options: warmup"),
    ):
        with pytest.raises(UntraceableError, match=reason):
            kernel_graph(wrapper(body, **names), [MATRIX])
    with pytest.raises(UntraceableError, match="its wrapper is a Tuner"):
        kernel_graph(Tuner(), [MATRIX])  # pyright: ignore


def test_nodes_have_the_lines_that_comments_tell(tmp_path: Path) -> None:
    """Inductor names nodes of Dynamo's graph in a comment above every launch."""
    source = tmp_path / "wrapper.py"
    source.write_text(
        "def call(args):\n"
        "    x, y = args\n"
        "    args.clear()\n"
        "    buf0 = torch.empty_strided((2, 2), (2, 1))\n"
        "    # Topologically Sorted Source Nodes: [linear], Original ATen: [aten.mm]\n"
        "    torch.mm(x, y, out=buf0)\n"
        "    # Topologically Sorted Source Nodes: [unknown, relu, add], Original ATen: [aten.add]\n"
        "    kernel.run(buf0, x, 4, stream=0)\n"
        "    # Topologically Sorted Source Nodes: [], Original ATen: []\n"
        "    torch.mm(buf0, y, out=buf0)\n"
        "    return (buf0,)\n"
    )
    names: dict[str, Any] = {"torch": torch, "kernel": Tuner()}
    exec(compile(source.read_text(), str(source), "exec"), names)
    origins: dict[str, Origin] = {
        "linear": {"source": "model.py:7"},
        "relu": {"source": "model.py:8", "scopes": ("model", "layer"), "backward_of": "model.py:3"},
        "add": {"source": "model.py:9", "scopes": ("model", "loss")},
    }
    for known, expected in ((origins, [None, "model.py:7", "model.py:8", None]), ({}, [None] * 4)):
        found = kernel_graph(names["call"], [MATRIX, MATRIX], known)
        nodes = [node for node in found.module.graph.nodes if node.op == "call_function"]
        assert [node.meta["source"] for node in nodes] == expected
        assert scopes_of(nodes[2]) == (("model",) if known else ())  # the kernel is of both
        assert nodes[2].meta.get("backward_of") == ("model.py:3" if known else None)
    source.unlink()
    found = kernel_graph(names["call"], [MATRIX, MATRIX], origins)
    assert not any(node.meta.get("source") for node in found.module.graph.nodes)
