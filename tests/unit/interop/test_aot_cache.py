"""Replayed graphs in AOTAutograd's cache: when they are saved, and when they are found again.

On the host, where Inductor's kernels run without a GPU; graphs are compiled, kept and loaded, but launched ordinarily.
"""

from __future__ import annotations

import importlib.util
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._inductor.triton_bundler import StaticallyLaunchedAutotuner, TritonBundle
from torch._inductor.utils import fresh_cache

import pygraph
from pygraph.interop import boxed, compiled_function, compilers
from pygraph.interop.inductor_graphs import InductorSource
from pygraph.ir.drawn_after import DRAWN_AFTER
from pygraph.ir.dropout_masks import DROPOUT_MASK

pytestmark = pytest.mark.filterwarnings("ignore")  # of Dynamo's and Inductor's, which differ between versions


@pytest.fixture(autouse=True)
def _host_as_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compilers, "touches_cuda", lambda graph: True)
    monkeypatch.setattr(compilers, "needs_host", lambda graph: False)
    MADE.clear()
    make = compilers.Compilers._replay

    def counted(*args: Any) -> Any:
        MADE.append(make(*args))
        return MADE[-1]

    monkeypatch.setattr(compilers.Compilers, "_replay", counted)
    torch._dynamo.reset()
    with fresh_cache():
        yield
    torch._dynamo.reset()


MADE: list[boxed.BoxedReplay] = []
"""All that were made in a test."""


def run(fn: Callable[..., Any], *args: Any, backend: Any = "pygraph", **options: Any) -> Any:
    """Compile a function and call it, as a new process would."""
    torch._dynamo.reset()
    counters.clear()
    if backend == "pygraph":
        backend = pygraph.backend
    return torch.compile(fn, backend=backend, **options)(*args)


def found() -> tuple[int, int]:
    """How many graphs were found, and how many of them were compiled and kept."""
    return counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_saved"]


