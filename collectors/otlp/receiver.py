"""From a message to records, whatever way it came."""

import ipaddress
import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Final, Literal

from latencyprism.collectors.otlp import instances as of_resource
from latencyprism.collectors.otlp.config import OtlpConfig
from latencyprism.collectors.otlp.instances import Instances
from latencyprism.collectors.otlp.requests import WANTED, is_possible, is_request, timing
from latencyprism.collectors.otlp.spans import Decoder, Export, MalformedError
from latencyprism.collectors.source import Emit
from latencyprism.schemas.topics import TELEMETRY_REQUESTS

logger = logging.getLogger(__name__)

Encoding = Literal["protobuf", "json"]

NO_INSTANCE: Final = "spans without a server"
IMPOSSIBLE: Final = "spans with impossible times"
EXCESS: Final = "spans beyond the bound"

ADVICE: Final = {
    NO_INSTANCE: "name it by service.instance.id=host:port (OTEL_RESOURCE_ATTRIBUTES) or in "
    "collectors.otlp.services",
    IMPOSSIBLE: "look at the sender's clock",
    EXCESS: "send smaller batches or raise collectors.otlp.max_requests",
}
"""What to do about each kind of span that is refused."""


class Receiver:
    """Takes messages from any thread, one at a time, and never waits for what is behind ``emit``.

    Records go out without a watermark: spans come when their exporter wants.
    """

    def __init__(
        self, instances: Instances, config: OtlpConfig, counts: Counter[str], emit: Emit
    ) -> None:
        self._instances = instances
        self._counts = counts
        self._emit = emit
        self._lock = threading.Lock()
        self._told: set[str] = set()
        """Refusals that were logged."""
        decoder = Decoder(
            WANTED,
            of_resource.WANTED,
            max_spans=config.max_requests,
            max_fields=config.max_fields,
        )
        self._decode: dict[Encoding, Callable[[bytes], Export]] = {
            "protobuf": decoder.protobuf,
            "json": decoder.json,
        }

    def take(self, body: bytes, encoding: Encoding, peer: str | None) -> Counter[str]:
        """Take one message of an address; how many spans were refused, by kind.

        Raises :class:`MalformedError` when it is no message; none of it is taken then.
        """
        with self._lock:
            self._counts["messages"] += 1
            try:
                export = self._decode[encoding](body)
            except MalformedError:
                self._counts["malformed messages"] += 1
                raise
            refused = self._report(export, peer)
            self._counts.update(refused)
        return refused

    def refuse(self, kind: str) -> None:
        """Count a message that was not even read."""
        with self._lock:
            self._counts[kind] += 1

    def _report(self, export: Export, peer: str | None) -> Counter[str]:
        refused = Counter({EXCESS: export.excess} if export.excess else {})
        self._counts["other spans"] += export.others
        for resource, span in export.spans:
            if not is_request(span):
                self._counts["other spans"] += 1
                continue
            instance = self._instances.find(resource, span.attributes, peer)
            if instance is None:
                refused[NO_INSTANCE] += 1
            elif not is_possible(span):
                refused[IMPOSSIBLE] += 1
            else:
                self._counts["requests"] += 1
                self._emit.sample(TELEMETRY_REQUESTS, timing(span, instance))
        for kind in set(refused) - self._told:
            self._told.add(kind)
            logger.warning("Refusing %s: %s", kind, ADVICE[kind])
        return refused


def explained(refused: Counter[str]) -> str:
    """What a sender is told about the spans that were refused."""
    return "; ".join(f"{count} {kind}: {ADVICE[kind]}" for kind, count in refused.items())


def ip_address(told: str) -> str | None:
    """A sender's address without its scope; of IPv4 inside IPv6 the former; None of no address."""
    try:
        address = ipaddress.ip_address(told.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
