"""Alerts of a real broker, heard by one reader after another."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from kafka_io import KafkaIO
from test_stacks import fake_sample
from test_stacks_choice import FAULT

from latencyprism.collectors.publisher import MemoryPublisher
from latencyprism.collectors.stacks import profile as profile_module
from latencyprism.collectors.stacks import source as source_module
from latencyprism.collectors.stacks.alerts import KafkaAlerts
from latencyprism.collectors.stacks.choice import Choice
from latencyprism.collectors.stacks.config import StacksConfig
from latencyprism.collectors.stacks.source import StacksSource
from latencyprism.schemas.topics import ALERTS


def heard(alerts: KafkaAlerts, wait_s: float = 10.0) -> list[str]:
    """Ids of what comes until something came, or nothing for so long."""
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        if ids := [alert.alert_id for alert in alerts.poll(0.1)]:
            return ids
    return []


def test_a_reader_begins_at_the_end_and_the_next_misses_nothing(kafka_io: KafkaIO) -> None:
    offsets: dict[int, int] = {}
    kafka_io.send(ALERTS, FAULT, key="m")
    first = KafkaAlerts(kafka_io.kafka, offsets=offsets)
    assert heard(first, 3.0) == [], "what came before is over"
    kafka_io.send(ALERTS, replace(FAULT, alert_id="a2"), key="m")
    assert heard(first) == ["a2"]
    first.close()

    kafka_io.send(ALERTS, replace(FAULT, alert_id="a3"), key="m")
    second = KafkaAlerts(kafka_io.kafka, offsets=offsets)
    assert heard(second) == ["a3"]
    second.close()


def test_a_source_ends_in_time_and_the_next_takes_the_fault_of_between(
    kafka_io: KafkaIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_module, "sample", fake_sample)
    monkeypatch.setattr(source_module, "program", lambda _: "py-spy")
    offsets: dict[int, int] = {}
    choice, publisher = Choice(), MemoryPublisher()
    now_ns = time.time_ns()
    fault = replace(FAULT, fired_ns=now_ns, updated_ns=now_ns)

    @contextmanager
    def running() -> Iterator[None]:
        source = StacksSource(
            (f"http://{FAULT.instance}",),
            StacksConfig(duration_s=1),
            lambda: KafkaAlerts(kafka_io.kafka, offsets=offsets),
            choice=choice,
            processes=lambda port: {port: "core"},
        )
        stop = threading.Event()
        thread = threading.Thread(target=source.run, args=(publisher, stop))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(0.5)
        assert not thread.is_alive()

    def taken() -> list[str]:
        publisher.flush()
        return [p.fingerprint for packed in publisher.packs for p in packed.pack.samples]

    with running():
        until(lambda: bool(offsets))
        kafka_io.send(ALERTS, fault, key="m")
        until(lambda: taken() == ["f1"])
    kafka_io.send(ALERTS, replace(fault, fingerprint="f2"), key="m")
    with running():
        until(lambda: taken() == ["f1", "f2"])


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
