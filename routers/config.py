"""What a router obeys, how far it may be sent, and how it is reached."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRules:
    """Bounds on what commands may do, whoever sent them."""

    max_ejected_share: Annotated[float, Ge(0), Lt(1)] = 0.5
    """Share of the targets that may be drained or at weight 0 at once; of one target, none."""
    min_weight: Annotated[float, Gt(0), Le(1)] = 0.05
    """A weight above 0 is raised to this, so that a slow target keeps proving itself."""
    min_concurrency: Annotated[int, Ge(1)] = 1
    """A concurrency limit is raised to this."""
    min_rate_rps: Annotated[float, Gt(0)] = 0.1
    """A rate limit is raised to this, requests a second."""
    max_value: Annotated[float, Gt(1)] = 1_000_000.0
    """Limits above it are refused as nonsense."""
    lease_max_ms: Annotated[int, Ge(1000)] = 300_000
    """Longer leases are refused; also how far back a starting router reads."""
    clock_tolerance_ms: Annotated[int, Ge(0)] = 2_000
    """A command issued further in the future than this is refused: the clocks disagree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HAProxyConfig:
    """The HAProxy instance that is commanded through its runtime socket."""

    socket: str = "/run/haproxy/admin.sock"
    """Path of the stats socket; it must be declared with ``level admin``."""
    backend: str = "llm"
    maxconn: Annotated[int, Ge(0)] = 0
    """Normal ``maxconn`` of each server, which a restore brings back; 0 is HAProxy's no limit."""
    timeout_s: Annotated[float, Gt(0)] = 2.0
    """For one exchange on the socket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    """The reference proxy."""

    host: str = "127.0.0.1"
    port: Annotated[int, Ge(0), Le(65535)] = 8080
    """0 takes a free one; the log tells which."""
    queue_limit: Annotated[int, Ge(0)] = 256
    """Requests that may wait for a target; the next one is refused at once."""
    queue_timeout_s: Annotated[float, Gt(0)] = 30.0
    """Longest wait for a target."""
    connect_timeout_s: Annotated[float, Gt(0)] = 2.0
    """For the connection to a target; an answer may take as long as it takes."""
    retry_down_s: Annotated[float, Gt(0)] = 1.0
    """A target that refused a connection is left alone this long."""
    max_body_bytes: Annotated[int, Ge(1)] = 32 * 1024 * 1024
    drain_timeout_s: Annotated[float, Ge(0)] = 10.0
    """At the end, open streams get this long to finish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """One router and the targets it serves."""

    router: str = "router"
    """Name in acks; each running router needs its own."""
    targets: Mapping[str, str] = field(default_factory=dict)
    """Instance as commands name it (host:port) → the router's own name for it: a server of the
    HAProxy backend, or the address at which the proxy reaches it. Commands for others are left
    to other routers."""
    rules: LeaseRules = LeaseRules()
    verify_s: Annotated[float, Gt(0)] = 1.0
    """How often the router's state is read back and what drifted is put right."""
    haproxy: HAProxyConfig = HAProxyConfig()
    proxy: ProxyConfig = ProxyConfig()
