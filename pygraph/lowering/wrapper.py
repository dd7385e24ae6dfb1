"""The launches of Inductor's code as a graph of kernels and allocations.

Inductor compiles a graph to a Python function, its *wrapper*: allocations, calls of library operations and launches of
Triton kernels in a row, without branches. Run once on fake tensors, with every launch recorded instead of made, it
shows all of that as nodes. Nothing of how a kernel is launched is lost on the way: a node launches the same tuned
kernel that the wrapper does.
"""

# The wrapper's functions and Inductor's kernels are private. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.launches import Number
from pygraph.ir.scopes import Origin
from pygraph.lowering.kernel_recorder import KernelGraph, KernelRecorder, Origins, UntraceableError
from pygraph.lowering.wrapper_globals import traced_globals


def kernel_graph(
    call: Callable[[list[Any]], Sequence[Any]],
    inputs: Sequence[TensorSpec | Number],
    origins: Mapping[str, Origin] | None = None,
) -> KernelGraph:
    """The kernels and allocations of a wrapper for these inputs.

    Wrapper::

        def call(args):
            x, w = args
            buf0 = empty_strided_cuda((8, 8), (8, 1), torch.float32)
            extern_kernels.mm(x, w, out=buf0)
            triton_poi_fused_relu_0.run(buf0, 64, stream=stream0)
            return (buf0,)

    Nodes::

        empty_strided = aten.empty_strided.default([8, 8], [8, 1], dtype=torch.float32, device=device("cuda:0"))
        mm = aten.mm.out(x, w, out=empty_strided)
        launch = pygraph.launch("triton_poi_fused_relu_0", [empty_strided], [], [])
        return (empty_strided,)

    Args:
        call: The wrapper: a Python function of one list, which it empties.
        inputs: The specs of the inputs; numbers (sizes) as they are.
        origins: The user's lines and scopes, by the names that the wrapper's comments have for what it computes.

    Raises:
        UntraceableError: The wrapper calls code that is not known here, as kernels for the CPU.
    """
    if not isinstance(call, types.FunctionType):
        raise UntraceableError(f"its wrapper is a {type(call).__name__}")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        recorder = KernelRecorder(mode, Origins(call.__code__, origins or {}))
        values = [recorder.placeholder(spec) if isinstance(spec, TensorSpec) else spec for spec in inputs]
        run = types.FunctionType(call.__code__, traced_globals(call, recorder), call.__name__, call.__defaults__)
        try:
            with torch.no_grad(), recorder:
                returned = run(values)
        except UntraceableError:
            raise
        except Exception as error:  # of whatever kind: nothing has run but fake operations
            raise UntraceableError(f"{type(error).__name__}: {error}") from error
        return recorder.finish(returned)
