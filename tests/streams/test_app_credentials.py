"""How the application logs in."""

import ssl
from dataclasses import replace

import faust

from latencyprism.schemas.connection import KafkaConfig
from latencyprism.streams.app import credentials


def test_an_open_cluster_needs_nothing() -> None:
    assert credentials(KafkaConfig()) is None


def test_tls_alone() -> None:
    found = credentials(KafkaConfig(security_protocol="SSL"))
    assert isinstance(found, faust.SSLCredentials)
    assert isinstance(found.context, ssl.SSLContext)


def test_a_password_with_and_without_tls() -> None:
    config = KafkaConfig(security_protocol="SASL_PLAINTEXT", sasl_username="u", sasl_password="p")
    plain = credentials(config)
    assert (plain.username, plain.password, plain.protocol.value) == ("u", "p", "SASL_PLAINTEXT")
    assert plain.mechanism.value == "SCRAM-SHA-512"
    covered = credentials(replace(config, security_protocol="SASL_SSL"))
    assert covered.protocol.value == "SASL_SSL"
    assert isinstance(covered.ssl_context, ssl.SSLContext)
