"""The stack of one machine comes back whole, whichever part of it is killed."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from kafka_io import KafkaIO

from latencyprism.children import FIRST_BACKOFF_S
from latencyprism.local.broker import BrokerError, LocalBroker
from latencyprism.schemas.records import Ack
from latencyprism.schemas.topics import CONTROL_ACKS
from latencyprism.settings import Settings
from latencyprism.stack import BrokerKeeper, Stack, running_stack
from latencyprism.storage import open_store

BACK_S = 60.0


class BrokenBroker(LocalBroker):
    """A broker that cannot run: its program is missing."""

    product = "broken"

    def _command(self, port: int, directory: Path) -> list[str]:  # noqa: ARG002 the base's contract
        self.starts = getattr(self, "starts", 0) + 1
        raise BrokerError("no such program")


@dataclass
class Clock:
    """Seconds that pass when told."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_broker_that_cannot_come_back_is_tried_with_backoff(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, broker = Clock(), BrokenBroker(directory=tmp_path, port=1)
    keeper = BrokerKeeper(broker, clock_s=clock)
    assert not keeper.revive()
    assert "no such program" in caplog.text
    clock.now += FIRST_BACKOFF_S / 2
    assert not keeper.revive()
    assert broker.starts == 1
    clock.now += FIRST_BACKOFF_S
    assert not keeper.revive()
    assert broker.starts == 2


def ack(number: int) -> Ack:
    return Ack(
        ack_id=f"a{number}",
        command_id="c",
        target="t:1",
        epoch=1,
        router="r",
        effect="applied",
        dry_run=False,
        at_ns=time.time_ns(),
    )


def wait(stack: Stack, until: Callable[[], bool], revived: list[str]) -> None:
    """Keep the stack alive until something holds."""
    deadline = time.monotonic() + BACK_S
    while not until():
        assert time.monotonic() < deadline, revived
        revived += stack.revive()
        time.sleep(0.1)


@pytest.mark.kafka
@pytest.mark.clickhouse
@pytest.mark.slow
def test_history_goes_on_after_the_store_and_the_broker_were_killed(tmp_path: Path) -> None:
    with running_stack(Settings(data_dir=tmp_path), workers=1, say=lambda _: None) as stack:
        kafka_io = KafkaIO(stack.settings.kafka)

        def stored() -> int:
            with open_store(stack.settings, migrated=False) as client:
                return int(str(client.query("SELECT count() FROM acks").result_rows[0][0]))

        def send(number: int) -> None:
            kafka_io.send(CONTROL_ACKS, ack(number), key="t:1")

        send(1)
        wait(stack, lambda: stored() == 1, [])

        revived: list[str] = []
        store = next(child for child in stack.supervisor.children if child.name == "store")
        assert store.process is not None
        os.kill(store.process.pid, signal.SIGKILL)
        store.process.wait()
        send(2)
        wait(stack, lambda: "store" in revived, revived)
        assert store.wait_ready(BACK_S)
        wait(stack, lambda: stored() == 2, revived)

        assert stack.keeper is not None
        stack.keeper.broker.kill()
        wait(stack, lambda: "Kafka" in revived, revived)
        send(3)
        wait(stack, lambda: stored() == 3, revived)
        assert revived == ["store", "Kafka"]
