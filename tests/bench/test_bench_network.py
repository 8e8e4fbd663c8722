from pathlib import Path

import pytest

from latencyprism.bench import network
from latencyprism.bench.network import capture_of, measure_offline, write_capture
from latencyprism.pcap import exchanges_of


def test_the_made_capture_holds_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "a.pcap"

    packets = write_capture(path, capture_of(3, 20), gap_us=5000)

    assert packets == 3 * (4 + 20 + 1)
    found = exchanges_of(path)
    assert found.counts == {}
    assert [(e["state"], e["chunks"], e["model"]) for e in found.exchanges] == [
        ("complete", 20, "m")
    ] * 3
    assert [e["itl_p50_ms"] for e in found.exchanges] == [15.0] * 3


def test_the_offline_figure_is_a_rate() -> None:
    assert 1000 < measure_offline(streams=2, events=50) < 1e8


def test_an_event_that_was_not_seen_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = network.capture_of

    def without_the_last_event(streams: int, events: int) -> object:
        return iter(list(whole(streams, events))[: -streams - 1])

    monkeypatch.setattr(network, "capture_of", without_the_last_event)

    with pytest.raises(RuntimeError, match="99 of 100 events"):
        measure_offline(streams=2, events=50)
