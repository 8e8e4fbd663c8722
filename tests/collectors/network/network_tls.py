"""Both ends of a TLS connection, spoken by OpenSSL, as packets with times."""

import shutil
import ssl
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from network_wire import MS, START_NS, Wire

from latencyprism.collectors.network.tap import Tap
from latencyprism.schemas.records import RequestTiming


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate for localhost, signed by itself."""

    path: Path
    key: Path

    @classmethod
    def make(cls, folder: Path) -> "Certificate":
        """Let openssl make one; raises FileNotFoundError without it."""
        made = cls(folder / "certificate.pem", folder / "key.pem")
        program = shutil.which("openssl")
        if program is None:
            raise FileNotFoundError("openssl")
        wish = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
        names = "-subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1"
        files = ["-out", str(made.path), "-keyout", str(made.key)]
        subprocess.run(
            [program, *wish.split(), *names.split(), *files], check=True, capture_output=True
        )
        return made

    def server(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.path, self.key)
        return context

    def client(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.path)


class TlsTalk:
    """A connection, and the packets of all that is sent on it, with their times.

    An ``eager`` client sends the end of its handshake together with its first request; what TLS 1.3
    servers send right after the handshake (tickets) then comes behind the request.
    """

    def __init__(
        self,
        server: ssl.SSLContext,
        client: ssl.SSLContext,
        *,
        eager: bool = False,
        wire: Wire | None = None,
    ) -> None:
        self.wire = wire or Wire()
        self.now_ns = START_NS
        self.timeline = [(START_NS, packet) for packet in self.wire.syn()]
        self._in = {"client": ssl.MemoryBIO(), "server": ssl.MemoryBIO()}
        self._out = {"client": ssl.MemoryBIO(), "server": ssl.MemoryBIO()}
        self.ends = {
            "client": client.wrap_bio(
                self._in["client"], self._out["client"], server_hostname="localhost"
            ),
            "server": server.wrap_bio(self._in["server"], self._out["server"], server_side=True),
        }
        done: set[str] = set()
        while len(done) < 2 and not (eager and "client" in done):
            for side in ("client", "server"):
                with suppress(ssl.SSLWantReadError):
                    self.ends[side].do_handshake()
                    done.add(side)
                if not (eager and "client" in done):
                    self.flush(side)

    def after(self, ms: float) -> "TlsTalk":
        """Let time pass."""
        self.now_ns += round(ms * MS)
        return self

    def flush(self, side: str) -> None:
        """Send what a side has to say in one segment, and let the other read it."""
        data = self._out[side].read()
        if data:
            self.timeline.append((self.now_ns, self.wire.packet(side, data)))
            other = "server" if side == "client" else "client"
            self._in[other].write(data)
            with suppress(ssl.SSLWantReadError, ssl.SSLZeroReturnError):
                while self.ends[other].read(1 << 16):
                    pass

    def send(self, side: str, *pieces: bytes) -> int:
        """Send pieces, each a record, in one segment; when."""
        for piece in pieces:
            self.ends[side].write(piece)
        self.flush(side)
        return self.now_ns

    def leave(self, side: str) -> None:
        """Say that nothing more will come."""
        with suppress(ssl.SSLWantReadError):
            self.ends[side].unwrap()
        self.flush(side)

    def raw(self, side: str, data: bytes) -> None:
        """Send bytes past TLS; nobody but the tap reads them."""
        self.timeline.append((self.now_ns, self.wire.packet(side, data)))


def play_at(tap: Tap, timeline: Sequence[tuple[int, bytes]]) -> list[RequestTiming]:
    """Feed packets at their times, and flush once at the end."""
    for at_ns, packet in timeline:
        tap.packet(at_ns, packet, 0, len(packet))
    return tap.flush(timeline[-1][0] + MS)
