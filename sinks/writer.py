"""Runs the sink on a real Kafka and a real store."""

import logging
import signal
import threading
import time
from collections.abc import Callable

from latencyprism.schemas.codec import codec_for
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.sinks.clickhouse_rows import ClickHouseRows
from latencyprism.sinks.client import connect
from latencyprism.sinks.config import StoreConfig
from latencyprism.sinks.errors import StoreAwayError
from latencyprism.sinks.kafka_log import KafkaLetterBox, KafkaLog
from latencyprism.sinks.migrations.migrate import MigrationError, apply, missing_columns
from latencyprism.sinks.sink import FIRST_RETRY_S, Sink, SinkCounts

logger = logging.getLogger(__name__)

POLL_S = 0.1
FINISH_S = 5.0
"""How long a sink that is told to stop tries to insert what it has read."""


def run_sink(
    store: StoreConfig,
    kafka: KafkaConfig,
    *,
    ready: Callable[[str], object] | None = None,
    stop: threading.Event | None = None,
) -> SinkCounts:
    """Write every topic to the store until SIGTERM, SIGINT or ``stop``; blocks.

    Waits for a store that is away and brings its tables up to date first. ``ready`` is called
    with a line of text once partitions are assigned. Signals are taken over only in the main
    thread. Raises :class:`~.errors.StoreAuthError`, :class:`~.errors.StoreVersionError` and
    :class:`~.migrations.migrate.MigrationError`, which waiting does not cure.
    """
    stop = stop or threading.Event()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
    if not _prepare(store, stop):
        return SinkCounts()
    codec = codec_for(kafka)
    log, rows = KafkaLog(kafka), ClickHouseRows(store)
    try:
        sink = Sink(
            store,
            log=log,
            store=rows,
            letterbox=KafkaLetterBox(kafka, codec),
            codec=codec,
            clock_s=time.monotonic,
            clock_ns=time.time_ns,
        )
        announced = False
        while not stop.is_set():
            sink.step(POLL_S)
            if not announced and log.assigned:
                announced = True
                logger.info("writing %d partitions to %s", log.assigned, store.database)
                if ready is not None:
                    ready(f"{log.assigned} partitions")
        _finish(sink)
        return sink.counts
    finally:
        rows.close()
        log.close()


def _prepare(store: StoreConfig, stop: threading.Event) -> bool:
    """Bring the tables up to date, waiting for the store; False when told to stop meanwhile."""
    pause_s = FIRST_RETRY_S
    while not stop.is_set():
        try:
            client = connect(store)
            try:
                apply(client, store)
                if missing := missing_columns(client, store):
                    raise MigrationError(
                        f"{store.database} has no {', '.join(missing)}: its tables were made by "
                        "another release, or changed by hand"
                    )
            finally:
                client.close()
        except StoreAwayError as e:
            logger.warning("waiting for the store: %s", e)
            stop.wait(pause_s)
            pause_s = min(2 * pause_s, store.retry_max_ms / 1000)
        else:
            return True
    return False


def _finish(sink: Sink) -> None:
    deadline = time.monotonic() + FINISH_S
    while not sink.finish():
        if time.monotonic() > deadline:
            logger.warning("stopping with rows unwritten; they will be read from Kafka again")
            return
        time.sleep(FIRST_RETRY_S)
