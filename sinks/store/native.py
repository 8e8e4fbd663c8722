"""The one block of ClickHouse's Native format that chDB leaves out. Pure."""

from collections.abc import Sequence


def empty_block(columns: Sequence[tuple[str, str]]) -> bytes:
    """A block of no rows with the names and types of its columns.

    A server sends it first, so that clients know the columns of an answer without rows. Layout:
    number of columns, number of rows, then name and type of each column, all lengths as LEB128.
    """
    block = bytearray(_leb128(len(columns)) + _leb128(0))
    for text in (part for column in columns for part in column):
        encoded = text.encode()
        block += _leb128(len(encoded)) + encoded
    return bytes(block)


def _leb128(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
