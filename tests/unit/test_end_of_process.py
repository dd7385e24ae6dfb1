"""The end of a process: whatever is alive then, nothing is printed and the process succeeds."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import torch

PREPARE = """
import atexit, builtins, os, sys, warnings
import torch, pygraph
warnings.simplefilter("ignore")
device = pygraph.default_device()
x = torch.ones(3, device=device)
model = torch.nn.Linear(3, 3).to(device)
f = pygraph.jit(lambda x: x * 2 + 1)
for _ in range(3):
    f(x)
"""

ENDS = {
    "in a cycle": "class A: pass\na = A(); a.itself, a.f = a, f; del f, a",
    "kept by builtins": "builtins.kept = f, f(x), pygraph.jit(model)(x)",
    "composed": """
g = pygraph.jit(lambda x: (x * x).sum())
torch.func.vmap(torch.func.grad(g))(torch.ones(2, 3, device=device))
pygraph.make_graphed_callables(model, (x,))(x).sum().backward()
""",
    "a step": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
@pygraph.jit
def step(x):
    optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()
for _ in range(4):
    step(x)
""",
    "the backend": """
def g(x):
    y = model(x); torch._dynamo.graph_break(); return y * 2
fast = torch.compile(g, backend=pygraph.backend)
for _ in range(3):
    fast(x).sum().backward()
builtins.kept = fast
""",
    "calls at exit": "atexit.register(lambda: f(x)); atexit.register(lambda: f(torch.ones(7, device=device)))",
    "an exit inside": """
def leave(x):
    sys.exit(0)
pygraph.jit(leave)(x)
""",
}


ROOT = pathlib.Path(__file__).parents[2]


def run_python(*arguments: str) -> None:
    """Run a process that must succeed and print no errors."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.stderr, done.returncode) == ("", 0), done.stdout


# All of these can be alive in one process, which the last one ends.
TOGETHER = tuple(ENDS)
ENDS["all together"] = "\n".join(ENDS[name].replace("; del f, a", "") for name in TOGETHER)

# Apart, as the child waits ten seconds for autograd's threads once there are any, in eager too. A fork of a process
# that uses CUDA is another matter.
if not torch.cuda.is_available():
    ENDS["a fork"] = "child = os.fork()\nf(x)\nif child:\n    assert os.waitpid(child, 0)[1] == 0"


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in TOGETHER else n for n in ENDS])
def test_nothing_is_printed(name: str, device: torch.device) -> None:
    run_python("-c", PREPARE + ENDS[name])


def test_nothing_is_printed_after_doctests_that_compile() -> None:
    run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "--doctest-modules", "pygraph/interop/dynamo.py")


def test_finalizers_need_no_names_of_their_modules(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from pygraph.interop import boxed
    from pygraph.runtime import recorded_region

    unraised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraised.append)
    replaying = boxed.BoxedReplay.__new__(boxed.BoxedReplay)
    region = recorded_region.RecordedRegion.__new__(recorded_region.RecordedRegion)
    with monkeypatch.context() as gone:
        gone.setattr(boxed, "sys", None)
        gone.setattr(recorded_region, "sys", None)
        del replaying, region
    assert not unraised
