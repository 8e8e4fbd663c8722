"""A worker waits for its cluster, and says so."""

import logging
import threading
import time

import pytest

from latencyprism.schemas.connection import KafkaConfig
from latencyprism.streams import worker
from latencyprism.streams.worker import Sparse, wait_for_topics
from latencyprism.topics_admin import ensure_topics


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "WAIT_S", 0.2)


def test_it_waits_for_a_cluster_that_is_away_until_it_is_stopped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stop = threading.Event()
    threading.Timer(1.0, stop.set).start()
    began = time.monotonic()
    assert not wait_for_topics(KafkaConfig(bootstrap="127.0.0.1:9"), stop)
    assert time.monotonic() - began < 5
    said = [r.getMessage() for r in caplog.records if r.name == worker.__name__]
    assert len(said) > 1
    assert "waiting for Kafka at 127.0.0.1:9" in said[0]


@pytest.mark.kafka
def test_it_waits_for_topics_that_are_missing(
    kafka: KafkaConfig, caplog: pytest.LogCaptureFixture
) -> None:
    other = KafkaConfig(bootstrap=kafka.bootstrap, prefix=f"{kafka.prefix}x", partitions=1)
    maker = threading.Timer(1.0, ensure_topics, args=(other,), kwargs={"timeout_s": 30})
    maker.start()
    assert wait_for_topics(other, threading.Event())
    maker.join()
    assert "latencyprism topics --create" in caplog.text


def test_a_repeated_message_passes_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    sparse = Sparse()

    def passes(message: str, *arguments: object) -> bool:
        return sparse.filter(
            logging.LogRecord("x", logging.ERROR, "x", 1, message, arguments, None)
        )

    assert passes("no node %s", 1)
    assert passes("other")
    assert not passes("no node %s", 2)
    now[0] = worker.REPEAT_S
    assert passes("no node %s", 3)
