"""Numbers and tables as text in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from pygraph.process.cache import readable

Cell = str | None
"""A text of a table; None for nothing."""


def times(ratio: float | None) -> Cell:
    """A speed-up.

    >>> times(1.234)
    '1.23 ×'
    """
    return None if ratio is None else f"{ratio:.2f} ×"


def percent(share: float | None, signed: bool = False) -> Cell:
    """A share, or a change.

    >>> percent(0.994), percent(0.9996), percent(-0.29, signed=True)
    ('99 %', '100 %', '-29 %')
    """
    return None if share is None else (f"{share:+.0%}" if signed else f"{share:.0%}").replace("%", " %")


def size(number: float | None) -> Cell:
    """A number of bytes.

    >>> size(0), size(312), size(1536), size(953e6)
    ('0 B', '312 B', '1.5 KB', '953.0 MB')
    """
    return None if number is None else readable(number)


def table(headings: Sequence[str], lines: Sequence[Sequence[Cell]], numbers: bool = True) -> str:
    r"""A table, its first column to the left and the others to the right, unless they are no ``numbers``.

    >>> print(table(["a", "b"], [["x", "1"], ["y|z", None]]))
    | a | b |
    | --- | ---: |
    | x | 1 |
    | y\|z | – |
    """
    rules = ["---", *["---:" if numbers else "---"] * (len(headings) - 1)]
    texts = [["–" if cell is None else " ".join(cell.replace("|", "\\|").split()) for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in [list(headings), rules, *texts])
