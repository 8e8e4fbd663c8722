import random
import shutil
import ssl
from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from network_tls import Certificate, TlsTalk, play_at
from network_wire import (
    DONE,
    MS,
    ROLE,
    START_NS,
    STREAM_END,
    STREAM_HEAD,
    Wire,
    answer,
    chunk,
    delta,
    make_tap,
    request,
    usage,
)

from latencyprism.collectors.network.tap import Tap
from latencyprism.collectors.network.tls import ENDPOINT, ESTIMATED, EVENTS_OF_A_STREAM
from latencyprism.collectors.network.tls_records import (
    MAX_HELLO,
    RecordReader,
    offers_http2,
    server_hello,
)
from latencyprism.schemas.records import RequestTiming

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="the program openssl, which makes a certificate"
)

BODY = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "PROMPT text"}]}
REQUEST = request(BODY, headers=["Authorization: Bearer 0123456789abcdef", "Accept: */*"])
POLL = request(path="/metrics", method="GET")
TOKEN = chunk(delta(content=" token"))
SUITES = ["TLSv1.3", "ECDHE-ECDSA-AES128-GCM-SHA256", "ECDHE-ECDSA-CHACHA20-POLY1305"]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return Certificate.make(tmp_path_factory.mktemp("tls"))


def talk(certificate: Certificate, suite: str = "TLSv1.3", **how: object) -> TlsTalk:
    server, client = certificate.server(), certificate.client()
    if suite != "TLSv1.3":
        client.maximum_version = ssl.TLSVersion.TLSv1_2
        client.set_ciphers(suite)
    return TlsTalk(server, client, **how)  # type: ignore[arg-type]


def ask(spoken: TlsTalk) -> int:
    """Send a request, headers and body in records of their own."""
    head, body = REQUEST.split(b"\r\n\r\n", 1)
    return spoken.after(5).send("client", head + b"\r\n\r\n", body)


def stream(spoken: TlsTalk, tokens: int, *, gap_ms: float = 20, ends: bool = True) -> list[int]:
    """Answer as vLLM does: headers, after a while tokens, and three records at the end; the times
    of the tokens.
    """
    spoken.after(12).send("server", STREAM_HEAD)
    spoken.after(200)
    times = [spoken.send("server", chunk(ROLE), TOKEN)]
    times += [spoken.after(gap_ms).send("server", TOKEN) for _ in range(tokens - 1)]
    spoken.send("server", chunk(usage(3, tokens, 0)), chunk(DONE))
    if ends:
        spoken.send("server", STREAM_END)
    return times


def times_of(part: RequestTiming) -> list[int]:
    assert part.chunk_base_ns is not None
    deltas = accumulate(part.chunk_deltas_us, initial=0)
    return [part.chunk_base_ns + delta_us * 1000 for delta_us in deltas]


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("eager", [False, True])
def test_a_stream_is_timed_by_its_records(
    certificate: Certificate, suite: str, eager: bool
) -> None:
    spoken = talk(certificate, suite, eager=eager and suite == "TLSv1.3")
    asked = ask(spoken)
    spoken.flush("server")  # tickets
    sent = stream(spoken, 6)
    tap = make_tap()

    (part,) = play_at(tap, spoken.timeline)

    assert part.arrival_ns == part.request_end_ns == asked
    assert part.first_byte_ns == asked + 12 * MS
    assert times_of(part) == sent
    assert part.first_token_ns == sent[0]
    assert (part.state, part.end_ns) == ("complete", sent[-1])
    assert (part.streaming, part.status, part.model, part.method) == (True, None, None, None)
    assert (part.endpoint, part.estimated) == (ENDPOINT, ESTIMATED)
    assert part.request_bytes == len(REQUEST)
    assert part.response_bytes == len(
        STREAM_HEAD + chunk(ROLE) + 6 * TOKEN + chunk(usage(3, 6, 0)) + chunk(DONE) + STREAM_END
    )
    assert part.prompt_tokens is part.completion_tokens is None
    assert tap.counts == {"TLS connections": 1, "exchanges": 1}


