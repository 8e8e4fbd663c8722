"""The brokers that a machine runs for itself, for real."""

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from latencyprism.local import broker as broker_module
from latencyprism.local import kafka as kafka_module
from latencyprism.local.broker import BrokerError, LocalBroker, UnavailableError, free_port
from latencyprism.local.fallback import FallbackBroker
from latencyprism.local.jars import kafka_version
from latencyprism.local.kafka import EmbeddedKafka, start_broker

real_kafka = pytest.mark.usefixtures("kafka_broker")  # which skips where Java is not


def write(broker: LocalBroker, topic: str, *values: bytes) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(20)
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for value in values:
        producer.produce(topic, value)
    assert producer.flush(20) == 0


def read(broker: LocalBroker, topic: str, count: int) -> list[bytes | None]:
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": uuid.uuid4().hex,
            "auto.offset.reset": "earliest",
        }
    )
    try:
        consumer.subscribe([topic])
        values: list[bytes | None] = []
        deadline = time.monotonic() + 30
        while len(values) < count and time.monotonic() < deadline:
            messages = consumer.consume(count - len(values), timeout=0.5)
            values += [message.value() for message in messages if message.error() is None]
        return values
    finally:
        consumer.close()


def answers(bootstrap: str) -> bool:
    host, _, port = bootstrap.partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def await_silence(bootstrap: str) -> None:
    deadline = time.monotonic() + 30
    while answers(bootstrap):
        assert time.monotonic() < deadline, "the broker still answers"
        time.sleep(0.1)


@real_kafka
def test_a_directory_outlives_crashes_and_restarts_of_kafka(tmp_path: Path) -> None:
    with EmbeddedKafka(directory=tmp_path) as broker:
        write(broker, "kept", b"1", b"2")
        address = broker.bootstrap
        broker.kill()
        assert not broker.running
        broker.start()
        assert broker.bootstrap == address
    with EmbeddedKafka(directory=tmp_path) as broker:
        assert read(broker, "kept", 2) == [b"1", b"2"]
        assert broker.name == f"Apache Kafka {kafka_version()} at {broker.bootstrap}"
        assert broker.start() is broker, "starting a running broker changes nothing"


@real_kafka
def test_kafka_dies_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys, time\n"
        "from latencyprism.local.kafka import EmbeddedKafka\n"
        "print(EmbeddedKafka(directory=pathlib.Path(sys.argv[1])).start().bootstrap, flush=True)\n"
        "time.sleep(300)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        bootstrap = parent.stdout.readline().strip()
        assert answers(bootstrap)
        os.kill(parent.pid, signal.SIGKILL)
    await_silence(bootstrap)


@real_kafka
def test_a_temporary_directory_is_removed_on_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with EmbeddedKafka() as broker:
        assert len(list(tmp_path.iterdir())) == 1
    assert not answers(broker.bootstrap)
    assert list(tmp_path.iterdir()) == []


@real_kafka
def test_a_second_broker_on_one_directory_is_told_why(tmp_path: Path) -> None:
    with EmbeddedKafka(directory=tmp_path):
        second = EmbeddedKafka(directory=tmp_path)
        with pytest.raises(BrokerError, match=f"another broker runs on {tmp_path}"):
            second.start()
        assert not second.running


@real_kafka
def test_kafka_that_ends_at_start_shows_its_log(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "meta.properties").write_text("version=1\nnode.id=7\ncluster.id=x\n")
    with pytest.raises(BrokerError, match=r"(?s)did not start: .*ended with status.*node.*7"):
        EmbeddedKafka(directory=tmp_path).start()


@real_kafka
def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(BrokerError, match=f"cannot listen on 127.0.0.1:{port}: another"):
            EmbeddedKafka(directory=tmp_path, port=port).start()


@real_kafka
def test_a_port_lost_to_another_program_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as rival:
        rival.bind(("127.0.0.1", 0))  # taken, and yet it does not answer
        lost = rival.getsockname()[1]
        ports = iter([lost])
        monkeypatch.setattr(broker_module, "free_port", lambda: next(ports, None) or free_port())
        with EmbeddedKafka(directory=tmp_path) as broker:
            assert answers(broker.bootstrap)
            assert broker.bootstrap != f"127.0.0.1:{lost}"
        assert "Address already in use" in (tmp_path / "kafka.log").read_text()


@real_kafka
def test_kafka_refuses_a_folder_that_it_would_split(tmp_path: Path) -> None:
    with pytest.raises(BrokerError, match="no folder with a comma"):
        EmbeddedKafka(directory=tmp_path / "a,b").start()


@pytest.fixture
def without_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "no-java"))


@pytest.mark.usefixtures("without_java")
def test_the_fallback_serves_where_java_is_not_and_states_its_limits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("noida_db", reason="the extra 'broker' is not installed")
    with start_broker(directory=tmp_path / "data") as broker:
        assert isinstance(broker, FallbackBroker)
        write(broker, "small", b"1", b"2", b"3")
        assert read(broker, "small", 3) == [b"1", b"2", b"3"]
        broker.stop()
        broker.start()
        assert read(broker, "small", 3) == [b"1", b"2", b"3"]
    warned = "\n".join(record.getMessage() for record in caplog.records)
    assert "there is no java in JAVA_HOME" in warned
    assert all(limit in warned for limit in FallbackBroker.limits)


@pytest.mark.usefixtures("without_java")
def test_without_any_broker_the_words_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(BrokerError) as failure:
        start_broker()
    assert not isinstance(failure.value, UnavailableError)
    for word in ("openjdk-17", "latencyprism[broker]", "kafka.bootstrap"):
        assert word in str(failure.value)


@real_kafka
def test_where_java_is_the_real_one_is_started() -> None:
    with start_broker() as broker:
        assert isinstance(broker, kafka_module.EmbeddedKafka)
        assert broker.limits == ()
