"""ClickHouse behind the sink's ports."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from clickhouse_connect.driver.exceptions import ClickHouseError

from latencyprism.sinks.client import connect, explained
from latencyprism.sinks.config import StoreConfig
from latencyprism.sinks.errors import RowsRefusedError
from latencyprism.sinks.tables import Row, Table

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

SETTINGS = {
    "async_insert": 0,  # an answer means stored
    "input_format_null_as_default": 0,  # what was not seen must not become 0
    "input_format_skip_unknown_fields": 0,
    "max_partitions_per_insert_block": 0,  # a replay may span many days
}


class ClickHouseRows:
    """Inserts blocks of rows. Not thread-safe.

    Connects when first used and again after the store was away, since a restarted embedded store
    has another port.
    """

    def __init__(self, config: StoreConfig) -> None:
        self._config = config
        self._client: Client | None = None

    def insert(self, table: Table, rows: Sequence[Row]) -> None:
        """One insert in one format-Arrow block; atomic for the rows of one day."""
        block = table.arrow(rows)
        if self._client is None:
            self._client = connect(self._config)
        try:
            self._client.insert_arrow(table.name, block, settings=SETTINGS)
        except ClickHouseError as e:
            error = explained(e, self._client.uri)
            if not isinstance(error, RowsRefusedError):
                self.close()
            raise error from e

    def close(self) -> None:
        """Drop the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None
