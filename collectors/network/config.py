"""Settings of the network source."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """Where packets are captured, and the bounds of what is remembered of them."""

    interface: str = ""
    """Network interface to capture on, such as ``lo``; empty captures on all of them, because
    clients may reach a server by any."""
    namespaces: tuple[str, ...] = ()
    """Network namespaces in which servers are looked for by their port, beside this one: a name of
    ``ip netns``, the number of a process, the start of a container's id (12 digits or more), a path
    such as ``/proc/123/ns/net``, or ``auto``: that of the process which listens on a server's port
    when nothing does in this one."""
    ring_mib: Annotated[int, Ge(1), Le(256)] = 8
    """Memory shared with the kernel for packets not read yet."""
    block_timeout_ms: Annotated[int, Ge(1), Le(50)] = 20
    """Longest time the kernel fills one block of the ring before it hands it over."""
    part_interval_ms: Annotated[int, Ge(20), Le(100)] = 100
    """Time between two reports of an exchange that has news, and between two watermarks."""
    max_connections: Annotated[int, Ge(1)] = 4096
    """Connections followed; the one that was silent longest is forgotten beyond it."""
    max_exchanges: Annotated[int, Ge(1)] = 8192
    """Exchanges open at once; further ones are counted and not reported."""
    max_pipelined: Annotated[int, Ge(1)] = 16
    """Requests of one connection that wait for their answer; more make it lose track."""
    max_streams: Annotated[int, Ge(1)] = 1024
    """Streams of one HTTP/2 connection that wait for their answer; further ones are counted and not
    reported."""
    max_held_bytes: Annotated[int, Ge(1)] = 1 << 18
    """Memory for one direction of a connection while an earlier segment of it is missing."""
    max_gaps: Annotated[int, Ge(1)] = 64
    """Connections with a missing segment; the one that waited longest is given up beyond it."""
    max_gap_ms: Annotated[int, Gt(0)] = 300
    """How long a missing segment is waited for; then the connection is picked up at the next
    message."""
    max_event_bytes: Annotated[int, Ge(256)] = 1 << 16
    """Part of a server-sent event that is looked at; larger ones are counted."""
    tls_quiet_ms: Annotated[int, Ge(100)] = 1000
    """A stream inside TLS that was silent for so long has ended, unless its server is known to say
    when one ends."""
    max_silence_s: Annotated[float, Gt(0)] = 5.0
    """After packets were lost: how long an open exchange without a packet is still believed."""
