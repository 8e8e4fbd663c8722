"""Settings of the gateway source."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Le


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Which access logs are read, whose requests count, and the bounds of reading."""

    files: tuple[str, ...] = ()
    """Access logs to follow; one that does not exist yet is waited for."""
    syslog: tuple[str, ...] = ()
    """Where to take log lines as datagrams: ``127.0.0.1:5140``, ``[::1]:5140``, or the path of a
    Unix socket to make. Whoever can send there can invent requests: keep it on this host."""
    socket_mode: Annotated[int, Ge(0), Le(0o777)] = 0o660
    """Permissions of the Unix sockets; the gateway must be allowed to write."""
    servers: Mapping[str, str] = field(default_factory=dict)
    """What a log calls a server (``backend/server``, an address, ``unix:/path``) → its instance
    (``host:port``), where the address in the log is not the one in ``engines``."""
    all_upstreams: bool = False
    """Whether requests to servers that ``engines`` does not name are reported too."""
    from_start: bool = False
    """Whether a log that is there at the start is read from its beginning rather than its end."""
    lateness_ms: Annotated[int, Ge(50), Le(60_000)] = 250
    """Longest time between the end of a request and its line in the log; more than the ``flush``
    of a gateway that buffers its log. Windows without a better source wait that long."""
    linger_ms: Annotated[int, Ge(0)] = 10_000
    """How long a log that was moved away is still read after its last line: a gateway writes there
    until it is told to open the new one."""
    max_line_bytes: Annotated[int, Ge(256), Le(1 << 20)] = 16_384
    """Longer lines are left out and counted."""
    tick_bytes: Annotated[int, Ge(4_096), Le(1 << 26)] = 1 << 20
    """Most that is read of one log at a time, twenty times a second."""
    max_behind_bytes: Annotated[int, Ge(4_096)] = 64 << 20
    """When more than this is unread, reading goes on at the end; what is left out is counted."""
