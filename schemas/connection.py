"""How every part reaches Kafka: one set of values, spelled for each client library."""

import ssl
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge

from latencyprism.schemas.topics import Topic, full_name


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaConfig:
    """Address and credentials of the Kafka cluster, and how topics are laid out on it."""

    bootstrap: str = ""
    """Brokers as host:port,host:port; empty starts an embedded broker where a command can."""
    prefix: str = "prism"
    """Put before every topic and consumer group, with a dot."""
    partitions: Annotated[int, Ge(1)] = 6
    """Partitions of the topics keyed by instance or service; bounds the number of workers."""
    replication: Annotated[int, Ge(1)] = 1
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    sasl_username: str = ""
    sasl_password: str = field(default="", repr=False)
    ssl_ca: str = ""
    """PEM file of the authority that signed the brokers' certificates; empty uses the system's."""
    ssl_certificate: str = ""
    """PEM file of the client's own certificate; empty for none."""
    ssl_key: str = field(default="", repr=False)
    registry_url: str = ""
    """Confluent-compatible schema registry; empty writes single-object encoding."""

    def topic(self, topic: Topic) -> str:
        """Name of the topic on this cluster."""
        return full_name(self.prefix, topic)

    def group(self, name: str) -> str:
        """Consumer group of a part, such as ``prism.sinks``."""
        return f"{self.prefix}.{name}" if self.prefix else name

    def librdkafka(
        self, **overrides: str | int | float | bool
    ) -> dict[str, str | int | float | bool]:
        """Configuration for confluent-kafka; ``overrides`` have underscores for dots."""
        config: dict[str, str | int | float | bool] = {
            "bootstrap.servers": self.bootstrap,
            "security.protocol": self.security_protocol,
            # By itself it tries, and logs, twenty times a second while a broker is away.
            "reconnect.backoff.ms": 1_000,
        }
        if self.security_protocol.startswith("SASL"):
            config |= {
                "sasl.mechanism": self.sasl_mechanism,
                "sasl.username": self.sasl_username,
                "sasl.password": self.sasl_password,
            }
        if self.security_protocol.endswith("SSL"):
            pairs = (
                ("ssl.ca.location", self.ssl_ca),
                ("ssl.certificate.location", self.ssl_certificate),
                ("ssl.key.location", self.ssl_key),
            )
            config |= {key: value for key, value in pairs if value}
        return config | {key.replace("_", "."): value for key, value in overrides.items()}

    def ssl_context(self) -> ssl.SSLContext | None:
        """TLS context for clients that take one; None without TLS. Raises OSError on bad files."""
        if not self.security_protocol.endswith("SSL"):
            return None
        context = ssl.create_default_context(cafile=self.ssl_ca or None)
        if self.ssl_certificate:
            context.load_cert_chain(self.ssl_certificate, self.ssl_key or None)
        return context
