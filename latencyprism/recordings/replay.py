"""Recordings through the streams again: in this process, or through Kafka and the workers."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

from latencyprism.listen import Listener
from latencyprism.recordings.feed import TICK_NS, Parcel, feed
from latencyprism.recordings.format import Recording
from latencyprism.recordings.report import ReportBuilder
from latencyprism.schemas.codec import codec_for
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.records import BatchProfile
from latencyprism.schemas.topics import ALERTS, CONTROL_ACKS, CONTROL_COMMANDS, LATENCY_BATCHES
from latencyprism.streams.config import NS_PER_MS, NS_PER_S, StreamsConfig
from latencyprism.streams.shard import InstanceShard, ServiceShard
from latencyprism.streams.worker import GROUP

AHEAD_NS = 10 * NS_PER_S
"""Recorded time by which the feed may be ahead of the workers; bounds what they have to hold."""
PATIENCE_S = 120.0
"""Longest without any progress of the workers; a refit of theirs may take seconds."""
CLUSTER_TIMEOUT_S = 10.0
QUIET_S = 0.5
"""Nothing new for so long after all was decided, and the replay is over."""
OUTCOMES = (LATENCY_BATCHES, ALERTS, CONTROL_COMMANDS, CONTROL_ACKS)
REPLAY_TIMEOUT_MS = 60_000
"""Wall time after which a source counts as silent in a replay, whose packs come all at once."""


def replay_config(config: StreamsConfig) -> StreamsConfig:
    """The workers' configuration for a replay: the recordings' clock, not the wall's."""
    timeout_ms = max(config.source_timeout_ms, REPLAY_TIMEOUT_MS)
    return replace(config, clock="event", source_timeout_ms=timeout_ms)


def flush_ns(config: StreamsConfig) -> int:
    """How far watermarks must pass the end of a recording so that its last window closes."""
    return (config.window_ms + config.grace_ms) * NS_PER_MS + TICK_NS


def replay_in_process(
    target: Recording, *, warm: Sequence[Recording] = (), config: StreamsConfig | None = None
) -> dict[str, Any]:
    """The report of feeding the recordings to the streams' pure parts, without Kafka.

    Deterministic but for ``figures``; the same alerts and verdicts as :func:`replay` gives.
    """
    config = replay_config(config or StreamsConfig())
    instances: InstanceShard[None] = InstanceShard(config)
    services = ServiceShard(config)
    report = ReportBuilder(start_ns=target.meta.start_ns, end_ns=target.meta.end_ns)
    began = time.perf_counter()
    samples = 0
    for tick in feed(target, warm=warm, flush_ns=flush_ns(config)):
        for parcel in tick:
            samples += len(parcel.pack.samples)
            instances.add(parcel.topic, parcel.instance, parcel.pack, parcel.pack.watermark_ns)
        for profile in instances.drain().profiles:
            report.add(profile)
            for out in services.follow(profile):
                report.add(out)
    seconds = time.perf_counter() - began
    figures = {"replay.seconds": seconds, "replay.samples_per_s": samples / seconds}
    return report.as_json(figures, damage=[d for r in (*warm, target) for d in r.damage])


class ReplayError(RuntimeError):
    """A replay that the workers do not bring to an end; says what to look at."""


def replay(
    target: Recording,
    kafka: KafkaConfig,
    *,
    warm: Sequence[Recording] = (),
    config: StreamsConfig | None = None,
    speed: float | None = None,
) -> dict[str, Any]:
    """The report of feeding the recordings to running workers through Kafka.

    The workers must be configured as :func:`replay_config` of ``config`` says, and the topics hold
    nothing of the recordings' instances. ``speed`` is a factor of real time; None is as fast as
    the workers go. Blocks until the last window is judged and decided on. Raises ReplayError when
    the workers make no progress, KafkaException when the cluster is away.
    """
    run = _Run(target, kafka)
    try:
        first_ns: int | None = None
        for tick in feed(target, warm=warm, flush_ns=flush_ns(config or StreamsConfig())):
            first_ns = tick[0].pack.watermark_ns if first_ns is None else first_ns
            run.wait_for_workers(tick)
            if speed is not None:
                run.wait_until((tick[0].pack.watermark_ns - first_ns) / NS_PER_S / speed)
            run.publish(tick)
        run.finish()
    finally:
        run.close()
    return run.report([d for recording in (*warm, target) for d in recording.damage])