def test_every_guess_is_named() -> None:
    fields = set(RequestTiming.__dataclass_fields__)

    assert set(ESTIMATED) <= fields
    exact = {"request_id", "part", "instance", "source", "observed_at_ns", "arrival_ns"}
    never_told = fields - set(ESTIMATED) - exact - {"estimated"}
    assert all(RequestTiming.__dataclass_fields__[name].default is None for name in never_told)


def test_headers_that_come_with_the_first_token_are_no_token_of_their_own(
    certificate: Certificate,
) -> None:
    spoken = talk(certificate)
    ask(spoken)
    sent = [spoken.after(80).send("server", STREAM_HEAD, chunk(ROLE), TOKEN)]
    sent += [spoken.after(20).send("server", TOKEN) for _ in range(4)]

    (part,) = play_at(make_tap(), spoken.timeline)

    assert times_of(part) == sent
    assert (part.first_byte_ns, part.state) == (sent[0], "open")


def test_an_open_stream_is_told_in_parts(certificate: Certificate) -> None:
    spoken, tap = talk(certificate), make_tap()
    ask(spoken)
    sent = stream(spoken, 12)

    parts = []
    for at_ns, packet in spoken.timeline:
        tap.packet(at_ns, packet, 0, len(packet))
        parts += tap.flush(at_ns)

    assert [part.part for part in parts] == list(range(len(parts)))
    assert [at for part in parts if part.chunk_base_ns for at in times_of(part)] == sent
    assert {part.state for part in parts[:-1]} == {"open"}
    assert parts[0].chunks_before == 0
    assert len(times_of(parts[0])) == EVENTS_OF_A_STREAM + 1


@pytest.mark.parametrize(
    "body", [b'{"usage":{"completion_tokens":4}}', b"x" * 900, b"x" * 100_000], ids=len
)
def test_an_answer_as_a_whole_is_no_stream(certificate: Certificate, body: bytes) -> None:
    spoken, tap = talk(certificate), make_tap()
    for _ in range(3):
        ask(spoken)
        head, rest = answer(body).split(b"\r\n\r\n")
        spoken.after(500).send("server", head + b"\r\n\r\n")
        spoken.after(0.1)
        for at in range(0, len(rest), 16384):
            spoken.send("server", rest[at : at + 16384])

    assert play_at(tap, spoken.timeline) == []
    assert tap.counts["TLS exchanges that are no stream"] == 2  # the last is still open
    tap.forget("end")
    assert len(tap._ledger) == 0


def test_a_page_on_a_slow_link_is_no_stream(certificate: Certificate) -> None:
    spoken, tap = talk(certificate), make_tap()
    ask(spoken)
    spoken.after(20).send("server", answer(b"")[:-4])
    for _ in range(10):
        spoken.after(80).send("server", *(bytes(1300) for _ in range(10)))

    assert play_at(tap, spoken.timeline) == []
    assert tap.counts["TLS exchanges that are no stream"] == 1


def test_polls_between_streams_change_nothing(certificate: Certificate) -> None:
    spoken, tap = talk(certificate), make_tap()
    sent = []
    for tokens in (5, 8, 6):
        spoken.after(30).send("client", POLL)
        spoken.after(2).send("server", answer(b"metric 1\n" * 1000))
        ask(spoken)
        sent.append(stream(spoken, tokens))

    parts = play_at(tap, spoken.timeline)

    assert [times_of(part) for part in parts] == sent
    assert tap.counts["TLS exchanges that are no stream"] == 3
    assert len({part.request_id for part in parts}) == 3


def test_a_server_that_does_not_say_so_ends_a_stream_in_silence(certificate: Certificate) -> None:
    spoken, tap = talk(certificate), make_tap(tls_quiet_ms=1000)
    ask(spoken)
    sent = stream(spoken, 6, ends=False)

    (part,) = play_at(tap, spoken.timeline)
    assert part.state == "open"
    assert tap.flush(sent[-1] + 1000 * MS) == []
    (part,) = tap.flush(sent[-1] + 1001 * MS)

    assert (part.state, part.end_ns) == ("complete", sent[-1])
    assert part.observed_at_ns == sent[-1] + 1001 * MS
    assert tap.flush(sent[-1] + 5000 * MS) == []


