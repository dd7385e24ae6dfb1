"""Types of values that may stand in a Program as they are: compared by equality, and printed as Python writes them."""

from __future__ import annotations

import torch

IMMUTABLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
