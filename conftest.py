"""The end of the doctests of `pygraph/`: Dynamo is reset before the namespace of an example is cleared."""

from __future__ import annotations

import functools
import sys
from collections.abc import Generator

import pytest
import torch
from _pytest.doctest import DoctestItem


@pytest.fixture(autouse=True)
def dynamo_before_namespace(request: pytest.FixtureRequest) -> Generator[None, None, None]:
    """Free compiled code first.

    Dynamo adds global names to the namespace of a function that it compiles, and deletes them when the compiled code
    dies. doctest clears the namespace when an example has run: the deletion fails later, in the callback of a weak
    reference, and Python prints an ignored ``KeyError`` at the end of the process.
    """
    item = request.node
    if not isinstance(item, DoctestItem):
        yield
        return
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(item.runner, "run", functools.partial(item.runner.run, clear_globs=False))
        yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    item.dtest.globs.clear()
