"""Recipes of fused runs on disk: when they are found again, and what makes them worthless.

On the host, with runs of which Inductor makes calls of library operations only: these are seen as on a GPU.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._inductor.codecache import FxGraphCache
from torch._inductor.output_code import CompiledFxGraph, CompiledFxGraphConstants
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from pygraph.ir.descriptors import Fallback, TensorSpec
from pygraph.lowering import fused_run, inductor, run_cache, wrapper_globals
from pygraph.lowering.fused_run import FusedRun, compile_run
from pygraph.lowering.inductor import FusedGraph
from pygraph.lowering.kernel_recorder import UntraceableError

pytestmark = pytest.mark.filterwarnings("ignore")  # of Inductor's, which differ between versions


def _on_host(device: str, size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(wrapper_globals, "_empty_strided", _on_host)
    with fresh_cache():
        yield


def step(x: Tensor, w: Tensor, ones: Tensor) -> tuple[Tensor, ...]:
    hidden = x @ w
    return hidden, x.t() @ ones, hidden.t() @ ones


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 4), torch.randn(4, 4), torch.ones(4, 4)]


def run(fused: FusedRun, given: Sequence[Tensor]) -> list[Any]:
    """Run the parts one after the other."""
    known: dict[str, Any] = {"input": given}
    for of, part in zip(("forward", "backward"), fused.parts, strict=False):
        assert not any(isinstance(constant, FakeTensor) for constant in part.kernels.constants)
        taken = [known[value.of][value.number] for value in part.inputs]
        known[of] = part.kernels.module(*taken, *part.kernels.constants)
    return [known[value.of][value.number] for value in fused.results]


def traced(fn: Callable[..., Any], given: Sequence[Tensor]) -> fx.GraphModule:
    """The graph of a function, as a run of a Program is one."""
    module = make_fx(fn)(*given)
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    run = fx.GraphModule(dict(module.named_buffers()), graph)
    for name in list(run._buffers):  # buffers would become inputs
        vars(run)[name] = run._buffers.pop(name)
    return run


def compiled(
    fn: Callable[..., Any] = step, given: Sequence[Tensor] | None = None, begins: Sequence[int] = (2,),
    static: Sequence[int] = (1,), note: CheckpointPolicy | None = None,
) -> tuple[int, int, int]:  # fmt: skip
    """Compile a run, and check its results.

    Returns:
        How many recipes were found, how many were missed, and how many were saved.
    """
    given = inputs() if given is None else given
    module = traced(fn, given)
    for node in module.graph.nodes:
        node.meta = {"recompute": note} if note else {}
    counters.clear()
    fused = compile_run(module, [TensorSpec.of(value) for value in given], "f", begins, static)
    assert fused is not None
    for got, expected in zip(run(fused, given), fn(*given), strict=True):
        assert torch.equal(got, expected)
        assert got.stride() == expected.stride()
    found = counters["pygraph"]
    return found["run_cache_hit"], found["run_cache_miss"], found["run_cache_saved"]


NEW, FOUND = (0, 1, 1), (1, 0, 0)


def recipe() -> Path:
    """The only recipe."""
    (found,) = Path(cache_dir(), "pygraph").glob("*/*")
    return found


def test_it_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled() == NEW
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", None)
    assert compiled() == FOUND
    assert compiled() == FOUND


def test_forward_and_backward_exchange_values() -> None:
    compiled()
    first, second = _fused().parts
    assert {value.of for value in second.inputs} == {"input", "forward"}
    assert first.key != second.key


def test_a_forward_whose_kernels_are_not_seen_is_compiled_with_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = FusedGraph.kernels

    def unseen(graph: FusedGraph, specs: Any) -> Any:
        found, note = kernels(graph, specs)
        return found, Fallback("its kernels", "it is a test") if graph.name.endswith("forward") else note

    monkeypatch.setattr(FusedGraph, "kernels", unseen)
    given, fused = inputs(), _fused()
    assert len(fused.parts) == 1
    for got, expected in zip(run(fused, given), step(*given), strict=True):
        assert torch.equal(got, expected)


def _fused() -> FusedRun:
    given = inputs()
    fused = compile_run(traced(step, given), [TensorSpec.of(value) for value in given], "f", (2,), (1,))
    assert fused is not None
    return fused


def test_a_run_without_a_backward() -> None:
    assert compiled(begins=()) == NEW
    assert compiled(begins=()) == FOUND


def test_constants_come_from_the_cache() -> None:
    constant = torch.ones(4, 4)

    def fn(x: Tensor, w: Tensor, ones: Tensor) -> tuple[Tensor, ...]:
        return ((x @ w) @ constant, ones @ constant)

    for value in (1.0, 2.0):
        constant[0, 0] = value
        assert compiled(fn) == NEW
        assert compiled(fn) == FOUND


def other(x: Tensor, w: Tensor, ones: Tensor) -> tuple[Tensor, ...]:
    hidden = x @ w.t()
    return hidden, x.t() @ ones, hidden.t() @ ones


def test_it_is_that_of_another_run() -> None:
    assert compiled() == NEW
    x, w, ones = inputs()
    for changed in (
        lambda: compiled(other),
        lambda: compiled(begins=()),
        lambda: compiled(static=()),
        lambda: compiled(given=[x, w.t(), ones]),
        lambda: compiled(given=[x, torch.randn(20)[4:].view(4, 4), ones]),
        lambda: compiled(given=[x.double(), w.double(), ones.double()]),
        lambda: compiled(note=CheckpointPolicy.MUST_RECOMPUTE),
    ):
        assert changed() == NEW
        assert changed() == FOUND
    assert compiled() == FOUND


def test_versions_and_settings_are_part_of_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled() == NEW
    with inductor_config.patch(max_fusion_size=3):
        assert compiled() == NEW
    with functorch_config.patch(ban_recompute_reductions=False):
        assert compiled() == NEW
    with monkeypatch.context() as patch:
        patch.setattr(run_cache, "source_hash", lambda: "another pygraph")
        assert compiled() == NEW
    with monkeypatch.context() as patch:
        patch.setattr("torch._inductor.codecache.torch_key", lambda: b"another torch")
        assert compiled() == NEW
    with monkeypatch.context() as patch:
        patch.setattr("torch._inductor.codecache.triton_key", lambda: "another triton", raising=False)
        patch.setattr("torch._inductor.codecache.CacheBase.get_system", lambda: {"hash": "another GPU"})
        assert compiled() == NEW
    assert compiled() == FOUND


_OTHERS = '{"parts": [["fabc", [["input", 0]]]], "results": [["forward", 0]]}'


def _signed(text: str) -> bytes:
    return f"{run_cache._digest(text)}\n{text}".encode()


@pytest.mark.parametrize(
    "contents",
    [
        b"", b"\xff\xfe\x00", b"[]", _OTHERS.encode(), _signed("["), _signed("[]"), _signed("{}"), _signed(_OTHERS),
        _signed('{"parts": [], "results": []}'), _signed(_OTHERS.replace("fabc", "../../etc/passwd")),
        _signed(_OTHERS.replace("0", "-1")), _signed(_OTHERS.replace("0", "999")),
        _signed(_OTHERS.replace('"input"', '"elsewhere"')), _signed(_OTHERS.replace('"fabc"', "7")),
    ],
)  # fmt: skip
def test_a_damaged_or_foreign_file_is_compiled_anew(contents: bytes) -> None:
    assert compiled() == NEW
    path = recipe()
    path.write_bytes(contents)
    assert compiled() == NEW
    assert compiled() == FOUND
    assert recipe() == path


def test_half_a_file_is_compiled_anew() -> None:
    assert compiled() == NEW
    whole = recipe().read_bytes()
    for length in (10, 64, 65, len(whole) - 1):
        recipe().write_bytes(whole[:length])
        assert compiled() == NEW
    assert recipe().read_bytes() == whole


def test_a_recipe_that_wires_code_wrongly_is_compiled_anew() -> None:
    """As no recipe of ours does; but its digest is right."""
    assert compiled() == NEW
    _, _, text = recipe().read_text().partition("\n")
    recipe().write_bytes(_signed(text.replace('["forward", 0]', '["forward", 7]')))
    assert compiled() == NEW
    assert compiled() == FOUND


@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_code_that_inductor_no_longer_has_is_compiled_anew(how: str) -> None:
    assert compiled() == NEW
    for path in [path for path in Path(cache_dir(), "fxgraph").rglob("*") if path.is_file()]:
        path.write_bytes(path.read_bytes()[:100]) if how == "damaged" else path.unlink()
    assert compiled() == NEW
    assert compiled() == FOUND


def test_a_directory_that_cannot_be_written() -> None:
    Path(cache_dir(), "pygraph").write_text("a file")
    for _ in range(2):
        assert compiled() == (0, 1, 0)


def _pass(graph: fx.Graph) -> None:
    """A pass of the user's without an identity."""


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (inductor_config, {"force_disable_caches": True}), (inductor_config, {"fx_graph_cache": False}),
        (inductor_config, {"pre_grad_custom_pass": _pass}), (inductor_config, {"joint_custom_pre_pass": _pass}),
        (functorch_config, {"bundled_autograd_cache": True}),
        (functorch_config, {"joint_custom_pass": lambda graph, inputs: graph}),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)  # fmt: skip
