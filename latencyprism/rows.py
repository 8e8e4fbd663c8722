"""Rows of an answer on a terminal: a table where it fits, a record a row where it does not."""

import math
from collections.abc import Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

BORDER = 3
"""Characters that a table's column takes beside its text."""
EXACT = 10_000
"""From here on four digits would be too few, and an exponent hard to read."""


def rows_of(
    columns: Sequence[str], rows: Sequence[Sequence[object]], *, width: int
) -> RenderableType:
    """The rows for a terminal of so many characters; values are never cut off."""
    if not rows:
        return Text("no rows", "dim")
    cells = [[cell(value) for value in row] for row in rows]
    needed = [
        max(len(line) for text in (name, *column) for line in text.split("\n") or [""])
        for name, column in zip(columns, zip(*cells, strict=True), strict=True)
    ]
    if sum(needed) + BORDER * len(needed) + 1 <= width:
        table = Table(*columns)
        for row in cells:
            table.add_row(*map(Text, row))
        return table
    margin = max(map(len, columns))
    records = (_record(columns, row, margin) for row in cells)
    return Group(*(part for record in records for part in (Rule(style="dim"), record)))


def cell(value: object) -> str:
    """One value in words a person reads; a list has a line an element."""
    match value:
        case None:
            return "-"
        case float() if math.isnan(value):
            return "-"
        case float():
            return f"{value:.4g}" if abs(value) < EXACT else f"{value:.0f}"
        case datetime():
            return value.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        case list() | tuple():
            return "\n".join(map(cell, value)) or "-"
        case _:
            return str(value)


def _record(columns: Sequence[str], row: Sequence[str], margin: int) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=margin, style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in zip(columns, row, strict=True):
        table.add_row(name, Text(text))
    return table