class _Run:
    """One replay's ends at Kafka, and how far the workers are."""

    def __init__(self, target: Recording, kafka: KafkaConfig) -> None:
        self._target = target
        self._kafka = kafka
        self._codec = codec_for(kafka)
        self._producer = Producer(kafka.librdkafka(partitioner="murmur2_random", linger_ms=5))
        self._listener = Listener(kafka, OUTCOMES, self._codec)
        self._group = Consumer(
            kafka.librdkafka(group_id=kafka.group(GROUP), enable_auto_commit=False)
        )
        """Looks at the workers' group without being of it."""
        name = kafka.topic(LATENCY_BATCHES)
        found = self._group.list_topics(name, timeout=CLUSTER_TIMEOUT_S).topics[name].partitions
        self._decisions = [TopicPartition(name, partition) for partition in found]
        self._report = ReportBuilder(start_ns=target.meta.start_ns, end_ns=target.meta.end_ns)
        self._failure: str | None = None
        self._began = time.perf_counter()
        self._moved = time.monotonic()
        self._reached_ns: dict[str, int] = {}
        """End of the newest window of each instance."""
        self._base_ns = 0
        """Start of the recording that is fed now."""
        self._fed_ns = 0
        self._samples = 0

    def publish(self, tick: Sequence[Parcel]) -> None:
        """Hand the packs of one tick to the producer."""
        for parcel in tick:
            self._samples += len(parcel.pack.samples)
            value = self._codec.encode(parcel.topic, parcel.pack)
            self._producer.produce(
                self._kafka.topic(parcel.topic),
                value,
                key=parcel.instance.encode(),
                on_delivery=self._delivered,
            )
        self._producer.poll(0)
        if self._failure is not None:
            raise ReplayError(f"Kafka did not take the feed: {self._failure}")

    def wait_for_workers(self, tick: Sequence[Parcel]) -> None:
        """Block until the workers are near enough to what comes next."""
        now_ns = tick[0].pack.watermark_ns
        if now_ns - self._fed_ns > TICK_NS:
            self._base_ns = now_ns
        self._fed_ns = now_ns
        instances = {parcel.instance for parcel in tick}
        while now_ns - min(self._progress(instance) for instance in instances) > AHEAD_NS:
            self._listen(0.05)

    def wait_until(self, seconds: float) -> None:
        """Block until so long after the beginning."""
        while (left := self._began + seconds - time.perf_counter()) > 0:
            self._listen(min(left, 0.05))

    def finish(self) -> None:
        """Block until every instance's last window is judged, and decided on."""
        left = self._producer.flush(PATIENCE_S)
        if left:
            raise ReplayError(f"Kafka did not take {left} messages within {PATIENCE_S:.0f} s")
        instances = {name for names in self._target.meta.streams.values() for name in names}
        while any(self._progress(name) <= self._target.meta.end_ns for name in instances):
            self._listen(0.05)
        while not self._decided():
            self._listen(0.05)
        quiet = time.monotonic() + QUIET_S
        while time.monotonic() < quiet:
            if self._listen(QUIET_S):
                quiet = time.monotonic() + QUIET_S

    def report(self, damage: Sequence[Any]) -> dict[str, Any]:
        """What came out."""
        return self._report.as_json(
            {
                "replay.seconds": self._seconds,
                "replay.samples_per_s": self._samples / self._seconds,
            },
            damage=damage,
        )

    def close(self) -> None:
        """Leave the cluster; ends the time that counts."""
        self._seconds = time.perf_counter() - self._began
        self._listener.close()
        self._group.close()

    def _progress(self, instance: str) -> int:
        return max(self._reached_ns.get(instance, 0), self._base_ns)

    def _listen(self, timeout_s: float) -> bool:
        """Take what has come; whether anything has."""
        heard = False
        for _, record in self._listener.poll(timeout_s):
            heard = True
            self._report.add(record)
            if isinstance(record, BatchProfile):
                known_ns = self._reached_ns.get(record.instance, 0)
                self._reached_ns[record.instance] = max(known_ns, record.window_end_ns)
        if heard:
            self._moved = time.monotonic()
        elif time.monotonic() - self._moved > PATIENCE_S:
            raise ReplayError(
                f"no window was judged for {PATIENCE_S:.0f} s: is a worker running for prefix "
                f"{self._kafka.prefix!r} with streams.clock=event, and are the topics fresh?"
            )
        return heard

    def _decided(self) -> bool:
        """Whether the workers have decided on all profiles that there are."""
        ends = {
            place.partition: self._group.get_watermark_offsets(place, timeout=CLUSTER_TIMEOUT_S)[1]
            for place in self._decisions
        }
        committed = self._group.committed(self._decisions, timeout=CLUSTER_TIMEOUT_S)
        return all(
            place.offset >= ends[place.partition] for place in committed if ends[place.partition]
        )

    def _delivered(self, error: Any, _message: Any) -> None:
        if error is not None:
            self._failure = str(error)
