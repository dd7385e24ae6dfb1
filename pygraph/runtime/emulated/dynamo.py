"""Hiding the emulated device's own Python code from Dynamo, so that ``torch.compile`` compiles its users' only."""

# Dynamo's switches have no public names. Checked with torch 2.13; they are there since 2.8.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

F = TypeVar("F", bound=Callable[..., Any])

_SKIP: Any = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def hide_from_dynamo(function: F) -> F:
    """Have Dynamo run the function, and all that it calls, uncompiled; costs nothing in a call.

    Dynamo looks at every frame that runs below a function of which it could not make one graph. Kernels in Python,
    called by torch's dispatcher, are among them: compiling them takes seconds and shows in its limits and logs.
    """
    eval_frame.set_code_exec_strategy(function.__code__, _SKIP)
    return function
