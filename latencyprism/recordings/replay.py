"""Recordings through the streams again: in this process, or through Kafka and the workers."""

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from latencyprism.recordings.feed import TICK_NS, feed
from latencyprism.recordings.format import Recording
from latencyprism.recordings.report import ReportBuilder
from latencyprism.streams.config import NS_PER_MS, StreamsConfig
from latencyprism.streams.shard import InstanceShard, ServiceShard

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
    began = perf_counter()
    samples = 0
    for tick in feed(target, warm=warm, flush_ns=flush_ns(config)):
        for parcel in tick:
            samples += len(parcel.pack.samples)
            instances.add(parcel.topic, parcel.instance, parcel.pack, parcel.pack.watermark_ns)
        for profile in instances.drain().profiles:
            report.add(profile)
            for out in services.follow(profile):
                report.add(out)
    seconds = perf_counter() - began
    figures = {"replay.seconds": seconds, "replay.samples_per_s": samples / seconds}
    return report.as_json(figures, damage=[d for r in (*warm, target) for d in r.damage])
