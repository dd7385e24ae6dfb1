"""Torch's errors in words of the user's, and strict errors that have one cause and few frames."""

from __future__ import annotations

import math
import pickle
import re
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pygraph
from pygraph.errors import FallbackError, TraceError

equal = torch.ops.aten.equal
compiled = torch.compile(lambda x: x * 2, backend="eager")


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "numpy": (lambda x: torch.as_tensor(x.numpy() * 2), "it converts a tensor to NumPy, and its values are"),
    "address": (lambda x: x + x.data_ptr() % 7, "it asks for the data pointer of a tensor"),
    "compiled": (lambda x: compiled(x), "it calls a function that torch.compile has made"),
    "equal": (lambda x: equal(x, x + 1), "aten.equal.default gives a value of the host that depends on data"),
    "number": (lambda x: x * math.gamma(x.sum()), "it needs a value on the host. From"),
    "size": (lambda x: torch.zeros(int(x.sum())), "it needs a value on the host. From"),
    "devices": (lambda x: x @ torch.ones(3, 3), "an operation has tensors of two devices, {device} and cpu"),
    "pickle": (lambda x: x * len(pickle.dumps(x)), "it pickles a tensor, whose values are on the device"),
    "text": (lambda x: x + len(f"{x}"), ": it asks for the text of a tensor"),
    "none": (lambda x: x + None, "TypeError: unsupported operand type(s) for +: 'Tensor' and 'NoneType'"),  # type: ignore
}  # fmt: skip


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_strict_error_is_of_the_call_and_has_one_cause(device: torch.device, kind: str) -> None:
    fn, told = FUNCTIONS[kind]
    with pytest.raises(FallbackError, match=re.escape(told.format(device=device))) as caught:
        pygraph.jit(fn, strict=True)(torch.ones(3, device=device))
    assert str(caught.value).startswith(f"{fn.__name__}(…): ")
    assert "test_torch_errors.py:" in str(caught.value)
    printed = "".join(traceback.format_exception(caught.value))
    assert not isinstance(caught.value.__cause__, TraceError)
    assert printed.count("direct cause") == (0 if kind in ("text", "number", "size") else 1)
    assert printed.count(f"{'pygraph'}/") <= 2  # the frame of the call, and none that came to know of it


def test_every_problem_has_a_remedy_or_is_the_function_s_own(device: torch.device) -> None:
    for kind, (fn, _) in FUNCTIONS.items():
        if kind in ("text", "none"):
            continue
        with pytest.raises(TraceError) as caught:
            pygraph.trace(fn)(torch.ones(3, device=device))
        assert re.search(r"From test_torch_errors\.py:\d+\. \w.*\.$", str(caught.value)), kind


def test_a_method_and_a_module_raise_alike(device: torch.device) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(x.numpy())

    with pytest.raises(FallbackError, match=r"^Model\(…\): it converts a tensor to NumPy"):
        pygraph.jit(Model(), strict=True)(torch.ones(3, device=device))
