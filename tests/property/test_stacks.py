"""Random programs under random stacks of our transforms, vmap, grad, jvp, … equal the same stacks without ours."""

from __future__ import annotations

import torch
from hypothesis import example, given

from tests.property.compositions import Composition, Ours, check_ours_change_nothing, compositions
from tests.property.strategies import Case, Step, TensorInput
from tests.property.test_laws import examples


# What is saved has one row, whose stride is another one than in the trace.
@given(compositions())
@example(Composition(Case((TensorInput((1, 3)),), (Step("temporary"),)), (Ours("devicify"),), "backward"))
@examples(25, 800)
def test_ours_change_nothing(device: torch.device, composition: Composition) -> None:
    check_ours_change_nothing(composition, device)
