"""Bytes of a message ↔ typed records.

Two framings are read, whichever was written: Confluent's (magic 0, schema id of 4 bytes) when a
registry is known, and Avro's single-object encoding (magic C3 01, fingerprint of 8 bytes) with the
shipped schemas. One of them is written.
"""

import io
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

from fastavro import schemaless_reader, schemaless_writer
from fastavro.types import Schema

from latencyprism.schemas import avro
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.topics import TOPICS, Topic
from latencyprism.schemas.writer import compile_writer

SINGLE_OBJECT = b"\xc3\x01"
CONFLUENT = b"\x00"

R = TypeVar("R")

Reason = Literal[
    "empty", "bad_magic", "unknown_schema", "wrong_record", "malformed", "invalid_value"
]


class DecodeError(ValueError):
    """Bytes that are no message of this topic; ``reason`` is short, the text says where."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class SchemaRegistry(Protocol):
    """What the codec asks of a schema registry; both may block once a schema and are cached."""

    def register(self, subject: str, schema: dict[str, Any]) -> int:
        """Id of the schema under the subject, registered if it is new. Raises OSError."""

    def schema(self, schema_id: int) -> dict[str, Any] | None:
        """Schema of an id, None if the registry has none. Raises OSError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack(Generic[R]):
    """Many records of one agent, topic and key in one message.

    ``watermark_ns``: the agent holds no earlier sample of this topic and key, so a window that
    ends before it can be closed. Agents send empty packs to move it when nothing happens.
    """

    agent: str
    boot_ns: int
    sequence: int
    watermark_ns: int
    samples: Sequence[R]


class Codec:
    """Encodes and decodes the messages of every topic. Not thread-safe while schemas are new."""

    def __init__(self, registry: SchemaRegistry | None = None, *, prefix: str = "") -> None:
        self._registry = registry
        self._prefix = prefix
        self._writers = {topic.name: _Writer(topic) for topic in TOPICS}
        self._ids: dict[str, int] = {}
        self._by_id: dict[int, tuple[str, Schema] | None] = {}

    def encode(self, topic: Topic, message: Any) -> bytes:
        """Bytes of a record, or of a :class:`Pack` of records for a packed topic.

        Raises ValueError naming the topic and field when the message does not fit its schema.
        """
        writer = self._writers[topic.name]
        header = self._header(topic, writer)
        try:
            return header + writer.encode(message)
        except Exception:  # noqa: BLE001 - fastavro takes more kinds of values, and tells what is wrong
            return header + _written_by_fastavro(topic, writer, message)

    def decode(self, topic: Topic, data: bytes) -> Any:
        """The record, or the :class:`Pack` of records, that the bytes hold.

        Raises :class:`DecodeError` for anything else.
        """
        writer = self._writers[topic.name]
        name, schema, start = self._writer_schema(data)
        if name != topic.record.__name__:
            raise DecodeError(
                "wrong_record",
                f"{topic.name} carries {topic.record.__name__}, the message holds {name}",
            )
        source = io.BytesIO(data)
        source.seek(start)
        try:
            value = schemaless_reader(source, schema, writer.schema)
        except Exception as e:  # fastavro raises what its C code meets: EOF, Index, Unicode, ...
            raise DecodeError(
                "malformed", f"byte {source.tell()} of {len(data)}: {type(e).__name__} {e}"
            ) from e
        if source.tell() != len(data):
            raise DecodeError("malformed", f"{len(data) - source.tell()} bytes after the record")
        return writer.from_dict(cast("dict[str, Any]", value))

    def _header(self, topic: Topic, writer: "_Writer") -> bytes:
        if self._registry is None:
            return SINGLE_OBJECT + writer.fingerprint
        if topic.name not in self._ids:
            subject = (
                f"{self._prefix}.{topic.name}-value" if self._prefix else f"{topic.name}-value"
            )
            self._ids[topic.name] = self._registry.register(subject, avro.message_schema(topic))
        return CONFLUENT + struct.pack(">I", self._ids[topic.name])

    def _writer_schema(self, data: bytes) -> tuple[str, Schema, int]:
        if not data:
            raise DecodeError("empty", "the message has no bytes")
        if data[:2] == SINGLE_OBJECT:
            known = avro.known_schemas().get(data[2:10])
            if known is None:
                raise DecodeError(
                    "unknown_schema",
                    f"fingerprint {data[2:10].hex()} belongs to no schema of this release",
                )
            return *known, 10
        if data[:1] == CONFLUENT and len(data) >= 5:
            (schema_id,) = struct.unpack_from(">I", data, 1)
            return *self._registered(schema_id), 5
        raise DecodeError(
            "bad_magic",
            f"starts with {data[:4].hex()}, neither {SINGLE_OBJECT.hex()} (single-object) nor 00 "
            "and a schema id (Confluent)",
        )

    def _registered(self, schema_id: int) -> tuple[str, Schema]:
        if self._registry is None:
            raise DecodeError(
                "unknown_schema", f"schema id {schema_id}, and no schema registry is configured"
            )
        if schema_id not in self._by_id:
            found = self._registry.schema(schema_id)
            self._by_id[schema_id] = (_record_name(found), avro.parse(found)) if found else None
        known = self._by_id[schema_id]
        if known is None:
            raise DecodeError("unknown_schema", f"the schema registry has no schema {schema_id}")
        return known


def _written_by_fastavro(topic: Topic, writer: "_Writer", message: Any) -> bytes:
    out = io.BytesIO()
    try:
        schemaless_writer(
            out, writer.schema, writer.to_dict(message), strict=True, disable_tuple_notation=True
        )
    except (ValueError, TypeError, AttributeError, IndexError, OverflowError, struct.error) as e:
        raise ValueError(f"{topic.name}: {topic.record.__name__} does not fit: {e}") from e
    return out.getvalue()


def registry_for(kafka: KafkaConfig) -> SchemaRegistry | None:
    """The configured schema registry, if any."""
    if not kafka.registry_url:
        return None
    from latencyprism.schemas.registry import ConfluentRegistry  # a dependency of its own

    return ConfluentRegistry(kafka.registry_url)


def codec_for(kafka: KafkaConfig) -> Codec:
    """A codec that uses the configured schema registry, or none."""
    return Codec(registry_for(kafka), prefix=kafka.prefix)


def _record_name(schema: dict[str, Any]) -> str:
    return str(schema.get("name", "?")).removesuffix("Pack").rpartition(".")[2]


class _Writer:
    """What a topic needs to write and to read into the current schema."""

    def __init__(self, topic: Topic) -> None:
        schema = avro.message_schema(topic)
        self.schema = avro.parse(schema)
        self.encode = compile_writer(self.schema)
        self.fingerprint = avro.schema_fingerprint(schema)
        to_dict, from_dict = avro.to_dict(topic.record), avro.from_dict(topic.record)

        def pack_to_dict(pack: Pack[Any]) -> dict[str, Any]:
            return {
                "agent": pack.agent,
                "boot_ns": pack.boot_ns,
                "sequence": pack.sequence,
                "watermark_ns": pack.watermark_ns,
                "samples": [to_dict(sample) for sample in pack.samples],
            }

        def pack_from_dict(value: dict[str, Any]) -> Pack[Any]:
            value["samples"] = tuple(from_dict(sample) for sample in value["samples"])
            return Pack(**value)

        self.to_dict = pack_to_dict if topic.packed else to_dict
        self.from_dict = pack_from_dict if topic.packed else from_dict