def test_a_server_that_says_so_may_stall(certificate: Certificate) -> None:
    spoken, tap = talk(certificate), make_tap(tls_quiet_ms=1000)
    ask(spoken)
    stream(spoken, 6)
    ask(spoken)
    sent = stream(spoken, 6, ends=False)
    play_at(tap, spoken.timeline)

    assert tap.flush(sent[-1] + 60_000 * MS) == []
    resumed = TlsTalk.send(spoken.after(60_000), "server", TOKEN)
    (part,) = play_at(tap, spoken.timeline[-1:])
    assert (part.state, times_of(part)) == ("open", [resumed])


def test_a_server_that_says_so_only_sometimes_is_not_relied_on(certificate: Certificate) -> None:
    spoken, tap = talk(certificate), make_tap(tls_quiet_ms=1000)
    for ends in (True, False, True, False):
        ask(spoken)
        sent = stream(spoken, 6, ends=ends)
    play_at(tap, spoken.timeline)

    (part,) = tap.flush(sent[-1] + 1100 * MS)

    assert (part.state, part.end_ns) == ("complete", sent[-1])


def test_the_last_chunk_may_come_with_done(certificate: Certificate) -> None:
    spoken = talk(certificate)
    ask(spoken)
    spoken.after(12).send("server", STREAM_HEAD)
    sent = [spoken.after(20).send("server", TOKEN) for _ in range(6)]
    ended = spoken.after(3).send("server", chunk(DONE) + STREAM_END)

    (part,) = play_at(make_tap(), spoken.timeline)

    assert (part.state, part.end_ns, times_of(part)) == ("complete", ended, sent)


def test_the_next_request_ends_a_stream(certificate: Certificate) -> None:
    spoken = talk(certificate)
    ask(spoken)
    sent = stream(spoken, 6, ends=False)
    asked = ask(spoken)

    (part,) = play_at(make_tap(), spoken.timeline)

    assert (part.state, part.end_ns, part.observed_at_ns) == ("complete", sent[-1], asked)


@pytest.mark.parametrize(
    ("how", "marks", "state"),
    [
        ("server", False, "complete"),
        ("client", False, "complete"),
        ("server", True, "aborted"),
        ("client", True, "aborted"),
        ("reset", False, "aborted"),
        ("lost", False, "aborted"),
    ],
)
def test_the_end_of_the_connection(
    certificate: Certificate, how: str, marks: bool, state: str
) -> None:
    spoken, tap = talk(certificate), make_tap()
    if marks:
        ask(spoken)
        stream(spoken, 6)
    ask(spoken)
    sent = stream(spoken, 6, ends=False)
    spoken.after(3)
    if how in ("server", "client"):
        spoken.leave(how)
        spoken.raw(how, b"")
        spoken.timeline[-1] = spoken.now_ns, spoken.wire.fin(how)
    elif how == "reset":
        spoken.timeline.append((spoken.now_ns, spoken.wire.reset("client")))
    parts = play_at(tap, spoken.timeline)
    if how == "lost":
        tap.forget("clock set")
        parts = tap.flush(spoken.now_ns)

    last = parts[-1]
    assert (last.state, "state" in last.estimated) == (state, True)
    assert last.end_ns is not None
    assert sent[-1] <= last.end_ns <= sent[-1] + 3 * MS
    assert len(tap._ledger) == 0


def test_keys_and_alerts_are_no_requests(certificate: Certificate) -> None:
    spoken, tap = talk(certificate), make_tap()
    ask(spoken)
    spoken.after(12).send("server", STREAM_HEAD)
    for _ in range(6):
        spoken.after(20).send("server", TOKEN)
    for size in (17 + 2, 17 + 5):
        spoken.raw("client", b"\x17\x03\x03" + size.to_bytes(2, "big") + bytes(size))
    spoken.after(20).send("server", TOKEN)

    (part,) = play_at(tap, spoken.timeline)

    assert (part.state, len(times_of(part))) == ("open", 7)


