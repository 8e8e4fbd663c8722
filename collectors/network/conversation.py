"""What the tap asks of a protocol: the bytes of both sides of one connection, given in order."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from latencyprism.collectors.network.config import NetworkConfig
from latencyprism.collectors.network.exchange import Ledger

Ending = Literal["client", "server", "reset", "lost"]
"""Who ended a connection: a FIN of either side, a reset, or nobody: track of it was lost."""

Feed: TypeAlias = Callable[[int, bytes], None]
"""Takes the time of a segment (ns since the epoch; it does not go back within a side) and the next
bytes of one side; raises :class:`RefusedError`."""


class RefusedError(ValueError):
    """Bytes that cannot be followed; the text is the kind to count, such as ``TLS connections``.

    The tap then closes the conversation as lost, and opens another at the next segment that
    :func:`~latencyprism.collectors.network.protocols.open_conversation` takes.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The connection that a conversation is held on, and where its exchanges are opened."""

    key: bytes
    """Addresses and ports, client first; see :mod:`~latencyprism.collectors.network.frames`."""
    instance: str
    ledger: Ledger
    config: NetworkConfig


class Conversation(Protocol):
    """One connection in one protocol. Opens exchanges in the ledger of its link, and closes them.

    Never blocks, keeps bounded memory, and raises nothing but :class:`RefusedError`.
    """

    @property
    def client(self) -> Feed:
        """Takes what the client sends. The tap asks for it once and keeps it."""

    @property
    def server(self) -> Feed:
        """Takes what the server sends. The tap asks for it once and keeps it."""

    @property
    def waiting(self) -> bool:
        """Whether an exchange is open."""

    def joins(self, head: bytes, *, from_client: bool) -> bool:
        """Whether a side of which nothing was given so far, because its handshake was not seen,
        can be given from the segment on that begins with ``head``.
        """

    def skip(self, at_ns: int, count: int, *, from_client: bool) -> bool:
        """``count`` bytes of a side were lost for good; what is given next comes after them.

        False when the conversation cannot go on behind them: it is then closed as lost.
        """

    def close(self, at_ns: int, ending: Ending) -> None:
        """Close every open exchange; nothing is given afterwards."""
