"""A real Apache Kafka on this machine without Docker: one KRaft node, loopback only."""

import logging
import os
import subprocess
from pathlib import Path

from latencyprism.local.broker import (
    HOST,
    BrokerError,
    LocalBroker,
    UnavailableError,
    free_port,
)
from latencyprism.local.fallback import FallbackBroker
from latencyprism.local.jars import ensure_jars, find_java, kafka_version

logger = logging.getLogger(__name__)

LOG4J = Path(__file__).with_name("log4j2.xml")
CLUSTER_ID = "bGF0ZW5jeXByaXNtLWxvYw"
FORMAT_TIMEOUT_S = 60.0

# A cluster of one, small and quick to start; what is not named stands as Kafka ships it.
PROPERTIES: dict[str, object] = {
    "process.roles": "broker,controller",
    "node.id": 1,
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    "auto.create.topics.enable": "false",
    "auto.leader.rebalance.enable": "false",
    "group.initial.rebalance.delay.ms": 0,
    "offsets.topic.num.partitions": 4,
    "offsets.topic.replication.factor": 1,
    "transaction.state.log.num.partitions": 4,
    "transaction.state.log.replication.factor": 1,
    "transaction.state.log.min.isr": 1,
    "share.coordinator.state.topic.num.partitions": 1,
    "share.coordinator.state.topic.replication.factor": 1,
    "share.coordinator.state.topic.min.isr": 1,
    "num.network.threads": 2,
    "num.io.threads": 4,
    # After a crash the node is let back in when its old session is over.
    "broker.session.timeout.ms": 5_000,
    "broker.heartbeat.interval.ms": 1_000,
    "log.cleaner.dedupe.buffer.size": 16 * 2**20,
    # Bounds the disk: a partition holds at most 256 MiB and a segment.
    "log.segment.bytes": 64 * 2**20,
    "log.retention.bytes": 256 * 2**20,
    "log.index.size.max.bytes": 2**20,
}


def start_broker(*, directory: Path | None = None, port: int | None = None) -> LocalBroker:
    """Start real Kafka where Java is, else the fallback with its limits logged as warnings.

    Blocks 3 to 6 s, minutes when Kafka's jars have to be fetched first. Raises
    :class:`BrokerError` saying what to install, or why the broker did not start. The result is
    a context manager that stops it.
    """
    try:
        return EmbeddedKafka(directory=directory, port=port).start()
    except UnavailableError as no_kafka:
        try:
            fallback = FallbackBroker(directory=directory, port=port).start()
        except UnavailableError as no_fallback:
            raise BrokerError(
                f"{no_kafka}. {no_fallback}. Or set kafka.bootstrap to a Kafka cluster"
            ) from no_fallback
        logger.warning("%s. Running %s instead", no_kafka, fallback.name)
        for limit in fallback.limits:
            logger.warning("a limit of this broker: %s", limit)
        return fallback


class EmbeddedKafka(LocalBroker):
    """Apache Kafka in KRaft's combined mode, its jars resolved with Maven at the first start.

    The first run on a machine writes an archive of the loaded classes beside the jars when it is
    stopped (5 s, 50 MB); later starts take 40 % less time by it.
    """

    product = f"Apache Kafka {kafka_version()}"

    def __init__(
        self, *, directory: Path | None = None, port: int | None = None, heap_mb: int = 384
    ) -> None:
        super().__init__(directory=directory, port=port)
        self._heap_mb = heap_mb
        self._archive: _ClassArchive | None = None

    def stop(self) -> None:
        super().stop()
        if self._archive is not None:
            self._archive.keep()

    def _command(self, port: int, directory: Path) -> list[str]:
        java, jars = find_java(), ensure_jars()
        self._archive = _ClassArchive(jars)
        properties = directory / "server.properties"
        values = self._properties(port, directory)
        properties.write_text("".join(f"{key}={value}\n" for key, value in values.items()))
        program = [
            java,
            f"-Xmx{self._heap_mb}m",
            *("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xlog:disable", "-Xlog:all=error"),
            f"-Dlog4j2.configurationFile={LOG4J}",
            f"-Dlatencyprism.log={directory / 'kafka.log'}",
            *("-cp", f"{jars}/*"),
        ]
        if not (directory / "data" / "meta.properties").exists():
            _format(program, properties)
        return [program[0], *self._archive.options(), *program[1:], "kafka.Kafka", str(properties)]

    def _properties(self, port: int, directory: Path) -> dict[str, object]:
        data, controller = directory / "data", free_port()
        if "," in str(data):
            raise BrokerError(f"Kafka takes no folder with a comma in its name: {data}")
        return PROPERTIES | {
            "listeners": f"PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller}",
            "advertised.listeners": f"PLAINTEXT://{HOST}:{port}",
            "controller.quorum.voters": f"1@{HOST}:{controller}",
            "log.dirs": data,
        }


def _format(program: list[str], properties: Path) -> None:
    done = subprocess.run(
        [*program, "kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c", str(properties)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=FORMAT_TIMEOUT_S,
    )
    if done.returncode:
        raise BrokerError(
            f"Kafka could not format its storage: {(done.stderr or done.stdout)[-2000:]}"
        )


class _ClassArchive:
    """The JVM's dynamic archive of loaded classes, which it ignores when it does not fit."""

    def __init__(self, jars: Path) -> None:
        self._path = jars / "classes.jsa"
        self._new = jars / f"classes-{os.getpid()}.tmp"

    def options(self) -> list[str]:
        if self._path.exists():
            return [f"-XX:SharedArchiveFile={self._path}"]
        return [f"-XX:ArchiveClassesAtExit={self._new}"]

    def keep(self) -> None:
        if self._new.exists():
            self._new.replace(self._path)