def test_a_client_with_a_certificate(certificate: Certificate) -> None:
    server, client = certificate.server(), certificate.client()
    server.verify_mode = ssl.CERT_REQUIRED
    server.load_verify_locations(certificate.path)
    client.load_cert_chain(certificate.path, certificate.key)
    spoken = TlsTalk(server, client, eager=True)
    asked = ask(spoken)
    spoken.flush("server")
    sent = stream(spoken, 6)

    (part,) = play_at(make_tap(), spoken.timeline)

    assert (part.arrival_ns, part.request_bytes) == (asked, len(REQUEST))
    assert times_of(part) == sent


def test_a_connection_joined_in_the_middle(certificate: Certificate) -> None:
    spoken, tap = talk(certificate), make_tap()
    ask(spoken)
    stream(spoken, 4)
    spoken.after(2000)
    skipped = len(spoken.timeline)
    asked = ask(spoken)
    sent = stream(spoken, 6)

    (part,) = play_at(tap, spoken.timeline[skipped:])

    assert (part.arrival_ns, times_of(part)) == (asked, sent)
    assert part.estimated == (*ESTIMATED, "arrival_ns")


def both_offer_http2(certificate: Certificate, suite: str = "TLSv1.3") -> TlsTalk:
    server, client = certificate.server(), certificate.client()
    if suite != "TLSv1.3":
        client.maximum_version = ssl.TLSVersion.TLSv1_2
    for context in (server, client):
        context.set_alpn_protocols(["h2", "http/1.1"])
    return TlsTalk(server, client)


def frames(*payloads: bytes) -> bytes:
    """Frames of data of HTTP/2."""
    return b"".join(len(p).to_bytes(3, "big") + bytes([0, 0, 0, 0, 0, 1]) + p for p in payloads)


def http2_stream(spoken: TlsTalk, tokens: int) -> list[int]:
    spoken.after(1).send("server", bytes(40), bytes(9))  # settings
    spoken.send("client", bytes(9))
    spoken.after(12).send("server", bytes(120))  # headers
    event = delta(content=" token")
    times = [spoken.after(20).send("server", frames(event)) for _ in range(tokens)]
    spoken.send("client", bytes(13))  # a wider window
    spoken.after(1).send("server", frames(b""))
    return times


@pytest.mark.parametrize("suite", ["TLSv1.3", "TLSv1.2"])
def test_streams_of_http2_one_after_the_other(certificate: Certificate, suite: str) -> None:
    spoken, tap = both_offer_http2(certificate, suite), make_tap()
    sent = []
    for tokens in (6, 7):
        spoken.after(5).send("client", bytes(70), REQUEST)
        sent.append(http2_stream(spoken, tokens))

    parts = play_at(tap, spoken.timeline)

    assert [times_of(part) for part in parts] == sent
    assert {part.state for part in parts} == {"complete"}
    assert all("arrival_ns" in part.estimated for part in parts)
    assert tap.counts["TLS connections with HTTP/2"] == 1


def test_streams_of_http2_that_overlap_are_given_up(certificate: Certificate) -> None:
    spoken, tap = both_offer_http2(certificate), make_tap(tls_quiet_ms=1000)
    spoken.after(5).send("client", REQUEST)
    http2_stream(spoken, 6)
    spoken.after(5).send("client", REQUEST)
    for token in range(20):
        spoken.after(20).send("server", frames(delta(content=" token")))
        if token == 10:
            spoken.send("client", REQUEST)
    spoken.after(20).send("client", REQUEST)
    spoken.after(1500).send("client", REQUEST)
    sent = http2_stream(spoken, 6)

    parts = play_at(tap, spoken.timeline)

    assert [part.state for part in parts] == ["complete", "aborted", "complete"]
    assert times_of(parts[2]) == sent
    assert tap.counts["TLS streams that overlap"] == 1


def test_requests_of_http2_that_overlap_before_an_answer_are_given_up(
    certificate: Certificate,
) -> None:
    spoken, tap = both_offer_http2(certificate), make_tap()
    spoken.after(5).send("client", REQUEST)
    spoken.after(50).send("client", REQUEST)
    http2_stream(spoken, 6)

    assert play_at(tap, spoken.timeline) == []
    assert tap.counts["TLS streams that overlap"] == 1


