"""Migrations on a real store, and what is told about SQL files without one."""

from dataclasses import replace

import pytest
from clickhouse_connect.driver.exceptions import DatabaseError

from latencyprism.sinks.client import connect
from latencyprism.sinks.config import StoreConfig
from latencyprism.sinks.errors import StoreAwayError
from latencyprism.sinks.migrations.migrate import (
    Migration,
    MigrationError,
    MigrationStatus,
    apply,
    dry_run,
    missing_columns,
    shipped,
    status,
)
from latencyprism.sinks.migrations.script import removes_data, statements
from latencyprism.sinks.tables import TABLES

pytest_plugins = ("sinks_fixtures",)

ONE = Migration(name="001_one.sql", sql="CREATE TABLE IF NOT EXISTS a (x Int8) ENGINE = Memory;")
TWO = Migration(name="002_two.sql", sql="DROP TABLE IF EXISTS a;")


def test_statements_are_split_outside_of_text_names_and_comments() -> None:
    sql = """
    -- a comment; with a semicolon and a quote '
    CREATE TABLE a (`x;y` Int8 COMMENT 'it''s; \\' so'); /* ; */
    SELECT 1 -- the last has no semicolon
    """
    assert statements(sql) == ["CREATE TABLE a (`x;y` Int8 COMMENT 'it''s; \\' so')", "SELECT 1"]
    assert statements(" ;; -- nothing\n") == []


@pytest.mark.parametrize(
    ("statement", "dangerous"),
    [
        ("DROP TABLE a", True),
        ("drop view a", True),
        ("TRUNCATE TABLE a", True),
        ("DELETE FROM a WHERE 1", True),
        ("ALTER TABLE a DELETE WHERE 1", True),
        ("ALTER TABLE a DROP COLUMN x", True),
        ("ALTER TABLE a\n MODIFY TTL t + toIntervalDay(1)", True),
        ("CREATE OR REPLACE TABLE a (x Int8) ENGINE = Memory", True),
        ("ALTER TABLE a ADD COLUMN x Int8", False),
        ("CREATE OR REPLACE VIEW a AS SELECT 1", False),
        ("CREATE TABLE a (x Int8 COMMENT 'DROP TABLE a') ENGINE = Memory", False),
        ("ALTER TABLE a ADD COLUMN y Int8 COMMENT 'what DELETE means'", False),
    ],
)
def test_what_removes_data_is_told_from_what_does_not(statement: str, dangerous: bool) -> None:
    assert removes_data(statement) is dangerous


def test_shipped_migrations_are_numbered_without_a_hole_and_remove_nothing() -> None:
    names = [migration.name for migration in shipped()]
    assert [int(name[:3]) for name in names] == list(range(1, len(names) + 1))
    for migration in shipped():
        assert statements(migration.sql)
        assert not any(map(removes_data, statements(migration.sql)))
        assert "kafka" not in migration.sql.lower().replace("kafka's", "")


@pytest.mark.clickhouse
def test_from_nothing_to_applied_and_again(fresh: StoreConfig) -> None:
    client = connect(fresh)
    names = [migration.name for migration in shipped()]
    assert {step.state for step in status(client, fresh)} == {"pending"}
    planned = dry_run(client, fresh)
    assert len(planned) == sum(len(statements(migration.sql)) for migration in shipped())
    assert {step.state for step in status(client, fresh)} == {"pending"}, "a dry run does nothing"

    assert apply(client, fresh) == names
    assert status(client, fresh) == [MigrationStatus(name=n, state="applied") for n in names]
    assert (apply(client, fresh), dry_run(client, fresh)) == ([], [])
    assert missing_columns(client, fresh) == []
    client.command("ALTER TABLE acks_raw DROP COLUMN detail")
    assert missing_columns(client, fresh) == ["acks_raw.detail"]


@pytest.mark.clickhouse
def test_a_failure_half_way_is_gone_on_from(fresh: StoreConfig) -> None:
    client = connect(fresh)
    broken = replace(ONE, sql=ONE.sql + "CREATE TABLE nonsense (x Nope) ENGINE = Memory;")
    with pytest.raises(StoreAwayError, match="Nope"):
        apply(client, fresh, migrations=[broken])
    assert status(client, fresh, [broken])[0].state == "pending"
    assert apply(client, fresh, migrations=[ONE]) == [ONE.name]
    assert client.command("EXISTS TABLE a") == 1


@pytest.mark.clickhouse
def test_shipped_files_may_run_twice(fresh: StoreConfig) -> None:
    client = connect(fresh)
    apply(client, fresh)
    client.command("TRUNCATE TABLE migrations")
    assert apply(client, fresh) == [migration.name for migration in shipped()]


@pytest.mark.clickhouse
def test_an_applied_file_that_changed_stops_everything(fresh: StoreConfig) -> None:
    client = connect(fresh)
    apply(client, fresh, migrations=[ONE])
    changed = replace(ONE, sql=ONE.sql + "\n-- changed")
    pending = replace(TWO, sql="CREATE TABLE b (x Int8) ENGINE = Memory")
    assert [step.state for step in status(client, fresh, [changed, pending])] == [
        "changed",
        "pending",
    ]
    with pytest.raises(MigrationError, match=r"001_one\.sql: changed after being applied"):
        apply(client, fresh, migrations=[changed, pending], force=True)
    assert client.command("EXISTS TABLE b") == 0


@pytest.mark.clickhouse
def test_what_removes_data_needs_force(fresh: StoreConfig) -> None:
    client = connect(fresh)
    with pytest.raises(MigrationError, match=r"002_two\.sql removes data \(DROP TABLE"):
        apply(client, fresh, migrations=[ONE, TWO])
    with pytest.raises(DatabaseError):
        client.command("EXISTS TABLE a")
    assert apply(client, fresh, migrations=[ONE, TWO], force=True) == [ONE.name, TWO.name]
    assert client.command("EXISTS TABLE a") == 0


@pytest.mark.clickhouse
def test_a_file_of_another_release_is_named(fresh: StoreConfig) -> None:
    client = connect(fresh)
    apply(client, fresh, migrations=[ONE])
    assert status(client, fresh, []) == [MigrationStatus(name=ONE.name, state="foreign")]


@pytest.mark.clickhouse
def test_retention_follows_the_settings(fresh: StoreConfig) -> None:
    client = connect(fresh)
    apply(client, fresh)
    apply(client, replace(fresh, retention_days=3, rollup_retention_days=9))
    found = client.query(
        "SELECT name, extract(engine_full, 'toIntervalDay\\\\((\\\\d+)\\\\)') FROM system.tables"
        " WHERE database = currentDatabase() AND engine_full LIKE '%TTL%'"
    ).result_rows
    days = {str(name): str(number) for name, number in found}
    assert set(days) == {t.name for t in TABLES} | {
        "request_sources",
        "requests_per_minute_raw",
        "batches_per_minute_raw",
    }
    assert {days.pop("requests_per_minute_raw"), days.pop("batches_per_minute_raw")} == {"9"}
    assert set(days.values()) == {"3"}
