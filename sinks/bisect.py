"""Finding the rows that a store refuses, at the price of a few inserts for each. Pure."""

from collections.abc import Callable, Sequence

from latencyprism.sinks.errors import RowsRefusedError
from latencyprism.sinks.tables import Row


def insert_but_refused(
    rows: Sequence[Row], insert: Callable[[Sequence[Row]], None]
) -> list[tuple[int, RowsRefusedError]]:
    """Insert all rows that are taken; index and reason of each that is not, in order.

    ``insert`` takes all rows it is given or raises RowsRefusedError and takes none; whatever else
    it raises passes through. Costs one call without refused rows, about 2 log2(n) for each one.
    """
    refused: list[tuple[int, RowsRefusedError]] = []
    waiting = [(0, len(rows))] if rows else []
    while waiting:
        start, stop = waiting.pop()
        try:
            insert(rows[start:stop])
        except RowsRefusedError as e:
            if stop - start == 1:
                refused.append((start, e))
            else:
                middle = (start + stop) // 2
                waiting += [(middle, stop), (start, middle)]
    return refused
