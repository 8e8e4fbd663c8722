"""A Kafka that asks for TLS and a password, reached with the product's settings."""

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from kafka_io import KafkaIO

from latencyprism import deadletters
from latencyprism.local.broker import HOST, free_port
from latencyprism.local.kafka import EmbeddedKafka
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.topics import ALERTS
from latencyprism.topics_admin import TopicsError, ensure_topics

USER, PASSWORD = "prism", "a password"


class SecuredKafka(EmbeddedKafka):
    """Beside the plain listener one that takes SASL over TLS."""

    secured_port = 0
    certificate = Path()

    def _properties(self, port: int, directory: Path) -> dict[str, object]:
        values = super()._properties(port, directory)
        secured = f",SECURED://{HOST}:{self.secured_port}"
        return values | {
            "listeners": f"{values['listeners']}{secured}",
            "advertised.listeners": f"{values['advertised.listeners']}{secured}",
            "listener.security.protocol.map": (
                "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURED:SASL_SSL"
            ),
            "listener.name.secured.sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "listener.name.secured.scram-sha-512.sasl.jaas.config": (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            ),
            "listener.name.secured.ssl.keystore.type": "PEM",
            "listener.name.secured.ssl.keystore.location": self.certificate,
        }


@pytest.fixture(scope="module")
def secured(
    kafka_broker: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KafkaConfig]:
    """Settings for a secured Kafka; the session's broker is asked for only to skip without Java."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, so no certificate can be made")
    folder = tmp_path_factory.mktemp("secured")
    key, ca, both = folder / "key.pem", folder / "ca.pem", folder / "both.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=kafka", "-addext", f"subjectAltName=IP:{HOST}"),
            *("-keyout", str(key), "-out", str(ca)),
        ],
        check=True,
        capture_output=True,
    )
    both.write_text(key.read_text() + ca.read_text())
    broker = SecuredKafka()
    broker.secured_port, broker.certificate = free_port(), both
    with broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        scram = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        upsertion = UserScramCredentialUpsertion(USER, scram, PASSWORD.encode())
        admin.alter_user_scram_credentials([upsertion])[USER].result(20)
        yield KafkaConfig(
            bootstrap=f"{HOST}:{broker.secured_port}",
            prefix="secured",
            partitions=1,
            security_protocol="SASL_SSL",
            sasl_mechanism="SCRAM-SHA-512",
            sasl_username=USER,
            sasl_password=PASSWORD,
            ssl_ca=str(ca),
        )


def test_topics_and_messages_go_over_sasl_and_tls(secured: KafkaConfig) -> None:
    assert ensure_topics(secured, timeout_s=20).findings == ()
    io = KafkaIO(secured)
    io.send_bytes(ALERTS, [("chat", b"x")])
    assert io.read_messages(ALERTS, 1)[0].value() == b"x"
    assert deadletters.read(secured, limit=1).total == 0


async def test_the_stream_workers_client_takes_the_same_settings(secured: KafkaConfig) -> None:
    pytest.importorskip("faust", reason="the extra 'streams' is not installed")
    from aiokafka.admin import AIOKafkaAdminClient
    from faust.transport.drivers.aiokafka import credentials_to_aiokafka_auth

    from latencyprism.streams.app import credentials

    auth = credentials_to_aiokafka_auth(credentials(secured), secured.ssl_context())
    client = AIOKafkaAdminClient(bootstrap_servers=secured.bootstrap, **auth)
    await client.start()
    try:
        assert (await client.describe_cluster())["brokers"]
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sasl_password": "wrong"}, "(?i)authentication failed"),
        ({"ssl_ca": ""}, "(?i)certificate verify failed"),
        ({"security_protocol": "PLAINTEXT"}, "takes PLAINTEXT there"),
    ],
)
def test_wrong_credentials_are_told(
    secured: KafkaConfig, changes: dict[str, str], words: str
) -> None:
    with pytest.raises(TopicsError, match=words):
        ensure_topics(replace(secured, **changes), timeout_s=3)  # type: ignore[arg-type] # texts
