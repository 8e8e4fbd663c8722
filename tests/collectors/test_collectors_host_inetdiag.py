"""The netlink codec, on made-up answers and on the kernel's own."""

import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latencyprism.collectors.host import inetdiag
from latencyprism.collectors.host.counts import Counts
from latencyprism.collectors.host.inetdiag import ESTABLISHED, LISTEN, InetDiag, TcpSocket
from latencyprism.collectors.host.sockets import ConnectionTotals, Listener, Sockets

SEQUENCE = 7
SOCK_DIAG, ERROR, DONE, NOOP = 20, 2, 3, 1


def message(kind: int, payload: bytes, *, flags: int = 2, sequence: int = SEQUENCE) -> bytes:
    return struct.pack("=IHHII", 16 + len(payload), kind, flags, sequence, 0) + payload


def attribute(kind: int, data: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(data), kind) + data + bytes(-len(data) % 4)


def info(rtt_us: int, retransmits: int = 0, limited_us: int = 0) -> bytes:
    return bytes(68) + struct.pack("=I28xI72xQ", rtt_us, retransmits, limited_us) + bytes(48)


def answer(
    attributes: bytes = b"", *, state: int = ESTABLISHED, cookie: int = 5, queued: int = 0
) -> bytes:
    head = struct.pack("=BBBBHH", 2, state, 0, 0, socket.htons(8000), socket.htons(9000))
    rest = struct.pack("=IQIIIII", 0, cookie, 0, queued, 128, 0, 4242)
    return head + bytes(32) + rest + attributes


END = message(DONE, struct.pack("=i", 0))


def parse(data: bytes) -> tuple[list[TcpSocket], bool, dict[str, int]]:
    counts = Counts()
    found, last = inetdiag.parse(data, sequence=SEQUENCE, counts=counts)
    return found, last, {kind: count for kind, count in counts.items() if count}


def test_sockets_of_an_answer() -> None:
    odd = attribute(5, b"abc")
    data = message(SOCK_DIAG, answer(odd + attribute(2, info(120, 3, 9)), cookie=1))
    data += message(SOCK_DIAG, answer(state=LISTEN, cookie=2, queued=4))

    found, last, refused = parse(data + END)

    assert found == [
        TcpSocket(
            state=ESTABLISHED,
            port=8000,
            inode=4242,
            cookie=1,
            queued=0,
            rtt_us=120,
            retransmits=3,
            client_limited_us=9,
        ),
        TcpSocket(state=LISTEN, port=8000, inode=4242, cookie=2, queued=4),
    ]
    assert (last, refused) == (True, {})
    assert parse(data)[1] is False


def test_info_of_an_old_kernel_is_taken_as_far_as_it_goes() -> None:
    ((old, *_), *_) = parse(message(SOCK_DIAG, answer(attribute(2, info(120, 3)[:104]))))

    assert (old.rtt_us, old.retransmits, old.client_limited_us) == (120, 3, None)


@pytest.mark.parametrize(
    ("data", "refused"),
    [
        (b"abc", "netlink_truncated"),
        (message(SOCK_DIAG, answer())[:-8], "netlink_truncated"),
        (struct.pack("=IHHII", 8, SOCK_DIAG, 2, SEQUENCE, 0), "netlink_truncated"),
        (message(SOCK_DIAG, bytes(40)), "netlink_truncated"),
        (message(ERROR, b""), "netlink_truncated"),
        (message(NOOP, bytes(8)), "netlink_unexpected"),
        (message(SOCK_DIAG, answer(), sequence=6), "netlink_stale"),
        (message(SOCK_DIAG, answer(), flags=0x12), "netlink_interrupted"),
        (message(SOCK_DIAG, answer(struct.pack("=HH", 200, 2))), "netlink_attributes"),
        (message(SOCK_DIAG, answer(struct.pack("=HH", 3, 2))), "netlink_attributes"),
        (message(SOCK_DIAG, answer(b"\x04")), "netlink_attributes"),
    ],
)
def test_each_refusal_is_counted_by_its_kind(data: bytes, refused: str) -> None:
    assert parse(data)[2] == {refused: 1}


def test_an_answer_to_an_earlier_request_does_not_end_this_one() -> None:
    stale_end = message(DONE, struct.pack("=i", 0), sequence=6)

    found, last, refused = parse(stale_end + message(SOCK_DIAG, answer()) + END)

    assert (len(found), last, refused) == (1, True, {"netlink_stale": 1})


@pytest.mark.parametrize("kind", [ERROR, DONE])
def test_refusal_by_the_kernel_raises_its_code(kind: int) -> None:
    with pytest.raises(FileNotFoundError, match="inet_diag"):
        parse(message(kind, struct.pack("=i", -2)))


