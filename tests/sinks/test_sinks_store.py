"""The embedded store through the real clients: protocol, errors, limits, ownership, crashes."""

import gzip
import http.client
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import clickhouse_connect
import pyarrow as pa
import pytest
from clickhouse_connect.driver.exceptions import DatabaseError

from latencyprism.sinks.client import connect
from latencyprism.sinks.config import StoreConfig
from latencyprism.sinks.errors import StoreAuthError, StoreAwayError
from latencyprism.sinks.process import StoreProcess
from latencyprism.sinks.store.engine import Limits
from latencyprism.sinks.store.lock import find_endpoint

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

pytest_plugins = ("sinks_fixtures",)
pytestmark = pytest.mark.clickhouse


@pytest.fixture
def db(store: StoreProcess) -> Iterator["Client"]:
    """A client of an empty database with a table ``t (a UInt64, b String)``, a below 100."""
    client = connect(StoreConfig(url=store.url, database="protocol"))
    client.command("CREATE DATABASE protocol", use_database=False)
    client.command(
        "CREATE TABLE t (a UInt64, b String, CONSTRAINT small CHECK a < 100)"
        " ENGINE = MergeTree ORDER BY a"
    )
    yield client
    client.command("DROP DATABASE protocol", use_database=False)
    client.close()


def ask(
    store: StoreProcess, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    """One plain HTTP exchange."""
    host = urlsplit(store.url)
    connection = http.client.HTTPConnection(str(host.hostname), host.port, timeout=30)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, named)
    response = connection.getresponse()
    answer = response.status, response.read(), dict(response.getheaders())
    connection.close()
    return answer


def test_parameters_settings_and_types(db: "Client") -> None:
    answer = db.query(
        "SELECT {n:UInt8} + 1, {s:String}, {a:Array(Float64)}, getSetting('max_threads')",
        parameters={"n": 2, "s": "it's `\\", "a": [1.5, 2.0]},
        settings={"max_threads": 3},
    )
    assert answer.result_rows == [(3, "it's `\\", [1.5, 2.0], 3)]
    assert db.query("SELECT getSetting('max_threads') = 3").result_rows == [(False,)]


@pytest.mark.parametrize("compress", ["lz4", "zstd", "gzip", False])
def test_native_inserts_and_large_answers_in_every_encoding(
    store: StoreProcess, db: "Client", compress: str | bool
) -> None:
    client = clickhouse_connect.get_client(dsn=store.url, database="protocol", compress=compress)
    rows = [[number % 100, "text " * 50] for number in range(2_000)]
    assert client.insert("t", rows, column_names=["a", "b"]).written_rows == 2_000
    found = client.query("SELECT a, b FROM t ORDER BY a").result_rows
    assert found == sorted(map(tuple, rows))
    client.close()


def test_arrow_dataframe_command_stream_and_raw(db: "Client") -> None:
    block = pa.table({"a": pa.array([1, 2], pa.uint64()), "b": ["x", "y"]})
    assert db.insert_arrow("t", block).written_rows == 2
    assert db.query_arrow("SELECT a FROM t ORDER BY a").column(0).to_pylist() == [1, 2]
    assert list(db.query_df("SELECT b FROM t ORDER BY a")["b"]) == ["x", "y"]
    assert db.command("SELECT count() FROM t") == 2
    assert db.query("SELECT * FROM t LIMIT 0").column_names == ("a", "b")
    nothing = db.query("SELECT a, map(b, 1.5) AS m FROM t WHERE a = {n:UInt8}", parameters={"n": 9})
    assert (nothing.column_names, nothing.result_rows) == (("a", "m"), [])
    assert json.loads(db.raw_query("SELECT a FROM t WHERE a = 2", fmt="JSONEachRow")) == {"a": 2}
    with db.query_row_block_stream("SELECT number FROM numbers(200000)") as blocks:
        assert sum(len(block) for block in blocks) == 200_000


