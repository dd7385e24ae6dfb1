"""Frames of user code, and the instructions in it that ask for a type."""

from __future__ import annotations

import contextlib
import dis
import sys
from collections.abc import Iterator
from typing import Any

import torch

from pygraph.tracing.user_frames import is_user_frame, type_questions


def frame_here() -> Any:
    return sys._getframe()


def test_this_file_is_the_users() -> None:
    assert is_user_frame(frame_here())


def test_a_frame_of_torch_is_not_though_the_user_has_called_it() -> None:
    frames: list[Any] = []

    class Module(torch.nn.Module):
        def forward(self) -> None:
            frames.append(sys._getframe(1))

    Module()()
    assert not is_user_frame(frames[0])


def test_a_frame_of_the_standard_library_is_that_of_its_caller() -> None:
    frames: list[Any] = []

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        frames.append(sys._getframe(1))
        yield

    with context():
        pass
    assert "contextlib" in frames[0].f_code.co_filename
    assert is_user_frame(frames[0])


def test_only_questions_about_types_count() -> None:
    def function(k: Any) -> Any:
        if isinstance(k, float):
            return k.__class__
        match k:
            case int():
                return len([k])
            case _:
                return k

    names = {
        instruction.opname
        for instruction in dis.get_instructions(function)
        if instruction.offset in type_questions(function.__code__)
    }
    assert {"LOAD_ATTR", "MATCH_CLASS"} <= names
    calls = [i for i in dis.get_instructions(function) if i.opname == "CALL"]
    assert [call.offset in type_questions(function.__code__) for call in calls] == [True, False]
