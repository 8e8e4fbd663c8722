"""The stacks source: when an alert fires, what the server's Python processes were doing."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from latencyprism.collectors.host.source import local_servers
from latencyprism.collectors.source import Emit
from latencyprism.collectors.stacks.alerts import Alerts
from latencyprism.collectors.stacks.choice import Choice
from latencyprism.collectors.stacks.config import StacksConfig
from latencyprism.collectors.stacks.profile import processes_of, take_profiles
from latencyprism.collectors.stacks.pyspy import program
from latencyprism.schemas.records import Alert
from latencyprism.schemas.topics import TELEMETRY_STACKS

logger = logging.getLogger(__name__)

POLL_S = 0.05
"""Short, since ending takes this and what the alerts need to be closed."""


class StacksSource:
    """Takes stacks of a server's processes when a fault of it fires or gets worse.

    At most once in ``pause_s`` for one fingerprint of an instance, one instance at a time.
    ``alerts`` opens what tells of them; ``processes`` gives those of the server at a port;
    ``choice`` is what is remembered from the source before.
    """

    name = "stacks"

    def __init__(
        self,
        engines: Sequence[str],
        config: StacksConfig,
        alerts: Callable[[], Alerts],
        *,
        choice: Choice | None = None,
        processes: Callable[[int], Mapping[int, str]] = processes_of,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines = engines
        self._config = config
        self._alerts = alerts
        self._choice = choice or Choice()
        self._processes = processes
        self._wall_ns = wall_ns
        self._monotonic_s = monotonic_s
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> Mapping[str, int]:
        """See :class:`~latencyprism.collectors.source.Counting`."""
        return dict(self._counts)

    def run(self, emit: Emit, stop: threading.Event) -> None:
        """See :meth:`Source.run`. Raises UnavailableError without py-spy."""
        program(self._config)
        ports = dict(local_servers(self._engines))
        alerts = self._alerts()
        try:
            while not stop.is_set():
                for alert in alerts.poll(POLL_S):
                    if self._wanted(alert, ports):
                        self._take(alert, ports[alert.instance], emit, stop)
                    if stop.is_set():  # before the next is asked for: it may be cut short
                        break
        finally:
            alerts.close()

    def _wanted(self, alert: Alert, ports: Mapping[str, int]) -> bool:
        if alert.state == "resolved" or alert.instance not in ports:
            return False
        refusal = self._choice.refusal(
            alert,
            pause_s=self._config.pause_s,
            wall_ns=self._wall_ns(),
            now_s=self._monotonic_s(),
        )
        if refusal is not None:
            self._counts[refusal] += 1
        return refusal is None

    def _take(self, alert: Alert, port: int, emit: Emit, stop: threading.Event) -> None:
        processes = self._processes(port)
        if not processes:
            self._counts["no process"] += 1
            logger.warning("No process of %s can be seen, so no stacks of it", alert.instance)
        profiles = take_profiles(alert.instance, processes, self._config, alert=alert, stop=stop)
        if any(profile.samples for profile in profiles):
            self._choice.took(alert, self._monotonic_s())
        elif stop.is_set():  # cut short: the alert is there again when the source is
            return
        for profile in profiles:
            self._counts["failed" if profile.error else "profiles"] += 1
            emit.sample(TELEMETRY_STACKS, profile)
            emit.watermark(TELEMETRY_STACKS, profile.instance, profile.observed_at_ns)
