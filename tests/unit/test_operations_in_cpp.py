"""Custom operations that are written in C++: in graphs, fused kernels around them, gradients, and `torch.compile`."""

# The flag of the C++ library that torch was built with is known to torch._C only. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pygraph
from pygraph.process.cache import cache_directory
from tests.steps import assert_same

pytestmark = pytest.mark.filterwarnings("ignore")  # of Dynamo's and Inductor's, which differ between versions


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The operations, compiled, unless an earlier run has done so, and loaded."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler was found")
    base = Path(torch.__file__).parent
    source = Path(__file__).parents[1] / "custom_operations.cpp"
    flags = [
        "-O0",
        "-std=c++20",
        "-shared",
        "-fPIC",
        "-w",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
    ]
    includes = [f"-I{base / 'include'}", f"-I{base / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{base / 'lib'}", "-ltorch_cpu", "-lc10"]
    command = [compiler, *flags, *includes, str(source), *libraries, "-o"]
    parts = [*map(str.encode, [torch.__version__, *command]), source.read_bytes()]
    library = cache_directory() / "tests" / f"operations-{hashlib.sha256(b' '.join(parts)).hexdigest()[:20]}.so"
    if not library.exists():
        made = tmp_path_factory.mktemp("cpp") / "operations.so"
        done = subprocess.run([*command, str(made)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:2000]
        library.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(made, beside := library.with_suffix(f".{os.getpid()}"))
        os.replace(beside, library)  # another worker may do the same
    torch.ops.load_library(library)
    return torch.ops.pygraph_tests_cpp


def pieces(operations: Any) -> dict[str, Callable[[Tensor, Tensor], Any]]:
    def updating(x: Tensor, y: Tensor) -> Tensor:
        z = (x * y).sin()
        operations.shift(z, y + 1)
        return z.relu() * 2

    def updating_an_argument(x: Tensor, y: Tensor) -> Tensor:
        operations.shift(x, y)
        return (x + 1).cos()

    return {
        "value": lambda x, y: operations.cube(x.sin() + y, 0.5).relu() + 1,
        "update": updating,
        "update of an argument": updating_an_argument,
    }


WAYS: dict[str, Callable[[Any], Any]] = {
    "jit": pygraph.jit,
    "fuse": lambda fn: pygraph.jit(fn, fuse=True),
    "torch.compile": lambda fn: torch.compile(fn, backend=pygraph.backend),
}


def test_operations_in_cpp(device: torch.device, operations: Any) -> None:
    """One test, so that one worker compiles them."""
    for way, transform in WAYS.items():
        for name, fn in pieces(operations).items():
            torch._dynamo.reset()
            fast = transform(fn)
            for _ in range(4):
                x, y = torch.randn(5, 7, device=device), torch.randn(5, 7, device=device)
                mine, ours = x.clone(), y.clone()
                assert_same((fast(mine, ours), mine, ours), (fn(x, y), x, y), device)
            if way == "jit" or (way == "fuse" and device.type == "cuda"):
                assert "no fallbacks" in str(fast.explain()), (way, name)
        torch._dynamo.reset()
        fn = pieces(operations)["value"]
        fast = transform(fn)
        for _ in range(3):
            x, y = torch.randn(5, 7, device=device), torch.randn(5, 7, device=device)
            gradients: list[Any] = []
            for each in (fast, fn):
                leaf = x.clone().requires_grad_()
                each(leaf, y).sum().backward()
                gradients.append(leaf.grad)
            assert_same(*gradients, device)
