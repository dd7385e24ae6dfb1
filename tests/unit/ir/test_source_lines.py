"""The code on the user's lines, by their names in reports."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from pygraph.ir.source_lines import line_in, text_of, user_frame


def frame_of(path: Path) -> FrameType:
    """The frame of a new module that has run, at its last line."""
    path.parent.mkdir()
    path.write_text("import sys\nframe = sys._getframe()  # here\n")
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    return names["frame"]


def test_the_text_of_a_line(tmp_path: Path) -> None:
    """Of several files with the same name, a line is not known to be of one."""
    line = user_frame(frame_of(tmp_path / "first" / "same_name.py"))
    assert line == "same_name.py:2"
    assert text_of(line) == "frame = sys._getframe()  # here"
    assert user_frame(frame_of(tmp_path / "second" / "same_name.py")) == line
    assert text_of(line) == text_of("unknown.py:1") == text_of(None) == ""


def test_the_text_of_a_line_of_dynamos(tmp_path: Path) -> None:
    frame_of(tmp_path / "folder" / "of_dynamo.py")
    assert line_in(f'  File "{tmp_path / "folder" / "of_dynamo.py"}", line 1, in step') == "of_dynamo.py:1"
    assert text_of("of_dynamo.py:1") == "import sys"


def test_lines_of_the_standard_library_are_not_the_users() -> None:
    """What is copied or mapped by it is named by the line that asks for that."""

    class Asked:
        def __deepcopy__(self, memo: object) -> str | None:
            return user_frame(sys._getframe(1))

    line = copy.deepcopy(Asked())
    assert str(line).startswith("test_source_lines.py:")
    assert text_of(str(line)) == "line = copy.deepcopy(Asked())"
