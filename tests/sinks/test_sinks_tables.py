"""Records → rows → the real store and back, for every kind of record."""

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sinks_support import KEYS, MS, T0, pack

from latencyprism.schemas.avro import from_dict, record_schema
from latencyprism.schemas.records import DeadLetter, StageTime
from latencyprism.schemas.topics import MODELS, TELEMETRY_XPU, TOPICS
from latencyprism.sinks.clickhouse_rows import ClickHouseRows
from latencyprism.sinks.config import StoreConfig
from latencyprism.sinks.errors import RowsRefusedError, StoreError
from latencyprism.sinks.tables import BY_TOPIC, TABLES, Table, is_instant, letter_id

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

pytest_plugins = ("sinks_fixtures",)

INSTANTS = st.integers(min_value=946_684_800 * 10**9, max_value=4_102_444_799 * 10**9)
SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "string": st.text(max_size=20),
    "bytes": st.binary(max_size=40),
    "boolean": st.booleans(),
    "int": st.integers(-(2**31), 2**31 - 1),
    "long": st.integers(-(2**63), 2**63 - 1),
    "double": st.floats(allow_nan=False),
}


def values(avro: Any, field: str = "") -> st.SearchStrategy[Any]:
    """What an Avro type can hold."""
    if isinstance(avro, list):
        (inner,) = (branch for branch in avro if branch != "null")
        return st.none() | values(inner, field)
    kind = avro["type"] if isinstance(avro, dict) else avro
    if kind == "array":
        return st.lists(values(avro["items"], field), max_size=3)
    if kind == "map":
        return st.dictionaries(SCALARS["string"], values(avro["values"]), max_size=3)
    if kind == "enum":
        return st.sampled_from(avro["symbols"])
    if kind == "record":
        return st.fixed_dictionaries(
            {inner["name"]: values(inner["type"]) for inner in avro["fields"]}
        )
    return INSTANTS if is_instant(field) else SCALARS[kind]


def records(table: Table) -> st.SearchStrategy[Any]:
    """Records of a table's topic."""
    schema = record_schema(table.topic.record)
    fields = {field["name"]: values(field["type"], field["name"]) for field in schema["fields"]}
    return st.fixed_dictionaries(fields).map(from_dict(table.topic.record))


def test_every_topic_but_the_detectors_state_has_a_table() -> None:
    assert set(BY_TOPIC) == {topic.name for topic in TOPICS} - {MODELS.name}
    assert set(KEYS) == {table.name for table in TABLES}


@pytest.mark.clickhouse
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_record_comes_back_as_it_was(
    table: Table, data: st.DataObject, client: "Client", config: StoreConfig
) -> None:
    client.command(f"TRUNCATE TABLE {table.name}")
    key = dict.fromkeys(KEYS[table.name])
    sent = data.draw(st.lists(records(table), min_size=1, max_size=5))
    rows = (
        table.rows(pack(*sent)) if table.topic.packed else [r for m in sent for r in table.rows(m)]
    )
    ClickHouseRows(config).insert(table, rows)

    wanted = _by_key(table.arrow(rows), key)
    columns = ", ".join(f"`{column.name}`" for column in table.columns)
    found = client.query_arrow(
        f"SELECT {columns} FROM {table.name} FINAL",
        settings={"output_format_arrow_string_as_string": 0},
    )
    assert _by_key(found, key) == wanted


def _by_key(table: pa.Table, key: dict[str, Any]) -> dict[Any, Any]:
    """Rows by key, the last of each; text as bytes, since that is what the store has."""
    rows = [{name: _bytes(value) for name, value in row.items()} for row in table.to_pylist()]
    return {tuple(map(str, (row[name] for name in key))): row for row in rows}


def _bytes(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, list | tuple):
        return [_bytes(item) for item in value]
    if isinstance(value, dict):
        return [_bytes(item) for item in value.items()]
    return value


@pytest.mark.clickhouse
def test_rows_replace_each_other_by_the_keys_that_the_twin_has(client: "Client") -> None:
    found = client.query(
        "SELECT name, sorting_key FROM system.tables WHERE database = currentDatabase()"
    ).result_rows
    stored = {name: tuple(key.split(", ")) for name, key in found if name in KEYS}
    assert stored == KEYS


@pytest.mark.clickhouse
def test_every_column_says_what_it_is(client: "Client") -> None:
    silent = client.query(
        "SELECT concat(table, '.', name) FROM system.columns WHERE database = currentDatabase()"
        " AND comment = '' AND table IN (SELECT name FROM system.tables WHERE database ="
        " currentDatabase() AND engine LIKE '%MergeTree')"
    ).result_rows
    assert silent == []


def test_a_value_that_does_not_fit_names_its_column() -> None:
    table = BY_TOPIC[TELEMETRY_XPU.name]
    (row,) = table.rows(pack(_xpu(memory_used_bytes=2**70)))
    with pytest.raises(RowsRefusedError, match=r"xpu_samples_raw\.memory_used_bytes"):
        table.arrow([row])


def test_throttle_reasons_that_were_not_told_are_not_taken_for_none() -> None:
    table = BY_TOPIC[TELEMETRY_XPU.name]
    names = [column.name for column in table.columns]
    rows = [*table.rows(pack(_xpu(), _xpu(throttle_reasons=()), _xpu(throttle_reasons=("heat",))))]
    assert table.arrow(rows)["throttle_reasons"].to_pylist() == [["unknown"], [], ["heat"]]
    assert "throttle_reasons" in names


def test_a_record_inside_a_record_keeps_its_names() -> None:
    table = BY_TOPIC["latency.batches"]
    stages = next(column for column in table.columns if column.name == "stages")
    assert stages.convert is not None
    array = pa.array([stages.convert([StageTime(stage="decode", how="measured")])], stages.type)
    assert array.to_pylist() == [
        [{"stage": "decode", "mean_ms": None, "error_ms": None, "how": "measured"}]
    ]


def test_a_letter_is_the_same_when_it_is_delivered_again() -> None:
    letter = _letter(at_ns=T0, offset=5)
    assert letter_id(letter) == letter_id(_letter(at_ns=T0 + MS, offset=5))
    assert letter_id(letter) != letter_id(_letter(at_ns=T0, offset=6))
    assert letter_id(_letter(at_ns=T0, offset=-1)) != letter_id(_letter(at_ns=T0 + MS, offset=-1))


@pytest.mark.clickhouse
def test_a_time_out_of_bounds_is_refused_by_the_store(
    client: "Client", config: StoreConfig
) -> None:
    table = BY_TOPIC[TELEMETRY_XPU.name]
    rows = table.rows(pack(_xpu(observed_at_ns=0)))
    with pytest.raises(RowsRefusedError, match="sane_time") as refused:
        ClickHouseRows(config).insert(table, rows)
    assert refused.value.code == 469
    assert isinstance(refused.value, StoreError)
    assert client.command("SELECT count() FROM xpu_samples") == 0


def _xpu(**values: Any) -> Any:
    defaults: dict[str, Any] = {
        "instance": "a:1",
        "source": "xpu",
        "observed_at_ns": T0,
        "host": "h",
        "vendor": "nvidia",
        "device": "GPU-1",
    }
    return TELEMETRY_XPU.record(**(defaults | values))


def _letter(*, at_ns: int, offset: int) -> DeadLetter:
    return DeadLetter(
        topic="alerts",
        partition=0,
        offset=offset,
        at_ns=at_ns,
        component="sinks",
        reason="malformed",
        detail="d",
        payload=b"p",
    )
