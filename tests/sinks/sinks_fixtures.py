"""Fixtures of the sinks' tests: one store process, and a database of its own for each test."""

import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from latencyprism.sinks.client import connect
from latencyprism.sinks.config import StoreConfig
from latencyprism.sinks.migrations.migrate import apply
from latencyprism.sinks.store.process import StoreProcess

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client


@pytest.fixture(scope="session")
def store() -> Iterator[StoreProcess]:
    """One embedded store for all tests; a test takes a database of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="latencyprism-store-") as folder,
        StoreProcess(Path(folder)) as process,
    ):
        yield process


@pytest.fixture
def config(store: StoreProcess) -> StoreConfig:
    """A database of this test's own, not made yet."""
    return StoreConfig(url=store.url, database=f"t{uuid.uuid4().hex[:10]}")


@pytest.fixture
def client(config: StoreConfig) -> Iterator["Client"]:
    """A client of the test's database, its tables made; both are gone after the test."""
    client = connect(config)
    apply(client, config)
    yield client
    client.command(f"DROP DATABASE {config.database}", use_database=False)
    client.close()
