"""Tables, for a terminal and in Markdown."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table


def figures_table(first: str, headers: Sequence[str], **looks: Any) -> Table:
    """Return a table of numbers, with the names of their rows in the first column; ``looks`` are arguments of its
    class."""
    table = Table(**{"box": box.SIMPLE_HEAD, "pad_edge": False, "padding": (0, 2, 0, 0), **looks})
    table.add_column(first, overflow="fold")
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, of a head and lines.

    >>> print(markdown([("plan", "ms"), ("none", "9")]))
    | plan | ms |
    | --- | --- |
    | none | 9 |
    """
    head, *lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    return "\n".join([head, "| " + " | ".join("---" for _ in rows[0]) + " |", *lines])
