"""The glossary: every word once, and no link where a word is part of a name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from pygraph.report.glossary import TERMS, by_form, pieces

WORDS = [
    "region",
    "kernel",
    "node",
    "patched",
    "copied",
    "pool",
    "kind of call",
    "baked value",
    "provisional",
    "hit",
    "miss",
]


def test_the_words_of_reports_are_explained() -> None:
    assert set(WORDS) <= {term.name for term in TERMS}


def test_the_page_of_the_docs_has_them_all() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/glossary.md").read_text(encoding="utf-8")
    rows = [f"| {term.name} | {term.meaning} |" for term in TERMS]
    assert page.splitlines()[6:] == rows


def test_every_form_belongs_to_one_term() -> None:
    forms = Counter(form for term in TERMS for form in {term.name, *term.forms})
    assert [form for form, count in forms.items() if count > 1] == []
    assert len({term.anchor for term in TERMS}) == len(TERMS)


def test_terms_are_in_order_and_sentences() -> None:
    assert [term.name for term in TERMS] == sorted((term.name for term in TERMS), key=str.lower)
    assert all(term.meaning.endswith(".") and "  " not in term.meaning for term in TERMS)


@pytest.mark.parametrize("text", ["3 kinds of calls: 2 hits", "region", "", "no words here", "copies, copy; copied"])
def test_pieces_are_the_text(text: str) -> None:
    found = pieces(text)
    assert "".join(piece for piece, _ in found) == text
    assert all(term is None or by_form()[piece] is term for piece, term in found)


def test_the_longest_form_is_the_word() -> None:
    assert [piece for piece, term in pieces("5 kinds of calls and 2 calls") if term] == ["kinds of calls", "calls"]


@pytest.mark.parametrize(
    "text", ["model.pool.weight", "aten.copy_", "args['node']", "graphs_per_call", "/tmp/graph", "copy(x)"]
)
def test_parts_of_names_are_no_words(text: str) -> None:
    assert all(term is None for _, term in pieces(text))