async def test_the_async_client_works_side_by_side(store: StoreProcess, db: "Client") -> None:
    import asyncio

    client = await clickhouse_connect.get_async_client(dsn=store.url, database="protocol")
    try:
        await client.insert("t", [[1, "x"]], column_names=["a", "b"])
        answers = await asyncio.gather(
            *(client.query("SELECT a + {n:UInt8} FROM t", parameters={"n": n}) for n in range(12))
        )
        assert [answer.result_rows for answer in answers] == [[(1 + n,)] for n in range(12)]
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("sql", "code", "name"),
    [
        ("SELECT nope", 47, "UNKNOWN_IDENTIFIER"),
        ("SELECT * FROM nope", 60, "UNKNOWN_TABLE"),
        ("SELEC 1", 62, "SYNTAX_ERROR"),
        ("SELECT throwIf(1)", 395, "FUNCTION_THROW_IF_VALUE_IS_NON_ZERO"),
    ],
)
def test_errors_carry_their_number(db: "Client", sql: str, code: int, name: str) -> None:
    with pytest.raises(DatabaseError) as failed:
        db.command(sql)
    assert (failed.value.code, failed.value.name) == (code, name)


def test_a_refused_insert_stores_nothing(db: "Client") -> None:
    with pytest.raises(DatabaseError) as failed:
        db.insert("t", [[1, "x"], [500, "y"]], column_names=["a", "b"])
    assert failed.value.code == 469
    assert db.command("SELECT count() FROM t") == 0


def test_ping_and_where_the_query_may_stand(store: StoreProcess, db: "Client") -> None:
    assert ask(store, "GET", "/ping")[:2] == (200, b"Ok.\n")
    assert ask(store, "GET", "/?query=SELECT%201")[:2] == (200, b"1\n")
    assert ask(store, "POST", "/", b"SELECT 2")[:2] == (200, b"2\n")
    assert ask(store, "POST", "/?query=SELECT", b"3")[:2] == (200, b"3\n")
    insert = quote("INSERT INTO protocol.t FORMAT JSONEachRow")
    body = gzip.compress(b'{"a": 7, "b": "FORMAT Native\\n"}')
    assert ask(store, "POST", f"/?query={insert}", body, Content_Encoding="gzip")[0] == 200
    values = b"INSERT INTO protocol.t (a, b) VALUES (8, 'x FORMAT Native\n')"
    assert ask(store, "POST", "/", values)[0] == 200
    assert db.query("SELECT a, b FROM t ORDER BY a").result_rows == [
        (7, "FORMAT Native\n"),
        (8, "x FORMAT Native\n"),
    ]


def test_a_form_with_large_parameters(db: "Client") -> None:
    text = "y" * 50_000
    assert db.query("SELECT {x:String}", parameters={"x": text}).result_rows == [(text,)]


def test_get_only_reads(store: StoreProcess, db: "Client") -> None:
    sql = quote("INSERT INTO protocol.t VALUES (1, 'x')")
    status, body, headers = ask(store, "GET", f"/?query={sql}")
    assert (status, headers["X-ClickHouse-Exception-Code"]) == (500, "164")
    assert b"readonly" in body
    assert db.command("SELECT count() FROM t") == 0


def test_what_would_have_no_effect_or_break_the_folder_is_refused_in_words(db: "Client") -> None:
    for sql in ("SET max_threads = 1", "USE system", "CREATE TEMPORARY TABLE x (a Int8)"):
        with pytest.raises(DatabaseError, match="keeps no sessions"):
            db.command(sql)
    with pytest.raises(DatabaseError, match="latencyprism sink"):
        db.command("CREATE TABLE k (a Int8) ENGINE = Kafka('h', 't', 'g', 'JSON')")


def test_requests_beyond_the_limits_and_broken_ones(store: StoreProcess) -> None:
    limit = Limits().body_bytes
    status, body, _ = ask(store, "POST", "/", b"", Content_Length=str(limit + 1))
    assert (status, b"more than" in body) == (413, True)
    bomb = gzip.compress(b"\0" * (limit + 1))
    assert ask(store, "POST", "/", bomb, Content_Encoding="gzip")[0] == 413
    assert ask(store, "POST", "/", b"x", Content_Encoding="br")[0] == 400
    assert ask(store, "POST", "/", b"not lz4", Content_Encoding="lz4")[0] == 400
    cut = gzip.compress(b"SELECT 1")[:-6]
    assert ask(store, "POST", "/", cut, Content_Encoding="gzip")[0] == 400
    assert ask(store, "POST", "/", b"zz\r\n", Transfer_Encoding="chunked")[0] == 400
    assert ask(store, "POST", "/?a%27b=1", b"SELECT 1")[0] == 400
    assert ask(store, "GET", "/ping")[0] == 200


