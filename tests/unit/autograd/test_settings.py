"""Settings of a call: grad mode, autocast, default dtype, restored for a while."""

from __future__ import annotations

import torch

from pygraph.autograd.settings import Settings


def test_settings_are_restored_for_a_while() -> None:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.set_default_dtype(torch.float64)
        inside = Settings.now()
        torch.set_default_dtype(torch.float32)
    outside = Settings.now()
    assert inside != outside
    with inside.restored():
        assert Settings.now() == inside
        assert torch.zeros(1).dtype == torch.float64
        assert not torch.is_grad_enabled()
    assert Settings.now() == outside
