import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
from network_wire import INSTANCE, MS, START_NS, STREAM_HEAD, Wire, chunk, delta, make_tap, request

from latencyprism.collectors.network.config import NetworkConfig
from latencyprism.collectors.network.ring import MemoryRing
from latencyprism.collectors.network.source import SKEW_NS, NetworkSource, Reports
from latencyprism.collectors.network.tap import Tap
from latencyprism.collectors.network.targets import Targets, Watch
from latencyprism.schemas.records import RequestTiming
from latencyprism.schemas.topics import TELEMETRY_REQUESTS, Topic

HOLD_NS = 50 * MS


@dataclass(slots=True)
class Heard:
    """An emit that remembers, in order."""

    samples: list[RequestTiming] = field(default_factory=list)
    watermarks: list[tuple[str, int]] = field(default_factory=list)

    def sample(self, topic: Topic, sample: Any) -> None:
        assert topic is TELEMETRY_REQUESTS
        self.samples.append(sample)

    def watermark(self, topic: Topic, instance: str, watermark_ns: int) -> None:
        assert topic is TELEMETRY_REQUESTS
        self.watermarks.append((instance, watermark_ns))


@dataclass(slots=True)
class Clock:
    wall: int = START_NS
    monotonic: int = 0

    def advance(self, ns: int) -> None:
        self.wall += ns
        self.monotonic += ns


class Bench:
    """Reports over a ring in memory, on a clock of the test's own."""

    def __init__(self, instances: tuple[str, ...] = (INSTANCE,)) -> None:
        self.clock = Clock()
        self.ring = MemoryRing(hold_ns=HOLD_NS)
        self.tap: Tap = make_tap(*instances)
        self.heard = Heard()
        self.reports = Reports(
            self.ring,
            self.tap,
            Targets([Watch.of(f"http://{instance}") for instance in instances]),
            interval_ms=100,
            wall_ns=lambda: self.clock.wall,
            monotonic_ns=lambda: self.clock.monotonic,
        )

    def after(self, ms: int) -> float:
        self.clock.advance(ms * MS)
        return self.reports.step(self.heard)


def test_the_watermark_follows_the_clock_at_the_ring_s_distance() -> None:
    bench = Bench(instances=(INSTANCE, "127.0.0.1:9000"))

    for _ in range(3):
        bench.after(100)

    expected = [START_NS + 100 * k * MS - HOLD_NS for k in (1, 2, 3)]
    assert bench.heard.watermarks == [
        (instance, at) for at in expected for instance in (INSTANCE, "127.0.0.1:9000")
    ]


def test_reports_come_at_their_interval_however_often_it_is_woken() -> None:
    bench = Bench()

    waits = [bench.after(10) for _ in range(35)]

    assert len(bench.heard.watermarks) == 4  # the first at once
    assert waits[0] == pytest.approx(0.09)
    assert max(waits) <= 0.1


def test_a_late_report_does_not_shift_or_pile_up_the_next() -> None:
    bench = Bench()
    bench.after(0)

    assert bench.after(450) == pytest.approx(0.05)
    assert len(bench.heard.watermarks) == 2


def test_news_before_the_watermark_are_out_before_it() -> None:
    bench, wire = Bench(), Wire()
    bench.after(0)
    packets = [*wire.syn(), wire.client(request({"model": "m"})), wire.server(STREAM_HEAD)]
    packets += [wire.server(chunk(delta(content="x"))) for _ in range(10)]
    emitted = 1

    for packet in packets:
        bench.clock.advance(20 * MS)
        bench.ring.packets.append((bench.clock.wall, packet))
        bench.reports.step(bench.heard)
        seen = len(bench.heard.watermarks)
        if seen > emitted:
            emitted = seen
            _, watermark_ns = bench.heard.watermarks[-1]
            assert watermark_ns == bench.clock.wall - SKEW_NS  # the packet just taken is newer
            assert bench.heard.samples[-1].observed_at_ns == bench.clock.wall
    assert emitted == 3


def test_a_ring_that_was_not_emptied_holds_it_at_the_newest_packet() -> None:
    bench = Bench()
    bench.ring.full = 2
    bench.ring.packets.extend((START_NS + n * MS, b"") for n in range(3))

    bench.after(100)

    assert bench.heard.watermarks == [(INSTANCE, START_NS + MS - SKEW_NS)]


def test_a_ring_that_fills_up_is_drained_before_a_report_is_due() -> None:
    bench = Bench()
    bench.after(0)
    bench.ring.packets.extend([(START_NS, b"")] * (bench.ring.full // 4 - 1))

    bench.after(20)
    assert bench.ring.packets
    bench.ring.packets.append((START_NS, b""))
    bench.after(20)

    assert not bench.ring.packets
    assert len(bench.heard.watermarks) == 1


def test_dropped_packets_are_counted() -> None:
    bench = Bench()
    bench.ring.dropped = 12

    bench.after(100)
    bench.after(100)

    assert bench.tap.counts["lost packets"] == 12


def test_a_clock_that_is_set_closes_what_is_open_and_takes_the_watermark_along() -> None:
    bench, wire = Bench(), Wire()
    for packet in [*wire.syn(), wire.client(request({"model": "m"}))]:
        bench.ring.packets.append((START_NS + MS, packet))
    bench.after(100)

    bench.clock.wall -= 3600_000 * MS
    bench.after(100)
    bench.after(100)

    assert [(s.state, s.estimated) for s in bench.heard.samples] == [
        ("open", ()),
        ("aborted", ("state", "end_ns")),
    ]
    assert bench.heard.watermarks[-1] == (INSTANCE, bench.clock.wall - HOLD_NS)


def test_a_url_that_names_no_server_is_told_at_the_start() -> None:
    source = NetworkSource(["nonsense"], NetworkConfig())

    with pytest.raises(ValueError, match="nonsense"):
        source.run(Heard(), threading.Event())
    assert source.counts == {}
