"""The contract of a source: what the agent gives it and asks of it."""

import threading
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from latencyprism.schemas.topics import Topic


class UnavailableError(Exception):
    """This machine does not permit a source; the message says why and what to do."""


class AbsentError(UnavailableError):
    """This machine does not have what a source watches, so there is nothing to mend."""


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
    """One way of watching; runs in a thread of its own until told to stop.

    Threads that it starts are named after it (its name, a space, anything), so that what they
    cost is counted as its own.
    """

    name: str
    """Its kind as in the settings; then, where there are several of a kind, a space and which."""

    def run(self, emit: Emit, stop: threading.Event) -> None:
        """Watch and emit until ``stop`` is set.

        May raise: the agent reports it and starts the source again with backoff. Must return
        within 500 ms of ``stop``. Raises PermissionError or :class:`UnavailableError` when it
        makes no sense to try again.
        """


@runtime_checkable
class Counting(Protocol):
    """A source that tells what it met."""

    @property
    def counts(self) -> Mapping[str, int]:
        """What it saw, refused and lost since its start, by kind; cheap, from any thread."""


@runtime_checkable
class Preparing(Protocol):
    """A source that opens something only a privileged process can."""

    def prepare(self) -> None:
        """Open it now, before the agent gives privileges up; the next ``run`` uses it.

        Called at most once, before the first ``run``. Raises what ``run`` would: it is reported
        and ``run`` is started all the same.
        """
