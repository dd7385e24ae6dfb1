"""What the tests of traces look for fakes with finds them."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.fakes import assert_no_fake_left, fakes_left


def test_a_fake_that_is_held_is_found() -> None:
    with FakeTensorMode():
        held = [torch.ones(3)]
    assert len(fakes_left()) == 1
    with pytest.raises(AssertionError, match="1 left, held by"):
        assert_no_fake_left()
    held.clear()
    assert_no_fake_left()


def test_a_number_of_a_trace_is_found() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = mode.from_tensor(torch.ones(3, 4), static_shapes=False)
    size = fake.shape[0]
    del fake, mode
    assert size in fakes_left()


def test_a_fake_in_garbage_is_not_counted() -> None:
    with FakeTensorMode():
        ring: list[object] = [torch.ones(3)]
    ring.append(ring)
    del ring
    assert_no_fake_left()