def test_an_answer_beyond_the_limit_fails_with_a_number(db: "Client") -> None:
    with pytest.raises(DatabaseError) as failed:
        db.query(
            "SELECT repeat('x', 1000000) FROM numbers(10000)", settings={"max_result_bytes": 10**6}
        )
    assert failed.value.code == 396


def test_web_pages_are_not_answered(store: StoreProcess) -> None:
    assert ask(store, "POST", "/", b"SELECT 1", Origin="http://evil.example")[0] == 403
    assert ask(store, "POST", "/", b"SELECT 1", Host="evil.example")[0] == 403


def test_a_password_keeps_others_out(tmp_path: Path) -> None:
    with StoreProcess(tmp_path, password="secret") as guarded:
        config = StoreConfig(directory=str(tmp_path), password="secret", database="default")
        client = connect(config)
        assert client.command("SELECT 1") == 1
        client.close()
        with pytest.raises(StoreAuthError, match=r"store\.password"):
            connect(StoreConfig(url=guarded.url, password="wrong"))
        assert ask(guarded, "POST", "/", b"SELECT 1", Authorization="Basic ???")[0] in (400, 403)
        assert ask(guarded, "GET", "/ping")[0] == 200


def test_a_taken_folder_is_refused_with_its_owner_and_address(store: StoreProcess) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "latencyprism.sinks.store", "--directory", str(store.directory)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    endpoint = find_endpoint(store.directory)
    assert endpoint is not None
    assert second.returncode == 1
    assert f"belongs to the store process {endpoint.pid}" in second.stderr
    assert endpoint.url in second.stderr
    assert "Traceback" not in second.stderr
    assert ask(store, "GET", "/ping")[0] == 200


def test_sigterm_ends_cleanly_with_the_answer_under_way_and_keeps_data(tmp_path: Path) -> None:
    process = StoreProcess(tmp_path).start()
    config = StoreConfig(directory=str(tmp_path), database="default")
    client = connect(config)
    client.command("CREATE TABLE t (a UInt64) ENGINE = MergeTree ORDER BY a")
    client.insert("t", [[1], [2]], column_names=["a"])
    slow: list[Any] = []
    asker = threading.Thread(
        target=lambda: slow.append(connect(config).command("SELECT sleep(1.5) + 7"))
    )
    asker.start()
    deadline = time.monotonic() + 10
    running = "SELECT count() > 1 FROM system.processes WHERE query LIKE '%sleep(1.5)%'"
    while client.command(running) != 1:
        assert time.monotonic() < deadline, "the slow query never ran"
    assert process.stop() == 0
    asker.join()
    assert slow == [7]
    with pytest.raises(StoreAwayError, match="no store process serves"):
        connect(config)
    with process:
        assert connect(config).command("SELECT sum(a) FROM t") == 3


def test_kill_9_loses_no_acknowledged_insert(tmp_path: Path) -> None:
    process = StoreProcess(tmp_path)
    config = StoreConfig(directory=str(tmp_path), database="default")
    acknowledged = 0
    for round_ in range(3):
        process.start()
        client = connect(config)
        client.command("CREATE TABLE IF NOT EXISTS t (a UInt64) ENGINE = MergeTree ORDER BY a")
        killer = threading.Timer(0.6 + 0.2 * round_, process.kill)
        killer.start()
        try:
            while True:
                block = pa.table(
                    {"a": pa.array(range(acknowledged, acknowledged + 500), pa.uint64())}
                )
                client.insert_arrow("t", block)
                acknowledged += 500
        except DatabaseError:
            killer.join()
    assert acknowledged > 0
    with process:
        client = connect(config)
        present = client.query(
            "SELECT count(), uniqExact(a), max(a) FROM t WHERE a < {n:UInt64}",
            parameters={"n": acknowledged},
        ).result_rows
        assert present[0][1:] == (acknowledged, acknowledged - 1)
        client.close()


def test_the_program_says_why_it_cannot_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "latencyprism.sinks.store", "--directory", str(tmp_path / "file")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert str(tmp_path / "file") in done.stderr


def test_the_program_prints_its_port(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "latencyprism.sinks.store", "--directory", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/ping")
        assert connection.getresponse().read() == b"Ok.\n"
        connection.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
