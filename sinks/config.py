"""How the store is reached, how it is written to and how long it keeps what it was given."""

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Le, MinLen


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Address and credentials of a ClickHouse server, or the folder of the embedded store."""

    url: str = ""
    """A server as http://host:8123 or https://host:8443; empty for the embedded store, whose
    process is found through ``directory``."""
    directory: str = ""
    """Folder of the embedded store; one store process owns it."""
    database: Annotated[str, MinLen(1)] = "latencyprism"
    """Database that holds the tables; made by the migrations."""
    username: str = "default"
    password: str = field(default="", repr=False)
    verify_tls: bool = True
    """Check the server's certificate against an authority."""
    tls_ca: str = ""
    """PEM file of the authority that signed it; empty uses the system's."""
    connect_timeout_s: Annotated[float, Ge(0.1)] = 5.0
    request_timeout_s: Annotated[float, Ge(1.0)] = 60.0
    """Longest wait for the answer to an insert or a query."""
    batch_rows: Annotated[int, Ge(1), Le(100_000)] = 10_000
    """Rows of one table at which they are inserted without waiting for ``flush_ms``."""
    flush_ms: Annotated[int, Ge(10)] = 1_000
    """Longest time a row waits to be inserted while the store takes rows, ms."""
    buffer_mb: Annotated[int, Ge(1)] = 64
    """Message bytes held for all tables together; beyond it the writer reads no further, MB."""
    retry_max_ms: Annotated[int, Ge(10)] = 10_000
    """Longest pause between two attempts while the store is away, ms; the first waits 200."""
    retention_days: Annotated[int, Ge(1)] = 30
    """Days a row is kept, counted from when it was written so that replayed history stays."""
    rollup_retention_days: Annotated[int, Ge(1)] = 400
    """Days a per-minute summary is kept after its last change."""
