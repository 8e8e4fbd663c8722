"""What can go wrong between the writer and a store, by what is to be done about it."""


class StoreError(RuntimeError):
    """The store did not do what it was asked; the text says what, where and what to do.

    ``code`` is ClickHouse's error number where it gave one.
    """

    def __init__(self, message: str, *, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class StoreAwayError(StoreError):
    """Nothing can be written for now: not reachable, overloaded, full, read-only, no such table.

    The same rows may be taken later, so the writer keeps them and tries again.
    """


class StoreAuthError(StoreError):
    """The store does not accept the user name, the password or the certificate."""


class StoreVersionError(StoreError):
    """The store answers, but is too old or is no ClickHouse."""


class RowsRefusedError(StoreError):
    """At least one of these rows will never be taken: wrong type, or against a constraint."""


ROW_CODES = frozenset(
    {
        6,  # CANNOT_PARSE_TEXT
        26,  # CANNOT_PARSE_QUOTED_STRING
        27,  # CANNOT_PARSE_INPUT_ASSERTION_FAILED
        38,  # CANNOT_PARSE_DATE
        41,  # CANNOT_PARSE_DATETIME
        53,  # TYPE_MISMATCH
        69,  # ARGUMENT_OUT_OF_BOUND
        70,  # CANNOT_CONVERT_TYPE
        72,  # CANNOT_PARSE_NUMBER
        117,  # INCORRECT_DATA
        131,  # TOO_LARGE_STRING_SIZE
        190,  # SIZES_OF_ARRAYS_DONT_MATCH
        307,  # TOO_MANY_BYTES: the request is too large; fewer rows pass
        321,  # VALUE_IS_OUT_OF_RANGE_OF_DATA_TYPE
        349,  # CANNOT_INSERT_NULL_IN_ORDINARY_COLUMN
        407,  # DECIMAL_OVERFLOW
        469,  # VIOLATED_CONSTRAINT
    }
)
"""ClickHouse error numbers that blame the rows; every other number blames the store."""

AUTH_CODES = frozenset({192, 193, 194, 195, 497, 516})
"""Unknown user, wrong password, not allowed."""
