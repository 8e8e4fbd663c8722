"""HTTP/2 and TLS as the network source reads them, from any bytes of both sides."""

from latencyprism.collectors.network.config import NetworkConfig
from latencyprism.collectors.network.conversation import Conversation, Link, RefusedError
from latencyprism.collectors.network.exchange import Ledger
from latencyprism.collectors.network.http2 import Http2
from latencyprism.collectors.network.http2_frames import PREFACE
from latencyprism.collectors.network.tls import Tls
from latencyprism.collectors.network.tls_records import offers_http2, server_hello


def _link() -> Link:
    return Link(key=bytes(12), instance="i:1", ledger=Ledger(16), config=NetworkConfig())


def _converse(conversation: Conversation, link: Link, data: bytes) -> None:
    """Give pieces of the bytes to both sides: each begins with a byte that says to which (lowest
    bit), whether it is lost (the next), and how much later it comes; then a byte says how long
    it is.
    """
    now_ns = 1_000_000_000
    try:
        while len(data) > 2:
            how, size, data = data[0], data[1], data[2:]
            piece, data = data[: size + 1], data[size + 1 :]
            now_ns += (how >> 2) ** 4 * 1000
            if how & 2:
                if not conversation.skip(now_ns, len(piece), from_client=not how & 1):
                    break
            elif how & 1:
                conversation.server(now_ns, piece)
            else:
                conversation.client(now_ns, piece)
            _check(link, now_ns)
    except RefusedError:
        pass
    conversation.close(now_ns, "lost")
    _check(link, now_ns)
    assert len(link.ledger) == 0
    assert not link.ledger.timed


def _check(link: Link, now_ns: int) -> None:
    for part in link.ledger.flush(now_ns):
        assert part.arrival_ns <= part.observed_at_ns <= now_ns
        assert all(delta_us >= 0 for delta_us in part.chunk_deltas_us)


def target_http2(data: bytes) -> None:
    link = _link()
    conversation = Http2(link, client_whole=True, server_whole=True)
    conversation.client(0, PREFACE)
    _converse(conversation, link, data)


def target_http2_joined(data: bytes) -> None:
    link = _link()
    _converse(Http2(link, client_whole=False, server_whole=False), link, data)


def target_tls(data: bytes) -> None:
    link = _link()
    _converse(Tls(link, whole=True), link, data)


def target_tls_joined(data: bytes) -> None:
    link = _link()
    _converse(Tls(link, whole=False), link, data)


def target_tls_hello(data: bytes) -> None:
    offers_http2(data)
    server_hello(data)
