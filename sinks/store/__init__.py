"""The embedded store: one process that owns a chDB folder and serves ClickHouse's HTTP protocol."""

from latencyprism.sinks.store.lock import DirectoryTakenError
from latencyprism.sinks.store.server import serve_store

__all__ = ["DirectoryTakenError", "serve_store"]
