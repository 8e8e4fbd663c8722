"""Settings of the OTLP receiver."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Le


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpConfig:
    """Where spans are taken, whose they are, and the bounds of taking them."""

    grpc: str = "127.0.0.1:4317"
    """Address for OTLP over gRPC; empty takes none. There is no authentication: whoever can
    connect can invent requests."""
    http: str = "127.0.0.1:4318"
    """Address for OTLP over HTTP (``POST /v1/traces``, protobuf or JSON); empty takes none."""
    services: Mapping[str, str] = field(default_factory=dict)
    """``service.name`` or ``service.instance.id`` of the spans → instance (``host:port``)."""
    max_message_kb: Annotated[int, Ge(16), Le(65_536)] = 4_096
    """Longest message, also after decompression, 1024 bytes."""
    max_requests: Annotated[int, Ge(1)] = 10_000
    """Most requests taken from one message; further ones are rejected and the sender is told."""
    max_fields: Annotated[int, Ge(1_000)] = 250_000
    """Most fields read of one protobuf message; a message of more is refused."""
    max_connections: Annotated[int, Ge(1)] = 64
    """HTTP connections at once; further ones are answered 503, and their sender tries again."""
