"""All replicas of one service: profiles in, alerts and commands out."""

from latencyprism.schemas.records import Ack, Alert, BatchProfile, Command
from latencyprism.streams.config import ServiceConfig
from latencyprism.streams.fleet import Fleet
from latencyprism.streams.sculpting import Sculptor


class ServicePipeline:
    """Pure: no clock, no I/O. Not thread-safe; memory bounded by the number of replicas.

    Times are event time near the wall clock, since routers hold leases against it.
    """

    def __init__(self, service: str, *, config: ServiceConfig | None = None) -> None:
        config = config or ServiceConfig()
        self.service = service
        self._fleet = Fleet(service, config.fleet)
        self._sculptor = Sculptor(service, config.sculpting)

    def add(self, profile: BatchProfile, now_ns: int) -> list[Alert | Command]:
        """Take in one profile, in order per instance.

        Returns the alerts that changed, then the commands that follow from them. Idempotent: a
        profile that was delivered before, or is older than its instance's newest, changes nothing.
        """
        alerts = self._fleet.add(profile)
        return [*alerts, *self._sculptor.decide(self._fleet, now_ns)]

    def tick(self, now_ns: int) -> list[Alert | Command]:
        """Renew leases and resolve alerts of replicas that fell silent; call it every second."""
        alerts = self._fleet.tick(now_ns)
        return [*alerts, *self._sculptor.decide(self._fleet, now_ns)]

    def acknowledge(self, ack: Ack) -> None:
        """Take in a router's answer to a command."""
        self._sculptor.acknowledge(ack)

    def open_alerts(self) -> list[Alert]:
        """Alerts that are on."""
        return self._fleet.alerts()
