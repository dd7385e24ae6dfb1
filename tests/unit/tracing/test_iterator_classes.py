"""The methods of classes written in Python that a trace watches."""

from __future__ import annotations

import contextlib
import random
import sys
from typing import Any

from torch.utils.data import DataLoader

from pygraph.tracing import iterator_classes


def _refuse(value: object) -> None:
    raise AssertionError(value)


def _methods() -> list[Any]:
    return [DataLoader.__iter__, random.Random.random, random.Random.seed, *random.SystemRandom.__dict__.values()]


def test_methods_are_restored_after_an_interruption_of_their_restoration() -> None:
    """Ctrl-C in the first function of pygraph that runs after the trace: no class keeps a method of the trace."""

    def interrupt(frame: Any, event: str, arg: object) -> None:
        if (
            event == "call"
            and frame.f_code.co_filename == iterator_classes.__file__
            and "watched" not in frame.f_code.co_name
        ):
            sys.setprofile(None)
            raise KeyboardInterrupt

    before = _methods()
    watched = iterator_classes.watched_classes(lambda: False, _refuse)
    watched.__enter__()
    assert _methods() != before
    sys.setprofile(interrupt)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            watched.__exit__(None, None, None)
    finally:
        sys.setprofile(None)
    assert _methods() == before
