"""Telemetry of a running system → a recording."""

import heapq
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from latencyprism.listen import Listener
from latencyprism.recordings.format import RecordingWriter
from latencyprism.schemas.codec import codec_for
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.topics import TELEMETRY, Topic

log = logging.getLogger(__name__)

HOLD_NS = 5_000_000_000
"""How much later than a record an earlier one may come and still be put before it."""
HELD_MAX = 200_000
"""Records that wait for earlier ones at the same time; beyond it the earliest is let go."""
POLL_S = 0.2
FLUSH_S = 2.0
"""How often what was sorted goes to the files; a recorder that is killed loses the rest."""


class Sorter:
    """Puts records that come from several agents in order of time, within ``HOLD_NS``."""

    def __init__(self) -> None:
        self._held: list[tuple[int, int, Topic, Any]] = []
        self._numbers = count()
        self._newest_ns = 0

    def add(self, topic: Topic, record: Any) -> Iterator[tuple[Topic, Any]]:
        """Take a record; gives those that are old enough to be written."""
        at_ns = record.observed_at_ns
        self._newest_ns = max(self._newest_ns, at_ns)
        heapq.heappush(self._held, (at_ns, next(self._numbers), topic, record))
        while self._held[0][0] < self._newest_ns - HOLD_NS or len(self._held) > HELD_MAX:
            yield self._take()

    def rest(self) -> Iterator[tuple[Topic, Any]]:
        """What is still held, in order."""
        while self._held:
            yield self._take()

    def _take(self) -> tuple[Topic, Any]:
        _, _, topic, record = heapq.heappop(self._held)
        return topic, record


def record(
    kafka: KafkaConfig,
    out: Path,
    *,
    duration_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, int]:
    """Record what comes on the telemetry topics from now on; records written by topic name.

    Blocks for ``duration_s`` of ``clock``, or until interrupted (Ctrl-C): then what came is kept.
    Raises RecordingError when ``out`` holds something, KafkaException when no broker answers.
    """
    counts: Counter[str] = Counter()
    sorter = Sorter()
    with RecordingWriter(out, engine=None, source="captured from a running system") as writer:

        def write(topic: Topic, sample: Any) -> None:
            writer.write(topic, sample)
            writer.engine = writer.engine or getattr(sample, "engine", None)
            counts[topic.name] += 1

        listener = Listener(kafka, TELEMETRY, codec_for(kafka))
        end = clock() + duration_s
        flush = clock() + FLUSH_S
        try:
            while clock() < end:
                for topic, sample in listener.poll(POLL_S):
                    for earlier in sorter.add(topic, sample):
                        write(*earlier)
                if clock() >= flush:
                    writer.flush()
                    flush = clock() + FLUSH_S
        except KeyboardInterrupt:
            log.warning("stopped early; %s holds what came until now", out)
        finally:
            listener.close()
            for earlier in sorter.rest():
                write(*earlier)
    return dict(counts)
