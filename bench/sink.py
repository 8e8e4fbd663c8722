"""How fast the store takes rows, and what kills of the writer cost."""

import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confluent_kafka import Producer

from latencyprism.bench.figures import Figure, Report, median
from latencyprism.schemas.codec import Codec, Pack
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.records import RequestTiming
from latencyprism.schemas.topics import TELEMETRY_REQUESTS
from latencyprism.sinks.clickhouse_rows import ClickHouseRows
from latencyprism.sinks.client import connect
from latencyprism.sinks.config import StoreConfig
from latencyprism.sinks.memory import MemoryBroker, MemoryLetterBox, MemoryLog
from latencyprism.sinks.migrations.migrate import apply
from latencyprism.sinks.process import SinkProcess, StoreProcess
from latencyprism.sinks.sink import Sink
from latencyprism.sinks.tables import BY_TOPIC

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

RUNS = 3
ROWS = 100_000
BLOCK = 10_000
PACK = 100
KILLS = 5
KILL_ROWS = 50_000
KILL_PAUSE_S = (0.2, 1.0)
SETTLE_S = 120.0
T0 = 1_750_000_000_000_000_000
MS = 1_000_000


def measure() -> tuple[Mapping[str, Figure], Mapping[str, str]]:
    """Figures of store and writer on this machine; takes one to three minutes.

    ``chdb.rows_per_s`` is what the store process takes over HTTP, in blocks of 10,000 exchanges
    that were built before; ``sink.rows_per_s`` counts decoding and building too. The kills need a
    real Kafka.
    """
    with _store() as config:
        figures = {
            "chdb.rows_per_s": median([_insert_rows_per_s(config) for _ in range(RUNS)], "1/s"),
            "sink.rows_per_s": median([_sink_rows_per_s(config) for _ in range(RUNS)], "1/s"),
        }
    from latencyprism.local.broker import BrokerError
    from latencyprism.local.kafka import EmbeddedKafka

    try:
        with EmbeddedKafka() as broker:
            kafka = KafkaConfig(bootstrap=broker.bootstrap, prefix="bench", partitions=3)
            missing, duplicates = _kills(kafka)
    except BrokerError as e:
        return figures, dict.fromkeys(("kills.missing_rows", "kills.duplicate_rows"), str(e))
    figures["kills.missing_rows"] = Figure(value=missing, unit="rows", n=KILLS)
    figures["kills.duplicate_rows"] = Figure(value=duplicates, unit="rows", n=KILLS)
    return figures, {}


def _insert_rows_per_s(config: StoreConfig) -> float:
    table = BY_TOPIC[TELEMETRY_REQUESTS.name]
    rows = table.rows(_pack(_exchanges(0, ROWS)))
    blocks = [table.arrow(rows[first : first + BLOCK]) for first in range(0, ROWS, BLOCK)]
    client = connect(config)
    client.command("TRUNCATE TABLE request_parts")
    began = time.perf_counter()
    for block in blocks:
        client.insert_arrow(table.name, block)
    took = time.perf_counter() - began
    _expect(client, ROWS)
    client.close()
    return ROWS / took


def _sink_rows_per_s(config: StoreConfig) -> float:
    codec, broker = Codec(), MemoryBroker()
    exchanges = _exchanges(0, ROWS)
    for first in range(0, ROWS, PACK):
        message = codec.encode(TELEMETRY_REQUESTS, _pack(exchanges[first : first + PACK]))
        broker.append(TELEMETRY_REQUESTS, message)
    client = connect(config)
    client.command("TRUNCATE TABLE request_parts")
    rows = ClickHouseRows(config)
    sink = Sink(
        config,
        log=MemoryLog(broker),
        store=rows,
        letterbox=MemoryLetterBox(broker, codec),
        codec=codec,
        clock_s=time.monotonic,
        clock_ns=time.time_ns,
    )
    began = time.perf_counter()
    while sink.counts.messages < ROWS // PACK:
        sink.step(0)
    sink.finish()
    took = time.perf_counter() - began
    _expect(client, ROWS)
    rows.close()
    client.close()
    return ROWS / took


