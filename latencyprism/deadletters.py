"""The dead letters: messages that no part could take, listed, shown, and put back."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from rich.console import Group
from rich.table import Table
from rich.text import Text

from latencyprism.schemas.codec import Codec, DecodeError, codec_for
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.records import DeadLetter
from latencyprism.schemas.topics import BY_NAME, DEADLETTER, TOPICS

TIMEOUT_S = 15.0
COUNTED = 10_000
"""Newest letters that are counted by reason; older ones are passed over."""
SHOWN_BYTES = 512
KEPT_BYTES = 900_000
"""What a letter keeps of a message; a longer one was cut and cannot be put back."""
KEPT_KEY_BYTES = 50_000
"""The same of its key."""


MISSING = (
    KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001 librdkafka's own codes are public constants
    KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001
    KafkaError.UNKNOWN_TOPIC_OR_PART,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One letter and where it stands on the topic."""

    offset: int
    letter: DeadLetter


@dataclass(frozen=True, slots=True, kw_only=True)
class Letters:
    """The newest letters, oldest first, and how many there are of each reason."""

    newest: tuple[Stored, ...]
    reasons: Mapping[str, int]
    total: int
    """Letters on the topic; those beyond the newest 10,000 are not in ``reasons``."""


def read(kafka: KafkaConfig, *, limit: int, timeout_s: float = TIMEOUT_S) -> Letters:
    """Read the newest letters and count them by reason.

    Blocks; raises OSError when the topic cannot be read.
    """
    with _Reader(kafka, timeout_s) as reader:
        begin = max(reader.begin, reader.end - COUNTED)
        reasons: Counter[str] = Counter()
        newest: list[Stored] = []
        for stored in reader.read(begin, reader.end):
            reasons[stored.letter.reason] += 1
            newest.append(stored)
            del newest[: max(0, len(newest) - limit)]
        return Letters(newest=tuple(newest), reasons=dict(reasons), total=reader.end - reader.begin)


def read_one(kafka: KafkaConfig, offset: int, *, timeout_s: float = TIMEOUT_S) -> Stored:
    """The letter at an offset.

    Blocks; raises LookupError when there is none, and OSError when the topic cannot be read.
    """
    with _Reader(kafka, timeout_s) as reader:
        if not reader.begin <= offset < reader.end:
            there = f"{reader.begin} to {reader.end - 1}" if reader.end > reader.begin else "none"
            raise LookupError(f"no dead letter at offset {offset}; there are: {there}")
        return next(reader.read(offset, offset + 1))


