"""Random programs under random stacks of our transforms, vmap, grad, jvp, … equal the same stacks without ours."""

from __future__ import annotations

import torch
from hypothesis import given

from tests.property.compositions import Composition, check_ours_change_nothing, compositions
from tests.property.test_laws import examples


@given(compositions())
@examples(80)
def test_ours_change_nothing(device: torch.device, composition: Composition) -> None:
    check_ours_change_nothing(composition, device)
