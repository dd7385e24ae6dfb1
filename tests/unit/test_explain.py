"""explain(): counts, fallbacks with reasons and lines, as text and as data."""

from __future__ import annotations

import json

import pytest
import torch

import pygraph


@pytest.fixture
def x(device: torch.device) -> torch.Tensor:
    return torch.arange(6.0, device=device).view(2, 3)


def test_before_any_call(x: torch.Tensor) -> None:
    report = pygraph.jit(torch.sin).explain()
    assert report.to_dict()["entries"] == []
    assert "no fallbacks" in str(report)


def test_counts(x: torch.Tensor) -> None:
    fn = pygraph.jit(lambda x, k: torch.relu(x * k) + 1)
    for k in (1.0, 2.0, 3.0):
        fn(x, k)
    report = fn.explain().to_dict()
    assert report["name"] == "<lambda>"
    assert report["calls"] == 3
    assert report["kernels"] == report["kernels_in_graphs"] == 4  # the number, the product, relu, the sum
    assert report["bytes_copied_per_replay"] == 0
    assert report["patched_nodes"] > 0
    assert [region["kind"] for region in report["regions"]] == ["graph"]
    # On CUDA, a copy is only tried where the model of costs does not rule it out.
    assert set(report["regions"][0]["times_us"]) >= {"launch", "patch"}
    assert report["arguments"] == [f"args[0]: float32[2, 3] {x.device.type}", "args[1]: float"]
    assert report["fallbacks"] == []
    json.dumps(report)


def test_every_kind_of_call_has_a_row(x: torch.Tensor) -> None:
    fn = pygraph.jit(lambda x: x + 1)
    fn(x)
    fn(x[:1])
    text = str(fn.explain())
    assert len(fn.explain().to_dict()["entries"]) == 2
    assert "float32[2, 3]" in text
    assert "float32[1, 3]" in text


def test_fallbacks_have_reason_source_and_count(x: torch.Tensor) -> None:
    fn = pygraph.jit(lambda x: torch.sin(x)[x > 0])
    for _ in range(3):
        fn(x)
    (fallback,) = fn.explain().to_dict()["fallbacks"]
    assert fallback["what"] == "aten.index.Tensor"
    assert "host" in fallback["reason"] or "depends on data" in fallback["reason"]
    assert fallback["source"].startswith("test_explain.py:")
    assert fallback["count"] == 3
    assert "fallback ×3: " in str(fn.explain())


def test_copied_bytes_are_reported_with_the_input(x: torch.Tensor) -> None:
    fn = pygraph.graphify(lambda x: torch.sin(x) + 1)
    fn(x)
    report = fn.explain().to_dict()
    assert report["bytes_copied_per_replay"] >= x.nbytes


def test_what_cannot_be_traced_says_why(x: torch.Tensor) -> None:
    fn = pygraph.jit(lambda x: x if str(x) else -x)
    assert torch.equal(fn(x), x)
    text = str(fn.explain())
    assert "as it is" in text
    assert "test_explain.py:" in text


def test_calls_inside_others_are_counted(x: torch.Tensor) -> None:
    fn = pygraph.jit(lambda x: (x * x).sum())
    pygraph.jit(lambda x: fn(x) + 1)(x)
    (fallback,) = fn.explain().to_dict()["fallbacks"]
    assert "inside a trace" in fallback["reason"]


def test_derived_functions_have_rows(x: torch.Tensor) -> None:
    fn = pygraph.jit(lambda x: (x * x).sum())
    torch.func.grad(fn)(x)
    text = str(fn.explain())
    assert "forward(<lambda>)" in text
    assert "backward(<lambda>)" in text


def test_many_arguments_are_not_all_in_the_table(x: torch.Tensor) -> None:
    fn = pygraph.jit(lambda *xs: sum(xs[1:], xs[0]))
    fn(*[x + index for index in range(30)])
    report = fn.explain()
    assert len(report.to_dict()["arguments"]) == 30
    assert "args[3]" in str(report)
    assert "args[4]" not in str(report)
    assert "26 more" in str(report)


def test_calls_that_are_differentiated_from_outside(x: torch.Tensor) -> None:
    """They do not run as they are, but as the functions whose reports follow."""
    fn = pygraph.jit(lambda x: torch.tanh(x) * 2)
    for _ in range(3):
        fn(x.clone().requires_grad_()).sum().backward()
    text = str(fn.explain())
    assert "differentiated from" in text
    assert "as it is" not in text
    calls = " ".join(line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│"))  # it may wrap
    assert "forward(<lambda>): args[0]" in calls
    assert [entry["differentiated"] for entry in fn.explain().to_dict()["entries"]] == [True, False, False]


def test_regions_that_are_no_graphs_say_what_they_cost(x: torch.Tensor) -> None:
    fn = pygraph.jit(lambda x: (x * 2)[x > 0].sum() + 1)
    for _ in range(12):
        fn(x)
    report = fn.explain()
    costs = {region["kind"]: region["times_us"] for region in report.to_dict()["regions"]}
    assert costs["eager"].keys() == {"launch"}
    assert costs["eager"]["launch"] > 0
    text = " ".join(str(report).split())
    assert "region 1 is no graph (the shape of its result depends on data, test_explain.py" in text
    assert "of the host, waiting included" in text
