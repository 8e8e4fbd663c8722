import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from agent_support import (
    UNBOUND,
    Beating,
    Failing,
    Stuck,
    config,
    planned,
    running,
    states,
    wait_for,
)
from mock_kafka import mock_cluster

from latencyprism.collectors import agent as agent_module
from latencyprism.collectors import runner as runner_module
from latencyprism.collectors.agent import Agent, process_cost, set_by_signals
from latencyprism.collectors.catalogue import Planned
from latencyprism.collectors.config import (
    CollectorConfig,
    CostConfig,
    PrivilegesConfig,
    PublishConfig,
)
from latencyprism.collectors.discovery.config import DiscoveryConfig
from latencyprism.collectors.publisher import MemoryPublisher
from latencyprism.collectors.source import AbsentError, Source, UnavailableError
from latencyprism.schemas.records import AgentSample
from latencyprism.schemas.topics import TELEMETRY_AGENTS, TELEMETRY_HOST


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "FIRST_BACKOFF_S", 0.02)
    monkeypatch.setattr(runner_module, "LONGEST_BACKOFF_S", 0.1)
    monkeypatch.setattr(agent_module, "WATCH_S", 0.02)
    monkeypatch.setattr(agent_module, "HEALTH_S", 0.05)


class Closing(MemoryPublisher):
    """Remembers how it was closed."""

    closed: float | None = None

    def close(self, timeout_s: float) -> None:
        super().close(timeout_s)
        self.closed = timeout_s


def test_source_that_crashes_is_started_again_and_the_others_go_on() -> None:
    publisher = Closing()
    failing, beating = Failing("network", RuntimeError("boom")), Beating("host")
    agent = Agent(config(), publisher, plan=planned(failing, beating))
    with running(agent):
        wait_for(lambda: failing.runs >= 4)
        first = beating.beats
        wait_for(lambda: beating.beats > first + 2)
        status = agent.status().sources[0]

    assert beating.runs == 1
    assert status.failures >= 3
    assert status.error == "RuntimeError: boom"
    assert states(agent) == {"network": "stopped", "host": "stopped"}
    assert publisher.closed == agent_module.FLUSH_S
    watermarks = {packed.topic.name: packed.pack.watermark_ns for packed in publisher.packs}
    assert watermarks["telemetry.host"] == beating.beats


def test_unavailable_source_is_reported_with_its_reason() -> None:
    def refuse(_: CollectorConfig) -> Sequence[Source]:
        raise UnavailableError("no GPU")

    beating = planned(Beating())
    agent = Agent(
        config(), MemoryPublisher(), plan=lambda c: [*beating(c), Planned("xpu", (), refuse, c)]
    )
    with running(agent):
        wait_for(lambda: states(agent)["host"] == "running")
        (_, xpu) = agent.status().sources

    assert (xpu.name, xpu.state, xpu.error) == ("xpu", "unavailable", "no GPU")


@pytest.mark.parametrize(
    ("refusal", "level"), [(UnavailableError, "WARNING"), (AbsentError, "INFO")]
)
def test_what_the_machine_does_not_have_is_no_warning(
    refusal: type[UnavailableError], level: str, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: CollectorConfig) -> Sequence[Source]:
        raise refusal("no accelerator")

    caplog.set_level("INFO", "latencyprism.collectors")
    Agent(config(), MemoryPublisher(), plan=lambda c: [Planned("xpu", (), refuse, c)])

    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (level, "Source xpu is not available: no accelerator")
    ]


@pytest.mark.parametrize(("user", "told"), [("nobody", True), ("", False)])
def test_a_source_that_comes_after_privileges_were_given_up_asks_for_a_restart(
    monkeypatch: pytest.MonkeyPatch, user: str, told: bool
) -> None:
    monkeypatch.setattr(agent_module, "permitted", lambda: {"CAP_NET_RAW"})
    settings = config(privileges=PrivilegesConfig(user=user), sources=())

    def refuse(_: CollectorConfig) -> Sequence[Source]:
        raise UnavailableError("needs capabilities")

    def plan(config: CollectorConfig) -> list[Planned]:
        return [Planned(kind, (), refuse, config) for kind in config.sources]

    agent = Agent(
        settings,
        MemoryPublisher(),
        plan=plan,
        reread=lambda: (replace(settings, sources=("kernel", "network")), ()),
    )
    with running(agent):
        agent.reload.set()
        wait_for(lambda: "kernel" in states(agent))
        errors = {source.name: source.error for source in agent.status().sources}

    assert ("restart the agent" in str(errors["kernel"])) is told
    assert errors["network"] == "needs capabilities"


