"""The extension is there wherever it can be built: the other tests of it are skipped without it."""

from __future__ import annotations

import pytest

from pygraph.process import extension


@pytest.mark.skipif(
    extension._compiler() is None or not extension.enabled(), reason="no C++ compiler, or PYGRAPH_NATIVE=0"
)
def test_it_is_built_where_there_is_a_compiler() -> None:
    assert extension.start(wait=True) is not None, extension.reason()