def _kills(kafka: KafkaConfig) -> tuple[float, float]:
    """Rows missing and rows too many in the view after kills in the middle of the stream."""
    from latencyprism.topics_admin import ensure_topics

    ensure_topics(kafka, timeout_s=30)
    with _store() as config, tempfile.TemporaryDirectory() as folder:
        sink = SinkProcess(replace(config, flush_ms=100, batch_rows=2_000), kafka, Path(folder))
        sending = threading.Thread(target=_send, args=(kafka,))
        chance = random.Random(1)  # noqa: S311 no secret depends on it
        with sink:
            sending.start()
            for _ in range(KILLS):
                time.sleep(chance.uniform(*KILL_PAUSE_S))
                sink.kill()
                sink.start()
            sending.join()
            client = connect(config)
            count, different = _settled(client)
            client.close()
    return KILL_ROWS - different, count - different


def _send(kafka: KafkaConfig) -> None:
    """Exchanges over some seconds, each pack delivered twice."""
    codec, producer = Codec(), Producer(kafka.librdkafka())
    exchanges = _exchanges(0, KILL_ROWS)
    for first in range(0, KILL_ROWS, PACK):
        message = codec.encode(TELEMETRY_REQUESTS, _pack(exchanges[first : first + PACK]))
        for _ in range(2):
            key = str(first).encode()
            producer.produce(kafka.topic(TELEMETRY_REQUESTS), message, key=key)
        producer.poll(0.01)
    producer.flush(30)


def _settled(client: "Client") -> tuple[int, int]:
    """Rows and different rows in the view, once all are there or the time is over."""
    deadline = time.monotonic() + SETTLE_S
    sql = "SELECT count(), uniqExact(request_id) FROM requests"
    while True:
        ((count, different),) = client.query(sql).result_rows
        if different == KILL_ROWS or time.monotonic() > deadline:
            return int(count), int(different)
        time.sleep(0.5)


@contextmanager
def _store() -> Iterator[StoreConfig]:
    with (
        tempfile.TemporaryDirectory(prefix="latencyprism-bench-") as folder,
        StoreProcess(Path(folder)) as store,
    ):
        config = StoreConfig(url=store.url)
        client = connect(config)
        apply(client, config)
        client.close()
        yield config


def _expect(client: "Client", rows: int) -> None:
    found = client.command("SELECT count() FROM requests")
    if found != rows:
        raise RuntimeError(f"{found} of {rows} rows arrived, so the speed says nothing")


def _pack(samples: Sequence[Any]) -> Pack[Any]:
    return Pack(agent="bench", boot_ns=T0, sequence=0, watermark_ns=T0, samples=samples)


def _exchanges(start: int, count: int) -> list[RequestTiming]:
    """Exchanges of one part with ten chunks each, 1 ms apart, over eight servers."""
    return [
        RequestTiming(
            request_id=f"{number:032x}",
            part=0,
            state="complete",
            instance=f"host-{number % 8}:8000",
            source="network",
            observed_at_ns=T0 + number * MS + 210 * MS,
            endpoint="/v1/chat/completions",
            model="bench-model",
            streaming=True,
            status=200,
            arrival_ns=T0 + number * MS,
            request_end_ns=T0 + number * MS + 1_000,
            first_byte_ns=T0 + number * MS + 12 * MS,
            first_token_ns=T0 + number * MS + 100 * MS,
            end_ns=T0 + number * MS + 210 * MS,
            chunks_before=0,
            chunk_base_ns=T0 + number * MS + 100 * MS,
            chunk_deltas_us=tuple(10_000 + (number * step) % 997 for step in range(1, 10)),
            request_bytes=500 + number % 300,
            response_bytes=4_000 + number % 900,
            prompt_tokens=100 + number % 50,
            completion_tokens=10,
        )
        for number in range(start, start + count)
    ]


if __name__ == "__main__":
    import json

    figures, skipped = measure()
    report = Report(bench="sink", figures=figures, skipped=skipped)
    sys.stdout.write(json.dumps(report.as_json(), indent=2) + "\n")
