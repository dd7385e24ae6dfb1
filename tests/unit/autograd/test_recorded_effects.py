"""Effects of a recorded function: draws, updates, and which updated tensors its results depend on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pygraph.autograd.recorded_effects import RecordedEffects
from pygraph.tracing.specialization import record_call

CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "none": (lambda x, y: x * 2, {"draws": False, "writes": False, "written": {}, "used": set()}),
    "draws": (lambda x, y: x * torch.rand(3), {"draws": True, "writes": False}),
    "an update": (lambda x, y: (y.add_(1), x * 2)[1], {"writes": True, "written": {1: False}}),
    "an update that is read": (lambda x, y: (y.add_(1), x * y)[1], {"writes": True, "written": {1: True}}),
    "an update of a view": (lambda x, y: (y[0].zero_(), x * 2)[1], {"writes": True, "written": {1: False}}),
}


@pytest.mark.parametrize("name", CASES)
def test_effects(name: str) -> None:
    fn, expected = CASES[name]
    recording, _ = record_call(fn, (torch.zeros(3), torch.ones(3)), {}, frozenset(), name)
    effects = RecordedEffects(recording, 2)
    assert {key: getattr(effects, key) for key in expected} == expected


def test_lifted_tensors_that_are_read_are_used() -> None:
    args = (torch.zeros(3), torch.ones(3), torch.ones(3))
    recording, _ = record_call(lambda x, y, z: x * z, args, {}, frozenset(), "f")
    assert RecordedEffects(recording, 1).used == {1}
