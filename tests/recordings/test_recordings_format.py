"""Recordings on disk: what is written is read; what is broken costs itself and is told."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from latencyprism.recordings.format import (
    BLOCK_BYTES,
    META,
    Recording,
    RecordingError,
    RecordingWriter,
)
from latencyprism.schemas.records import HostSample, RequestTiming
from latencyprism.schemas.topics import TELEMETRY_ENGINE, TELEMETRY_HOST, TELEMETRY_REQUESTS

INSTANCE = "10.0.0.1:8000"
HOST = HostSample(
    instance=INSTANCE, source="host", observed_at_ns=0, host="h", interval_ns=100_000_000
)
REQUEST = RequestTiming(
    request_id="r",
    part=0,
    state="open",
    instance=INSTANCE,
    source="network",
    observed_at_ns=0,
    endpoint="/v1/completions",
    arrival_ns=0,
    chunks_before=0,
    chunk_deltas_us=(1, 2),
)


def hosts(count: int) -> list[HostSample]:
    return [replace(HOST, observed_at_ns=i * 1000, cpu_busy=i / count) for i in range(count)]


def record(folder: Path, count: int = 10) -> Path:
    with RecordingWriter(folder, engine="vllm", source="test") as writer:
        for i, host in enumerate(hosts(count)):
            writer.write(TELEMETRY_HOST, host)
            writer.write(TELEMETRY_REQUESTS, replace(REQUEST, observed_at_ns=i * 1000, part=i))
    return folder


def test_what_is_written_is_read(tmp_path: Path) -> None:
    recording = Recording(record(tmp_path / "r"))
    assert list(recording.records(TELEMETRY_HOST)) == hosts(10)
    assert [r.part for r in recording.records(TELEMETRY_REQUESTS)] == list(range(10))
    assert list(recording.records(TELEMETRY_ENGINE)) == []
    assert recording.damage == []


def test_meta_tells_span_and_streams(tmp_path: Path) -> None:
    meta = Recording(record(tmp_path / "r")).meta
    assert (meta.engine, meta.source) == ("vllm", "test")
    assert (meta.start_ns, meta.end_ns) == (0, 9000)
    assert meta.streams == {"telemetry.host": (INSTANCE,), "telemetry.requests": (INSTANCE,)}


def test_merged_is_in_time_order_across_topics(tmp_path: Path) -> None:
    merged = list(Recording(record(tmp_path / "r")).merged())
    times = [sample.observed_at_ns for _, sample in merged]
    assert times == sorted(times)
    assert [topic for topic, _ in merged[:2]] == [TELEMETRY_REQUESTS, TELEMETRY_HOST]


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    one, other = record(tmp_path / "a"), record(tmp_path / "b")
    name = "telemetry.host.avro"
    assert (one / name).read_bytes() == (other / name).read_bytes()


def test_a_flushed_recording_is_whole_though_its_recorder_was_killed(tmp_path: Path) -> None:
    writer = RecordingWriter(tmp_path / "r", engine=None, source="test")
    for host in hosts(5):
        writer.write(TELEMETRY_HOST, host)
    writer.flush()
    writer.write(TELEMETRY_HOST, hosts(6)[5])
    assert list(Recording(tmp_path / "r").records(TELEMETRY_HOST)) == hosts(5)
    writer.close()


def test_a_broken_block_costs_itself_and_names_file_and_record(tmp_path: Path) -> None:
    folder = record(tmp_path / "r", count=4000)
    path = folder / "telemetry.host.avro"
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 40] = bytes(40)
    path.write_bytes(data)
    recording = Recording(folder)
    read = list(recording.records(TELEMETRY_HOST))
    (damage,) = recording.damage
    assert damage.file == "telemetry.host.avro"
    assert "block at byte" in damage.reason
    used = set(read)
    lost = [host for host in hosts(4000) if host not in used]
    assert 0 < len(lost) < 4000
    assert lost[0].observed_at_ns == damage.record * 1000, "the first one lost is the one named"
    assert lost[-1].observed_at_ns - lost[0].observed_at_ns == (len(lost) - 1) * 1000
    assert read[-1] == hosts(4000)[-1], "what follows the broken block is used"


@pytest.mark.parametrize("stray", [{"instance": ""}, {"observed_at_ns": 10**15}])
def test_records_that_meta_does_not_tell_of_are_left_out(
    tmp_path: Path, stray: dict[str, Any]
) -> None:
    folder = record(tmp_path / "r")
    meta = (folder / "meta.json").read_text()
    with RecordingWriter(tmp_path / "s", engine="vllm", source="test") as writer:
        for host in (*hosts(10), replace(HOST, **stray)):
            writer.write(TELEMETRY_HOST, host)
    (folder / "telemetry.host.avro").write_bytes(
        (tmp_path / "s" / "telemetry.host.avro").read_bytes()
    )
    (folder / "meta.json").write_text(meta)

    recording = Recording(folder)

    assert list(recording.records(TELEMETRY_HOST)) == hosts(10)
    (damage,) = recording.damage
    assert "1 records of an instance or time not in meta.json" in damage.reason


def test_a_truncated_file_is_used_up_to_the_cut(tmp_path: Path) -> None:
    folder = record(tmp_path / "r", count=4000)
    path = folder / "telemetry.host.avro"
    path.write_bytes(path.read_bytes()[:-100])
    recording = Recording(folder)
    read = list(recording.records(TELEMETRY_HOST))
    assert read == hosts(4000)[: len(read)]
    assert 0 < len(read) < 4000
    assert [damage.record for damage in recording.damage] == [len(read)]


@pytest.mark.parametrize("data", [b"", b"not avro at all", b"Obj\x01"])
def test_a_file_that_is_no_container_is_told_and_the_others_used(
    tmp_path: Path, data: bytes
) -> None:
    folder = record(tmp_path / "r")
    (folder / "telemetry.host.avro").write_bytes(data)
    recording = Recording(folder)
    assert {topic for topic, _ in recording.merged()} == {TELEMETRY_REQUESTS}
    assert [damage.file for damage in recording.damage] == ["telemetry.host.avro"]


def test_a_missing_file_that_meta_tells_of_is_damage(tmp_path: Path) -> None:
    folder = record(tmp_path / "r")
    (folder / "telemetry.host.avro").unlink()
    recording = Recording(folder)
    assert list(recording.records(TELEMETRY_HOST)) == []
    assert "missing" in recording.damage[0].reason


def test_a_block_bounds_what_one_broken_byte_costs(tmp_path: Path) -> None:
    folder = record(tmp_path / "r", count=4000)
    plain_bytes_a_record = 40  # at least: strings, times and nulls of HOST
    path = folder / "telemetry.host.avro"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    recording = Recording(folder)
    lost = 4000 - sum(1 for _ in recording.records(TELEMETRY_HOST))
    assert lost <= BLOCK_BYTES / plain_bytes_a_record


def test_recording_into_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("data")
    with pytest.raises(RecordingError, match="not an empty folder"):
        RecordingWriter(tmp_path, engine=None, source="test")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no meta.json"),
        ("{", "can't be read"),
        ('{"engine": "vllm", "t0_ns": 1}', "no recording"),
        ('{"format": 99}', "format 99"),
        ('{"format": 1, "engine": null}', "damaged"),
    ],
)
def test_a_folder_that_is_no_recording_is_refused_with_words(
    tmp_path: Path, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / META).write_text(text)
    with pytest.raises(RecordingError, match=message):
        Recording(tmp_path)


def test_topics_of_another_release_are_refused(tmp_path: Path) -> None:
    folder = record(tmp_path / "r")
    meta = json.loads((folder / META).read_text())
    meta["streams"]["telemetry.moon"] = [INSTANCE]
    (folder / META).write_text(json.dumps(meta))
    with pytest.raises(RecordingError, match=r"telemetry\.moon"):
        Recording(folder)
