"""Everything one machine needs to run the pipe: broker, topics, store, workers and sink.

What the settings name (a Kafka cluster, a ClickHouse server) is used; the rest is started here and
ended with the command that asked for it.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from latencyprism import settings as settings_module
from latencyprism.children import Supervisor
from latencyprism.settings import Settings

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 90.0
TOPICS_TIMEOUT_S = 30.0


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


@contextmanager
def running_stack(
    settings: Settings, *, workers: int, say: Callable[[str], None]
) -> Iterator[Stack]:
    """Start what is missing, yield the running stack, and end what was started.

    Blocks for 10 to 20 s, most of it Kafka and imports. Raises :class:`ChildError` or OSError
    in words when a part does not come up.
    """
    from latencyprism.local.kafka import start_broker
    from latencyprism.topics_admin import ensure_topics

    folder = settings.data_dir
    folder.mkdir(parents=True, exist_ok=True)
    run = folder / "run"
    with ExitStack() as cleanup:
        name = settings.kafka.bootstrap
        if not settings.kafka.bootstrap:
            say("starting Kafka")
            broker = cleanup.enter_context(start_broker(directory=folder / "kafka"))
            name = broker.name
            settings = _with(settings, kafka=replace(settings.kafka, bootstrap=broker.bootstrap))
        say("making topics")
        for finding in ensure_topics(settings.kafka, timeout_s=TOPICS_TIMEOUT_S).findings:
            logger.warning("%s", finding)

        supervisor = Supervisor(run)
        cleanup.callback(supervisor.stop)
        if not settings.store.url:
            say("starting the store")
            store = supervisor.role("store", "store", config=settings_module.write(settings, run))
            port = store.wait_ready(READY_TIMEOUT_S)
            settings = _with(
                settings, store=replace(settings.store, url=f"http://127.0.0.1:{port}")
            )
        config = settings_module.write(settings, run)
        say("starting workers and sink")
        children = [supervisor.role("sink", "sink", config=config)]
        children += [
            supervisor.role(f"worker-{n}", "worker", "--number", str(n), config=config)
            for n in range(1, workers + 1)
        ]
        for child in children:
            child.wait_ready(READY_TIMEOUT_S)
        yield Stack(settings=settings, config=config, supervisor=supervisor, broker=name)


def _with(settings: Settings, **parts: object) -> Settings:
    return settings.model_copy(update=parts)