def test_a_hole_inside_a_record_is_survived() -> None:
    reader = RecordReader(whole=False)
    record = b"\x17\x03\x03\x00\x64" + bytes(100)

    assert not reader.skip(1)
    assert list(reader.feed(record[:30])) == []
    assert reader.skip(40)
    assert [(r.kind, r.length) for r in reader.feed(record[70:])] == [(23, 100)]
    assert not reader.skip(1)


def test_what_is_no_tls_is_refused_once() -> None:
    wire, tap = Wire(), make_tap()
    data = b"\x16\x03\x01\x00\x05hello" + b"nonsense"

    for number, packet in enumerate([*wire.syn(), wire.client(data), wire.server(data)]):
        tap.packet(START_NS + number, packet, 0, len(packet))

    assert tap.counts == {"TLS connections": 1, "not TLS": 1}


@given(st.binary(max_size=300))
def test_no_hello_is_too_strange(data: bytes) -> None:
    for kind in (1, 2):
        hello = bytes([kind]) + len(data).to_bytes(3, "big") + data
        assert offers_http2(hello) in (True, False)
        found = server_hello(hello)
        assert (found is None) == (kind == 1)


def test_the_start_of_a_hello_is_bounded() -> None:
    reader = RecordReader(whole=True)
    data = b"\x16\x03\x01\x40\x00" + bytes(0x4000)

    for at in range(0, len(data), 100):
        records = list(reader.feed(data[at : at + 100]))
        assert len(reader._hello) <= MAX_HELLO

    assert [len(record.hello) for record in records] == [MAX_HELLO]
    assert reader._hello == b""


def cut(spoken: TlsTalk, choice: random.Random) -> list[tuple[int, bytes]]:
    """The same bytes at the same times in smaller segments."""
    wire, found = Wire(), []
    for at_ns, packet in spoken.timeline:
        side = "client" if packet[20:22] == wire.client_end[1].to_bytes(2, "big") else "server"
        data = packet[40:]
        if not data:
            found.append((at_ns, packet))
            wire.next[side] += bool(packet[33] & 3)
            continue
        edges = sorted({0, len(data), *(choice.randrange(len(data)) for _ in range(3))})
        found += [(at_ns, wire.packet(side, data[a:b])) for a, b in pairwise(edges)]
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_any_cut_of_the_bytes_gives_the_same(certificate: Certificate, seed: int) -> None:
    spoken = talk(certificate)
    ask(spoken)
    sent = stream(spoken, 6)

    (part,) = play_at(make_tap(), cut(spoken, random.Random(seed)))

    assert times_of(part) == sent
    assert (part.state, part.request_bytes) == ("complete", len(REQUEST))


@given(
    records=st.lists(
        st.tuples(
            st.booleans(),
            st.sampled_from([20, 21, 22, 23, 24]) | st.integers(0, 255),
            st.integers(1, 300) | st.sampled_from([19, 22, 26, 36 + 17]),
            st.integers(0, 3_000_000),
        ),
        max_size=60,
    )
)
def test_any_records_are_survived(records: list[tuple[bool, int, int, int]]) -> None:
    wire, tap = Wire(), make_tap()
    hello = b"\x16\x03\x01\x00\x04\x01\x00\x00\x00"
    timeline = [(START_NS, p) for p in [*wire.syn(), wire.client(hello)]]
    at_ns = START_NS
    for from_client, kind, length, gap_ns in records:
        at_ns += gap_ns
        data = bytes([kind, 3, 3]) + length.to_bytes(2, "big") + bytes(length)
        timeline.append((at_ns, wire.packet("client" if from_client else "server", data)))

    parts = play_at(tap, timeline)
    check_in_order(parts)
    check_places(tap)


def check_in_order(parts: Sequence[RequestTiming]) -> None:
    for part in parts:
        assert part.estimated
        assert part.first_byte_ns is not None
        assert part.first_token_ns is not None
        assert part.arrival_ns <= part.first_byte_ns <= part.first_token_ns
        assert all(delta_us >= 0 for delta_us in part.chunk_deltas_us)


def check_places(tap: Tap) -> None:
    """Whatever happened, no place in the ledger is lost."""
    tap.forget("end of the test")
    tap.flush(START_NS)
    assert len(tap._ledger) == 0
    assert not tap._ledger.timed
