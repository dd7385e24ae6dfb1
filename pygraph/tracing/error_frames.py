"""Errors of a traced function: freed of the frames that hold its tensors and guards of torch's dispatcher."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
import traceback
from collections.abc import Generator

import torch

from pygraph.ir.source_lines import user_lines


@contextlib.contextmanager
def preserved_dispatch_state() -> Generator[None, None, None]:
    """Free errors that leave this block of guards of torch's dispatcher in their frames, which would undo later guards.

    Torch has such guards in the variables of functions. Private; checked with torch 2.11 and 2.13.
    """
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        try:
            yield
        except BaseException as error:
            _clear_frames(error)
            raise


def _clear_frames(error: BaseException) -> None:
    """Clear the frames of an error; the tracebacks of its causes, whose functions hold more, become a note."""
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        link = chain.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            traceback.clear_frames(link.__traceback__)
            chain += [link.__cause__, link.__context__]
            lines = [] if link is error else user_lines(link)
            if lines:
                link.add_note("In the function that was traced:\n" + "".join(lines).rstrip())
            if link is not error:
                link.__traceback__ = None
