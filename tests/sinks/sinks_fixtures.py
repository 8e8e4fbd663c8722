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
from latencyprism.sinks.process import StoreProcess

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


@pytest.fixture(scope="session")
def migrated(store: StoreProcess) -> StoreConfig:
    """One database for the tests that leave its tables as they are."""
    config = StoreConfig(url=store.url, database="shared")
    client = connect(config)
    apply(client, config)
    client.close()
    return config


@pytest.fixture
def config(migrated: StoreConfig) -> Iterator[StoreConfig]:
    """The shared database; whatever the test wrote is gone after it."""
    yield migrated
    client = connect(migrated)
    used = client.query(
        "SELECT DISTINCT table FROM system.parts WHERE active AND database = {name:String}"
        " AND table != 'migrations'",
        parameters={"name": migrated.database},
    ).result_columns
    for table in used[0] if used else ():
        client.command(f"TRUNCATE TABLE {table}")
    client.close()


@pytest.fixture
def client(config: StoreConfig) -> Iterator["Client"]:
    """A client of the shared database."""
    client = connect(config)
    yield client
    client.close()


@pytest.fixture
def fresh(store: StoreProcess) -> Iterator[StoreConfig]:
    """A database of this test's own, not made yet, gone after it."""
    config = StoreConfig(url=store.url, database=f"t{uuid.uuid4().hex[:10]}")
    yield config
    client = connect(config)
    client.command(f"DROP DATABASE IF EXISTS {config.database}", use_database=False)
    client.close()
