"""Reaching the store from a command: a server by URL, or the embedded one for the moment."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from latencyprism import settings as settings_module
from latencyprism.children import Supervisor
from latencyprism.settings import Settings
from latencyprism.sinks.client import connect
from latencyprism.sinks.migrations.migrate import apply
from latencyprism.stack import READY_TIMEOUT_S

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client


def store_directory(settings: Settings) -> Path:
    """Folder of the embedded store."""
    return Path(settings.store.directory or settings.data_dir / "store")


@contextmanager
def open_store(settings: Settings, *, migrated: bool = True) -> Iterator["Client"]:
    """A client of the store; ``migrated`` brings its tables up to date first.

    Without a URL the embedded store's folder is opened by a store process that ends with the
    block; OSError when another process has it, with the words to reach that one instead.
    """
    if settings.store.url:
        client = connect(settings.store)
        try:
            yield _migrated(client, settings) if migrated else client
        finally:
            client.close()
        return
    run = settings.data_dir / "run"
    supervisor = Supervisor(run)
    try:
        port = supervisor.role(
            "store", "store", config=settings_module.write(settings, run)
        ).wait_ready(READY_TIMEOUT_S)
        url = f"http://127.0.0.1:{port}"
        local = settings.model_copy(update={"store": replace(settings.store, url=url)})
        with open_store(local, migrated=migrated) as client:
            yield client
    finally:
        supervisor.stop()


def _migrated(client: "Client", settings: Settings) -> "Client":
    apply(client, settings.store)
    return client