def test_its_end_tells_what_became_of_the_samples(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "latencyprism.collectors")
    publisher = MemoryPublisher()
    agent = Agent(config(), publisher, plan=planned(Beating()))
    with running(agent):
        wait_for(lambda: states(agent)["host"] == "running")
        publisher.sample(TELEMETRY_HOST, "no record")

    assert caplog.records[-1].getMessage() == (
        f"Ended: of 1 samples 1 were dropped; the broker has {len(publisher.packs)} messages"
    )


def test_source_that_does_not_stop_holds_the_agent_up_only_so_long(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agent = Agent(config(), MemoryPublisher(), plan=planned(Stuck("host")))
    with running(agent):
        wait_for(lambda: states(agent)["host"] == "running")

    assert "did not end in time" in caplog.text


class Engines:
    """A plan with one source an engine, remembering all that were ever made."""

    def __init__(self) -> None:
        self.made: dict[str, list[Beating]] = {}

    def __call__(self, config: CollectorConfig) -> list[Planned]:
        if "wrong" in config.engines:
            raise ValueError("engine 'wrong': expected http://host:port or https://host:port")
        return [
            Planned(url, (url,), self._make, replace(config, engines=(url,)))
            for url in config.engines
        ]

    def _make(self, config: CollectorConfig) -> Sequence[Source]:
        (url,) = config.engines
        source = Beating(url)
        self.made.setdefault(source.name, []).append(source)
        return [source]


def test_settings_read_again_change_only_what_they_touch() -> None:
    engines = Engines()
    settings = [config(engines=("a", "b"))]
    agent = Agent(settings[0], MemoryPublisher(), plan=engines, reread=lambda: (settings[-1], ()))
    with running(agent):
        wait_for(lambda: states(agent) == {"a": "running", "b": "running"})
        settings.append(config(engines=("b", "c")))
        agent.reload.set()
        wait_for(lambda: states(agent) == {"b": "running", "c": "running"})
        beats = engines.made["b"][0].beats
        wait_for(lambda: engines.made["b"][0].beats > beats)
        assert agent.status().settings_error is None

    assert {url: [s.runs for s in made] for url, made in engines.made.items()} == {
        "a": [1],
        "b": [1],
        "c": [1],
    }


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (ValueError("kafka.partitions: 0 is not greater than 0"), "kafka.partitions: 0"),
        (OSError("settings.toml: permission denied"), "permission denied"),
        (RecursionError("brackets, ten thousand deep"), "ten thousand deep"),
        (config(engines=("a", "wrong")), "engine 'wrong'"),
    ],
)
def test_settings_that_cannot_be_used_change_nothing(
    changed: CollectorConfig | Exception, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    def reread() -> tuple[CollectorConfig, tuple[str, ...]]:
        if isinstance(changed, Exception):
            raise changed
        return changed, ()

    engines = Engines()
    publisher = MemoryPublisher()
    agent = Agent(config(engines=("a",)), publisher, plan=engines, reread=reread)
    with running(agent):
        wait_for(lambda: states(agent) == {"a": "running"})
        agent.reload.set()
        wait_for(lambda: agent.status().settings_error is not None)
        beats = engines.made["a"][0].beats
        wait_for(lambda: engines.made["a"][0].beats > beats)
        assert states(agent) == {"a": "running"}
        published = publisher.stats().samples
        wait_for(lambda: publisher.stats().samples > published)

    assert told in str(agent.status().settings_error)
    assert told in caplog.text
    assert engines.made["a"][0].runs == 1
    told_samples = [s for packed in publisher.packs for s in packed.pack.samples]
    assert any(told in str(sample.settings_error) for sample in told_samples)


def test_settings_that_only_a_restart_changes_are_named_and_the_rest_is_taken() -> None:
    engines = Engines()
    changed = config(engines=("b",), publish=PublishConfig(linger_ms=10), agent="other")
    agent = Agent(
        config(engines=("a",), agent="me"),
        MemoryPublisher(),
        plan=engines,
        reread=lambda: (changed, ("kafka",)),
    )
    with running(agent):
        agent.reload.set()
        wait_for(lambda: states(agent) == {"b": "running"})
        wait_for(lambda: agent.status().settings_error)

    assert agent.status().settings_error == "only a restart changes agent, publish, kafka"
    assert agent.status().instance == "me"


def test_source_that_was_refused_is_tried_again_with_the_settings() -> None:
    refused = Failing("network", PermissionError("no CAP_NET_RAW"))
    same = config()
    agent = Agent(same, MemoryPublisher(), plan=planned(refused), reread=lambda: (same, ()))
    with running(agent):
        wait_for(lambda: states(agent)["network"] == "unavailable")
        assert agent.status().sources[0].error == "no CAP_NET_RAW"
        time.sleep(0.1)
        assert refused.runs == 1
        agent.reload.set()
        wait_for(lambda: refused.runs == 2)


def test_found_servers_are_watched_and_gone_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finding(Beating):
        """Stands for the source that looks for servers."""

        def __init__(self, _: DiscoveryConfig, explicit: Sequence[str], found: object) -> None:
            super().__init__("discovery")
            assert callable(found)
            assert explicit == ()
            self.found = found
            made.append(self)

    made: list[Finding] = []
    monkeypatch.setattr(agent_module, "DiscoverySource", Finding)
    engines = Engines()
    agent = Agent(config(discovery=DiscoveryConfig()), MemoryPublisher(), plan=engines)
    with running(agent):
        wait_for(lambda: states(agent) == {"discovery": "running"})
        made[0].found(("a", "b"))
        wait_for(lambda: states(agent) == dict.fromkeys(("a", "b", "discovery"), "running"))
        made[0].found(("b",))
        wait_for(lambda: states(agent) == dict.fromkeys(("b", "discovery"), "running"))

    assert len(made) == 1
    assert engines.made["b"][0].runs == 1


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


def test_the_kind_that_is_measured_to_cost_most_is_shed_first_and_comes_back() -> None:
    cost = Cost()
    sources = [Beating("engine a:1"), Beating("engine b:1"), Beating("host", burn=True)]
    settings = config(cost=CostConfig(cpu_pct=50, rss_mb=1e6, patience_s=5, resume_s=5))
    agent = Agent(settings, MemoryPublisher(), plan=planned(*sources), cost=cost)
    with running(agent):
        wait_for(lambda: agent.status().cpu_pct is not None)
        cost.dear = True
        wait_for(lambda: states(agent)["host"] == "shed")
        assert "shed when the agent took" in str(agent.status().sources[2].error)
        time.sleep(0.4)
        assert states(agent)["engine a:1"] == states(agent)["engine b:1"] == "running"
        cost.dear = False
        wait_for(lambda: states(agent)["host"] == "running")
        wait_for(lambda: sources[2].runs == 2)

    assert [source.runs for source in sources] == [1, 1, 2]


def test_source_of_a_shed_kind_waits_until_the_kind_comes_back() -> None:
    cost = Cost()
    sources = [Beating("engine a:1"), Beating("host", burn=True)]
    late = Beating("host late")
    wanted: list[Source] = list(sources)
    settings = config(cost=CostConfig(cpu_pct=50, rss_mb=1e6, patience_s=5, resume_s=20))
    agent = Agent(
        settings,
        MemoryPublisher(),
        plan=lambda c: planned(*wanted)(c),  # noqa: PLW0108 - wanted changes
        cost=cost,
        reread=lambda: (settings, ()),
    )
    with running(agent):
        cost.dear = True
        wait_for(lambda: states(agent)["host"] == "shed")
        cost.dear = False
        wanted.append(late)
        agent.reload.set()
        wait_for(lambda: "host late" in states(agent))
        assert states(agent)["host late"] == "shed"
        wait_for(lambda: states(agent)["host late"] == "running")
        wait_for(lambda: states(agent)["host"] == "running")

    assert sources[0].runs == 1


def test_changed_ceilings_bring_back_what_is_shed() -> None:
    cost = Cost()
    settings = config(cost=CostConfig(cpu_pct=50, rss_mb=1e6, patience_s=5, resume_s=10_000))
    agent = Agent(
        settings,
        MemoryPublisher(),
        plan=planned(Beating("engine a:1"), Beating("host", burn=True)),
        cost=cost,
        reread=lambda: (replace(settings, cost=UNBOUND), ()),
    )
    with running(agent):
        cost.dear = True
        wait_for(lambda: states(agent)["host"] == "shed")
        agent.reload.set()
        wait_for(lambda: states(agent)["host"] == "running")


def test_agent_publishes_how_it_does() -> None:
    publisher = MemoryPublisher()
    beating = Beating("host", burn=True)
    agent = Agent(config(agent="me"), publisher, plan=planned(beating), boot_ns=7)
    with running(agent):
        wait_for(lambda: agent.status().cpu_pct is not None)
        wait_for(lambda: publisher.stats().samples > 3)

    packs = [packed for packed in publisher.packs if packed.topic is TELEMETRY_AGENTS]
    samples: list[AgentSample] = [sample for packed in packs for sample in packed.pack.samples]
    last = samples[-1]
    assert {packed.key for packed in packs} == {"me"}
    assert packs[-1].pack.watermark_ns == last.observed_at_ns
    assert (last.instance, last.boot_ns, last.settings_error) == ("me", 7, None)
    assert last.uptime_s > 0
    assert last.rss_mb is not None
    assert 5 < last.rss_mb < 2000
    (host,) = last.sources
    assert (host.name, host.state, host.failures) == ("host", "running", 0)
    assert host.counts["beats"] > 0
    assert host.counts["samples"] == 0
    assert max(source.cpu_pct or 0 for sample in samples for source in sample.sources) > 5


def test_cost_is_that_of_this_process() -> None:
    before, rss_mb = process_cost()
    sum(range(2_000_000))
    after, _ = process_cost()

    assert after > before
    assert rss_mb > 5


def test_signals_set_their_events_and_the_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    stop, reload = threading.Event(), threading.Event()
    with set_by_signals({signal.SIGTERM: stop, signal.SIGHUP: reload}):
        signal.raise_signal(signal.SIGHUP)
        assert reload.wait(5)
        assert not stop.is_set()
        signal.raise_signal(signal.SIGTERM)
        assert stop.wait(5)

    assert signal.getsignal(signal.SIGTERM) is before


STORM = textwrap.dedent("""
    import signal, sys, threading
    from latencyprism.collectors.agent import set_by_signals
    reload = threading.Event()
    with set_by_signals({signal.SIGHUP: reload}):
        print("begins", flush=True)
        sys.stdin.read()
        assert reload.wait(5)
    print("ended", threading.active_count(), flush=True)
""")


def test_a_storm_of_signals_does_no_harm() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STORM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begins\n"
    until = time.monotonic() + 1
    while time.monotonic() < until and process.poll() is None:
        process.send_signal(signal.SIGHUP)
    told, errors = process.communicate(timeout=10)

    assert (told, errors) == ("ended 1\n", "")


AGENT = textwrap.dedent("""
    import sys
    from latencyprism.collectors.agent import run_agent
    from latencyprism.collectors.config import CollectorConfig
    from latencyprism.schemas.connection import KafkaConfig
    config = CollectorConfig(engines=("http://127.0.0.1:1",), sources=("engine", "host"))
    print("begins", flush=True)
    run_agent(config, KafkaConfig(bootstrap=sys.argv[1]), observe=lambda a: print(a.status().host))
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
        for topic in ("telemetry.engine", "telemetry.host", "telemetry.agents"):
            cluster.create_topic(f"prism.{topic}", 2)
        stop = threading.Event()
        seen: list[Agent] = []
        thread = threading.Thread(
            target=run_agent,
            args=(
                config(engines=("http://127.0.0.1:1",), sources=("engine", "host")),
                KafkaConfig(bootstrap=cluster.bootstrap),
            ),
            kwargs={"stop": stop, "observe": seen.append},
        )
        thread.start()
        wait_for(lambda: seen and (seen[0].status().published_bytes_s or 0) > 0, 20)
        stop.set()
        thread.join(5)
        status = seen[0].status()

    assert not thread.is_alive()
    assert status.dropped == {}
    assert sum(source.counts["samples"] for source in status.sources) > 1
