"""Prints tables that fit the width of the terminal."""

from collections.abc import Collection, Iterable, Sequence

from rich import box
from rich.padding import Padding
from rich.table import Table

from mcis.datasets.errors import one_line
from mcis.platform.runs.progress import console

_UNLIMITED_WIDTH = 1000


def make_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Collection[str] = ()
) -> Table:
    """Builds a table whose cells are printed as plain text, without markup.

    Args:
        title: Shown above the table.
        columns: Headings.
        rows: One cell per column each.
        numbers: Headings of the columns that are right-aligned and never wrapped.
    """
    table = Table(title=one_line(title), title_justify="left")
    for column in columns:
        is_number = column in numbers
        table.add_column(one_line(column), justify="right" if is_number else "left", overflow="fold", no_wrap=is_number)
    for row in rows:
        table.add_row(*(one_line(str(cell)) for cell in row))
    return table


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    numbers: Collection[str] = (),
    optional: Sequence[str] = (),
) -> None:
    """Prints a table that fits the terminal.

    A table that is too wide loses its optional columns, one after the other. If it still is too wide, the text in its
    other columns is wrapped.

    Args:
        title: Shown above the table.
        columns: Headings.
        rows: One cell per column each.
        numbers: Headings of the columns that are right-aligned and never wrapped.
        optional: Headings of the columns that are left out on a narrow terminal, the least important first.
    """
    dropped: set[str] = set()
    table = _compact_table(title, columns, rows, numbers, dropped)
    for column in optional:
        if _width(table) <= console.width:
            break
        dropped.add(column)
        table = _compact_table(title, columns, rows, numbers, dropped)
    console.print(Padding(table, (0, 0, 1, 0), expand=False))


def _compact_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    numbers: Collection[str],
    dropped: Collection[str],
) -> Table:
    """Builds a table without the dropped columns, with a line below its headings instead of a frame."""
    positions = [position for position, column in enumerate(columns) if column not in dropped]
    kept_columns = [columns[position] for position in positions]
    kept_rows = [[row[position] for position in positions] for row in rows]

    table = make_table(title, kept_columns, kept_rows, numbers=numbers)
    table.box = box.SIMPLE_HEAD
    table.show_edge = False
    table.padding = (0, 1, 0, 0)
    table.title_style = "bold"
    return table


def print_descriptions(descriptions: Iterable[tuple[str, str]]) -> None:
    """Prints terms and their descriptions in two columns; long descriptions wrap within their column."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(overflow="fold", max_width=console.width * 3 // 8)
    grid.add_column(overflow="fold")
    for term, description in descriptions:
        grid.add_row(one_line(term), one_line(description))
    console.print(Padding(grid, (0, 0, 1, 0), expand=False))


def _width(table: Table) -> int:
    """Number of terminal columns that a table takes without wrapping."""
    return console.measure(table, options=console.options.update_width(_UNLIMITED_WIDTH)).maximum
