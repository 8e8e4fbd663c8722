"""Settings of the collector agent."""

import socket
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, MinLen

from latencyprism.collectors.discovery.config import DiscoveryConfig
from latencyprism.collectors.engine.config import EngineConfig
from latencyprism.collectors.gateway.config import GatewayConfig
from latencyprism.collectors.host.config import HostConfig
from latencyprism.collectors.kernel.config import KernelConfig
from latencyprism.collectors.network.config import NetworkConfig
from latencyprism.collectors.otlp.config import OtlpConfig
from latencyprism.collectors.stacks.config import StacksConfig
from latencyprism.collectors.xpu.config import XpuConfig

SourceName = Literal["engine", "host", "network", "xpu", "gateway", "otlp", "kernel", "stacks"]
Capability = Literal[
    "CAP_DAC_READ_SEARCH",
    "CAP_NET_ADMIN",
    "CAP_NET_RAW",
    "CAP_SYS_PTRACE",
    "CAP_SYS_ADMIN",
    "CAP_PERFMON",
    "CAP_BPF",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishConfig:
    """How samples are packed, and how many are held while the broker is away."""

    linger_ms: Annotated[int, Ge(1), Le(1000)] = 80
    """Longest time a sample waits to be packed with others."""
    pack_samples: Annotated[int, Ge(1), Le(10_000)] = 500
    """Most samples of one message; so many waiting samples are packed at once."""
    queue_samples: Annotated[int, Ge(1)] = 20_000
    """Most samples that wait to be packed; the oldest is dropped and counted beyond it."""
    backlog_mb: Annotated[float, Gt(0)] = 16.0
    """Most bytes of encoded messages held while the broker is away, 10^6 bytes; the oldest
    message is dropped and counted beyond it."""
    delivery_timeout_s: Annotated[float, Gt(0)] = 120.0
    """How long the client library tries to deliver a message it has taken over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostConfig:
    """What the agent may take from the machine it watches."""

    cpu_pct: Annotated[float, Gt(0)] = 20.0
    """Ceiling of the agent's own CPU use, % of one core. The packet tap takes about 1 % for each
    1,000 tokens a second: a ceiling near its usual cost would blind the agent under load."""
    rss_mb: Annotated[float, Gt(0)] = 200.0
    """Ceiling of the agent's resident memory, 10^6 bytes."""
    bytes_s: Annotated[float, Gt(0)] = 5e6
    """Ceiling of what the agent publishes, bytes a second."""
    patience_s: Annotated[int, Ge(1)] = 5
    """Seconds above a ceiling after which a source is shed."""
    resume_s: Annotated[int, Ge(1)] = 300
    """Seconds below all ceilings after which the source shed last is tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivilegesConfig:
    """Who the agent is after a start as root."""

    user: str = ""
    """User (name or number) whose rights the agent takes on once its sockets are open; empty goes
    on as it was started."""
    keep: tuple[Capability, ...] | None = None
    """Capabilities that are kept all the same; unset keeps what the enabled sources go on to need,
    empty none at all: then what was open stays open and cannot be opened again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorConfig:
    """What one agent watches, how often, and what it may cost."""

    agent: Annotated[str, MinLen(1)] = field(default_factory=socket.gethostname)
    """Name of this agent in every message; the host's name unless set."""
    engines: tuple[str, ...] = ()
    """Base URLs of the inference servers watched, such as ``http://127.0.0.1:8000``; those that
    discovery finds are watched as well."""
    sources: tuple[SourceName, ...] = ("engine", "host", "network", "xpu")
    """Ways of watching that are enabled; one that this machine does not permit is reported."""
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    host: HostConfig = field(default_factory=HostConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    xpu: XpuConfig = field(default_factory=XpuConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    otlp: OtlpConfig = field(default_factory=OtlpConfig)
    kernel: KernelConfig = field(default_factory=KernelConfig)
    stacks: StacksConfig = field(default_factory=StacksConfig)
    publish: PublishConfig = field(default_factory=PublishConfig)
    cost: CostConfig = field(default_factory=CostConfig)
    privileges: PrivilegesConfig = field(default_factory=PrivilegesConfig)
