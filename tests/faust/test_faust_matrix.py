"""What Faust does on a real Kafka 4.x: what the stream workers build on, and what they avoid.

docs/faust-on-kafka-4.md tells the findings; the measured times are logged by each test.
"""

import logging
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Message, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from kafka_io import KafkaIO
from matrix_app import SETTINGS, Case
from matrix_worker import Worker

from latencyprism.local.kafka import EmbeddedKafka
from latencyprism.schemas.codec import Codec
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.records import Ack
from latencyprism.schemas.topics import CONTROL_ACKS

pytest.importorskip("faust", reason="the extra 'streams' is not installed")

logger = logging.getLogger(__name__)
Headers = dict[str, str | bytes | None]
KEYS = 7
ROCKSDB = "rocksdb://?driver=rocksdict"


@dataclass(slots=True)
class Matrix:
    """One application of the matrix: its topics, its events and its workers."""

    case: Case
    folder: Path
    codec: Codec = field(default_factory=Codec)
    exit: ExitStack = field(default_factory=ExitStack)

    def make_topics(self) -> None:
        admin = AdminClient({"bootstrap.servers": self.case.bootstrap})
        partitions = {"events": self.case.partitions, "out": self.case.partitions, "batch": 1}
        topics = [NewTopic(self.topic(name), n, 1) for name, n in partitions.items()]
        for creation in admin.create_topics(topics).values():
            creation.result(20)

    def topic(self, name: str) -> str:
        return f"{self.case.app}-{name}"

    def worker(self, name: str = "w1", **changes: Any) -> Worker:
        """Start a worker; a second one of the same name finds the first one's tables."""
        case = replace(self.case, datadir=str(self.folder / name), **changes)
        worker = Worker(case, self.folder / f"{name}.log")
        return self.exit.enter_context(worker)

    def ready_worker(self, name: str = "w1", **changes: Any) -> Worker:
        worker = self.worker(name, **changes)
        worker.until(lambda tick: tick["assigned"] == list(range(self.case.partitions)))
        return worker

    def send(
        self, name: str, numbers: range, *, rate: float = 0, headers: Headers | None = None
    ) -> None:
        """Write events; ``rate`` a second, 0 as fast as it goes."""
        producer = Producer({"bootstrap.servers": self.case.bootstrap, "linger.ms": 2})
        begin = time.monotonic()
        for number in numbers:
            event = Ack(
                ack_id=str(number),
                command_id="c",
                target=key(number),
                epoch=number,
                router="r",
                effect="applied",
                dry_run=False,
                at_ns=time.time_ns(),
            )
            producer.produce(
                self.topic(name),
                self.codec.encode(CONTROL_ACKS, event),
                key=event.target.encode(),
                headers=headers,
            )
            producer.poll(0)
            if rate:
                time.sleep(max(0.0, begin + (number - numbers.start) / rate - time.monotonic()))
        assert producer.flush(30) == 0

    def forwarded(self, count: int) -> list[int]:
        """Numbers of the events that came out, once ``count`` different ones did."""

        def number(message: Message) -> int:
            ack: Ack = self.codec.decode(CONTROL_ACKS, message.value() or b"")
            return ack.epoch

        messages = KafkaIO(KafkaConfig(bootstrap=self.case.bootstrap)).read_until(
            self.topic("out"), lambda got: len({number(message) for message in got}) >= count
        )
        return [number(message) for message in messages]


def key(number: int) -> str:
    return f"m{number % KEYS}"


def expected(count: int) -> dict[str, int]:
    return dict(Counter(key(number) for number in range(count)))


@pytest.fixture
def matrix(
    kafka_broker: EmbeddedKafka, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Matrix]:
    case = Case(app=f"f{abs(hash(tmp_path)):x}"[:10], bootstrap=kafka_broker.bootstrap, datadir="")
    matrix = Matrix(case, tmp_path)
    matrix.make_topics()
    with matrix.exit:
        yield matrix


def test_the_matrix_runs_with_the_settings_of_the_product(tmp_path: Path) -> None:
    from latencyprism.streams.app import build_app
    from latencyprism.streams.config import StreamsConfig

    app = build_app(StreamsConfig(), KafkaConfig(bootstrap="127.0.0.1:1"), datadir=tmp_path)
    assert {name: getattr(app.conf, name) for name in SETTINGS} == SETTINGS
    assert not app.tables, "a worker with tables loses messages in a rebalance"


