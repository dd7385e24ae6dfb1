"""Code motion: which nodes are hoisted, which sink, and which keep their order."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.random_states import random_state, set_random_state
from pygraph.transforms.host_values.code_motion import gather_device_work

aten = torch.ops.aten
CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


class Graph:
    """A graph of one-dimensional tensors, and the names of its nodes in order."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def add(self, name: str, device: torch.device, op: Any = None, *args: Any) -> fx.Node:
        if op is None:
            node = self.graph.placeholder(name)
        else:
            node = self.graph.create_node("call_function", op, args, {}, name=name)
        node.meta["spec"] = TensorSpec((3,), (1,), torch.float32, device)
        return node

    def gathered(self, device: torch.device, *results: fx.Node) -> list[str]:
        self.graph.output(results)
        gather_device_work(self.graph, device)
        self.graph.lint()
        return [node.name for node in self.graph.nodes if node.op == "call_function"]


def test_host_work_and_uploads_come_first_and_downloads_last() -> None:
    graph = Graph()
    x, h = graph.add("x", CUDA), graph.add("h", CPU)
    device_a = graph.add("device_a", CUDA, aten.sin.default, x)
    download = graph.add("download", CPU, aten._to_copy.default, device_a)
    after = graph.add("after", CPU, aten.cos.default, download)
    host = graph.add("host", CPU, aten.exp.default, h)
    upload = graph.add("upload", CUDA, aten._to_copy.default, host)
    device_b = graph.add("device_b", CUDA, aten.add.Tensor, device_a, upload)
    order = graph.gathered(CUDA, device_b, after)
    assert order == ["host", "upload", "device_a", "device_b", "download", "after"]


def test_a_download_sinks_no_further_than_its_users() -> None:
    graph = Graph()
    x = graph.add("x", CUDA)
    first = graph.add("first", CUDA, aten.sin.default, x)
    download = graph.add("download", CPU, aten._to_copy.default, first)
    second = graph.add("second", CUDA, aten.cos.default, x)
    upload = graph.add("upload", CUDA, aten._to_copy.default, download)
    third = graph.add("third", CUDA, aten.exp.default, upload)
    order = graph.gathered(CUDA, second, third)
    assert order == ["first", "second", "download", "upload", "third"]


def random_draws() -> tuple[Graph, fx.Node, fx.Node, fx.Node]:
    """A draw on the host that needs the device, and others on the device and on the host after it."""
    graph = Graph()
    x = graph.add("x", CUDA)
    download = graph.add("download", CPU, aten._to_copy.default, x)
    host_a = graph.add("host_a", CPU, aten.bernoulli.default, download)
    drawn = graph.add("drawn", CUDA, aten.bernoulli.default, x)
    host_b = graph.add("host_b", CPU, aten.rand_like.default, host_a)
    return graph, host_a, drawn, host_b


def test_draws_on_the_device_have_a_generator_of_their_own_on_cuda() -> None:
    graph, *results = random_draws()
    assert graph.gathered(CUDA, *results) == ["drawn", "download", "host_a", "host_b"]


def test_draws_keep_their_order_where_host_and_device_share_a_generator() -> None:
    graph, *results = random_draws()
    assert graph.gathered(torch.device("meta"), *results) == ["download", "host_a", "drawn", "host_b"]


def test_states_of_the_devices_generator_stay_between_its_draws() -> None:
    graph = Graph()
    x = graph.add("x", CUDA)
    first = graph.add("first", CUDA, aten.rand_like.default, x)
    state = graph.add("state", CPU, random_state(), CUDA, 16)
    second = graph.add("second", CUDA, aten.rand_like.default, x)
    graph.add("setting", CPU, set_random_state(), state, CUDA)
    again = graph.add("again", CUDA, aten.rand_like.default, x)
    assert graph.gathered(CUDA, first, second, again) == ["first", "state", "second", "setting", "again"]
