"""Remedies: what an error of strict=True says to do is right for what it is about, and the error reads well."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pygraph
from pygraph.errors import FallbackError


def refused(fn: Callable[..., Any], *args: Any) -> FallbackError:
    with pytest.raises(FallbackError) as caught:
        pygraph.jit(fn, strict=True)(*args)
    text = str(caught.value)
    assert ".." not in text
    assert "trace(" not in text
    return caught.value


def test_a_value_that_is_returned(device: torch.device) -> None:
    error = refused(lambda x: x.sum().item(), torch.ones(3, device=device))
    assert "Return the tensor, and read it after the call." in str(error)
    assert pygraph.jit(lambda x: x.sum(), strict=True)(torch.ones(3, device=device)).item() == 3


def test_no_remedy_is_refused_itself(device: torch.device) -> None:
    def cond(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x * torch.rand_like(x), lambda x: x - 1, (x,))

    x = torch.ones(3, device=device)

    def decides(x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x

    for fn in (cond, decides, lambda x: x * int(x.sum())):
        text = str(refused(fn, x))
        assert "torch.where" in text
        assert "torch.cond" not in text


def test_an_index_on_the_device(device: torch.device) -> None:
    x, i = torch.ones(3, 2, device=device), torch.tensor(1, device=device)
    fn: Callable[..., Any] = lambda x, i: x[i] * 2  # noqa: E731
    assert "index_select" in str(refused(fn, x, i))
    fast = pygraph.jit(fn)
    fast(x, i)
    reasons = {one.what: one.reason for one in fast.explain().counted_fallbacks()}
    assert reasons["aten.mul.Tensor"] == "where an argument lies depends on data"
    assert pygraph.jit(lambda x, i: x.index_select(0, i[None])[0] * 2, strict=True)(x, i).tolist() == [2.0, 2.0]


def test_torch_s_own_words_are_one_line(device: torch.device) -> None:
    error = refused(lambda x: x * int(x.sum()), torch.ones(3, device=device))
    printed = "".join(traceback.format_exception(error))
    assert "docs.google.com" not in printed
    assert "TORCH_LOGS" not in printed


def test_an_error_of_the_call_is_named_once(device: torch.device) -> None:
    w = torch.ones(3, device=device, requires_grad=True)

    def hooked(x: Tensor) -> Tensor:
        y = x * w
        y.register_hook(lambda gradient: gradient * 2)
        return y

    text = str(refused(hooked, torch.ones(3, device=device)))
    assert re.match(r"hooked\(…\): it calls register_hook on .* From test_remedies\.py:\d+\. strict=True", text)


def test_a_list_that_is_read_as_items_lie(device: torch.device) -> None:
    log: list[Tensor] = []

    def stacked(x: Tensor) -> Tensor:
        log.append(x * 2)
        return torch.stack(log).sum()

    text = str(refused(stacked, torch.ones(3, device=device)))
    assert "_NoItem" not in text
    assert "it reads a list to which it appends at every call" in text


def test_an_empty_part_needs_no_pointer(device: torch.device) -> None:
    fast = pygraph.jit(lambda x: (x[:0] + 1, x * 2), strict=True)
    for _ in range(3):
        empty, double = fast(torch.ones(3, device=device))
        assert empty.shape == (0,)
        assert double.tolist() == [2.0] * 3


def test_a_report_has_no_internal_names(device: torch.device) -> None:
    fast = pygraph.jit(lambda x: x * 2 if x.sum() > 0 else x - 1)
    x = torch.ones(3, device=device)
    for sign in (1, -1, 1, -1, 1):
        fast(sign * x)
    for text in (str(fast.explain()), fast.explain_misses(), str(fast.explain().to_dict())):
        assert "pygraph_outcomes" not in text
    assert {"decision 1": "True"} in [entry["baked"] for entry in fast.explain().to_dict()["entries"]]