@given(st.binary(max_size=400), st.binary(max_size=80))
def test_no_datagram_hangs_or_raises_anything_else(data: bytes, attributes: bytes) -> None:
    for datagram in (data, message(SOCK_DIAG, answer(attributes)) + data):
        try:
            found, _, _ = parse(datagram)
        except OSError:
            continue
        assert len(found) <= len(datagram) // 88


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def test_the_kernel_tells_of_a_listener_and_a_connection(server: socket.socket) -> None:
    port = server.getsockname()[1]
    counts = Counts()
    sockets = Sockets("/none", InetDiag(counts))
    listeners = sockets.listeners(port)
    totals = ConnectionTotals()
    with socket.create_connection(("127.0.0.1", port)) as client:
        waiting = totals.grow(sockets.of_server(port, listeners) or [])
        accepted, _ = server.accept()
        accepted.sendall(b"x")
        client.recv(1)
        served = totals.grow(sockets.of_server(port, listeners) or [])
        accepted.close()
    sockets.close()

    assert {listener.family for listener in listeners} == {socket.AF_INET}
    assert (waiting["connections"], waiting["accept_queue"]) == (1, 1)
    assert waiting["server_retransmits"] is None
    assert (served["connections"], served["accept_queue"]) == (1, 0)
    assert (served["server_retransmits"], served["client_limited_us"]) == (0, 0)
    assert 0 < served["tcp_rtt_us"] < 1e6
    assert not any(counts.values())


def test_a_client_that_does_not_read_limits_the_server(server: socket.socket) -> None:
    port = server.getsockname()[1]
    server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    diag = InetDiag(Counts())
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    accepted, _ = server.accept()
    accepted.setblocking(False)
    accepted.send(bytes(1 << 19))
    limited = 0
    for _ in range(1000):
        (seen,) = diag.sockets(port, [ESTABLISHED], family=socket.AF_INET)
        limited = seen.client_limited_us or 0
        if limited:
            break
    for opened in (client, accepted, diag):
        opened.close()

    assert limited > 0


def test_more_sockets_than_the_bound_are_left_out_and_counted(
    server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inetdiag, "MAX_SOCKETS", 2)
    port = server.getsockname()[1]
    counts = Counts()
    diag = InetDiag(counts)
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]

    found = [diag.sockets(port, [ESTABLISHED], family=socket.AF_INET) for _ in range(2)]

    for client in clients:
        client.close()
    diag.close()
    assert [len(some) for some in found] == [2, 2]
    assert counts["sockets_beyond_bound"] == 2
    assert counts["netlink_errors"] == 0


def test_a_kernel_that_refuses_is_asked_by_a_new_socket_each_time() -> None:
    opened: list[socket.socket] = []

    def refusing() -> socket.socket:
        ours, kernels = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        sequence = len(opened) // 2 + 1
        kernels.send(message(ERROR, struct.pack("=i", -2), sequence=sequence))
        opened.extend((ours, kernels))
        return ours

    counts = Counts()
    diag = InetDiag(counts, refusing)
    sockets = Sockets("/none", diag)
    listeners = frozenset({Listener(family=socket.AF_INET, inode=1)})

    assert sockets.of_server(80, listeners) is None
    assert sockets.listeners(80) == frozenset()
    assert counts["netlink_errors"] == 3
    assert len(opened) == 6
    for one in opened:
        one.close()


def connection(cookie: int, retransmits: int | None = 0, limited_us: int = 0) -> TcpSocket:
    return TcpSocket(
        state=ESTABLISHED,
        port=80,
        inode=1,
        cookie=cookie,
        queued=0,
        rtt_us=10,
        retransmits=retransmits,
        client_limited_us=limited_us,
    )


def test_growth_counts_new_connections_from_their_birth() -> None:
    totals = ConnectionTotals()
    totals.grow([connection(1, retransmits=5)])

    grown = totals.grow([connection(1, retransmits=6, limited_us=20), connection(2, retransmits=3)])

    assert (grown["server_retransmits"], grown["client_limited_us"]) == (4, 20)
    assert totals.grow([])["server_retransmits"] == 0


def test_a_connection_that_was_passed_over_once_is_not_counted_anew() -> None:
    totals = ConnectionTotals()
    totals.grow([connection(1, retransmits=500)])
    totals.grow([])

    assert totals.grow([connection(1, retransmits=501)])["server_retransmits"] == 1


def test_growth_is_unknown_after_a_failure_and_when_a_connection_does_not_tell() -> None:
    totals = ConnectionTotals()
    totals.grow([connection(1)])
    totals.forget()

    assert totals.grow([connection(1)])["server_retransmits"] is None
    assert totals.grow([connection(1, retransmits=None)])["server_retransmits"] is None
