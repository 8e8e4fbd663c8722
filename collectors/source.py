"""The contract of a source: what the agent gives it and asks of it."""

import threading
from typing import Any, Protocol

from latencyprism.schemas.topics import Topic


class Emit(Protocol):
    """Where a source hands its samples; never blocks, never raises."""

    def sample(self, topic: Topic, sample: Any) -> None:
        """Take one record of the topic, keyed by its ``instance``; dropped and counted if full."""

    def watermark(self, topic: Topic, instance: str, watermark_ns: int) -> None:
        """Promise that no earlier sample of this topic and instance will follow.

        Sources call it at least every 200 ms for each instance they watch, samples or not, so
        that windows close on time and silence is told from absence.
        """


class Source(Protocol):
    """One way of watching; runs in a thread of its own until told to stop."""

    name: str

    def run(self, emit: Emit, stop: threading.Event) -> None:
        """Watch and emit until ``stop`` is set.

        May raise: the agent reports it and starts the source again with backoff. Must return
        within 500 ms of ``stop``.
        """
