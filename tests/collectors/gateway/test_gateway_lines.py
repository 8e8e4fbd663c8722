"""Every field of real log lines, and that no line does harm."""

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latencyprism.collectors.gateway.access import Access, LineError
from latencyprism.collectors.gateway.lines import message, read

DATA = Path(__file__).parent / "data"
TRACE = "ab" * 16
S = 1_000_000_000
MS = 1_000_000


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """HAProxy's httplog gives the local time."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def recorded(name: str) -> list[list[Access]]:
    return [read(message(line)) for line in (DATA / name).read_bytes().splitlines()]


def test_every_field_of_nginx() -> None:
    (access,) = recorded("nginx.log")[0]

    end_ns = 1_796_080_269_448 * MS
    assert access == Access(
        upstream="127.0.0.1:38727",
        state="complete",
        arrival_ns=end_ns - 89 * MS,
        first_byte_ns=end_ns - 89 * MS + 52 * MS,
        end_ns=end_ns,
        status=200,
        method="POST",
        path="/v1/completions",
        streaming=True,
        request_bytes=95,
        response_bytes=858,
        trace_id=TRACE,
        estimated=("arrival_ns", "first_byte_ns"),
    )


def test_nginx_tells_how_requests_ended() -> None:
    ends = [
        [(a.upstream, a.state, a.status, a.streaming) for a in accesses]
        for accesses in recorded("nginx.log")
    ]
    served = "127.0.0.1:38727"

    assert ends == [
        [(served, "complete", 200, True)],
        [(served, "complete", 200, False)],
        [(served, "aborted", 200, True)],  # the client went away while it read
        [(served, "aborted", 499, None)],  # the client went away before the answer
        [(served, "complete", 200, True)],
        [(served, "complete", 200, True)],
        [("127.0.0.1:1", "complete", 502, None), (served, "complete", 200, True)],
        [(served, "complete", 200, True)],
        [("127.0.0.1:1", "complete", 502, None), ("127.0.0.1:2", "complete", 502, False)],
        [("dead", "complete", 502, False)],
        [],  # answered by nginx
        [(served, "complete", 200, True)],  # the server was killed: nginx does not tell
    ]


def nginx(**fields: Any) -> list[Access]:
    line: dict[str, Any] = {
        "msec": "1796080269.448",
        "request_time": "1.000",
        "upstream_addr": "10.0.0.1:80",
        "upstream_response_time": "0.900",
        "upstream_header_time": "0.100",
        "upstream_status": "200",
        "status": "200",
        "uri": "/v1/completions",
    }
    return read(json.dumps(line | fields))


def test_each_server_that_was_tried_is_told_of_with_its_own_time() -> None:
    tried = nginx(
        upstream_addr="10.0.0.1:80, unix:/run/two.sock : 10.0.0.3:80",
        upstream_response_time="0.200, - : 0.700",
        upstream_header_time="-, - : 0.100",
        upstream_status="504, - : 200",
    )

    end_ns = 1_796_080_269_448 * MS
    began_ns = end_ns - S
    assert [(a.upstream, a.status, a.arrival_ns, a.first_byte_ns, a.end_ns) for a in tried] == [
        ("10.0.0.1:80", 504, began_ns, None, began_ns + 200 * MS),
        ("unix:/run/two.sock", None, began_ns + 200 * MS, None, began_ns + 200 * MS),
        ("10.0.0.3:80", 200, began_ns + 200 * MS, began_ns + 300 * MS, end_ns),
    ]
    assert [a.estimated for a in tried] == [
        ("arrival_ns", "end_ns"),
        ("arrival_ns", "end_ns"),
        ("arrival_ns", "first_byte_ns"),
    ]


def test_tries_that_sum_to_more_than_the_request_end_with_it() -> None:
    tried = nginx(
        upstream_addr="10.0.0.1:80, 10.0.0.2:80",
        upstream_response_time="1.200, 0.100",
        upstream_header_time="-, 0.050",
        upstream_status="504, 200",
    )

    assert all(a.arrival_ns <= a.end_ns == tried[1].end_ns for a in tried)


def test_sizes_with_headers_are_estimates() -> None:
    (access,) = nginx(request_length="400", bytes_sent="900")

    assert (access.request_bytes, access.response_bytes) == (400, 900)
    assert set(access.estimated) >= {"request_bytes", "response_bytes"}


def test_numbers_may_be_plain_json_and_stay_exact() -> None:
    assert nginx(msec=1796080269.448, request_time=1.0, status=200) == nginx()


def test_every_field_of_haproxy_json() -> None:
    (access,) = recorded("haproxy.log")[0]

    arrival_ns = 1_796_080_270_564 * MS
    assert access == Access(
        upstream="127.0.0.1:38727",
        state="complete",
        arrival_ns=arrival_ns,
        first_byte_ns=arrival_ns + MS,
        end_ns=arrival_ns + 46 * MS,
        status=200,
        method="POST",
        path="/v1/completions",
        streaming=True,
        request_bytes=304,
        response_bytes=972,
        proxy_queue_us=0,
        trace_id=TRACE,
        estimated=("end_ns", "first_byte_ns", "request_bytes", "response_bytes"),
    )


def test_haproxy_tells_idle_connections_queues_and_ends() -> None:
    _, kept_alive, client_gone, queued, server_killed, refused = (
        access for (access,) in recorded("haproxy.log")
    )

    assert kept_alive.arrival_ns == (1_796_080_270_611 + 301) * MS
    assert (client_gone.state, client_gone.status) == ("aborted", 200)
    assert queued.proxy_queue_us == 2_024_000
    assert queued.first_byte_ns == queued.arrival_ns + (2024 + 2 + 1) * MS
    assert (server_killed.state, server_killed.status) == ("aborted", 200)
    assert (refused.state, refused.status) == ("complete", 503)
    assert refused.first_byte_ns is None


def test_haproxys_own_format_names_the_server_instead_of_its_address() -> None:
    first, gone, queued = (access for (access,) in recorded("haproxy-httplog.log"))

    arrival_ns = 1_796_080_273_960 * MS
    assert first == Access(
        upstream="llm/one",
        state="complete",
        arrival_ns=arrival_ns,
        first_byte_ns=arrival_ns + MS,
        end_ns=arrival_ns + 43 * MS,
        status=200,
        method="POST",
        path="/v1/completions",
        response_bytes=977,
        proxy_queue_us=0,
        estimated=("end_ns", "first_byte_ns", "response_bytes"),
    )
    assert gone.state == "aborted"
    assert queued.proxy_queue_us == 2_034_000


def test_haproxys_time_is_this_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    ((utc,), *_) = recorded("haproxy-httplog.log")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    ((tokyo,), *_) = recorded("haproxy-httplog.log")

    assert utc.arrival_ns - tokyo.arrival_ns == 9 * 3600 * S


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("1/2/3/4/+5 200 +900 - - ---- 1/1/0/0/0 0/0", "logged early"),
        ("1/2/3/4/-1 200 900 - - ---- 1/1/0/0/0 0/0", "malformed"),
    ],
)
def test_haproxys_lines_without_an_end_are_refused(line: str, kind: str) -> None:
    with pytest.raises(LineError) as refused:
        read(f'10.0.0.9:1 [30/Nov/2026:23:11:13.960] front llm/one {line} "POST / HTTP/1.1"')

    assert refused.value.kind == kind


def test_haproxy_without_a_server_tells_of_none() -> None:
    line = (
        "10.0.0.9:1 [30/Nov/2026:23:11:13.960] front llm/<NOSRV> 0/-1/-1/-1/5 503 217 - - SC-- "
        '1/1/0/0/0 0/0 {a|b} "POST / HTTP/1.1"'
    )

    assert read(line) == []


def test_every_field_of_envoy_json() -> None:
    (access,) = recorded("envoy.log")[0]

    arrival_ns = 1_796_080_288_063_373 * 1_000
    assert access == Access(
        upstream="127.0.0.1:34345",
        state="complete",
        arrival_ns=arrival_ns,
        request_end_ns=arrival_ns,
        first_byte_ns=arrival_ns + 33 * MS,
        end_ns=arrival_ns + 69 * MS,
        status=200,
        method="POST",
        path="/v1/completions",
        streaming=True,
        request_bytes=95,
        response_bytes=998,
        trace_id=TRACE,
        estimated=("end_ns", "request_end_ns", "first_byte_ns"),
    )


@pytest.mark.parametrize("name", ["envoy.log", "envoy-default.log"])
def test_envoy_tells_how_requests_ended(name: str) -> None:
    ends = [(access.state, access.status) for accesses in recorded(name) for access in accesses]

    assert ends == [
        ("complete", 200),
        ("complete", 200),
        ("aborted", 200),  # the client went away while it read
        ("aborted", None),  # the client went away before the answer
        ("complete", 503),  # no connection to the server
        ("aborted", 200),  # the server was killed
    ]


def test_envoys_own_format_tells_less() -> None:
    (full,), (default,) = recorded("envoy.log")[0], recorded("envoy-default.log")[0]

    assert default == replace(
        full,
        arrival_ns=1_796_080_288_063 * MS,
        end_ns=(1_796_080_288_063 + 69) * MS,
        request_end_ns=None,
        first_byte_ns=None,
        streaming=None,
        trace_id=None,
        estimated=("end_ns",),
    )


def test_istios_format_has_three_fields_more() -> None:
    ((default,), *_) = recorded("envoy-default.log")
    line = (DATA / "envoy-default.log").read_text().splitlines()[0]

    assert read(line.replace(" 200 - ", ' 200 - via_upstream - "-" ')) == [default]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (
            '1.2.3.4 - - [30/Nov/2026:23:11:13 +0000] "GET / HTTP/1.1" 200 612 "-" "x"',
            "without times",
        ),
        ("", "unknown format"),
        ("hello", "unknown format"),
        ('{"level":"info"}', "unknown format"),
        ('{"msec":"1796080269.448","request_time":"0.0', "malformed"),
        ("[" * 100_000, "unknown format"),
        ('{"a":' + "[" * 100_000, "malformed"),
    ],
)
def test_lines_of_other_kinds_are_refused_with_advice(line: str, kind: str) -> None:
    with pytest.raises(LineError) as refused:
        read(line)

    assert refused.value.kind == kind


@pytest.mark.parametrize(
    "wrong",
    [
        {"msec": "yesterday"},
        {"msec": "NaN"},
        {"msec": float("inf")},
        {"msec": ["1"]},
        {"msec": "0.000"},
        {"msec": "9999999999.000"},
        {"request_time": "-1.000"},
        {"request_time": "999999999.000"},
        {"uri": None},
        {"uri": {"a": 1}},
        {"status": "ok"},
        {"body_bytes_sent": "-5"},
        {"body_bytes_sent": "9" * 30},
        {"upstream_status": "200, 200"},
        {"upstream_addr": ", ".join(["10.0.0.1:80"] * 17)},
    ],
)
def test_fields_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(LineError) as refused:
        nginx(**wrong)

    assert refused.value.kind == "malformed"


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("/v1/completions?key=secret", "/v1/completions"),
        ("/v1/completions#part", "/v1/completions"),
        ("https://llm.example/v1/completions?x", "/v1/completions"),
        ("/" + "a" * 999, "/" + "a" * 255),
        ("*", "*"),
    ],
)
def test_a_path_has_neither_query_nor_origin(uri: str, path: str) -> None:
    assert nginx(uri=uri)[0].path == path


@pytest.mark.parametrize(
    "header",
    [
        "",
        "<134>",
        "<134>Nov  3 23:11:14 haproxy[24853]: ",
        "<134>Nov 30 23:11:14 gate-1.example haproxy[24853]: ",
        "<190>Nov 30 23:11:14 gate-1 nginx: ",
        "Nov 30 23:11:14 gate-1 haproxy[24853]: ",
        "2026-11-30T23:11:14.123456+00:00 gate-1 haproxy[24853]: ",
        "<134>1 2026-11-30T23:11:10.611481+00:00 - haproxy 24853 - - ",
        '<134>1 2026-11-30T23:11:10.611481+00:00 gate-1 haproxy 24853 x [a@1 b="c"] ',
    ],
)
def test_syslog_headers_are_left_out(header: str) -> None:
    for line in ('{"msec":"1"}', "1.2.3.4:5 [30/Nov/2026:23:11:13.960] front llm/one 0/0/0/1/43"):
        assert message(f"{header}{line}\n".encode()) == line


def test_invalid_utf8_is_replaced() -> None:
    told = message(b'{"msec":"1796080269.448","uri":"/\xff"}\0')

    assert json.loads(told)["uri"] == "/\N{REPLACEMENT CHARACTER}"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda children: st.lists(children, max_size=3),
    max_leaves=4,
)
keys = st.sampled_from(
    [
        *("msec", "request_time", "upstream_addr", "upstream_response_time", "upstream_status"),
        *("upstream_header_time", "status", "request_completion", "uri"),
        *("Ts", "Th", "Ti", "TR", "Tw", "Tc", "Tr", "Ta", "ST", "B", "U", "si", "sp", "server"),
        *("ts", "start_time", "duration", "request_duration", "response_duration"),
        *("upstream_host", "response_flags", "path"),
    ]
)


@given(st.dictionaries(keys, values))
def test_any_json_is_read_or_refused(fields: dict[str, Any]) -> None:
    try:
        accesses = read(json.dumps(fields))
    except LineError:
        return
    assert all(access.arrival_ns <= access.end_ns for access in accesses)


@given(st.binary() | st.sampled_from((DATA / "haproxy-httplog.log").read_bytes().splitlines()))
def test_any_bytes_are_read_or_refused(line: bytes) -> None:
    with suppress(LineError):
        read(message(line))
