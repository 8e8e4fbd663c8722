"""Avro schemas as shipped: loading, packing, fingerprints, and conversion to typed records."""

import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any, TypeVar, cast

from fastavro.schema import fingerprint, parse_schema, to_parsing_canonical_form
from fastavro.types import Schema

from latencyprism.schemas.topics import TOPICS, Topic

NAMESPACE = "io.latencyprism"
R = TypeVar("R")


def file_name(record: type[Any]) -> str:
    """``RequestTiming`` → ``request_timing.avsc``."""
    letters = (f"_{c.lower()}" if c.isupper() else c for c in record.__name__)
    return "".join(letters).lstrip("_") + ".avsc"


def record_schema(record: type[Any]) -> dict[str, Any]:
    """Schema of a record class as its ``.avsc`` file has it; a dict that must not be changed."""
    text = files("latencyprism.schemas").joinpath(file_name(record)).read_text()
    return cast("dict[str, Any]", json.loads(text))


def pack_schema(record_schema: Mapping[str, Any]) -> dict[str, Any]:
    """Schema of a message that packs records of ``record_schema``; see :class:`Pack`."""
    name = record_schema["name"]
    return {
        "type": "record",
        "name": f"{name}Pack",
        "namespace": NAMESPACE,
        "doc": f"Many {name} records of one agent in one message.",
        "fields": [
            {"name": "agent", "type": "string", "doc": "Id of the agent that publishes."},
            {
                "name": "boot_ns",
                "type": "long",
                "doc": "When this run of the agent began, ns since the epoch; tells two runs, or "
                "two agents that share an id, apart.",
            },
            {
                "name": "sequence",
                "type": "long",
                "doc": "Counts the agent's packs of this topic and key from 0; a hole is a loss.",
            },
            {
                "name": "watermark_ns",
                "type": "long",
                "doc": "The agent holds no sample of this topic and key with an earlier "
                "observed_at_ns, ns since the epoch.",
            },
            {
                "name": "samples",
                "type": {"type": "array", "items": record_schema},
                "doc": "The records, oldest first; empty when there was nothing to tell.",
            },
        ],
    }


def message_schema(topic: Topic) -> dict[str, Any]:
    """Schema of the messages of a topic."""
    schema = record_schema(topic.record)
    return pack_schema(schema) if topic.packed else schema


def parse(schema: Schema) -> Schema:
    """Parse a schema by itself, without the names of any other."""
    return parse_schema(schema, named_schemas={})


def schema_fingerprint(schema: Schema) -> bytes:
    """CRC-64-AVRO of the canonical form, 8 bytes little endian as single-object encoding has it."""
    return bytes.fromhex(fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO"))


@lru_cache(maxsize=1)
def known_schemas() -> Mapping[bytes, tuple[str, Schema]]:
    """Every message schema this release can read by fingerprint: (record name, parsed schema).

    The current ones and those of the releases under ``schemas/releases``.
    """
    found: dict[bytes, tuple[str, Schema]] = {}
    for topic in TOPICS:
        for schema in released_schemas(topic):
            found[schema_fingerprint(schema)] = (topic.record.__name__, parse(schema))
        current = message_schema(topic)
        found[schema_fingerprint(current)] = (topic.record.__name__, parse(current))
    return found


def released_schemas(topic: Topic) -> list[dict[str, Any]]:
    """Message schemas of a topic as earlier releases shipped them, oldest first."""
    folder = files("latencyprism.schemas").joinpath("releases")
    schemas = []
    for release in (
        sorted(folder.iterdir(), key=lambda entry: entry.name) if folder.is_dir() else ()
    ):
        path = release.joinpath(file_name(topic.record))
        if path.is_file():
            schema = json.loads(path.read_text())
            schemas.append(pack_schema(schema) if topic.packed else schema)
    return schemas


def to_dict(record: type[Any]) -> Callable[[Any], dict[str, Any]]:
    """Compiled conversion of a record of this class to what fastavro writes."""
    names = [field.name for field in fields(record)]
    nested = {name: to_dict(cls) for name, (cls, _) in _nested(record).items()}

    def convert(value: Any) -> dict[str, Any]:
        out = {name: getattr(value, name) for name in names}
        for name, inner in nested.items():
            out[name] = [inner(item) for item in out[name]]
        return out

    return convert


def from_dict(record: type[R]) -> Callable[[dict[str, Any]], R]:
    """Compiled conversion of what fastavro read to a record of this class."""
    nested = {name: from_dict(cls) for name, (cls, _) in _nested(record).items()}
    lists = [name for name in _lists(record) if name not in nested]

    def convert(value: dict[str, Any]) -> R:
        for name in lists:
            if value[name] is not None:
                value[name] = tuple(value[name])
        for name, inner in nested.items():
            value[name] = tuple(inner(item) for item in value[name])
        return record(**value)

    return convert


def _hints(record: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(record)


def _lists(record: type[Any]) -> list[str]:
    return [
        name
        for name, hint in _hints(record).items()
        if any(typing.get_origin(part) is tuple for part in (hint, *typing.get_args(hint)))
    ]


def _nested(record: type[Any]) -> dict[str, tuple[type[Any], Any]]:
    return {
        name: (typing.get_args(hint)[0], hint)
        for name, hint in _hints(record).items()
        if typing.get_origin(hint) is tuple and is_dataclass(typing.get_args(hint)[0])
    }