def affine(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return torch.relu(x @ w).sum(-1), x + 1


def test_inference_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    first = run(affine, x, w)
    assert found() == (0, 1)
    monkeypatch.setattr(compilers, "compile_graph", None)
    again = run(affine, x, w)
    assert found() == (1, 0)
    assert len(MADE) == 2, "what is loaded is not replayed"
    for one, other, expected in zip(first, again, affine(x, w), strict=True):
        torch.testing.assert_close(one, expected)
        assert torch.equal(one, other)


def test_its_report_has_its_own_name_and_lines() -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    run(affine, x, w)
    run(affine, x, w)
    assert found() == (1, 0)
    for one in MADE:
        assert one.__name__.startswith("inference ")
        assert "test_aot_cache.py" in one.__name__
    first, again = (one._source._graph for one in MADE)  # pyright: ignore
    assert again.name == MADE[1].__name__
    assert again.origins == first.origins
    assert all("test_aot_cache.py" in str(origin["source"]) for origin in again.origins.values())
    assert (again.outputs, again.written, again.aligned) == (first.outputs, first.written, first.aligned)
    assert type(again.code) is type(first.code)


def test_training_with_a_backward_that_is_compiled_when_it_is_called() -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    for expected in ((0, 1), (1, 0)):
        torch.autograd.backward(run(affine, x, w)[0].sum())
        assert found() == expected
        got, w.grad = w.grad, None
        affine(x, w)[0].sum().backward()
        torch.testing.assert_close(got, w.grad)
        w.grad = None
    assert len(MADE) == 4  # each time a forward and a backward


def drops(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5) + F.dropout(x * 2, 0.25)


@pytest.mark.parametrize("in_order", [True, False])
def test_draws_that_may_be_in_another_order_are_not_kept(in_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their graph is needed then; kernels for the host do not say."""
    monkeypatch.setattr(InductorSource, "draws_in_order", lambda self, inputs: in_order)
    x = torch.randn(64)
    for expected in ((0, 1), (1, 0)):
        torch.manual_seed(3)
        got = run(drops, x)
        torch.manual_seed(3)
        assert torch.equal(got, drops(x))
        assert found() == (expected if in_order else (0, 0))


@pytest.mark.parametrize("has_host_work", [True, False])
def test_what_is_traced_again_has_nothing_for_the_order(has_host_work: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Program's nodes run in its order, and AOTAutograd refuses what orders draws for Inductor."""
    traced: list[str] = []
    prepare, original = compilers.prepare_aot_draws, compilers.AtenSource

    def with_link(graph: fx.Graph) -> None:
        """Have what is drawn depend on another draw, as attention would."""
        prepare(graph)
        (x,) = graph.find_nodes(op="placeholder")
        with graph.inserting_after(x):
            mask = graph.call_function(DROPOUT_MASK, ([64], [1], torch.float32, torch.device("cpu"), 0.5, None))
        with graph.inserting_after(mask):
            link = graph.call_function(DRAWN_AFTER, (mask, mask))
        x.replace_all_uses_with(link)
        link.args = (x, mask)
        link.meta = dict(x.meta)
        with x.meta["val"].fake_mode:
            mask.meta["val"] = torch.empty(64, dtype=torch.bool)

    def note(module: fx.GraphModule, *args: Any) -> Any:
        traced.append(module.code)
        return original(module, *args)

    monkeypatch.setattr(compilers, "prepare_aot_draws", with_link)
    monkeypatch.setattr(compilers, "AtenSource", note)
    monkeypatch.setattr(compilers, "needs_host", lambda graph: has_host_work)
    monkeypatch.setattr(InductorSource, "draws_in_order", lambda self, inputs: False)
    run(drops, torch.randn(64))
    (text,) = traced
    assert "dropout_mask" in text
    assert "drawn_after" not in text


def test_what_is_kept_is_for_the_same_options_and_backend() -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    run(affine, x, w)
    run(affine, x, w, backend="inductor")
    assert found() == (0, 1), "plain torch.compile has found what is replayed"
    run(affine, x, w, mode="max-autotune-no-cudagraphs")
    assert found() == (0, 1), "what is not replayed has found what is"
    assert len(MADE) == 1
    run(affine, x, w, options={"max_graphs": 3})
    assert found() == (1, 0)
    assert MADE[-1]._options.max_graphs == 3


def test_other_lines_are_other_graphs(tmp_path: pathlib.Path) -> None:
    """Reports would have the old ones."""
    source = "def f(x):\n    y = x * 2\n    return y.sin()\n"

    def version(name: str, text: str) -> Callable[[Tensor], Tensor]:
        path = tmp_path / "written.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.f

    x = torch.randn(4)
    run(version("one", source), x)
    assert found() == (0, 1)
    run(version("one", source), x)
    assert found() == (1, 0)
    run(version("one", "\n\n" + source), x)
    assert found() == (0, 1)
    assert counters["inductor"]["fxgraph_cache_hit"] == 1, "Inductor's own cache does not depend on lines"


def test_code_that_has_gone_is_compiled_again() -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    run(affine, x, w)
    from torch._inductor.codecache import FxGraphCache

    shutil.rmtree(FxGraphCache._get_tmp_dir())
    torch.testing.assert_close(run(affine, x, w), affine(x, w))
    assert found() == (0, 1)
    run(affine, x, w)
    assert found() == (1, 0)


class LoadedKernel:
    """A kernel of Inductor's that can be launched, and therefore not be stored."""

    launchers = (None,)

    def __reduce__(self) -> Any:
        raise AssertionError("it is stored")


def test_kernels_that_have_been_loaded_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a graph that was in Inductor's cache already; on the host no kernel is loaded."""

    def compiled(*args: Any, **options: Any) -> Any:
        graph = compile_graph(*args, **options)
        kernel: Any = LoadedKernel()
        graph.code._triton_bundle = TritonBundle([], [StaticallyLaunchedAutotuner("key", "name", kernel)])
        return graph

    compile_graph: Any = compilers.compile_graph
    monkeypatch.setattr(compilers, "compile_graph", compiled)
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    for expected in ((0, 1), (1, 0)):
        run(affine, x, w)
        assert found() == expected
        assert not counters["inductor"]["fxgraph_cache_pickle_error"]


def test_dynamic_sizes_keep_their_guards() -> None:
    def f(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] < 6 else x * 3

    for kept in (1, 0):
        torch._dynamo.reset()
        counters.clear()
        fast = torch.compile(f, backend=pygraph.backend, dynamic=True)
        for n in (3, 5, 7, 4, 9):
            x = torch.randn(n, 2)
            torch.testing.assert_close(fast(x), f(x))
        assert found() == (2 * (1 - kept), 2 * kept)


def test_updates_of_inputs_and_buffers() -> None:
    torch.manual_seed(0)
    for expected in ((0, 1), (1, 0)):
        model = nn.BatchNorm1d(3).train()
        reference = nn.BatchNorm1d(3).train()
        x = torch.randn(5, 3)
        with torch.no_grad():
            torch.testing.assert_close(run(model, x), reference(x))
        assert found() == expected
        for got, wanted in zip(model.buffers(), reference.buffers(), strict=True):
            torch.testing.assert_close(got, wanted)


def test_graphs_with_work_of_the_host_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "needs_host", lambda graph: True)
    x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    for _ in range(2):
        run(affine, x, w)[0].sum().backward()
        assert found() == (0, 0)


def test_training_that_is_found_again_leaves_the_wrappers_out() -> None:
    """As one that was compiled: from the second call on."""
    x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    for expected in ((0, 1), (1, 0)):
        fast = torch.compile(affine, backend=pygraph.backend)
        torch._dynamo.reset()
        counters.clear()
        for number in range(3):
            result: Any = fast(x, w)[0]
            is_direct = result.grad_fn._forward_cls.forward.__module__ == compiled_function.__name__
            assert is_direct == (number > 0)
            (gradient,) = torch.autograd.grad(result.sum(), [w])
            torch.testing.assert_close(gradient, torch.autograd.grad(affine(x, w)[0].sum(), [w])[0])
        assert found() == expected


def test_where_torch_bundles_code_nothing_is_kept() -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    with torch._functorch.config.patch(bundled_autograd_cache=True):
        for _ in range(2):
            torch.testing.assert_close(run(affine, x, w), affine(x, w))
            assert found() == (0, 0)
