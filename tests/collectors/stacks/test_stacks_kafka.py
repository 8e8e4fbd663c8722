"""Alerts of a real broker, heard by one reader after another."""

import time
from dataclasses import replace

from kafka_io import KafkaIO
from test_stacks_choice import FAULT

from latencyprism.collectors.stacks.alerts import KafkaAlerts
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
