"""Samples that wait for the window they fall in."""

from typing import Generic, TypeVar

from latencyprism.schemas.records import EngineSample, HostSample, XpuSample

S = TypeVar("S", EngineSample, HostSample, XpuSample)
Identity = tuple[int, *tuple[str, ...]]
"""Time of a sample, then what tells it from others of that time."""


class Samples(Generic[S]):
    """At most ``bound`` samples of one kind, each once; more are dropped and counted."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._waiting: dict[Identity, S] = {}
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sample: S) -> bool:
        """Take a sample; False when it waits already or there is no room."""
        identity = _identity(sample)
        if identity in self._waiting:
            return False
        if len(self._waiting) >= self._bound:
            self.dropped += 1
            return False
        self._waiting[identity] = sample
        return True

    def take(self, before_ns: int) -> tuple[S, ...]:
        """Remove and return the samples of before that time, oldest first."""
        due = sorted(identity for identity in self._waiting if identity[0] < before_ns)
        return tuple(self._waiting.pop(identity) for identity in due)

    def oldest_ns(self) -> int | None:
        """Time of the oldest sample; None when none waits."""
        return min((identity[0] for identity in self._waiting), default=None)

    def forget(self) -> None:
        """Drop all."""
        self._waiting.clear()


def _identity(sample: EngineSample | HostSample | XpuSample) -> Identity:
    at_ns = sample.observed_at_ns
    match sample:
        case EngineSample():
            return at_ns, sample.source
        case HostSample():
            return at_ns, sample.source, sample.host
        case XpuSample():
            return at_ns, sample.source, sample.host, sample.vendor, sample.device
