"""From packets to reports of exchanges: every connection with a watched server, bounded."""

from collections import Counter, OrderedDict
from typing import Final, Protocol

from latencyprism.collectors.network.config import NetworkConfig
from latencyprism.collectors.network.conversation import (
    Conversation,
    Ending,
    Feed,
    Link,
    RefusedError,
)
from latencyprism.collectors.network.exchange import Ledger
from latencyprism.collectors.network.frames import (
    ACK,
    FIN,
    RST,
    SYN,
    Buffer,
    Segment,
    ends,
    refusal,
    reverse,
    segment,
)
from latencyprism.collectors.network.protocols import HEAD_BYTES, open_conversation
from latencyprism.collectors.network.tcp import MODULUS, Direction
from latencyprism.schemas.records import RequestTiming

_SIGNAL: Final = SYN | FIN | RST


class Servers(Protocol):
    """Tells which connections are with a server that is watched."""

    def find(self, address: bytes, port: int) -> str | None:
        """Instance at a packed address; None when nobody watches it."""


class _Side(Direction):
    """One direction of a connection, as packets find it.

    ``feed`` takes its bytes in order; None while nothing is known of the connection's protocol.
    """

    __slots__ = ("connection", "feed", "from_client")

    def __init__(self, connection: "_Connection", *, from_client: bool) -> None:
        super().__init__()
        self.connection = connection
        self.feed: Feed | None = None
        self.from_client = from_client


class _Connection:
    """A connection and what is made of it; ``conversation`` is None until its first bytes."""

    __slots__ = (
        "client",
        "conversation",
        "gap_since_ns",
        "key",
        "link",
        "now_ns",
        "server",
        "turn_ns",
    )

    def __init__(self, link: Link) -> None:
        self.link = link
        self.key = link.key
        self.conversation: Conversation | None = None
        self.client = _Side(self, from_client=True)
        self.server = _Side(self, from_client=False)
        self.now_ns = 0
        self.turn_ns = 0
        """Its ``now_ns`` when it was last looked at whether it is silent."""
        self.gap_since_ns = 0

    def open(self, head: bytes, *, from_client: bool, whole: bool) -> bool:
        """Begin the conversation that a segment starts, if it starts one."""
        opened = open_conversation(
            self.link, head[:HEAD_BYTES], from_client=from_client, whole=whole
        )
        if opened is None:
            return False
        self.conversation = opened
        self.client.feed, self.server.feed = opened.client, opened.server
        return True

    def close(self, ending: Ending) -> None:
        """Close what is open, and know nothing of either side."""
        if self.conversation is not None:
            self.conversation.close(self.now_ns, ending)
            self.conversation = None
        for side in (self.client, self.server):
            side.feed = None
            side.stop()


