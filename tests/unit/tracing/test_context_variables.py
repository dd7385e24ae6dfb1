"""Context variables that a function sets in a context of its own."""

from __future__ import annotations

import contextvars

import torch

from pygraph.tracing.context_variables import changed_variable

_MINE: contextvars.ContextVar[int] = contextvars.ContextVar("mine", default=0)


def test_a_variable_that_is_set_is_named() -> None:
    context = contextvars.copy_context()
    context.run(_MINE.set, 1)
    assert changed_variable(context) == "the context variable mine"


def test_a_variable_that_is_put_back_has_not_changed() -> None:
    def set_and_reset() -> None:
        _MINE.reset(_MINE.set(1))

    context = contextvars.copy_context()
    context.run(set_and_reset)
    assert changed_variable(context) is None


def test_settings_of_torch_do_not_count() -> None:
    context = contextvars.copy_context()
    context.run(setattr, torch._inductor.config, "max_autotune", True)
    try:
        assert changed_variable(context) is None
    finally:
        context.run(setattr, torch._inductor.config, "max_autotune", False)