def test_nothing_is_kept_where_torch_keeps_nothing(config: Any, changes: dict[str, Any]) -> None:
    with config.patch(changes):
        for _ in range(2):
            assert compiled() == (0, 0, 0)
    assert not Path(cache_dir(), "pygraph").exists()


def test_kernels_that_are_not_seen_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def unseen(*_: Any) -> Any:
        raise UntraceableError("it calls a stranger")

    monkeypatch.setattr(inductor, "kernel_graph", unseen)
    given = inputs()
    fused = compile_run(traced(step, given), [TensorSpec.of(value) for value in given], "f", (), ())
    assert fused is not None
    assert [note.reason for note in fused.notes]
    assert not Path(cache_dir(), "pygraph").exists()


def test_a_fresh_cache_has_none() -> None:
    assert compiled() == NEW
    with fresh_cache():
        assert compiled() == NEW
    assert compiled() == FOUND


def test_when_workers_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a trace where nothing is kept; else when a run is not found."""
    started: list[str] = []
    for module in (run_cache, fused_run):
        monkeypatch.setattr(module, "start_workers", lambda name=module.__name__: started.append(name))
    run_cache.start_workers_early()
    assert started == [run_cache.__name__]
    compiled()
    assert started == [run_cache.__name__, fused_run.__name__]
    started.clear()
    run_cache.start_workers_early()
    compiled()
    assert started == []
    compiled(other)
    assert started == [fused_run.__name__]
    with functorch_config.patch(bundled_autograd_cache=True):
        run_cache.start_workers_early()
    assert started == [fused_run.__name__, run_cache.__name__]


SCRIPT = """
import sys
import torch
from pygraph.lowering import wrapper_globals
from tests.unit.lowering import test_run_cache as tests
wrapper_globals._empty_strided = tests._on_host
found = tests.compiled()
assert found != tests.FOUND or "torch._inductor.compile_fx" not in sys.modules  # of no use where nothing is compiled
print(*found)
"""


def _start(folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    root = Path(__file__).parents[3]
    return subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=root, env=environment, stdout=-1, text=True)


def _outcome(process: subprocess.Popen[str]) -> tuple[int, ...]:
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return tuple(map(int, out.split()))


def test_processes_find_what_others_have_made(tmp_path: Path) -> None:
    """Two that compile at the same time do no harm to each other, and a third one finds the recipe."""
    together = [_start(tmp_path), _start(tmp_path)]
    assert {_outcome(process) for process in together} <= {NEW, FOUND}
    assert _outcome(_start(tmp_path)) == FOUND


def test_what_is_used_of_torchs_private_parts() -> None:
    """Another version of torch may lack it: then `pygraph.lowering.run_cache` has to be looked at."""
    names = list(inspect.signature(FxGraphCache.prepare_key).parameters)
    assert names == ["gm", "example_inputs", "fx_kwargs", "inputs_to_check", "remote"]
    names = list(inspect.signature(FxGraphCache.load_with_key).parameters)
    assert names[:7] == ["key", "debug_lines", "example_inputs", "local", "remote_cache", "is_backward", "constants"]
    assert hasattr(CompiledFxGraph, "after_deserialization")
    assert callable(CompiledFxGraphConstants().unwrap)
    assert "enable_autograd_cache" in functorch_config.get_config_copy()
    from torch._inductor.async_compile import maybe_warm_pool

    assert callable(maybe_warm_pool)
