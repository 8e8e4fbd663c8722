"""Everything one machine needs to run the pipe: broker, topics, store, workers and sink.

What the settings name (a Kafka cluster, a ClickHouse server) is used; the rest is started here and
ended with the command that asked for it.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from latencyprism import settings as settings_module
from latencyprism.children import FIRST_BACKOFF_S, LONGEST_BACKOFF_S, Supervisor
from latencyprism.local.broker import LocalBroker
from latencyprism.settings import Settings

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 90.0
TOPICS_TIMEOUT_S = 30.0


class BrokerKeeper:
    """Starts the local broker again when it has ended, on its data and port, with backoff."""

    def __init__(
        self, broker: LocalBroker, *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.broker = broker
        self._clock_s = clock_s
        self._retry_at = 0.0
        self._backoff_s = FIRST_BACKOFF_S

    def revive(self) -> bool:
        """Start it if it has ended and its backoff is over; True if it did. Blocks 3 to 6 s then,
        longer when the broker does not come up, which is logged.
        """
        if self.broker.running or self._clock_s() < self._retry_at:
            return False
        logger.warning("%s has ended and is started again", self.broker.name)
        try:
            self.broker.start()
        except OSError as e:  # a full disk is one, too
            logger.warning("%s", e)
        self._retry_at = self._clock_s() + self._backoff_s
        self._backoff_s = min(LONGEST_BACKOFF_S, 2 * self._backoff_s)
        return self.broker.running


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A running pipe."""

    settings: Settings
    """With the addresses of what was started filled in."""
    config: Path
    """The same as a file, for further roles."""
    supervisor: Supervisor
    broker: str
    """What serves Kafka's protocol, in words."""
    history: str
    """Where the store is: its URL, or the folder of the embedded one."""
    keeper: BrokerKeeper | None
    """Of the broker, where this command runs it."""

    def revive(self) -> list[str]:
        """Start again what has ended, with backoff; names of those started now.

        Blocks for some seconds when the broker has to be started.
        """
        broker = ["Kafka"] if self.keeper is not None and self.keeper.revive() else []
        return broker + self.supervisor.revive()


@contextmanager
def running_stack(
    settings: Settings, *, workers: int, say: Callable[[str], None]
) -> Iterator[Stack]:
    """Start what is missing, yield the running stack, and end what was started.

    Blocks for 10 to 20 s, most of it Kafka and imports. Raises :class:`ChildError` or OSError
    in words when a part does not come up.
    """
    from latencyprism.local.kafka import start_broker
    from latencyprism.storage import store_directory
    from latencyprism.topics_admin import ensure_topics

    folder = settings.data_dir
    folder.mkdir(parents=True, exist_ok=True)
    run = folder / "run"
    with ExitStack() as cleanup:
        name, keeper = settings.kafka.bootstrap, None
        if not settings.kafka.bootstrap:
            say("starting Kafka")
            broker = cleanup.enter_context(start_broker(directory=folder / "kafka"))
            name, keeper = broker.name, BrokerKeeper(broker)
            settings = _with(settings, kafka=replace(settings.kafka, bootstrap=broker.bootstrap))
        say("making topics")
        for finding in ensure_topics(settings.kafka, timeout_s=TOPICS_TIMEOUT_S).findings:
            logger.warning("%s", finding)

        supervisor = Supervisor(run)
        cleanup.callback(supervisor.stop)
        if not settings.store.url:
            say("starting the store")
            # By its folder, since the store has another port when it is started again.
            directory = str(store_directory(settings))
            settings = _with(settings, store=replace(settings.store, directory=directory))
            store = supervisor.role("store", "store", config=settings_module.write(settings, run))
            store.wait_ready(READY_TIMEOUT_S)
        config = settings_module.write(settings, run)
        say("starting workers and sink")
        children = [supervisor.role("sink", "sink", config=config)]
        children += [
            supervisor.role(f"worker-{n}", "worker", "--number", str(n), config=config)
            for n in range(1, workers + 1)
        ]
        for child in children:
            child.wait_ready(READY_TIMEOUT_S)
        yield Stack(
            settings=settings,
            config=config,
            supervisor=supervisor,
            broker=name,
            history=settings.store.url or settings.store.directory,
            keeper=keeper,
        )


def _with(settings: Settings, **parts: object) -> Settings:
    return settings.model_copy(update=parts)
