"""Brings the tables of a store up to date, once each file and in the order of their numbers."""

import hashlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Literal

from clickhouse_connect.driver.exceptions import ClickHouseError

from latencyprism.sinks.client import explained
from latencyprism.sinks.config import StoreConfig
from latencyprism.sinks.migrations.script import removes_data, statements
from latencyprism.sinks.tables import TABLES

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

logger = logging.getLogger(__name__)

_CREATE_LEDGER = """
CREATE TABLE IF NOT EXISTS migrations
(
    name String COMMENT 'File of the migration.',
    checksum String COMMENT 'SHA-256 of the file when it was applied, 64 hex digits.',
    applied_at DateTime64(3, 'UTC') DEFAULT now64(3) COMMENT 'When it was applied.'
)
ENGINE = ReplacingMergeTree
ORDER BY name
COMMENT 'Which migrations have been applied.'
"""
_TTL_DAYS = re.compile(r"TTL toDateTime\((\w+)\) \+ toIntervalDay\((\d+)\)")
UNKNOWN_TABLE, UNKNOWN_DATABASE = 60, 81

State = Literal["pending", "applied", "changed", "foreign"]


class MigrationError(RuntimeError):
    """The tables were left as they are; the text says which file stands against it and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """A numbered SQL file."""

    name: str
    sql: str

    @property
    def checksum(self) -> str:
        """SHA-256 of the file, 64 hex digits."""
        return hashlib.sha256(self.sql.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationStatus:
    """Where a migration stands in a store.

    pending: not applied; applied: as shipped; changed: the file is not the one that was applied;
    foreign: applied by another release, which had a file that this one has not.
    """

    name: str
    state: State


def shipped() -> tuple[Migration, ...]:
    """The migrations of this release in order."""
    folder = files("latencyprism.sinks.migrations")
    return tuple(
        Migration(name=entry.name, sql=entry.read_text())
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".sql")
    )


def status(
    client: "Client", config: StoreConfig, migrations: Sequence[Migration] | None = None
) -> list[MigrationStatus]:
    """Every migration of this release and of the store. Raises :class:`StoreError`."""
    with _words(config):
        applied = _applied(client)
    migrations = shipped() if migrations is None else migrations
    known = {migration.name for migration in migrations}
    return [
        *(MigrationStatus(name=m.name, state=_state(m, applied.get(m.name))) for m in migrations),
        *(
            MigrationStatus(name=name, state="foreign")
            for name in sorted(applied)
            if name not in known
        ),
    ]


def dry_run(
    client: "Client", config: StoreConfig, migrations: Sequence[Migration] | None = None
) -> list[str]:
    """The statements that :func:`apply` would run, in order. Raises :class:`StoreError`."""
    migrations = shipped() if migrations is None else migrations
    return [text for m in _pending(client, config, migrations) for text in statements(m.sql)]


def apply(
    client: "Client",
    config: StoreConfig,
    *,
    force: bool = False,
    migrations: Sequence[Migration] | None = None,
) -> list[str]:
    """Apply what is pending and set the configured retention; names of what was applied.

    Idempotent: every file may run again from its start, as it does after a failure half way.
    Raises :class:`MigrationError` before anything is done when an applied file has changed, or
    when one removes data and ``force`` is not given; :class:`StoreError` when the store fails.
    """
    migrations = shipped() if migrations is None else migrations
    pending = _pending(client, config, migrations)
    if not force:
        _refuse_dangerous(pending)
    with _words(config):
        client.command(f"CREATE DATABASE IF NOT EXISTS {_quoted(config)}", use_database=False)
        client.command(_CREATE_LEDGER)
        for migration in pending:
            for statement in statements(migration.sql):
                client.command(statement)
            client.insert(
                "migrations",
                [[migration.name, migration.checksum]],
                column_names=["name", "checksum"],
            )
            logger.info("applied migration %s to %s", migration.name, config.database)
        _set_retention(client, config)
    return [migration.name for migration in pending]


def missing_columns(client: "Client", config: StoreConfig) -> list[str]:
    """Columns that the writer fills and the store has not, as ``table.column``.

    Empty after :func:`apply`. Raises :class:`StoreError`.
    """
    with _words(config):
        found = client.query(
            "SELECT table, name FROM system.columns WHERE database = {database:String}",
            parameters={"database": config.database},
        ).result_rows
    there = {f"{table}.{name}" for table, name in found}
    wanted = (f"{table.name}.{column.name}" for table in TABLES for column in table.columns)
    return [name for name in wanted if name not in there]


def _pending(
    client: "Client", config: StoreConfig, migrations: Iterable[Migration]
) -> list[Migration]:
    with _words(config):
        applied = _applied(client)
    changed = [m.name for m in migrations if _state(m, applied.get(m.name)) == "changed"]
    if changed:
        raise MigrationError(
            f"{', '.join(changed)}: changed after being applied to {config.database}; put the "
            "file back as it was and bring the change in a new one"
        )
    return [m for m in migrations if m.name not in applied]


def _refuse_dangerous(pending: Iterable[Migration]) -> None:
    for migration in pending:
        for statement in statements(migration.sql):
            if removes_data(statement):
                raise MigrationError(
                    f"{migration.name} removes data ({' '.join(statement.split())[:80]}): apply it "
                    "with --force"
                )


def _state(migration: Migration, applied_checksum: str | None) -> State:
    if applied_checksum is None:
        return "pending"
    return "applied" if applied_checksum == migration.checksum else "changed"


def _applied(client: "Client") -> Mapping[str, str]:
    """Checksum by name; empty where no migration was ever applied."""
    try:
        rows = client.query("SELECT name, checksum FROM migrations FINAL").result_rows
    except ClickHouseError as e:
        if getattr(e, "code", None) in (UNKNOWN_TABLE, UNKNOWN_DATABASE):
            return {}
        raise
    return {str(name): str(checksum) for name, checksum in rows}


def _set_retention(client: "Client", config: StoreConfig) -> None:
    """Make the tables' TTL the configured one; a table that has it is left alone."""
    rows = client.query(
        "SELECT name, engine_full FROM system.tables WHERE database = {database:String}",
        parameters={"database": config.database},
    ).result_rows
    for name, engine in rows:
        if match := _TTL_DAYS.search(engine):
            column, days = match[1], int(match[2])
            wanted = (
                config.retention_days if column == "inserted_at" else config.rollup_retention_days
            )
            if days != wanted:
                client.command(
                    f"ALTER TABLE {name} MODIFY TTL toDateTime({column}) + toIntervalDay({wanted})",
                    settings={"materialize_ttl_after_modify": 0},
                )
                logger.info("%s keeps rows for %d days instead of %d", name, wanted, days)


def _quoted(config: StoreConfig) -> str:
    return "`" + config.database.replace("`", "\\`") + "`"


@contextmanager
def _words(config: StoreConfig) -> Iterator[None]:
    try:
        yield
    except ClickHouseError as e:
        raise explained(e, config.url or config.directory) from e
