"""Both ends of an HTTP/2 connection, spoken by the library ``h2`` over packets of the tests."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from network_wire import Wire

pytest.importorskip("h2", reason="needs the library h2")
from h2.config import H2Configuration
from h2.connection import H2Connection


def _side(*, client: bool) -> H2Connection:
    return H2Connection(H2Configuration(client_side=client, header_encoding=None))


@dataclass(slots=True)
class Talk:
    """Two real state machines; what they write is kept as pieces in order, each a segment."""

    client: H2Connection = field(default_factory=lambda: _side(client=True))
    server: H2Connection = field(default_factory=lambda: _side(client=False))
    pieces: list[tuple[str, bytes]] = field(default_factory=list)

    def open(self) -> None:
        """Preface and settings, and their acknowledgements."""
        self.client.initiate_connection()
        self.flush()
        self.server.initiate_connection()
        self.flush()
        self.flush()

    def flush(self) -> None:
        """Send what either side has to say to the other."""
        for name, writer, reader in (
            ("client", self.client, self.server),
            ("server", self.server, self.client),
        ):
            if data := writer.data_to_send():
                self.pieces.append((name, data))
                reader.receive_data(data)

    def ask(
        self,
        body: dict[str, Any] | None = None,
        *,
        path: str = "/v1/chat/completions",
        headers: tuple[tuple[str, str], ...] = (),
        method: str = "POST",
    ) -> int:
        """Send a request, headers and body in segments of their own; its stream."""
        number = self.client.get_next_available_stream_id()
        head = [(":method", method), (":path", path), (":scheme", "http"), (":authority", "engine")]
        self.client.send_headers(number, [*head, *headers], end_stream=body is None)
        self.flush()
        if body is not None:
            self.client.send_data(number, json.dumps(body).encode(), end_stream=True)
            self.flush()
        return number

    def head(
        self, number: int, content_type: str = "text/event-stream", *, status: str = "200"
    ) -> None:
        """Begin the answer."""
        self.server.send_headers(number, [(":status", status), ("content-type", content_type)])
        self.flush()

    def data(self, number: int, body: bytes, **how: Any) -> None:
        """Go on with the answer."""
        self.server.send_data(number, body, **how)
        self.flush()

    def packets(self, wire: Wire | None = None) -> list[bytes]:
        """Packets of everything so far, the handshake first."""
        wire = wire or Wire()
        return [*wire.syn(), *(wire.packet(side, data) for side, data in self.pieces)]
