"""Results as tensors and a spec: unflattening restores them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pygraph.autograd.result_spec import ResultSpec, flatten_result

X, Y = torch.zeros(2), torch.ones(3)

RESULTS: dict[str, tuple[Any, int]] = {
    "a tensor": (X, 1),
    "a tuple": ((X, Y), 2),
    "numbers beside tensors": ({"x": X, "n": [1, None, "s", Y]}, 2),
    "no tensor": ((1, None), 0),
}


@pytest.mark.parametrize("name", RESULTS)
def test_unflattening_restores_a_result(name: str) -> None:
    result, count = RESULTS[name]
    tensors, spec = flatten_result(result)
    assert len(tensors) == len(spec.tensor_leaves) == count
    again, again_spec = flatten_result(spec.unflatten(tensors))
    assert again_spec == spec
    assert all(one is other for one, other in zip(again, tensors, strict=True))


def test_a_tuple_of_tensors_and_none() -> None:
    spec = ResultSpec.of_tuple((None, X, None))
    assert spec.tensor_leaves == [1]
    assert spec.unflatten([Y]) == (None, Y, None)
