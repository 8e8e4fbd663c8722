import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mock_kafka import mock_cluster

from latencyprism.collectors import agent as agent_module
from latencyprism.collectors.agent import (
    Agent,
    Runner,
    Shedder,
    Unavailable,
    backoff_s,
    build_sources,
    process_cost,
    stopped_by_signals,
)
from latencyprism.collectors.config import CollectorConfig, CostConfig
from latencyprism.collectors.engine.scraper import EngineSource
from latencyprism.collectors.host.source import HostSource
from latencyprism.collectors.publisher import MemoryPublisher
from latencyprism.collectors.source import Emit
from latencyprism.schemas.topics import TELEMETRY_HOST

UNBOUND = CostConfig(cpu_pct=1e6, rss_mb=1e6)
"""The process here is the whole test run, whose cost is not the agent's."""


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "FIRST_BACKOFF_S", 0.02)
    monkeypatch.setattr(agent_module, "LONGEST_BACKOFF_S", 0.1)
    monkeypatch.setattr(agent_module, "WATCH_S", 0.02)


class Beating:
    """Moves its watermark until stopped."""

    def __init__(self, name: str = "host") -> None:
        self.name = name
        self.runs = 0
        self.beats = 0

    def run(self, emit: Emit, stop: threading.Event) -> None:
        self.runs += 1
        while not stop.wait(0.005):
            self.beats += 1
            emit.watermark(TELEMETRY_HOST, "h:1", self.beats)


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


class Closing(MemoryPublisher):
    """Remembers how it was closed."""

    closed: float | None = None

    def close(self, timeout_s: float) -> None:
        super().close(timeout_s)
        self.closed = timeout_s


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
        assert time.monotonic() - began < 1


def states(agent: Agent) -> dict[str, str]:
    return {source.name: source.state for source in agent.status().sources}


@pytest.mark.parametrize(
    ("error", "told"), [(RuntimeError("boom"), "RuntimeError: boom"), (None, "ended by itself")]
)
def test_source_that_fails_is_started_again_and_the_others_go_on(
    error: Exception | None, told: str
) -> None:
    publisher = Closing()
    failing, beating = Failing("network", error), Beating("host")
    agent = Agent(CollectorConfig(cost=UNBOUND), publisher, [failing, beating])
    with running(agent):
        wait_for(lambda: failing.runs >= 4)
        first = beating.beats
        wait_for(lambda: beating.beats > first + 2)
        status = agent.status().sources[0]

    assert beating.runs == 1
    assert status.failures >= 3
    assert status.error == told
    assert states(agent) == {"network": "stopped", "host": "stopped"}
    assert publisher.closed == agent_module.FLUSH_S
    assert publisher.packs[-1].pack.watermark_ns == beating.beats


def test_source_that_is_not_permitted_is_not_tried_again() -> None:
    refused = Failing("network", PermissionError("no CAP_NET_RAW"))
    agent = Agent(CollectorConfig(cost=UNBOUND), MemoryPublisher(), [refused, Beating()])
    with running(agent):
        wait_for(lambda: states(agent)["network"] == "unavailable")
        time.sleep(0.1)

    assert refused.runs == 1
    assert agent.status().sources[0].error == "no CAP_NET_RAW"
    assert states(agent)["network"] == "unavailable"


def test_unavailable_source_is_reported_with_its_reason() -> None:
    agent = Agent(
        CollectorConfig(cost=UNBOUND), MemoryPublisher(), [Unavailable("xpu", "no GPU"), Beating()]
    )
    with running(agent):
        wait_for(lambda: states(agent)["host"] == "running")
        (_, xpu) = agent.status().sources

    assert (xpu.name, xpu.state, xpu.error) == ("xpu", "unavailable", "no GPU")


def test_source_that_does_not_stop_holds_the_agent_up_only_so_long(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agent = Agent(CollectorConfig(cost=UNBOUND), MemoryPublisher(), [Stuck("host")])
    with running(agent):
        wait_for(lambda: states(agent)["host"] == "running")

    assert "did not end in time" in caplog.text


class Cost:
    """What the agent is made to believe that it costs: a whole core, or nothing."""

    def __init__(self) -> None:
        self.dear = False
        self.rss_mb = 10.0
        self._cpu_s = 0.0
        self._at = time.monotonic()

    def __call__(self) -> tuple[float, float]:
        now = time.monotonic()
        self._cpu_s += (now - self._at) * (1.0 if self.dear else 0.0)
        self._at = now
        return self._cpu_s, self.rss_mb


def test_dearest_kinds_are_shed_in_order_and_come_back() -> None:
    cost = Cost()
    sources = [Beating("engine a:1"), Beating("engine b:1"), Beating("host"), Beating("network")]
    config = CollectorConfig(cost=CostConfig(cpu_pct=50, patience_s=2, resume_s=3))
    agent = Agent(config, MemoryPublisher(), sources, cost=cost)
    with running(agent):
        cost.dear = True
        wait_for(lambda: states(agent)["network"] == "shed")
        assert "shed while the agent took" in str(agent.status().sources[3].error)
        wait_for(lambda: states(agent)["host"] == "shed")
        time.sleep(0.2)
        assert states(agent)["engine a:1"] == states(agent)["engine b:1"] == "running"
        cost.dear = False
        wait_for(lambda: states(agent)["host"] == "running")
        wait_for(lambda: states(agent)["network"] == "running")
        wait_for(lambda: sources[3].runs == 2)

    assert [source.runs for source in sources] == [1, 1, 2, 2]


def test_status_tells_cost_and_publisher() -> None:
    agent = Agent(
        CollectorConfig(agent="me", cost=UNBOUND), MemoryPublisher(), [Beating()], boot_ns=7
    )
    with running(agent):
        wait_for(lambda: agent.status().cpu_pct is not None)
        status = agent.status()

    assert (status.agent, status.boot_ns) == ("me", 7)
    assert status.cpu_pct is not None
    assert status.cpu_pct >= 0
    assert status.rss_mb is not None
    assert 5 < status.rss_mb < 2000
    assert status.published_bytes_s == 0
    assert status.uptime_s > 0


def test_shedder_waits_for_its_patience_and_starts_over() -> None:
    shedder = Shedder(CostConfig(cpu_pct=5, rss_mb=100, patience_s=3, resume_s=4))
    seen = [shedder.observe(cpu, rss) for cpu, rss in [(6, 1), (6, 1), (4, 1), (6, 1), (1, 101)]]
    seen += [shedder.observe(6, 1) for _ in range(4)]
    calm = [shedder.observe(1, 1) for _ in range(8)]

    assert seen == [None, None, None, None, None, "shed", None, None, "shed"]
    assert calm == [None, None, None, "resume", None, None, None, "resume"]


@given(failures=st.integers(1, 10_000), seed=st.integers())
def test_backoff_is_bounded_and_never_zero(failures: int, seed: int) -> None:
    pause = backoff_s(failures, random.Random(seed))

    assert 0.5 * agent_module.FIRST_BACKOFF_S <= pause <= agent_module.LONGEST_BACKOFF_S


def test_stop_ends_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "FIRST_BACKOFF_S", 20.0)
    monkeypatch.setattr(agent_module, "LONGEST_BACKOFF_S", 20.0)
    runner = Runner(Failing("host", OSError("no")), MemoryPublisher(), random.Random(1))
    runner.start()
    wait_for(lambda: runner.status.state == "backoff")
    runner.stop()

    assert runner.join(1)
    assert runner.status.state == "stopped"


