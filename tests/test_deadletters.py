"""Dead letters: pure formatting, and reading and putting back on a real Kafka."""

import io
from dataclasses import replace

import pytest
from kafka_io import KafkaIO
from rich.console import Console

from latencyprism import deadletters
from latencyprism.deadletters import Letters, Stored, detail, hex_dump, home, table
from latencyprism.schemas.codec import Codec, DecodeError
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.records import DeadLetter
from latencyprism.schemas.topics import ALERTS, DEADLETTER

LETTER = DeadLetter(
    topic="alerts",
    partition=0,
    offset=7,
    at_ns=1_700_000_000_123_000_000,
    component="sinks",
    reason="bad_magic",
    detail="starts with 7b22 [bold]",
    key=b"chat",
    payload=b'{"a": 1}\x00\xff',
)


def shown(renderable: object) -> str:
    out = io.StringIO()
    Console(file=out, width=160, color_system=None).print(renderable)
    return out.getvalue()


def test_hex_dump_shows_offsets_bytes_and_text() -> None:
    assert hex_dump(b"", limit=16) == ""
    assert hex_dump(bytes(range(30, 50)), limit=64).splitlines() == [
        "000000  1e 1f 20 21 22 23 24 25 26 27 28 29 2a 2b 2c 2d  .. !\"#$%&'()*+,-",
        "000010  2e 2f 30 31                                      ./01",
    ]


def test_hex_dump_is_limited() -> None:
    lines = hex_dump(b"x" * 1000, limit=20).splitlines()
    assert lines[1].endswith("  xxxx")
    assert lines[2:] == ["... 980 more bytes"]


def test_the_table_lists_letters_and_counts_reasons() -> None:
    text = shown(
        table(
            Letters(
                newest=(Stored(offset=3, letter=LETTER),),
                reasons={"malformed": 1, "bad_magic": 2},
                total=5,
            )
        )
    )
    for word in ("2023-11-14 22:13:20.123", "alerts", "sinks", "starts with 7b22 [bold]", "10"):
        assert word in text
    assert text.index("bad_magic │ 2") < text.index("malformed │ 1")
    assert "5 letters, the oldest 2 not counted by reason" in text
    assert shown(table(Letters(newest=(), reasons={}, total=0))).strip() == "no letters"


def test_the_detail_shows_origin_reason_and_bytes() -> None:
    text = shown(detail(Stored(offset=3, letter=LETTER)))
    for word in ("alerts, partition 0, offset 7", "b'chat'", "bad_magic", "7b 22 61", '{"a": 1}..'):
        assert word in text


@pytest.mark.parametrize("topic", ["alerts", "prism.alerts"])
def test_a_letter_goes_home_under_either_name(topic: str) -> None:
    assert home(KafkaConfig(), replace(LETTER, topic=topic)) == "prism.alerts"


@pytest.mark.parametrize(
    ("letter", "words"),
    [
        (replace(LETTER, topic="elsewhere"), "no topic of this system"),
        (replace(LETTER, payload=bytes(900_000)), "first 900000 bytes"),
    ],
)
def test_a_letter_that_cannot_go_home_is_refused(letter: DeadLetter, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        home(KafkaConfig(), letter)


def test_letters_are_read_newest_last_and_counted(kafka: KafkaConfig, kafka_io: KafkaIO) -> None:
    for number in range(5):
        reason = "bad_magic" if number % 2 else "malformed"
        kafka_io.send(DEADLETTER, replace(LETTER, offset=number, reason=reason), key="alerts")
    letters = deadletters.read(kafka, limit=2)
    assert [stored.letter.offset for stored in letters.newest] == [3, 4]
    assert letters.reasons == {"malformed": 3, "bad_magic": 2}
    assert letters.total == 5
    third = deadletters.read_one(kafka, letters.newest[0].offset)
    assert third == letters.newest[0]


def test_no_letters(kafka: KafkaConfig) -> None:
    assert deadletters.read(kafka, limit=2) == Letters(newest=(), reasons={}, total=0)
    with pytest.raises(LookupError, match="no dead letter at offset 4; there are: none"):
        deadletters.read_one(kafka, 4)


def test_a_letter_that_cannot_be_read_is_shown_as_such(
    kafka: KafkaConfig, kafka_io: KafkaIO
) -> None:
    kafka_io.send_bytes(DEADLETTER, [("alerts", b"{}")])
    kafka_io.send(DEADLETTER, LETTER, key="alerts")
    letters = deadletters.read(kafka, limit=9)
    assert letters.reasons == {"letter_bad_magic": 1, "bad_magic": 1}
    assert letters.newest[0].letter.payload == b"{}"


def test_a_message_is_put_back_as_it_came(kafka: KafkaConfig, kafka_io: KafkaIO) -> None:
    kafka_io.send(DEADLETTER, LETTER, key="alerts")
    said = deadletters.requeue(kafka, 0)
    assert said == f"put 10 bytes back on {kafka.topic(ALERTS)}; letter 0 stays as a record"
    (message,) = kafka_io.read_messages(ALERTS, 1)
    assert (message.key(), message.value()) == (LETTER.key, LETTER.payload)
    with pytest.raises(DecodeError):
        Codec().decode(ALERTS, message.value() or b"")


def test_trouble_is_told_in_words(kafka: KafkaConfig) -> None:
    absent = replace(kafka, prefix="absent")
    with pytest.raises(OSError, match=r"cannot read absent\.deadletter .*topics --create"):
        deadletters.read(absent, limit=1, timeout_s=5)
    away = replace(kafka, bootstrap="127.0.0.1:1")
    with pytest.raises(OSError, match=r"cannot read .* from Kafka at 127.0.0.1:1: "):
        deadletters.read(away, limit=1, timeout_s=1)
