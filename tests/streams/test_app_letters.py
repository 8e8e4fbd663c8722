"""What is refused, and under which words."""

from dataclasses import replace

import pytest

from latencyprism.schemas.codec import Codec, DecodeError, Pack
from latencyprism.schemas.records import EngineSample
from latencyprism.schemas.topics import DEADLETTER, TELEMETRY_ENGINE
from latencyprism.streams.letters import (
    DETAIL_CHARS,
    KEY_BYTES,
    NAME_CHARS,
    PAYLOAD_BYTES,
    dead_letter,
    key_of,
)

SAMPLE = EngineSample(
    instance="a:1",
    source="engine",
    observed_at_ns=1,
    freshness="fresh",
    scrape_ms=1.0,
    restarted=False,
)


def pack(*samples: EngineSample) -> Pack[EngineSample]:
    return Pack(agent="x", boot_ns=1, sequence=0, watermark_ns=1, samples=samples)


def test_the_key_is_the_instance_of_all_samples() -> None:
    assert key_of(TELEMETRY_ENGINE, b"a:1", pack(SAMPLE)) == "a:1"
    assert key_of(TELEMETRY_ENGINE, b"b:2", pack()) == "b:2"


@pytest.mark.parametrize("key", [None, b"", b"\xff\xfe", b"b:2", b"a" * (NAME_CHARS + 1)])
def test_other_keys_are_refused(key: bytes | None) -> None:
    with pytest.raises(DecodeError) as refused:
        key_of(TELEMETRY_ENGINE, key, pack(SAMPLE))
    assert refused.value.reason == "invalid_value"


def test_a_letter_keeps_the_origin_and_a_bounded_payload() -> None:
    error = DecodeError("malformed", "byte 3")
    letter = dead_letter(
        error, topic="t", partition=2, offset=7, key=b"k", payload=b"x" * (PAYLOAD_BYTES + 5)
    )
    assert (letter.topic, letter.partition, letter.offset) == ("t", 2, 7)
    assert (letter.reason, letter.detail, letter.key) == ("malformed", "byte 3", b"k")
    assert len(letter.payload) == PAYLOAD_BYTES
    empty = dead_letter(error, topic="t", partition=0, offset=0, key=None, payload=None)
    assert empty.payload == b""


def test_an_agent_with_an_endless_id_is_refused() -> None:
    with pytest.raises(DecodeError, match="agent's id of 1001 characters"):
        key_of(TELEMETRY_ENGINE, b"a:1", replace(pack(SAMPLE), agent="x" * (NAME_CHARS + 1)))


def test_a_letter_about_the_largest_message_fits_kafkas_default_limit() -> None:
    error = DecodeError("invalid_value", "\u2603" * 1_000_000)
    letter = dead_letter(
        error, topic="t", partition=0, offset=0, key=b"k" * 1_000_000, payload=b"x" * 1_000_000
    )
    assert letter.key is not None
    assert (len(letter.key), len(letter.detail)) == (KEY_BYTES, DETAIL_CHARS)
    assert len(Codec().encode(DEADLETTER, letter)) < 1_000_000
