"""Operations that fail only where they run: eager's error, with the user's line."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pygraph


def of_two_dtypes(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x) @ w


def out_of_range(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(x * 2, w)


CALLS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]] = {
    "dtypes": (of_two_dtypes, lambda x: x.double()),
    "range": (out_of_range, lambda x: torch.tensor([9, 0, 0], device=x.device)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("options", [{}, {"strict": True}, {"mode": "replay"}])
def test_the_error_is_eager_s_with_the_user_s_line(device: torch.device, name: str, options: dict[str, Any]) -> None:
    if name == "range" and device.type == "cuda":
        pytest.skip("a kernel's assertion, after which the process can use the GPU no more: in eager too")
    fn, second = CALLS[name]
    x = torch.ones(3, 3, device=device)
    with pytest.raises(Exception) as eager:  # noqa: PT011  (of which class is torch's)
        fn(x, second(x))
    with pytest.raises(type(eager.value), match=re.escape(str(eager.value))) as caught:
        pygraph.jit(fn, **options)(x, second(x))
    assert type(caught.value) is type(eager.value)
    line = fn.__code__.co_firstlineno + 1
    if not options.get("strict"):  # it has run as it is, as nothing could be recorded
        assert line in [frame.lineno for frame in traceback.extract_tb(caught.value.__traceback__)]
        return
    (note,) = caught.value.__notes__
    assert note.startswith(f"From test_node_errors.py:{line}, in {fn.__name__}(…): return torch.")
    assert [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)] == [__file__]


def test_what_fails_besides_operations_has_all_frames(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(result: Any, args: Any) -> Any:
        raise RuntimeError("no memory of its own")

    monkeypatch.setattr("pygraph.runtime.body.own_memory", fails)
    x = torch.ones(3, 3, device=device)
    with pytest.raises(RuntimeError, match="of its own") as caught:
        pygraph.jit(lambda x: x + 1)(x)
    assert not getattr(caught.value, "__notes__", [])
    assert len(traceback.extract_tb(caught.value.__traceback__)) > 2