def test_avro_events_are_forwarded_with_their_headers_and_timers_run(matrix: Matrix) -> None:
    worker = matrix.worker()
    start_s = worker.until(lambda tick: tick["assigned"] == list(range(6)))
    matrix.send("events", range(1000), headers={"agent": b"a1"})
    worker.until(lambda tick: tick["n"] == 1000)
    assert worker.last["headers"] == {"agent": "a1"}
    assert worker.last["counts"] == expected(1000)
    assert sorted(matrix.forwarded(1000)) == list(range(1000))
    ticks = len(worker.ticks)
    worker.until(lambda _: len(worker.ticks) >= ticks + 3, timeout_s=5)
    stop_s = worker.stop()
    assert stop_s < 10
    logger.info("worker ready after %.1f s, ended %.1f s after SIGTERM", start_s, stop_s)


def test_take_gives_what_came_within_the_time(matrix: Matrix) -> None:
    worker = matrix.ready_worker()
    matrix.send("batch", range(250))
    worker.until(lambda tick: sum(tick["taken"]) == 250, timeout_s=20)
    assert max(worker.last["taken"]) == 100
    assert len(worker.last["taken"]) < 10


def recover(matrix: Matrix, end: Callable[[Worker], object], count: int, **changes: Any) -> None:
    """Count events, end the worker, and see that its successor goes on from the same counts."""
    worker = matrix.ready_worker(tables=True, **changes)
    matrix.send("events", range(count))
    worker.until(lambda tick: tick["n"] >= count)
    time.sleep(1.5)  # a commit interval, so that what is measured is recovery, not repetition
    end(worker)
    successor = matrix.worker(tables=True, **changes)
    recovered_s = successor.until(lambda tick: tick["counts"] == expected(count))
    matrix.send("events", range(count, count + 70))
    successor.until(lambda tick: tick["counts"] == expected(count + 70), timeout_s=30)
    repeated = successor.last["n"] - 70
    logger.info("tables back after %.1f s, %d events repeated", recovered_s, repeated)
    assert set(matrix.forwarded(count + 70)) == set(range(count + 70))


def test_a_killed_worker_with_tables_in_memory_recovers_them(matrix: Matrix) -> None:
    recover(matrix, Worker.kill, 2000)


@pytest.mark.slow
def test_a_stopped_worker_with_tables_in_memory_recovers_them(matrix: Matrix) -> None:
    recover(matrix, Worker.stop, 2000)


def test_a_stopped_worker_with_tables_on_disk_recovers_them(matrix: Matrix) -> None:
    recover(matrix, Worker.stop, 2000, store=ROCKSDB)


@pytest.mark.slow
def test_a_killed_worker_with_tables_on_disk_recovers_them(matrix: Matrix) -> None:
    recover(matrix, Worker.kill, 2000, store=ROCKSDB)


@pytest.mark.slow
def test_tables_come_back_from_the_changelog_alone(matrix: Matrix) -> None:
    def lose_disk(worker: Worker) -> None:
        worker.stop()
        shutil.rmtree(matrix.folder / "w1")

    recover(matrix, lose_disk, 2000, store=ROCKSDB)


@pytest.mark.slow
def test_exactly_once_recovers_from_a_kill(matrix: Matrix) -> None:
    recover(matrix, Worker.kill, 500, exactly_once=True)


@pytest.mark.slow
def test_a_static_member_comes_back_without_waiting_for_its_session_to_end(matrix: Matrix) -> None:
    recover(matrix, Worker.kill, 2000, instance="w1")


