"""One stream worker as a process: waits for its cluster, works, and ends cleanly."""

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.topics import TOPICS
from latencyprism.streams.config import StreamsConfig

logger = logging.getLogger(__name__)
librdkafka = logging.getLogger(f"{__name__}.librdkafka")
librdkafka.setLevel(logging.CRITICAL)  # what it has to say about the cluster is said here

GROUP: Final = "streams"
"""Consumer group of the workers, before the configured prefix."""
WAIT_S: Final = 5.0
"""Between two looks for the cluster, each with a line in the log."""
SAVE_EVERY_S: Final = 30.0
"""Between two snapshots of an instance; what was learned since the last is lost with the worker."""
STOP_S: Final = 20.0
"""Longest that an orderly end takes."""


TALKATIVE: Final = (
    "aiokafka",
    "aiokafka.consumer.fetcher",
    "aiokafka.consumer.group_coordinator",
    "aiokafka.producer.sender",
    "mode.timers",
)
"""Loggers that say the same many times a second while a broker is away."""
REPEAT_S: Final = 30.0


class Sparse(logging.Filter):
    """Lets a message that is repeated pass every ``REPEAT_S`` only."""

    def __init__(self) -> None:
        super().__init__()
        self._passed: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the message, whatever its arguments, has not passed for so long."""
        now, last = time.monotonic(), self._passed.get(str(record.msg))
        if last is not None and now - last < REPEAT_S:
            return False
        self._passed[str(record.msg)] = now
        return True


class WorkerError(RuntimeError):
    """A worker that had to end; says why."""


def run_worker(
    config: StreamsConfig,
    kafka: KafkaConfig,
    *,
    datadir: Path,
    ready: Callable[[], object] = lambda: None,
    save_every_s: float = SAVE_EVERY_S,
) -> None:
    """Work until SIGTERM or SIGINT, then publish and save what there is. Blocks.

    Waits for the cluster and its topics as long as they are missing. ``ready`` is called once,
    when the worker reads its first partitions. For the main thread of a process. Raises
    WorkerError when the work fails for good, OSError when TLS files cannot be read.
    """
    for name in TALKATIVE:
        logging.getLogger(name).addFilter(Sparse())
    stop = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        if wait_for_topics(kafka, stop):
            datadir.mkdir(parents=True, exist_ok=True)
            asyncio.run(_work(config, kafka, datadir, ready, save_every_s))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wait_for_topics(kafka: KafkaConfig, stop: threading.Event) -> bool:
    """Block until every topic is there, or ``stop`` is set; whether they are."""
    admin = AdminClient(kafka.librdkafka(), logger=librdkafka)
    wanted = {kafka.topic(topic) for topic in TOPICS}
    while not stop.is_set():
        began = time.monotonic()
        try:
            missing = wanted - set(admin.list_topics(timeout=WAIT_S).topics)
        except KafkaException as e:
            logger.warning("waiting for Kafka at %s: %s", kafka.bootstrap, e.args[0].str())
        else:
            if not missing:
                return True
            logger.warning(
                "waiting for topics %s: make them with `latencyprism topics --create`",
                ", ".join(sorted(missing)),
            )
        stop.wait(max(0.0, began + WAIT_S - time.monotonic()))
    return False


async def _work(
    config: StreamsConfig,
    kafka: KafkaConfig,
    datadir: Path,
    ready: Callable[[], object],
    save_every_s: float,
) -> None:
    from latencyprism.streams.app import build_app

    once = [ready]
    app = build_app(
        config,
        kafka,
        datadir=datadir,
        save_every_s=save_every_s,
        ready=lambda: once.pop()() if once else None,
    )
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await app.start()
    ended = asyncio.create_task(app.wait_until_stopped())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([ended, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    reason = app.crash_reason
    await asyncio.wait_for(app.stop(), STOP_S)
    if reason is not None:
        raise WorkerError(f"the worker ended: {type(reason).__name__} {reason}") from reason