def requeue(kafka: KafkaConfig, offset: int, *, timeout_s: float = TIMEOUT_S) -> str:
    """Put the message of a letter back on its topic, and say so; the letter stays.

    Doing it twice writes the message twice, which readers take. Blocks; raises LookupError when
    there is no such letter, ValueError when it cannot go back, OSError when Kafka does not take it.
    """
    letter = read_one(kafka, offset, timeout_s=timeout_s).letter
    topic = home(kafka, letter)
    failures: list[KafkaError] = []

    def delivered(error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            failures.append(error)

    producer = Producer(kafka.librdkafka(message_timeout_ms=int(timeout_s * 1e3)))
    producer.produce(topic, letter.payload, letter.key, on_delivery=delivered)
    undelivered = producer.flush(timeout_s)
    if failures or undelivered:
        why = failures[0].str() if failures else f"no answer within {timeout_s:g} s"
        raise OSError(f"Kafka at {kafka.bootstrap} did not take the message for {topic}: {why}")
    return f"put {len(letter.payload)} bytes back on {topic}; letter {offset} stays as a record"


def home(kafka: KafkaConfig, letter: DeadLetter) -> str:
    """Topic on the cluster that a letter's message came from. Raises ValueError in words."""
    names = {kafka.topic(topic) for topic in TOPICS}
    topic = letter.topic if letter.topic in names else None
    if letter.topic in BY_NAME:
        topic = kafka.topic(BY_NAME[letter.topic])
    if topic is None:
        raise ValueError(f"the letter came from {letter.topic!r}, which is no topic of this system")
    if len(letter.payload) >= KEPT_BYTES:
        raise ValueError(
            f"the letter keeps only the first {KEPT_BYTES} bytes of its message, so it cannot go "
            "back whole"
        )
    if letter.key is not None and len(letter.key) >= KEPT_KEY_BYTES:
        raise ValueError(
            f"the letter keeps only the first {KEPT_KEY_BYTES} bytes of its message's key, so the "
            "message cannot go back whole"
        )
    return topic


def table(letters: Letters) -> Group:
    """The letters as a table, and their number by reason."""
    listing = Table("offset", "time (UTC)", "topic", "by", "reason", "bytes", "detail")
    for stored in letters.newest:
        letter = stored.letter
        listing.add_row(
            str(stored.offset),
            when(letter.at_ns),
            Text(letter.topic),
            Text(letter.component),
            Text(letter.reason),
            str(len(letter.payload)),
            Text(letter.detail),
        )
    reasons = Table("reason", "letters")
    for reason, count in sorted(letters.reasons.items(), key=lambda pair: (-pair[1], pair[0])):
        reasons.add_row(Text(reason), str(count))
    passed_over = letters.total - sum(letters.reasons.values())
    summary = f"{letters.total} letters" + (
        f", the oldest {passed_over} not counted by reason" if passed_over else ""
    )
    return Group(listing, reasons, Text(summary)) if letters.total else Group(Text("no letters"))


def detail(stored: Stored) -> Group:
    """All about one letter, with the first bytes of its message."""
    letter = stored.letter
    facts = {
        "letter": f"offset {stored.offset}, refused {when(letter.at_ns)} UTC by {letter.component}",
        "from": f"{letter.topic}, partition {letter.partition}, offset {letter.offset}",
        "key": "none" if letter.key is None else repr(letter.key),
        "reason": letter.reason,
        "detail": letter.detail,
        "message": f"{len(letter.payload)} bytes",
    }
    grid = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        grid.add_row(name, Text(value))
    return Group(grid, Text(hex_dump(letter.payload, limit=SHOWN_BYTES)))


def hex_dump(data: bytes, *, limit: int) -> str:
    """Offset, hexadecimal and printable ASCII of the first ``limit`` bytes, 16 a line."""
    lines = []
    for begin in range(0, min(len(data), limit), 16):
        row = data[begin : min(begin + 16, limit)]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{begin:06x}  {row.hex(' '):<47}  {text}")
    if len(data) > limit:
        lines.append(f"... {len(data) - limit} more bytes")
    return "\n".join(lines)


def when(at_ns: int) -> str:
    """A time in UTC to the millisecond."""
    return f"{datetime.fromtimestamp(at_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3]


class _Reader:
    """The one partition of the dead letters' topic, from ``begin`` to before ``end``."""

    def __init__(self, kafka: KafkaConfig, timeout_s: float) -> None:
        self._kafka = kafka
        self._codec: Codec = codec_for(kafka)
        self._deadline = time.monotonic() + timeout_s
        self._partition = TopicPartition(kafka.topic(DEADLETTER), 0)
        self._consumer = Consumer(
            kafka.librdkafka(
                group_id=kafka.group("deadletters"),  # never joined, no offset is committed
                enable_auto_commit=False,
                enable_partition_eof=True,
            )
        )
        try:
            self.begin, self.end = self._consumer.get_watermark_offsets(
                self._partition, timeout=timeout_s
            )
        except KafkaException as e:
            self._consumer.close()
            raise self._failure(e.args[0]) from e

    def read(self, begin: int, end: int) -> Iterator[Stored]:
        """The letters at the offsets from ``begin`` to before ``end``."""
        topic, number = self._partition.topic, self._partition.partition
        self._consumer.assign([TopicPartition(topic, number, begin)])
        position = begin
        while position < end:
            messages = self._consumer.consume(500, timeout=0.2)
            if not messages and time.monotonic() > self._deadline:
                raise OSError(f"{topic}: no letter at offset {position} came in time")
            for message in messages:
                if error := message.error():
                    if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 public constant
                        return
                    raise self._failure(error)
                position = (message.offset() or 0) + 1
                if position <= end:
                    yield self._open(message)

    def _open(self, message: Message) -> Stored:
        data = message.value() or b""
        try:
            letter: DeadLetter = self._codec.decode(DEADLETTER, data)
        except DecodeError as e:
            letter = DeadLetter(
                topic=self._partition.topic,
                partition=self._partition.partition,
                offset=message.offset() or 0,
                at_ns=message.timestamp()[1] * 1_000_000,
                component="deadletters",
                reason=f"letter_{e.reason}",
                detail=f"the letter itself cannot be read: {e}",
                payload=data,
            )
        return Stored(offset=message.offset() or 0, letter=letter)

    def _failure(self, error: KafkaError) -> OSError:
        missing = error.code() in MISSING
        hint = "; make it with: latencyprism topics --create" if missing else ""
        return OSError(
            f"cannot read {self._partition.topic} from Kafka at {self._kafka.bootstrap}: "
            f"{error.str()}{hint}"
        )

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()
