"""Old readers read new writers and new readers read old writers, for every released schema."""

import io
from typing import Any

import pytest
from fastavro import schemaless_reader, schemaless_writer
from fastavro.utils import generate_many

from latencyprism.schemas import avro
from latencyprism.schemas.codec import Codec
from latencyprism.schemas.topics import TELEMETRY_HOST, TOPICS, Topic

RELEASES = [(topic, old) for topic in TOPICS for old in avro.released_schemas(topic)]


def roundtrip(writer: dict[str, Any], reader: dict[str, Any]) -> int:
    """Number of generated records that pass from the writer's schema to the reader's."""
    read = 0
    for record in generate_many(avro.parse(writer), 20):
        out = io.BytesIO()
        schemaless_writer(out, avro.parse(writer), record)
        out.seek(0)
        schemaless_reader(out, avro.parse(writer), avro.parse(reader))
        read += 1
    return read


def test_every_topic_was_released() -> None:
    assert {topic.name for topic in TOPICS} == {topic.name for topic, _ in RELEASES}


@pytest.mark.parametrize(("topic", "old"), RELEASES, ids=lambda v: getattr(v, "name", "old"))
def test_new_reader_reads_old_writer(topic: Topic, old: dict[str, Any]) -> None:
    assert roundtrip(old, avro.message_schema(topic)) == 20


@pytest.mark.parametrize(("topic", "old"), RELEASES, ids=lambda v: getattr(v, "name", "old"))
def test_old_reader_reads_new_writer(topic: Topic, old: dict[str, Any]) -> None:
    assert roundtrip(avro.message_schema(topic), old) == 20


def test_the_gate_refuses_a_field_without_default() -> None:
    old = avro.message_schema(TELEMETRY_HOST)
    sample = old["fields"][-1]["type"]["items"]
    grown = {**sample, "fields": [*sample["fields"], {"name": "new", "type": "long"}]}
    new = {
        **old,
        "fields": [
            *old["fields"][:-1],
            {"name": "samples", "type": {"type": "array", "items": grown}},
        ],
    }

    assert roundtrip(new, old) == 20
    with pytest.raises(Exception, match="new"):
        roundtrip(old, new)


def test_codec_reads_every_released_schema() -> None:
    codec = Codec()
    for topic, old in RELEASES:
        parsed = avro.parse(old)
        for record in generate_many(parsed, 5):
            out = io.BytesIO(b"\xc3\x01" + avro.schema_fingerprint(old))
            out.seek(10)
            schemaless_writer(out, parsed, record)
            codec.decode(topic, out.getvalue())