def two_workers(
    matrix: Matrix, end: Callable[[Worker], object], *, static: bool = False
) -> tuple[float, int]:
    """End one of two workers under load: seconds until the other has all, events repeated.

    Fails if an event is lost.
    """
    count = 3000
    first = matrix.ready_worker("w1", instance="w1" if static else "")
    second = matrix.worker("w2", instance="w2" if static else "")
    join_s = second.until(
        lambda tick: len(tick["assigned"]) == 3 == len(first.last["assigned"]), timeout_s=80
    )
    load = threading.Thread(target=matrix.send, args=("events", range(count)), kwargs={"rate": 300})
    load.start()
    first.until(lambda tick: tick["n"] > count / 6)
    begin = time.monotonic()
    end(first)
    second.until(lambda tick: tick["assigned"] == list(range(6)), timeout_s=60)
    takeover_s = time.monotonic() - begin
    load.join()
    forwarded = matrix.forwarded(count)
    lost = sorted(set(range(count)) - set(forwarded))
    assert not lost, f"{len(lost)} events were lost: {lost[:50]}"
    repeated = len(forwarded) - count
    logger.info(
        "2nd worker shares after %.1f s, takeover %.1f s, %d repeated", join_s, takeover_s, repeated
    )
    return takeover_s, repeated


def test_of_two_workers_one_is_killed_and_nothing_is_lost(matrix: Matrix) -> None:
    takeover_s, repeated = two_workers(matrix, Worker.kill)
    assert takeover_s > 4, "the session was expected to end first"
    assert repeated > 0, "what was read and not committed was expected to be read again"


@pytest.mark.slow
def test_of_two_workers_one_is_stopped_and_nothing_is_lost(matrix: Matrix) -> None:
    takeover_s, _ = two_workers(matrix, Worker.stop)
    assert takeover_s < 6, "a worker that stops gives its partitions up at once"


@pytest.mark.slow
def test_of_two_static_members_one_is_stopped_and_nothing_is_lost(matrix: Matrix) -> None:
    takeover_s, _ = two_workers(matrix, Worker.stop, static=True)
    assert takeover_s > 4, "a static member was expected to keep its partitions for a session"


def test_a_worker_goes_on_after_the_broker_was_restarted(tmp_path: Path) -> None:
    with EmbeddedKafka() as broker:
        matrix = Matrix(Case(app="restart", bootstrap=broker.bootstrap, datadir=""), tmp_path)
        matrix.make_topics()
        with matrix.exit:
            worker = matrix.ready_worker()
            matrix.send("events", range(700))
            worker.until(lambda tick: tick["n"] == 700)
            broker.stop()
            broker.start()
            begin = time.monotonic()
            matrix.send("events", range(700, 1400))
            worker.until(lambda tick: tick["n"] >= 1400)
            assert set(matrix.forwarded(1400)) == set(range(1400))
            logger.info(
                "%.1f s after the broker came back, %d repeated",
                time.monotonic() - begin,
                worker.last["n"] - 1400,
            )


def test_sparse_events_are_not_held_back(matrix: Matrix) -> None:
    worker = matrix.ready_worker()
    time.sleep(2)
    matrix.send("events", range(200), rate=20)
    worker.until(lambda tick: tick["n"] == 200)
    delays = sorted(worker.last["delays_ms"])
    logger.info(
        "event to agent: p50 %.1f ms, p99 %.1f ms, worst %.1f ms",
        delays[100],
        delays[197],
        delays[199],
    )
    assert delays[100] < 100


@pytest.mark.slow
def test_trap_on_window_close_loses_windows(matrix: Matrix) -> None:
    """Why the product closes its windows itself. A failure means that Faust has mended it."""
    worker = matrix.ready_worker(tables=True, windows=True)
    matrix.send("events", range(420), rate=70)
    for _ in range(3):  # later events, so that every window of the 420 can close
        time.sleep(3)
        matrix.send("events", range(7))
    worker.until(lambda tick: tick["n"] == 441)
    closed = sum(event["value"] for event in worker.events if event["event"] == "window")
    logger.info("on_window_close told of %d of 420 events", closed)
    assert 0 < closed < 420


def test_trap_source_topics_are_not_made(matrix: Matrix) -> None:
    """Why topics are made before a worker starts. Changelogs are made, agents' topics are not."""
    matrix.worker(app=f"{matrix.case.app}-bare", tables=True)
    admin = AdminClient({"bootstrap.servers": matrix.case.bootstrap})
    changelog = f"{matrix.case.app}-bare-{matrix.case.app}-bare-counts-changelog"
    deadline = time.monotonic() + 30
    while changelog not in (names := admin.list_topics(timeout=5).topics):
        assert time.monotonic() < deadline, sorted(names)
        time.sleep(0.2)
    assert f"{matrix.case.app}-bare-events" not in names
