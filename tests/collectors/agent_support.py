"""Sources and plans to try the agent with."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from latencyprism.collectors.agent import Agent
from latencyprism.collectors.catalogue import Planned
from latencyprism.collectors.config import CollectorConfig, CostConfig
from latencyprism.collectors.discovery.config import DiscoveryConfig
from latencyprism.collectors.source import Emit, Source
from latencyprism.schemas.topics import TELEMETRY_HOST

UNBOUND = CostConfig(cpu_pct=1e6, rss_mb=1e6, bytes_s=1e12)
"""The process here is the whole test run, whose cost is not the agent's."""
QUIET = DiscoveryConfig(enabled="off")


def config(**changes: object) -> CollectorConfig:
    """Settings without discovery and ceilings, with changes."""
    return CollectorConfig(**({"cost": UNBOUND, "discovery": QUIET} | changes))  # type: ignore[arg-type]


class Beating:
    """Moves its watermark until stopped."""

    def __init__(self, name: str = "host", burn: bool = False) -> None:
        self.name = name
        self.runs = 0
        self.beats = 0
        self.prepared = 0
        self.counts: Mapping[str, int] = {"beats": 0}
        self._burn = burn

    def prepare(self) -> None:
        self.prepared += 1

    def run(self, emit: Emit, stop: threading.Event) -> None:
        self.runs += 1
        while not stop.wait(0.005):
            self.beats += 1
            self.counts = {"beats": self.beats}
            emit.watermark(TELEMETRY_HOST, "h:1", self.beats)
            until = time.thread_time() + (0.004 if self._burn else 0)
            while time.thread_time() < until:
                pass


class Failing(Beating):
    """Raises, or returns, at each run."""

    def __init__(self, name: str, error: Exception | None) -> None:
        super().__init__(name)
        self.error = error

    def run(self, emit: Emit, stop: threading.Event) -> None:  # noqa: ARG002 - as all sources
        self.runs += 1
        if self.error is not None:
            raise self.error


class Stuck(Beating):
    """Does not listen to its stop event."""

    def run(self, emit: Emit, stop: threading.Event) -> None:  # noqa: ARG002 - as all sources
        time.sleep(3)


def planned(*sources: Source) -> Callable[[CollectorConfig], list[Planned]]:
    """A plan of just these, whatever the settings."""
    return lambda config: [
        Planned(source.name, (), partial(_just, source), config) for source in sources
    ]


def _just(source: Source, _: CollectorConfig) -> Sequence[Source]:
    return [source]


def wait_for(condition: Callable[[], object], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.005)


@contextmanager
def running(agent: Agent) -> Iterator[threading.Event]:
    stop = threading.Event()
    thread = threading.Thread(target=agent.run, args=(stop,))
    thread.start()
    try:
        yield stop
    finally:
        began = time.monotonic()
        stop.set()
        thread.join(10)
        assert not thread.is_alive()
        assert time.monotonic() - began < 1.2


def states(agent: Agent) -> dict[str, str]:
    return {source.name: source.state for source in agent.status().sources}
