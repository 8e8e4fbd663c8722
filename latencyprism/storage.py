"""Reaching the store from a command: a server by URL, or the embedded one for the moment."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from latencyprism import settings as settings_module
from latencyprism.children import Supervisor
from latencyprism.settings import Settings
from latencyprism.sinks.client import connect
from latencyprism.sinks.errors import StoreAwayError
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

    Without a URL it is the embedded store: that of a running ``up`` if there is one, else a store
    process on its folder that ends with the block. Raises :class:`StoreError` in words.
    """
    directory = store_directory(settings)
    config = replace(settings.store, directory=str(directory))
    with ExitStack() as stack:
        try:
            client = connect(config)
        except StoreAwayError:
            if config.url:
                raise
            stack.enter_context(_store_process(settings))
            client = connect(config)
        stack.callback(client.close)
        if migrated:
            apply(client, config)
        yield client


@contextmanager
def _store_process(settings: Settings) -> Iterator[None]:
    run = settings.data_dir / "run" / "query"
    supervisor = Supervisor(run)
    try:
        store = supervisor.role("store", "store", config=settings_module.write(settings, run))
        store.wait_ready(READY_TIMEOUT_S)
        yield
    finally:
        supervisor.stop()
