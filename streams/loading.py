"""What a worker reads before it takes over partitions; blocking, for another thread."""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka import Consumer, KafkaException, Message, TopicPartition

from latencyprism.schemas.codec import Codec, DecodeError, codec_for
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.records import BatchProfile, ModelSnapshot
from latencyprism.schemas.topics import LATENCY_BATCHES, MODELS, Topic

logger = logging.getLogger(__name__)

TAIL_MESSAGES: Final = 2_000
"""Newest messages of each partition of latency.batches that are read again: some 100 s of one
service, more than a worker can have published and not committed."""
TIMEOUT_S: Final = 10.0
"""Longest for an answer of the cluster."""
POLL_S: Final = 0.05
FETCH_MESSAGES: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Inheritance:
    """What earlier workers left for the partitions that are taken over."""

    snapshots: tuple[ModelSnapshot, ...]
    """Newest of each instance."""
    published: Mapping[str, int]
    """End of the newest published window of each instance seen lately."""
    history: tuple[tuple[int, BatchProfile], ...]
    """(partition, profile) of services that were decided on before, in order."""


def inherit(kafka: KafkaConfig, *, group: str, partitions: Iterable[int]) -> Inheritance:
    """Read what was left for the partitions. Blocks for some 100 ms, longer for much of it.

    ``group`` is the workers' consumer group, which tells how far decisions went. What can't be
    decoded is passed over with a log line. Raises KafkaException when the cluster is away.
    """
    taken = sorted(partitions)
    codec = codec_for(kafka)
    consumer = Consumer(
        kafka.librdkafka(group_id=group, enable_auto_commit=False, enable_partition_eof=False)
    )
    try:
        published: dict[str, int] = {}
        history: list[tuple[int, BatchProfile]] = []
        decided = _committed(consumer, kafka.topic(LATENCY_BATCHES), taken)
        for message, pack in _read(consumer, kafka, codec, LATENCY_BATCHES, None, TAIL_MESSAGES):
            for profile in pack.samples:
                known_ns = published.get(profile.instance, 0)
                published[profile.instance] = max(known_ns, profile.window_end_ns)
                if (message.offset() or 0) < decided.get(message.partition() or 0, 0):
                    history.append((message.partition() or 0, profile))
        snapshots = {
            snapshot.instance: snapshot
            for _, snapshot in _read(consumer, kafka, codec, MODELS, taken, None)
        }
    finally:
        consumer.close()
    return Inheritance(
        snapshots=tuple(snapshots.values()), published=published, history=tuple(history)
    )


def _committed(consumer: Consumer, name: str, partitions: Iterable[int]) -> dict[int, int]:
    wanted = [TopicPartition(name, partition) for partition in partitions]
    found = consumer.committed(wanted, timeout=TIMEOUT_S) if wanted else []
    return {place.partition: place.offset for place in found if place.offset >= 0}


def _read(
    consumer: Consumer,
    kafka: KafkaConfig,
    codec: Codec,
    topic: Topic,
    partitions: Iterable[int] | None,
    tail: int | None,
) -> Iterator[tuple[Message, Any]]:
    """Decoded messages up to the present end of these partitions (None: of all), at most the
    ``tail`` newest of each.
    """
    name = kafka.topic(topic)
    if partitions is None:
        metadata = consumer.list_topics(name, timeout=TIMEOUT_S).topics[name]
        partitions = sorted(metadata.partitions)
    ends: dict[int, int] = {}
    places = []
    for partition in partitions:
        first, end = consumer.get_watermark_offsets(
            TopicPartition(name, partition), timeout=TIMEOUT_S
        )
        start = first if tail is None else max(first, end - tail)
        if start < end:
            ends[partition] = end
            places.append(TopicPartition(name, partition, start))
    consumer.assign(places)
    heard = time.monotonic()
    while ends:
        messages = consumer.consume(FETCH_MESSAGES, POLL_S)
        if messages:
            heard = time.monotonic()
        elif time.monotonic() - heard > TIMEOUT_S:
            raise KafkaException(f"{name} was not read to its end within {TIMEOUT_S:.0f} s")
        for message in messages:
            if message.error():
                raise KafkaException(message.error())
            if (value := message.value()) is not None:
                try:
                    yield message, codec.decode(topic, value)
                except DecodeError as e:
                    logger.warning("passed over %s, offset %d: %s", name, message.offset(), e)
        for place in consumer.position([TopicPartition(name, partition) for partition in ends]):
            if place.offset >= ends[place.partition]:
                del ends[place.partition]
