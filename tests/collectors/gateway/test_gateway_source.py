"""From lines to records and watermarks."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_collected import Collected

from latencyprism.collectors.catalogue import plan
from latencyprism.collectors.config import CollectorConfig
from latencyprism.collectors.gateway.config import GatewayConfig
from latencyprism.collectors.gateway.source import GatewaySource, Reports
from latencyprism.collectors.gateway.upstreams import Upstreams
from latencyprism.collectors.source import Counting, Preparing, Source, UnavailableError
from latencyprism.schemas.records import RequestTiming

S = 1_000_000_000
END_NS = 1_796_080_269_448_000_000
ENGINES = ("http://127.0.0.1:8000", "http://10.0.0.2:8000", "http://[fd00::2]:8000")


class Lines:
    """A log of lines, given one read at a time."""

    def __init__(self, *reads: list[bytes]) -> None:
        self._reads = list(reads)

    @property
    def behind(self) -> bool:
        return bool(self._reads)

    def read(self, most: int) -> Iterator[bytes]:  # noqa: ARG002 - the shape of a log
        yield from self._reads.pop(0) if self._reads else []


def nginx(**fields: str) -> bytes:
    line = {
        "msec": "1796080269.448",
        "request_time": "1.000",
        "upstream_addr": "127.0.0.1:8000",
        "upstream_response_time": "1.000",
        "upstream_header_time": "0.100",
        "upstream_status": "200",
        "status": "200",
        "method": "POST",
        "uri": "/v1/completions",
    }
    return json.dumps(line | fields).encode()


def collect(
    *lines: bytes, engines: tuple[str, ...] = ENGINES, **settings: Any
) -> tuple[Collected, Counter[str]]:
    config, counts, collected = GatewayConfig(**settings), Counter[str](), Collected()
    upstreams = Upstreams(engines, config.servers, all_upstreams=config.all_upstreams)
    Reports(upstreams, config, counts, wall_ns=lambda: END_NS).tick([Lines(list(lines))], collected)
    return collected, counts


def test_every_field_of_the_record() -> None:
    collected, _ = collect(nginx())

    (request,) = collected.requests
    assert request == RequestTiming(
        request_id=request.request_id,
        part=0,
        state="complete",
        instance="127.0.0.1:8000",
        source="gateway",
        observed_at_ns=END_NS,
        endpoint="/v1/completions",
        status=200,
        arrival_ns=END_NS - S,
        first_byte_ns=END_NS - S + S // 10,
        end_ns=END_NS,
        chunks_before=0,
        estimated=("arrival_ns", "first_byte_ns"),
        method="POST",
    )
    assert len(request.request_id) == 32


def test_a_line_read_twice_has_one_id_and_others_have_others() -> None:
    plain = nginx()
    again, _ = collect(b"<190>Nov 30 23:11:14 gate nginx: " + plain, plain)
    other, _ = collect(nginx(connection="1-2"))
    tries, _ = collect(
        nginx(
            upstream_addr="127.0.0.1:8000, 127.0.0.1:8000",
            upstream_response_time="0.1, 0.2",
            upstream_header_time="-, 0.1",
            upstream_status="502, 200",
        )
    )

    ids = [request.request_id for request in again.requests]
    assert ids[0] == ids[1]
    assert len({ids[0], *(r.request_id for r in (*other.requests, *tries.requests))}) == 4


def test_only_watched_servers_and_paths_with_tokens_are_reported() -> None:
    collected, counts = collect(
        nginx(),
        nginx(upstream_addr="10.0.0.2:8000"),
        nginx(upstream_addr="[fd00::2]:8000"),
        nginx(upstream_addr="10.0.0.3:8000"),
        nginx(upstream_addr="llm"),
        nginx(upstream_addr="-"),
        nginx(uri="/metrics"),
        b"hello",
        b"{",
    )

    assert [request.instance for request in collected.requests] == [
        "127.0.0.1:8000",
        "10.0.0.2:8000",
        "[fd00::2]:8000",
    ]
    assert (
        +counts
        == Counter(
            {
                "lines": 9,
                "requests": 3,
                "other servers": 2,
                "other paths": 1,
                "answered by the gateway": 1,
                "refused lines: unknown format": 1,
                "refused lines: malformed": 1,
                "late requests": 0,
            }
        )
        - Counter()
    )


def test_all_servers_are_reported_when_asked_for() -> None:
    collected, counts = collect(
        nginx(upstream_addr="10.0.0.3:8000"),
        nginx(upstream_addr="engine-3:8000"),
        nginx(upstream_addr="unix:/run/llm.sock"),
        engines=(),
        all_upstreams=True,
    )

    assert [request.instance for request in collected.requests] == [
        "10.0.0.3:8000",
        "engine-3:8000",
    ]
    assert counts["other servers"] == 1
    assert set(collected.watermarks) == {"10.0.0.3:8000", "engine-3:8000"}


def test_names_of_the_log_are_mapped() -> None:
    servers = {"llm/one": "10.0.0.2:8000", "unix:/run/llm.sock": "127.0.0.1:8000"}
    collected, _ = collect(
        nginx(upstream_addr="unix:/run/llm.sock"),
        b"10.0.0.9:1 [30/Nov/2026:23:11:13.960] front llm/one 0/0/0/1/5 200 217 - - ---- "
        b'1/1/0/0/0 0/0 "POST /v1/completions HTTP/1.1"',
        servers=servers,
    )

    assert [request.instance for request in collected.requests] == [
        "127.0.0.1:8000",
        "10.0.0.2:8000",
    ]


def test_what_is_told_of_a_refusal_holds_no_text_of_the_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    collect(b"secret prompt", b"secret answer", nginx(uri="/v1/x?secret"), b'{"secret":')

    assert len(caplog.records) == 2  # one of each kind
    assert "secret" not in caplog.text


def test_the_watermark_waits_for_what_is_unread() -> None:
    config, counts, collected = GatewayConfig(lateness_ms=1000), Counter[str](), Collected()
    now_ns = [END_NS]
    reports = Reports(
        Upstreams(ENGINES[:1], {}, all_upstreams=False), config, counts, wall_ns=lambda: now_ns[0]
    )
    log = Lines([], [nginx()], [nginx()], [])
    seen = []
    for _ in range(5):
        reports.tick([log], collected)
        seen.append(collected.watermarks.get("127.0.0.1:8000"))
        now_ns[0] += S

    assert seen == [None, None, None, END_NS + 2 * S, END_NS + 3 * S]


def test_a_line_that_comes_later_than_promised_is_counted() -> None:
    config, counts, collected = GatewayConfig(), Counter[str](), Collected()
    now_ns = [END_NS]
    reports = Reports(
        Upstreams(ENGINES, {}, all_upstreams=False), config, counts, wall_ns=lambda: now_ns[0]
    )
    late = Lines([])
    reports.tick([late], collected)
    now_ns[0] += S
    reports.tick([late], collected)
    reports.tick([Lines([nginx()])], collected)

    assert (len(collected.requests), counts["late requests"]) == (1, 1)


def test_a_source_without_a_log_says_what_to_set() -> None:
    with pytest.raises(UnavailableError, match=r"collectors\.gateway\.files"):
        GatewaySource(ENGINES, GatewayConfig())


@pytest.mark.parametrize(
    ("engines", "settings", "named"),
    [
        (("nowhere",), {"files": ("x",)}, "nowhere"),
        (ENGINES, {"syslog": ("example.com:514",)}, "example.com:514"),
    ],
)
def test_settings_that_are_wrong_are_named(
    engines: tuple[str, ...], settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        GatewaySource(engines, GatewayConfig(**settings))


def test_the_source_has_the_shape_that_the_agent_wants(tmp_path: Path) -> None:
    source: Source = GatewaySource(ENGINES, GatewayConfig(files=(str(tmp_path / "log"),)))

    assert isinstance(source, Counting)
    assert isinstance(source, Preparing)


def test_a_source_that_runs_again_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    path.touch()
    source = GatewaySource(ENGINES[:1], GatewayConfig(files=(str(path),)))
    collected = Collected()
    source.prepare()
    for number in range(2):
        with path.open("ab") as log:
            log.write(nginx(connection=str(number)) + b"\n")
        stop = threading.Event()
        thread = threading.Thread(target=source.run, args=(collected, stop))
        thread.start()
        while len(collected.requests) <= number:
            assert not stop.wait(0.01)
        stop.set()
        thread.join(0.5)
        assert not thread.is_alive()

    assert len({request.request_id for request in collected.requests}) == 2
    assert source.counts["requests"] == 2


def test_a_source_that_another_replaces_leaves_no_file_open(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    log.write_text("")
    source = GatewaySource(ENGINES, GatewayConfig(files=(str(log),)))
    source.prepare()
    opened = sum(path.resolve() == log for path in Path("/proc/self/fd").iterdir())

    del source

    left = sum(path.resolve() == log for path in Path("/proc/self/fd").iterdir())
    assert (opened, left) == (1, 0)


def test_the_agent_makes_it_when_it_is_named() -> None:
    config = CollectorConfig(
        engines=ENGINES[:1], sources=("gateway",), gateway=GatewayConfig(files=("access.log",))
    )

    (planned,) = plan(config)
    (source,) = planned.make()
    assert isinstance(source, GatewaySource)
