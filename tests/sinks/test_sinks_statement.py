"""What the store reads from a request before the engine sees it."""

import gzip
import zlib

import lz4.frame  # type: ignore[import-untyped] # it has no stubs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latencyprism.sinks.store import compression
from latencyprism.sinks.store.native import empty_block
from latencyprism.sinks.store.statement import (
    first_word,
    formatted_insert,
    kind,
    output_format,
    quoted_name,
    quoted_text,
    refusal,
    selection,
)


@given(data=st.binary(max_size=200))
@pytest.mark.parametrize(
    ("head", "target", "settings", "format_"),
    [
        (b"INSERT INTO t FORMAT Native\n", "INSERT INTO t", "", "Native"),
        (b"insert into a.b (x, y) format Arrow\n", "insert into a.b (x, y)", "", "Arrow"),
        (
            b"-- why\n INSERT INTO TABLE `a b`.`c` (`x)`, `y.z`) FORMAT RowBinary\r\n",
            "INSERT INTO TABLE `a b`.`c` (`x)`, `y.z`)",
            "",
            "RowBinary",
        ),
        (
            b"/* c */INSERT INTO t SETTINGS async_insert=0, x = 'y' FORMAT Parquet ;\n",
            "INSERT INTO t",
            "SETTINGS async_insert=0, x = 'y'",
            "Parquet",
        ),
    ],
)
def test_rows_behind_an_insert_are_kept_to_the_byte(
    head: bytes, target: str, settings: str, format_: str, data: bytes
) -> None:
    insert = formatted_insert(head + data)
    assert insert is not None
    assert (insert.target, insert.settings, insert.format) == (target, settings, format_)
    assert insert.data == data


@pytest.mark.parametrize(
    "sql",
    [
        b"INSERT INTO t VALUES (1, 'x FORMAT Native\n')",
        b"INSERT INTO t SELECT 'FORMAT Native\n' FROM s FORMAT Native",
        b"SELECT 1 FORMAT Native\n",
        b"",
    ],
)
def test_other_statements_carry_no_formatted_rows(sql: bytes) -> None:
    assert formatted_insert(sql) is None


@pytest.mark.parametrize(
    ("sql", "word", "reads"),
    [
        (b"SELECT 1", b"SELECT", True),
        (b" \n-- SELECT\n/* x */ insert into t values (1)", b"INSERT", False),
        (b"((select 1) union all (select 2))", b"SELECT", True),
        (b"with 1 as a select a", b"WITH", True),
        (b"SHOW TABLES", b"SHOW", True),
        (b"", b"", False),
    ],
)
def test_what_only_reads_is_told_by_its_first_word(sql: bytes, word: bytes, reads: bool) -> None:
    assert first_word(sql) == word
    assert (kind(sql) == "read") is reads


def test_format_of_an_answer() -> None:
    assert output_format(b"SELECT 1\n FORMAT Native", "TabSeparated") == "Native"
    assert output_format(b"SELECT 1 FORMAT JSON ; ", "TabSeparated") == "JSON"
    assert output_format(b"SELECT 1", "TabSeparated") == "TabSeparated"
    assert selection(b"SELECT 1\n FORMAT Native") == b"SELECT 1\n "
    assert selection(b"SHOW TABLES") is None


def test_what_is_refused() -> None:
    assert "no sessions" in str(refusal(b"SET x = 1"))
    assert "no sessions" in str(refusal(b"create temporary table t (a Int8)"))
    assert "latencyprism sink" in str(refusal(b"CREATE TABLE t (a Int8) ENGINE=Kafka()"))
    assert refusal(b"SELECT 'ENGINE = Kafka'") is None


@given(st.text(max_size=20))
def test_quotes_cannot_be_left(text: str) -> None:
    for quoted, mark in ((quoted_name(text), "`"), (quoted_text(text), "'")):
        inside = quoted[1:-1].replace("\\\\", "").replace("\\" + mark, "")
        assert quoted[0] == quoted[-1] == mark
        assert mark not in inside
        assert not inside.endswith("\\")


@given(data=st.binary(max_size=5_000), split=st.integers(0, 5_000))
def test_every_encoding_comes_back_also_in_several_frames(data: bytes, split: int) -> None:
    makers = {
        "gzip": gzip.compress,
        "deflate": zlib.compress,
        "lz4": lz4.frame.compress,
        "zstd": lambda plain: compression.compress(plain, "zstd"),
    }
    for encoding, make in makers.items():
        body = make(data[:split]) + (make(data[split:]) if data[split:] else b"")
        assert compression.decompress(body, encoding, 5_000) == data
    assert compression.decompress(data, "", 5_000) == data


def test_bodies_that_are_too_large_cut_or_of_another_kind() -> None:
    for encoding in ("gzip", "lz4", "zstd"):
        body = compression.compress(b"\0" * 100_000, encoding)
        with pytest.raises(compression.TooLargeError):
            compression.decompress(body, encoding, 99_999)
        with pytest.raises(compression.UnknownEncodingError):
            compression.decompress(body[:-5], encoding, 100_000)
        with pytest.raises(compression.UnknownEncodingError):
            compression.decompress(b"something else entirely", encoding, 100_000)
    with pytest.raises(compression.UnknownEncodingError, match="none of gzip"):
        compression.decompress(b"", "br", 1)


def test_the_encoding_of_an_answer_is_one_the_client_takes() -> None:
    assert compression.choose("gzip, deflate, zstd;q=0.5") == "zstd"
    assert compression.choose("br") is None
    assert compression.choose("") is None


def test_a_block_of_no_rows_has_names_and_types() -> None:
    assert empty_block([("a", "UInt8")]) == b"\x01\x00\x01a\x05UInt8"
    long = "x" * 200
    assert empty_block([(long, "Int8")]).startswith(b"\x01\x00\xc8\x01" + long.encode())