def test_enabled_sources_are_built() -> None:
    config = CollectorConfig(
        engines=("http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:1"),
        sources=("engine", "host", "host"),
    )
    sources = build_sources(config)

    assert [type(source) for source in sources] == [EngineSource, EngineSource, HostSource]


def test_wrong_engine_url_is_named() -> None:
    with pytest.raises(ValueError, match="'localhost'"):
        build_sources(CollectorConfig(engines=("localhost",)))


def test_network_without_the_privilege_is_unavailable_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_module, "may_capture", lambda: False)
    (source,) = build_sources(
        CollectorConfig(engines=("http://127.0.0.1:1",), sources=("network",))
    )

    assert isinstance(source, Unavailable)
    assert "CAP_NET_RAW" in source.reason


def test_missing_library_is_unavailable_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "latencyprism.collectors.network.source", None)
    (source,) = build_sources(CollectorConfig(sources=("network",)))

    assert isinstance(source, Unavailable)
    assert "latencyprism[collectors]" in source.reason


@pytest.mark.parametrize("reason", [None, "no driver"])
def test_accelerators_are_watched_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch, reason: str | None
) -> None:
    from latencyprism.collectors.xpu import source as xpu

    monkeypatch.setattr(xpu, "unavailable", lambda: reason)
    (source,) = build_sources(CollectorConfig(sources=("xpu",)))

    if reason is None:
        assert isinstance(source, xpu.XpuSource)
    else:
        assert source == Unavailable("xpu", "no driver")


def test_cost_is_that_of_this_process() -> None:
    before, rss_mb = process_cost()
    sum(range(2_000_000))
    after, _ = process_cost()

    assert after > before
    assert rss_mb > 5


def test_signals_set_the_event_and_their_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    stop = threading.Event()
    with stopped_by_signals(stop):
        signal.raise_signal(signal.SIGTERM)
        assert stop.wait(5)

    assert signal.getsignal(signal.SIGTERM) is before


AGENT = textwrap.dedent("""
    import sys
    from latencyprism.collectors.agent import run_agent
    from latencyprism.collectors.config import CollectorConfig
    from latencyprism.schemas.connection import KafkaConfig
    config = CollectorConfig(engines=("http://127.0.0.1:1",), sources=("engine", "host"))
    print("begins", flush=True)
    run_agent(config, KafkaConfig(bootstrap=sys.argv[1]), observe=lambda a: print(a.status().agent))
    print("ended", flush=True)
""")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_agent_process_ends_within_a_second_of_a_signal_with_the_broker_away(number: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", AGENT, "127.0.0.1:1"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begins\n"
    time.sleep(0.7)
    began = time.monotonic()
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    took = time.monotonic() - began

    assert process.returncode == 0
    assert output.endswith("ended\n")
    # The agent's second, and the interpreter's own end on a busy machine.
    assert took < 2


def test_agent_publishes_what_its_sources_saw() -> None:
    from latencyprism.collectors.agent import run_agent
    from latencyprism.schemas.connection import KafkaConfig

    with mock_cluster() as cluster:
        for topic in ("telemetry.engine", "telemetry.host"):
            cluster.create_topic(f"prism.{topic}", 2)
        stop = threading.Event()
        seen: list[Agent] = []
        config = CollectorConfig(
            engines=("http://127.0.0.1:1",), sources=("engine", "host"), cost=UNBOUND
        )
        thread = threading.Thread(
            target=run_agent,
            args=(config, KafkaConfig(bootstrap=cluster.bootstrap)),
            kwargs={"stop": stop, "observe": seen.append},
        )
        thread.start()
        wait_for(lambda: seen and seen[0].status().publisher.packs > 3, 20)
        stop.set()
        thread.join(5)
        status = seen[0].status()

    assert not thread.is_alive()
    assert status.publisher.dropped == {}
    assert status.publisher.samples > 1