class Tap:
    """Follows the connections to the watched servers, and reports their exchanges.

    Never raises for what a packet holds: what cannot be followed is counted in ``counts`` by kind,
    and the connection is picked up again where its next message starts. Memory is bounded by
    ``config``. Time is that of the packets.
    """

    def __init__(
        self, targets: Servers, config: NetworkConfig, *, every_path: bool = False
    ) -> None:
        """``every_path`` reports all exchanges, not only those that are answered with tokens."""
        self._targets = targets
        self._config = config
        self._ledger = Ledger(config.max_exchanges, every_path=every_path)
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
            self.counts[refusal(buffer, at, end)] += 1
            return
        key, sequence, flags, start, stop = found
        side = self._sides.get(key)
        if side is None or side.next != sequence or flags & _SIGNAL or side.held or not side.feed:
            self._unusual(at_ns, found, buffer)
        elif start < stop:
            side.next = (sequence + stop - start) % MODULUS
            connection = side.connection
            if at_ns > connection.now_ns:
                connection.now_ns = at_ns
            try:
                side.feed(connection.now_ns, buffer[start:stop])
            except RefusedError as e:
                self._lose(connection, str(e))

    def _unusual(self, at_ns: int, found: Segment, buffer: Buffer) -> None:
        """Take any segment; :meth:`packet` spares the next one of an open connection the way."""
        key, sequence, flags, start, stop = found
        signal = flags & _SIGNAL
        if start == stop and not signal:
            return  # an acknowledgement, which only recorded packets hold
        side = self._sides.get(key)
        if side is None or flags & SYN:
            head = buffer[start : min(stop, start + HEAD_BYTES)]
            side = self._open(side, key, sequence, flags, head)
            if side is None:
                return
        connection = side.connection
        connection.now_ns = max(connection.now_ns, at_ns)
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
            self._bridge(connection)
        if self._doubted_ns and now_ns - self._doubted_ns > self._config.max_silence_s * 1e9:
            for connection in self._connections.values():
                conversation = connection.conversation
                silent = connection.now_ns < self._doubted_ns
                if silent and conversation is not None and conversation.waiting:
                    self._lose(connection, "silent after lost packets")
            self._doubted_ns = 0
        return self._ledger.flush(now_ns)

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
        if flags & RST:
            return None
        connection = self._connect(key, payload, syn=bool(flags & SYN))
        if connection is None:
            return None
        if len(self._connections) >= self._config.max_connections:
            self._close(self._silent(), "lost")
            self.counts["connection limit"] += 1
        self._connections[connection.key] = connection
        self._sides[connection.key] = connection.client
        self._sides[reverse(connection.key)] = connection.server
        opener = self._sides[key]
        opener.start(after if flags & SYN else sequence)
        return opener

    def _silent(self) -> _Connection:
        """A connection that was silent since it was last its turn (the clock algorithm)."""
        while True:
            connection = next(iter(self._connections.values()))
            if connection.now_ns == connection.turn_ns:
                return connection
            connection.turn_ns = connection.now_ns
            self._connections.move_to_end(connection.key)

    def _connect(self, key: bytes, head: bytes, *, syn: bool) -> _Connection | None:
        """A connection with a watched server that is opened, or can be joined, by a packet."""
        source, source_port, destination, destination_port = ends(key)
        for from_client, address, port in (
            (True, destination, destination_port),
            (False, source, source_port),
        ):
            instance = self._targets.find(address, port)
            if instance is None:
                continue
            connection = _Connection(
                Link(
                    key=key if from_client else reverse(key),
                    instance=instance,
                    ledger=self._ledger,
                    config=self._config,
                )
            )
            if syn:
                return connection if from_client else None
            if connection.open(head, from_client=from_client, whole=False):
                return connection
        return None

    def _data(self, side: _Side, sequence: int, data: bytes) -> None:
        connection = side.connection
        held = side.held
        try:
            if side.next is None:
                if not self._joins(side, data):
                    return
                side.start(sequence)
            for piece in side.push(connection.now_ns, sequence, data):
                if side.feed is None:
                    connection.open(piece, from_client=side.from_client, whole=True)
                assert side.feed is not None
                side.feed(connection.now_ns, piece)
        except RefusedError as e:
            self._lose(connection, str(e))
            return
        if side.held != held:
            self._watch_gap(connection)
        if side.ended:
            self._finished(side)

    def _joins(self, side: _Side, data: bytes) -> bool:
        """Whether a side that nobody followed so far can be followed from here."""
        connection = side.connection
        if connection.conversation is None:
            return connection.open(data, from_client=side.from_client, whole=False)
        return connection.conversation.joins(data[:HEAD_BYTES], from_client=side.from_client)

    def _watch_gap(self, connection: _Connection) -> None:
        directions = connection.client, connection.server
        if not any(direction.incomplete for direction in directions):
            self._gaps.pop(connection.key, None)
            return
        if connection.key not in self._gaps:
            connection.gap_since_ns = connection.now_ns
            self._gaps[connection.key] = connection
        if max(direction.held for direction in directions) > self._config.max_held_bytes:
            self._bridge(connection)
        elif len(self._gaps) > self._config.max_gaps:
            self._bridge(next(iter(self._gaps.values())))

    def _bridge(self, connection: _Connection) -> None:
        """Wait no longer for missing segments: they passed unseen, and what came behind them was
        heard by the other side when it came. Go on there if the conversation can; else give up.
        """
        self.counts["missing segments"] += 1
        del self._gaps[connection.key]
        for side in (connection.client, connection.server):
            if side.incomplete and not self._leap(side):
                self._lose(connection)
                return
        for side in (connection.client, connection.server):
            if side.ended:
                self._finished(side)
                return
        self._watch_gap(connection)

    def _leap(self, side: _Side) -> bool:
        """Go on behind the first hole of a side; False when the conversation ends with it."""
        connection, missing = side.connection, side.missing
        pieces = side.leap()
        at_ns = pieces[0][0] if pieces else connection.now_ns
        conversation = connection.conversation
        if conversation is None or side.feed is None:
            return False
        if not conversation.skip(at_ns, missing, from_client=side.from_client):
            return False
        try:
            for at_ns, piece in pieces:
                side.feed(at_ns, piece)
        except RefusedError as e:
            self.counts[str(e)] += 1
            return False
        return True

    def _lose(self, connection: _Connection, reason: str | None = None) -> None:
        """Give up what is open on a connection, and pick it up at its next message."""
        if reason is not None:
            self.counts[reason] += 1
        connection.close("lost")
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
        connection.close(ending)
        del self._connections[connection.key]
        del self._sides[connection.key]
        del self._sides[reverse(connection.key)]
        self._gaps.pop(connection.key, None)
