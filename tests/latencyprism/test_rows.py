"""Answers are readable at any width, and nothing is cut off."""

from datetime import UTC, datetime

import pytest
from rich.console import Console

from latencyprism.rows import cell, rows_of

COLUMNS = ("time", "reason", "share")
ROWS = [("12:00", "decode takes twice as long as its workload explains", 0.123456)]


def drawn(width: int) -> str:
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(rows_of(COLUMNS, ROWS, width=width))
    return capture.get()


def test_a_table_where_it_fits() -> None:
    assert len(drawn(120).splitlines()) == 5


def test_a_record_a_row_where_it_does_not() -> None:
    lines = drawn(66).splitlines()

    assert lines[1].split() == ["time", "12:00"]
    assert lines[2].split(maxsplit=1)[1] == ROWS[0][1]


def test_long_values_are_folded_not_cut() -> None:
    assert "".join(line[8:].strip() for line in drawn(30).splitlines()[2:-1]).replace(" ", "") == (
        ROWS[0][1].replace(" ", "")
    )


def test_no_rows() -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(rows_of(COLUMNS, [], width=80))
    assert capture.get().strip() == "no rows"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (float("nan"), "-"),
        (0.123456, "0.1235"),
        (14271.6, "14272"),
        (float("inf"), "inf"),
        (datetime(2026, 1, 2, 3, 4, 5, 678900, UTC), "2026-01-02 03:04:05.678"),
        (["a", 1.0], "a\n1"),
        ([], "-"),
        (7, "7"),
    ],
)
def test_values_in_words(value: object, text: str) -> None:
    assert text == cell(value)
