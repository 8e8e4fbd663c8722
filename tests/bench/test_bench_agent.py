import time

import numpy as np
import pytest

from latencyprism.bench.agent import Times, compare, measure_agent, measure_server
from latencyprism.bench.traffic import Seen, load, paced_server
from latencyprism.collectors.catalogue import may_capture


def steady(rates: list[float], waits_ms: list[float]) -> Seen:
    """Seconds with so many chunks each, every one of which came after so long."""
    at = [second + n / rate for second, rate in enumerate(rates) for n in range(int(rate))]
    waited = [waits_ms[int(moment)] / 1000 for moment in at]
    return Seen(at_s=np.asarray(at), waited_s=np.asarray(waited), failed=2)


def test_each_stretch_is_compared_with_those_around_it() -> None:
    rates = [100.0, 99.0, 100.0, 100.0, 100.0, 190.0, 200.0, 210.0, 220.0]
    seen = steady(rates, [10.0, 11.0, 10.0, 10.0, 10.0, 20.0, 20.0, 20.0, 20.0])
    figures = compare(seen, [(second, second + 1.0) for second in range(9)])

    assert figures["server.throughput_delta_pct"].low == pytest.approx(-1)
    assert figures["server.throughput_delta_pct"].high == pytest.approx(100 * (190 / 150 - 1))
    assert figures["server.throughput_delta_pct"].n == 2
    assert figures["server.p99_delta_pct"].low == pytest.approx(10)
    assert figures["noise.throughput_delta_pct"].value == pytest.approx(0)
    assert figures["noise.p99_delta_pct"].value == pytest.approx(0)
    assert figures["server.failed_requests"].value == 2


def test_silent_server_is_no_measurement() -> None:
    with pytest.raises(ValueError, match="sent nothing"):
        steady([10.0], [1.0]).between(5.0, 6.0)


def test_paced_server_gives_its_streams_what_was_asked() -> None:
    with paced_server(tokens_per_s=20, streams=4) as url, load(url, streams=4, tokens=5) as traffic:
        time.sleep(1.5)
        seen = traffic.end()

    assert seen.failed == 0
    assert 30 < seen.at_s.size < 140
    assert (seen.waited_s >= 0).all()
    assert np.median(seen.waited_s) == pytest.approx(0.05, abs=0.02)


def test_server_that_is_away_is_told() -> None:
    with pytest.raises(OSError, match="refused"), load("http://127.0.0.1:1", streams=1, tokens=1):
        raise AssertionError("there is no server")


@pytest.mark.root
@pytest.mark.skipif(not may_capture(), reason="needs CAP_NET_RAW")
def test_agent_and_what_it_takes_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("latencyprism.bench.agent.SETTLE_S", 0.5)
    monkeypatch.setattr("latencyprism.bench.agent.STREAMS", 4)
    times = Times(runs=1, run_s=1.0, rounds=1, block_s=0.5)
    figures = measure_agent(times) | measure_server(None, times)

    assert 0 < figures["agent.cpu_pct"].value < 100
    assert 20 < figures["agent.rss_mb"].value < 150
    assert figures["server.chunks_per_s"].value > 50
    assert {name for name in figures if name.endswith("delta_pct")} == {
        f"{group}.{value}_delta_pct"
        for group in ("server", "noise")
        for value in ("throughput", "p99")
    }


@pytest.mark.root
@pytest.mark.skipif(not may_capture(), reason="needs CAP_NET_RAW")
def test_an_agent_without_one_of_its_sources_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("latencyprism.bench.agent.SETTLE_S", 0.5)
    monkeypatch.setattr("latencyprism.bench.agent.STREAMS", 4)
    monkeypatch.setattr("latencyprism.bench.agent.UNBOUNDED", {"cpu_pct": 0.01, "patience_s": 1})
    with pytest.raises(OSError, match=r"did not run as it should(.|\n)*Shedding"):
        measure_agent(Times(runs=1, run_s=3.0))
