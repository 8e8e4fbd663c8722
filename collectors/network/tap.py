"""From packets to reports of exchanges: every connection with a watched server, bounded."""

from collections import Counter, OrderedDict
from typing import Final

from latencyprism.collectors.network.config import NetworkConfig
from latencyprism.collectors.network.exchange import Ledger
from latencyprism.collectors.network.frames import (
    ACK,
    FIN,
    RST,
    SYN,
    Buffer,
    ends,
    reverse,
    segment,
)
from latencyprism.collectors.network.http import (
    Ending,
    Feed,
    Http1,
    NotHttpError,
    starts_answer,
    starts_request,
)
from latencyprism.collectors.network.targets import Targets
from latencyprism.collectors.network.tcp import MODULUS, Direction
from latencyprism.schemas.records import RequestTiming

_TLS: Final = b"\x16\x03"
_HTTP2: Final = b"PRI * HTTP/2"


class _Side(Direction):
    """One direction of a connection, as packets find it; ``feed`` takes its bytes in order."""

    __slots__ = ("connection", "feed", "from_client")

    def __init__(self, connection: "_Connection", feed: Feed, *, from_client: bool) -> None:
        super().__init__()
        self.connection = connection
        self.feed = feed
        self.from_client = from_client


class _Connection:
    """A connection and what is made of it; ``http`` is None when it speaks something else."""

    __slots__ = ("client", "gap_since_ns", "http", "instance", "key", "now_ns", "server")

    def __init__(self, key: bytes, instance: str, http: Http1) -> None:
        self.key = key
        self.instance = instance
        self.http: Http1 | None = http
        self.client = _Side(self, http.client, from_client=True)
        self.server = _Side(self, http.server, from_client=False)
        self.now_ns = 0
        self.gap_since_ns = 0

    def restart(self, http: Http1) -> None:
        """Begin anew with the next message of the client."""
        self.http = http
        self.client.feed, self.server.feed = http.client, http.server
        self.client.stop()
        self.server.stop()


