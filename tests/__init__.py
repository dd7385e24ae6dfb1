"""Tests; a package, so that pytest does not import `tests/conformance` by the name of a benchmark."""
