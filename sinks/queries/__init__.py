"""Named investigation queries: the shipped ``.sql`` files, listed, read and run.

A file begins with its name, its question and its parameters::

    -- name: slow_requests
    -- question: Which exchanges took longest?
    -- parameter limit UInt32 = 20: how many exchanges

and its SQL takes them as ClickHouse's own ``{limit:UInt32}``, so values are never put into text.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from clickhouse_connect.driver.exceptions import ClickHouseError, DatabaseError

from latencyprism.sinks.client import explained
from latencyprism.sinks.errors import StoreError

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

_NAME = re.compile(r"-- name: (\w+)")
_QUESTION = re.compile(r"-- question: (.+)")
_PARAMETER = re.compile(r"-- parameter (\w+) (\w+(?:\([^)]*\))?) = ([^:]*(?::[\d:]+)?): (.+)")
_BAD_VALUE_CODES = frozenset({6, 27, 38, 41, 53, 69, 72, 457})
"""Numbers with which ClickHouse refuses a parameter's text."""


class QueryError(ValueError):
    """A query that is not shipped, or a parameter it has not; the text says what there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One value a query takes."""

    name: str
    type: str
    """ClickHouse type."""
    default: str
    """As text."""
    meaning: str

    def __str__(self) -> str:
        return f"{self.name}={self.default}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A shipped query."""

    name: str
    question: str
    parameters: tuple[Parameter, ...]
    sql: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a query found; every row has a value for every column. Times are in UTC."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]]


@lru_cache(maxsize=1)
def available() -> tuple[Query, ...]:
    """Every shipped query by name."""
    folder = files("latencyprism.sinks.queries")
    texts = {e.name: e.read_text() for e in folder.iterdir() if e.name.endswith(".sql")}
    return tuple(parse(name, texts[name]) for name in sorted(texts))


def get(name: str) -> Query:
    """The query of this name. Raises :class:`QueryError`."""
    for query in available():
        if query.name == name:
            return query
    names = ", ".join(query.name for query in available())
    raise QueryError(f"there is no query {name!r}; there are {names}")


def run(client: "Client", query: Query, values: Mapping[str, str] | None = None) -> Answer:
    """Ask the store; values not given are the defaults.

    Raises :class:`QueryError` for a parameter the query has not or a value of the wrong type,
    :class:`~latencyprism.sinks.errors.StoreError` when the store fails.
    """
    parameters = {parameter.name: parameter.default for parameter in query.parameters}
    for name in values or ():
        if name not in parameters:
            known = ", ".join(parameters) or "none"
            raise QueryError(f"{query.name} has no parameter {name!r}; there are {known}")
    parameters |= dict(values or {})
    try:
        found = client.query(query.sql, parameters=parameters)
    except ClickHouseError as e:
        raise _in_words(query, parameters, e, client.uri) from e
    return Answer(columns=tuple(found.column_names), rows=found.result_rows)


def parse(file: str, text: str) -> Query:
    """A query from its file. Raises :class:`QueryError` naming the line that is not understood."""
    head = [line for line in text.splitlines() if line.startswith("-- ")]
    name = _NAME.fullmatch(head[0]) if head else None
    question = _QUESTION.fullmatch(head[1]) if len(head) > 1 else None
    if name is None or question is None:
        raise QueryError(f"{file}: does not begin with its name and its question")
    parameters = []
    for line in head[2:]:
        match = _PARAMETER.fullmatch(line)
        if match is None:
            raise QueryError(f"{file}: {line!r} is no parameter")
        parameters.append(
            Parameter(name=match[1], type=match[2], default=match[3].strip(), meaning=match[4])
        )
    return Query(name=name[1], question=question[1], parameters=tuple(parameters), sql=text)


def _in_words(
    query: Query, parameters: Mapping[str, str], error: ClickHouseError, url: str
) -> QueryError | StoreError:
    if isinstance(error, DatabaseError) and error.code in _BAD_VALUE_CODES:
        given = ", ".join(f"{p.name}={parameters[p.name]!r} ({p.type})" for p in query.parameters)
        return QueryError(f"{query.name} cannot take one of {given}: {explained(error, url)}")
    return explained(error, url)
