"""torch's settings that a function runs under: grad mode, autocast, default dtype and device."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator

import torch

from pygraph.autograd.decomposition import Decomposing
from pygraph.autograd.levels import levels
from pygraph.ir.autocasting import autocast_kinds


@dataclasses.dataclass(frozen=True)
class Settings:
    """torch's settings at a call, under which its derivatives run later.

    Attributes:
        grad: Whether operations are recorded for derivatives.
        autocast: By device type, whether autocast is on, and its dtype.
        dtype: The default dtype of new tensors.
        device: The default device of new tensors.
        transformed: Whether transforms of torch.func were active.
    """

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    dtype: torch.dtype
    device: torch.device
    transformed: bool

    @classmethod
    def now(cls) -> Settings:
        """Return the present settings."""
        return cls(
            torch.is_grad_enabled(),
            tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in autocast_kinds()),
            torch.get_default_dtype(), torch.get_default_device(), bool(levels()),
        )  # fmt: skip

    @contextlib.contextmanager
    def restored(self) -> Generator[None, None, None]:
        """Restore the settings for a while; a backward runs later, and in another thread."""
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                if (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) != (enabled, dtype):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if torch.get_default_dtype() != self.dtype:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self.dtype)
            if torch.get_default_device() != self.device:
                stack.enter_context(self.device)
            if self.transformed and not levels():
                stack.enter_context(Decomposing())
            yield
