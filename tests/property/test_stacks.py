"""Random programs under random stacks of our transforms, vmap, grad, jvp, … equal the same stacks without ours."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.property.compositions import AMBIENT, Composition, Ours, check_ours_change_nothing, compositions
from tests.property.strategies import Case, Step, TensorInput
from tests.property.test_laws import examples


@pytest.mark.parametrize("ambient", AMBIENT)
@given(st.data())
@examples(4, 134)
def test_ours_change_nothing(device: torch.device, ambient: str, data: st.DataObject) -> None:
    check_ours_change_nothing(data.draw(compositions(ambient)), device)


def test_what_is_saved_has_one_row_whose_stride_is_another_one_than_in_the_trace(device: torch.device) -> None:
    case = Case((TensorInput((1, 3)),), (Step("temporary"),))
    check_ours_change_nothing(Composition(case, (Ours("devicify"),), "backward"), device)
