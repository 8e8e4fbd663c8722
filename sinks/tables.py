"""Which table takes the records of which topic, and how records become its columns. Pure.

Column names follow the records: a point in time ``arrival_ns`` becomes the column ``arrival``
(``DateTime64(9, 'UTC')``), every other field keeps its name, and records inside records become
arrays of named tuples. Types follow the Avro schemas, so a field added there has no column until
a migration adds one, which :func:`latencyprism.sinks.migrations.migrate.missing_columns` tells.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import pyarrow as pa

from latencyprism.schemas import topics
from latencyprism.schemas.avro import record_schema
from latencyprism.schemas.records import DeadLetter
from latencyprism.schemas.topics import Topic
from latencyprism.sinks.errors import RowsRefusedError

DURATIONS = frozenset({"interval_ns", "throttled_ns", "clock_step_ns"})
"""Fields in ns that are lengths of time; all others are points in time."""

UNKNOWN = ("unknown",)
"""What an array of names holds when nobody told them: ClickHouse has no null for an array."""

Row = tuple[Any, ...]

_INSTANT = pa.timestamp("ns", "UTC")
_SCALARS = {
    "string": pa.string(),
    "enum": pa.string(),
    "bytes": pa.binary(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "double": pa.float64(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table."""

    name: str
    type: pa.DataType
    convert: Callable[[Any], Any] | None = None
    """From a record's value to what Arrow takes; None when it takes the value as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table that takes the records of one topic, one row a record."""

    name: str
    topic: Topic
    columns: tuple[Column, ...]
    """Those of the record in its order, then the added one."""
    values: Callable[[Any], Row]
    """Values of a record in the order of its columns."""
    added: Callable[[Any, Any], Any] | None
    """Value of the added column from the message and the record; None without one."""

    def records(self, message: Any) -> Sequence[Any]:
        """The records that a message of the topic carries."""
        records: Sequence[Any] = message.samples if self.topic.packed else (message,)
        return records

    def rows(self, message: Any) -> list[Row]:
        """The rows of a message of the topic."""
        records = self.records(message)
        if self.added is None:
            return [self.values(record) for record in records]
        return [(*self.values(record), self.added(message, record)) for record in records]

    def arrow(self, rows: Sequence[Row]) -> pa.Table:
        """At least one row, as columns.

        Raises :class:`RowsRefusedError` naming the column when a value does not fit its type.
        """
        arrays = []
        for column, values in zip(self.columns, zip(*rows, strict=True), strict=True):
            try:
                items = list(map(column.convert, values)) if column.convert else values
                arrays.append(pa.array(items, column.type))
            except (pa.ArrowException, OverflowError, TypeError, ValueError, AttributeError) as e:
                raise RowsRefusedError(f"{self.name}.{column.name}: {e}") from e
        return pa.table(arrays, names=[column.name for column in self.columns])


def column_name(field: str) -> str:
    """Column of a field at the top of a record."""
    return field.removesuffix("_ns") if is_instant(field) else field


def is_instant(field: str) -> bool:
    """Whether a field at the top of a record is a point in time (or an array of them)."""
    return field.endswith("_ns") and field not in DURATIONS


def letter_id(letter: DeadLetter) -> str:
    """The same for the same refused bytes however often they are delivered, 32 hex digits.

    Bytes that never reached a broker have no offset to be known by, so their time counts too.
    """
    origin = (letter.topic, letter.partition, letter.offset, letter.component, letter.reason)
    when = letter.at_ns if letter.offset < 0 else 0
    head = "\0".join(map(str, (*origin, when))).encode()
    return hashlib.blake2b(head + b"\0" + letter.payload, digest_size=16).hexdigest()


def _table(name: str, topic: Topic) -> Table:
    schema = record_schema(topic.record)
    columns = [_column(field["name"], field["type"]) for field in schema["fields"]]
    added: Callable[[Any, Any], Any] | None = None
    if topic.packed:
        columns.append(Column(name="agent", type=pa.string()))
        added = _agent
    elif topic.record is DeadLetter:
        columns.append(Column(name="letter_id", type=pa.string()))
        added = _letter_id
    return Table(
        name=name,
        topic=topic,
        columns=tuple(columns),
        values=_values([field["name"] for field in schema["fields"]]),
        added=added,
    )


def _agent(message: Any, record: Any) -> str:  # noqa: ARG001 every added column has this shape
    return str(message.agent)


def _letter_id(message: Any, record: DeadLetter) -> str:  # noqa: ARG001 the same
    return letter_id(record)


def _column(field: str, avro: Any) -> Column:
    type_, convert = _arrow_type(avro, instant=is_instant(field))
    return Column(name=column_name(field), type=type_, convert=convert)


def _arrow_type(
    avro: Any, *, instant: bool = False
) -> tuple[pa.DataType, Callable[[Any], Any] | None]:
    if isinstance(avro, list):  # a union with null
        (inner,) = (branch for branch in avro if branch != "null")
        type_, convert = _arrow_type(inner, instant=instant)
        return (type_, _told) if pa.types.is_list(type_) else (type_, convert)
    kind = avro["type"] if isinstance(avro, dict) else avro
    if kind == "array":
        inner, convert = _arrow_type(avro["items"], instant=instant)
        return pa.list_(inner), _each(convert) if convert else None
    if kind == "map":
        inner, _ = _arrow_type(avro["values"])
        return pa.map_(pa.string(), inner), _pairs
    if kind == "record":
        fields = [(field["name"], *_arrow_type(field["type"])) for field in avro["fields"]]
        struct = pa.struct([(name, type_) for name, type_, _ in fields])
        return struct, _tuple_of([(name, convert) for name, _, convert in fields])
    return (_INSTANT if instant else _SCALARS[kind]), None


def _values(names: Sequence[str]) -> Callable[[Any], Row]:
    getter: Callable[[Any], Row] = attrgetter(*names)
    return getter


def _each(convert: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    return lambda items: [convert(item) for item in items]


def _told(names: Sequence[str] | None) -> Sequence[str]:
    return UNKNOWN if names is None else names


def _pairs(mapping: Any) -> list[tuple[str, float]]:
    return list(mapping.items())


def _tuple_of(fields: Sequence[tuple[str, Callable[[Any], Any] | None]]) -> Callable[[Any], Row]:
    get = _values([name for name, _ in fields])
    converts = [convert for _, convert in fields]
    if not any(converts):
        return get
    return lambda record: tuple(
        convert(value) if convert else value
        for convert, value in zip(converts, get(record), strict=True)
    )


TABLES = (
    _table("request_parts", topics.TELEMETRY_REQUESTS),
    _table("step_batches", topics.TELEMETRY_STEPS),
    _table("engine_samples_raw", topics.TELEMETRY_ENGINE),
    _table("host_samples_raw", topics.TELEMETRY_HOST),
    _table("xpu_samples_raw", topics.TELEMETRY_XPU),
    _table("kernel_samples_raw", topics.TELEMETRY_KERNEL),
    _table("stack_profiles_raw", topics.TELEMETRY_STACKS),
    _table("agent_samples_raw", topics.TELEMETRY_AGENTS),
    _table("batches_raw", topics.LATENCY_BATCHES),
    _table("alerts_raw", topics.ALERTS),
    _table("commands_raw", topics.CONTROL_COMMANDS),
    _table("acks_raw", topics.CONTROL_ACKS),
    _table("dead_letters_raw", topics.DEADLETTER),
)
"""Every table that is written from a topic. ``models`` is state of the workers, not history."""

BY_TOPIC = {table.topic.name: table for table in TABLES}
