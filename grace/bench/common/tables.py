"""Tables of rows for a terminal."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from rich import box
from rich.table import Table
from rich.text import Text

from grace.bench.common.text import UNKNOWN, clean

Item = TypeVar("Item")
Row = TypeVar("Row", bound=Mapping[str, Any])
Columns = dict[str, Callable[[Item], str]]
"""Columns of a table: titles, and functions that make a cell of a row."""


def table(
    rows: Iterable[Item],
    columns: Columns[Item],
    words: Collection[str] = (),
    style: Callable[[Item], str] | None = None,
    title: str | None = None,
    between: int = 2,
) -> Table:
    """Return a table, without the columns that have nothing in any row. Cells are text, never markup.

    Args:
        rows: what the columns' functions take.
        columns: the titles, and the functions that make cells.
        words: titles of columns of words beside the first one: they are aligned at the left, and stay if empty.
        style: the style of a row.
        title: the table's title.
        between: the number of spaces between two columns.
    """
    found = list(rows)
    cells = {title: [clean(cell(row)) for row in found] for title, cell in columns.items()}
    padding = (0, between, 0, 0)
    made = Table(title=title, padding=padding, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    made.title_justify, made.title_style = "left", "bold"
    shown = list[list[str]]()
    for title, column in cells.items():
        left = title in words or not shown
        if left or not {*column} <= {"", UNKNOWN}:  # a column without any figure tells nothing
            made.add_column(title, justify="left" if left else "right", overflow="fold")
            shown.append(column)
    for i, row in enumerate(found):
        cells_of_row = [Text(column[i]) for column in shown]  # Text: brackets in a cell are no markup
        made.add_row(*cells_of_row, style=style(row) if style is not None else "")
    return made


def grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Return rows by the values of some keys, None of those that a row lacks, in their order.

    >>> grouped([{"ranks": 4}, {"ranks": 2}, {"ranks": 4, "bandwidth": 1e9}], "ranks", "bandwidth")
    {(4, None): [{'ranks': 4}], (2, None): [{'ranks': 2}], (4, 1000000000.0): [{'ranks': 4, 'bandwidth': 1000000000.0}]}
    """
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(key) for key in keys), []).append(row)
    return found