class Tap:
    """Follows the connections to the watched servers, and reports their exchanges.

    Never raises for what a packet holds: what cannot be followed is counted in ``counts`` by kind,
    and the connection is picked up again where its next message starts. Memory is bounded by
    ``config``. Time is that of the packets.
    """

    def __init__(self, targets: Targets, config: NetworkConfig) -> None:
        self._targets = targets
        self._config = config
        self._ledger = Ledger(config.max_exchanges)
        self._sides: dict[bytes, _Side] = {}
        self._connections: OrderedDict[bytes, _Connection] = OrderedDict()
        self._gaps: OrderedDict[bytes, _Connection] = OrderedDict()
        self._doubted_ns = 0

    @property
    def counts(self) -> Counter[str]:
        """What was seen and refused so far, by kind."""
        return self._ledger.counts

    def __len__(self) -> int:
        """Connections followed."""
        return len(self._connections)

    def packet(self, at_ns: int, buffer: Buffer, at: int, end: int) -> None:
        """Take the IP packet ``buffer[at:end]``, captured at ``at_ns``."""
        found = segment(buffer, at, end)
        if found is None:
            self.counts["other packets"] += 1
            return
        key, sequence, flags, start, stop = found
        signal = flags & (SYN | FIN | RST)
        if start == stop and not signal:
            return  # an acknowledgement, which only recorded packets hold
        side = self._sides.get(key)
        if side is None or flags & SYN:
            side = self._open(side, key, sequence, flags, buffer[start : min(stop, start + 16)])
            if side is None:
                return
        connection = side.connection
        if at_ns > connection.now_ns:
            connection.now_ns = at_ns
        if flags & SYN:
            sequence = (sequence + 1) % MODULUS
        if start < stop:
            self._data(side, sequence, buffer[start:stop])
        if signal:
            self._signal(side, (sequence + stop - start) % MODULUS, flags)

    def flush(self, now_ns: int) -> list[RequestTiming]:
        """One part of each exchange that has news, oldest first.

        ``now_ns`` is the time up to which packets were taken: what has waited too long for a
        missing segment is given up.
        """
        oldest = now_ns - self._config.max_gap_ms * 1_000_000
        while self._gaps:
            connection = next(iter(self._gaps.values()))
            if connection.gap_since_ns > oldest:
                break
            self._lose(connection, "missing segments")
        if self._doubted_ns and now_ns - self._doubted_ns > self._config.max_silence_s * 1e9:
            for connection in self._connections.values():
                silent = connection.now_ns < self._doubted_ns
                if silent and connection.http is not None and connection.http.waiting:
                    self._lose(connection, "silent after lost packets")
            self._doubted_ns = 0
        return self._ledger.flush()

    def packets_lost(self, count: int, now_ns: int) -> None:
        """The kernel dropped packets before they could be taken.

        Connections with a hole in their sequence numbers are found by it; one that may have ended
        in the hole is no longer believed after a time of silence.
        """
        self.counts["lost packets"] += count
        self._doubted_ns = now_ns

    def forget(self, reason: str) -> None:
        """Lose track of every connection, such as when the clock was set."""
        for connection in self._connections.values():
            self._lose(connection, reason)
            connection.now_ns = 0

    def _open(
        self, side: _Side | None, key: bytes, sequence: int, flags: int, payload: bytes
    ) -> _Side | None:
        """The side that a packet of no known connection, or a SYN, belongs to, if any."""
        after = (sequence + 1) % MODULUS
        if side is not None:
            if not side.from_client or flags & ACK or side.next == after:
                if side.next is None:
                    side.start(after)
                return side
            self._close(side.connection, "reset")  # the port is used again
        if flags & RST or (not flags & SYN and not starts_request(payload)):
            return None
        _, _, address, port = ends(key)
        instance = self._targets.find(address, port)
        if instance is None:
            return None
        if len(self._connections) >= self._config.max_connections:
            self._close(next(iter(self._connections.values())), "lost")
            self.counts["connection limit"] += 1
        connection = _Connection(key, instance, self._http(key, instance))
        self._connections[key] = connection
        self._sides[key] = connection.client
        self._sides[reverse(key)] = connection.server
        connection.client.start(after if flags & SYN else sequence)
        return connection.client

    def _http(self, key: bytes, instance: str) -> Http1:
        return Http1(
            self._ledger,
            key=key,
            instance=instance,
            max_pipelined=self._config.max_pipelined,
            max_event_bytes=self._config.max_event_bytes,
        )

    def _data(self, side: _Side, sequence: int, data: bytes) -> None:
        connection = side.connection
        self._connections.move_to_end(connection.key)
        if side.next is None:
            if not self._joins(side, data):
                return
            side.start(sequence)
        held = side.held
        try:
            for piece in side.push(sequence, data):
                side.feed(connection.now_ns, piece)
        except NotHttpError as e:
            self._refuse(connection, data, str(e))
            return
        if side.held != held:
            self._watch_gap(connection)
        if side.ended:
            self._finished(side)

    def _joins(self, side: _Side, data: bytes) -> bool:
        """Whether a connection that nobody followed so far can be followed from here."""
        http = side.connection.http
        if http is None:
            return False
        return starts_request(data) if side.from_client else http.waiting and starts_answer(data)

    def _watch_gap(self, connection: _Connection) -> None:
        directions = connection.client, connection.server
        if not any(direction.incomplete for direction in directions):
            self._gaps.pop(connection.key, None)
            return
        if connection.key not in self._gaps:
            connection.gap_since_ns = connection.now_ns
            self._gaps[connection.key] = connection
        if max(direction.held for direction in directions) > self._config.max_held_bytes:
            self._lose(connection, "missing segments")
        elif len(self._gaps) > self._config.max_gaps:
            self._lose(next(iter(self._gaps.values())), "missing segments")

    def _refuse(self, connection: _Connection, data: bytes, reason: str) -> None:
        other = {_TLS: "TLS connections", _HTTP2: "HTTP/2 connections"}
        for prefix, name in other.items():
            if data.startswith(prefix):
                self._lose(connection, name)
                connection.http = None
                return
        self._lose(connection, reason)

    def _lose(self, connection: _Connection, reason: str) -> None:
        """Give up what is open on a connection, and pick it up at its next message."""
        self.counts[reason] += 1
        if connection.http is not None:
            connection.http.close(connection.now_ns, "lost")
            connection.restart(self._http(connection.key, connection.instance))
        self._gaps.pop(connection.key, None)

    def _signal(self, side: _Side, sequence: int, flags: int) -> None:
        """Take a FIN or RST, whose own sequence number is ``sequence``."""
        connection = side.connection
        if self._connections.get(connection.key) is not connection:
            return  # closed by what came in the same packet
        if flags & RST:
            self._close(connection, "reset")
        elif flags & FIN:
            side.finish(sequence)
            if side.incomplete:
                self._watch_gap(connection)
            else:
                self._finished(side)

    def _finished(self, side: _Side) -> None:
        self._close(side.connection, "client" if side.from_client else "server")

    def _close(self, connection: _Connection, ending: Ending) -> None:
        if connection.http is not None:
            connection.http.close(connection.now_ns, ending)
        del self._connections[connection.key]
        del self._sides[connection.key]
        del self._sides[reverse(connection.key)]
        self._gaps.pop(connection.key, None)
