"""The consumer on a real Kafka: obeys, answers, survives bad bytes and a lost broker."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from kafka_io import KafkaIO

from latencyprism.local.broker import UnavailableError
from latencyprism.local.kafka import EmbeddedKafka
from latencyprism.routers.adapter import MemoryAdapter
from latencyprism.routers.config import LeaseRules, RouterConfig
from latencyprism.routers.consumer import ControlConsumer, run_router
from latencyprism.routers.controller import Controller
from latencyprism.routers.lease import NORMAL, LeaseBook, TargetState
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.records import Ack, Action, Command, DeadLetter
from latencyprism.schemas.topics import CONTROL_ACKS, CONTROL_COMMANDS, DEADLETTER
from latencyprism.topics_admin import ensure_topics

CONFIG = RouterConfig(
    router="r1",
    targets={"a:1": "a", "b:1": "b"},
    rules=LeaseRules(lease_max_ms=60_000),
    verify_s=0.2,
)


def command(
    action: Action = "drain",
    *,
    target: str = "a:1",
    epoch: int = 1,
    lease_ms: int = 60_000,
    age_s: float = 0,
) -> Command:
    return Command(
        command_id=f"{target}-{epoch}",
        target=target,
        service="small",
        epoch=epoch,
        issued_ns=time.time_ns() - round(age_s * 1e9),
        lease_ms=lease_ms,
        action=action,
        value=0.5 if action == "weight" else None,
        reason="test",
        dry_run=False,
    )


class Running:
    """A consumer in its thread, with an adapter that keeps states in memory."""

    def __init__(self, kafka: KafkaConfig) -> None:
        self.adapter = MemoryAdapter()
        controller = Controller(
            LeaseBook(CONFIG.targets, CONFIG.rules), self.adapter, router=CONFIG.router
        )
        self.consumer = ControlConsumer(controller, CONFIG, kafka)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.consumer.run, args=(self.stop,))
        self.thread.start()

    def state(self, target: str = "a:1") -> TargetState | None:
        return self.adapter.states.get(target)

    def until(self, condition: Callable[[], bool], timeout_s: float = 15) -> None:
        ends = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < ends, self.adapter.states
            time.sleep(0.01)


@contextmanager
def running(kafka: KafkaConfig, *, caught_up: bool = True) -> Iterator[Running]:
    subject = Running(kafka)
    try:
        if caught_up:
            assert subject.consumer.caught_up.wait(20)
            subject.until(lambda: "a:1" in subject.adapter.states)
        yield subject
    finally:
        subject.stop.set()
        subject.thread.join(20)
        assert not subject.thread.is_alive()


def test_command_is_obeyed_answered_and_ends(kafka: KafkaConfig, kafka_io: KafkaIO) -> None:
    with running(kafka) as router:
        kafka_io.send(CONTROL_COMMANDS, command(lease_ms=1_000), key="a:1")
        router.until(lambda: router.state() == TargetState(drained=True))
        router.until(lambda: router.state() == NORMAL)
        applied, expired = kafka_io.read(CONTROL_ACKS, 2)
    assert isinstance(applied, Ack)
    assert (applied.effect, applied.ack_id) == ("applied", "a:1-1/1/r1/applied")
    assert (expired.effect, expired.router, expired.epoch) == ("expired", "r1", 1)
    assert 800e6 < expired.at_ns - applied.at_ns < 3_000e6


def test_restarted_router_obeys_the_leases_that_still_run(
    kafka: KafkaConfig, kafka_io: KafkaIO
) -> None:
    kafka_io.send(CONTROL_COMMANDS, command("weight", epoch=3), key="a:1")
    kafka_io.send(CONTROL_COMMANDS, command(target="b:1", lease_ms=500, age_s=5), key="b:1")
    with running(kafka) as router:
        router.until(lambda: router.state("b:1") is not None)
        assert router.state("a:1") == TargetState(weight=0.5)
        assert router.state("b:1") == NORMAL
        kafka_io.send(CONTROL_COMMANDS, command(epoch=2), key="a:1")
        acks = {(a.target, a.epoch): a.effect for a in kafka_io.read(CONTROL_ACKS, 3)}
    assert acks == {("a:1", 3): "applied", ("b:1", 1): "expired", ("a:1", 2): "refused"}


def test_router_that_stops_brings_its_targets_back(kafka: KafkaConfig, kafka_io: KafkaIO) -> None:
    with running(kafka) as router:
        kafka_io.send(CONTROL_COMMANDS, command(), key="a:1")
        router.until(lambda: router.state() == TargetState(drained=True))
    assert router.state() == NORMAL


def test_bad_bytes_become_dead_letters_and_the_next_command_is_obeyed(
    kafka: KafkaConfig, kafka_io: KafkaIO
) -> None:
    ack = Ack(ack_id="x", command_id="x", target="a:1", epoch=1, router="r", effect="applied",
              dry_run=False, at_ns=1)  # fmt: skip
    wrong = kafka_io.codec.encode(CONTROL_ACKS, ack)
    cut = kafka_io.codec.encode(CONTROL_COMMANDS, command())[:-3]
    bad = [b"", b"rubbish", wrong, cut]
    with running(kafka) as router:
        kafka_io.send_bytes(CONTROL_COMMANDS, [("a:1", value) for value in bad])
        kafka_io.send(CONTROL_COMMANDS, command(), key="a:1")
        router.until(lambda: router.state() == TargetState(drained=True))
        letters = kafka_io.read(DEADLETTER, 4)
        assert router.consumer.counts["dead_letters"] == 4
    assert all(isinstance(letter, DeadLetter) for letter in letters)
    assert [letter.reason for letter in letters] == [
        "empty",
        "bad_magic",
        "wrong_record",
        "malformed",
    ]
    assert [letter.payload for letter in letters] == bad
    assert {(x.topic, x.component, x.key) for x in letters} == {
        (kafka.topic(CONTROL_COMMANDS), "routers", b"a:1")
    }
    assert len({x.offset for x in letters}) == 4


def test_command_for_another_router_is_not_answered(kafka: KafkaConfig, kafka_io: KafkaIO) -> None:
    with running(kafka):
        kafka_io.send(CONTROL_COMMANDS, command(target="z:9"), key="a:1")
        kafka_io.send(CONTROL_COMMANDS, command(), key="a:1")
        (ack,) = kafka_io.read(CONTROL_ACKS, 1)
    assert ack.target == "a:1"


@pytest.mark.kafka
@pytest.mark.slow
def test_lost_broker_prolongs_no_lease_and_its_return_is_noticed(tmp_path: Path) -> None:
    with _own_broker(tmp_path) as broker:
        kafka = KafkaConfig(bootstrap=broker.bootstrap, prefix="lost", partitions=1)
        with running(kafka, caught_up=False) as router:
            # The topics are not there yet: targets are brought to normal all the same.
            router.until(lambda: router.state() == NORMAL)
            ensure_topics(kafka, timeout_s=30)
            outside = KafkaIO(kafka)
            outside.send(CONTROL_COMMANDS, command(lease_ms=4_000), key="a:1")
            router.until(lambda: router.state() == TargetState(drained=True))
            broker.kill()
            router.until(lambda: router.state() == NORMAL)
            broker.start()
            outside.send(CONTROL_COMMANDS, command("weight", epoch=2), key="a:1")
            router.until(lambda: router.state() == TargetState(weight=0.5), timeout_s=40)
            # The answer given while the broker was away has been kept.
            acks = {(ack.epoch, ack.effect) for ack in outside.read(CONTROL_ACKS, 3)}
    assert acks == {(1, "applied"), (1, "expired"), (2, "applied")}


def _own_broker(folder: Path) -> AbstractContextManager[EmbeddedKafka]:
    try:
        return EmbeddedKafka(directory=folder).start()
    except UnavailableError as error:
        pytest.skip(str(error))


def test_broker_that_is_away_from_the_start_keeps_nobody_throttled() -> None:
    with running(KafkaConfig(bootstrap="127.0.0.1:1"), caught_up=False) as router:
        router.until(lambda: router.state() == NORMAL)
        assert router.consumer.caught_up.is_set()


def test_router_without_targets_says_what_to_give() -> None:
    with pytest.raises(ValueError, match=r"give router\.targets"):
        run_router(RouterConfig(), KafkaConfig())
