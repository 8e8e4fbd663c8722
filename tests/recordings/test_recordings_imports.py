"""Traces of the lab become what the collectors would have sent."""

import gzip
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latencyprism.recordings.format import Recording, RecordingError
from latencyprism.recordings.imports import (
    PART_NS,
    HostCounters,
    MetricsPages,
    import_trace,
    request_parts,
)
from latencyprism.schemas.records import EngineSample, HostSample, RequestTiming
from latencyprism.schemas.topics import TELEMETRY_ENGINE, TELEMETRY_HOST, TELEMETRY_REQUESTS

INSTANCE = "127.0.0.1:8100"
MS = 1_000_000
SEND = 1_796_000_000_000_000_000


def row(
    gaps_us: list[int], lay_us: list[int], *, header_ms: int | None = 5, **more: Any
) -> dict[str, Any]:
    read = SEND + sum(gaps_us) * 1000
    return {
        "id": 1,
        "t_send": SEND,
        "t_hdr": SEND + header_ms * MS if header_ms is not None else 0,
        "t_end": read + MS,
        "plen": 100,
        "out": len(gaps_us),
        "status": 200 if header_ms is not None else 0,
        "err": None,
        "trace": "ab" * 16,
        "dt_us": gaps_us,
        "kl_us": lay_us,
    } | more


def parts(one: dict[str, Any]) -> list[RequestTiming]:
    return list(request_parts(one, INSTANCE))


def chunk_times(told: list[RequestTiming]) -> list[int]:
    times = []
    for part in told:
        if part.chunk_base_ns is not None:
            times.append(part.chunk_base_ns)
            for delta in part.chunk_deltas_us:
                times.append(times[-1] + delta * 1000)
    return times


events = st.lists(
    st.tuples(st.integers(0, 400_000), st.integers(-1, 3_000)), min_size=1, max_size=60
)


@given(events)
def test_parts_tell_every_event_once_and_in_time(told: list[tuple[int, int]]) -> None:
    one = row([gap + 10_000 for gap, _ in told], [lay for _, lay in told])
    made = parts(one)
    assert [part.part for part in made] == list(range(len(made)))
    assert [part.state for part in made] == ["open"] * (len(made) - 1) + ["complete"]
    assert sum(1 for part in made if part.chunk_base_ns is not None) <= len(made)
    packets: list[int] = []
    read = SEND
    for gap, lay in told:
        read += (gap + 10_000) * 1000
        packets.append(max([read - max(lay, 0) * 1000, *packets[-1:]]))
    times = chunk_times(made)
    assert len(times) == len(packets)
    assert max(abs(a - b) for a, b in zip(times, packets, strict=True)) <= 1000
    for before, after in pairwise(made):
        assert before.observed_at_ns // PART_NS < after.observed_at_ns // PART_NS
        assert after.chunks_before == before.chunks_before + (
            0 if before.chunk_base_ns is None else len(before.chunk_deltas_us) + 1
        )
    for part in made:
        tick = part.observed_at_ns // PART_NS
        assert part.chunk_base_ns is None or part.chunk_base_ns // PART_NS == tick


def test_a_part_knows_only_what_had_happened() -> None:
    made = parts(row([250_000, 20_000], [0, 0], header_ms=120))
    first, second, third = made
    assert (first.arrival_ns, first.prompt_tokens, first.model) == (SEND, 100, "small")
    assert (first.first_byte_ns, first.status, first.streaming) == (None, None, None)
    assert (second.first_byte_ns, second.status, second.streaming) == (SEND + 120 * MS, 200, True)
    assert (second.first_token_ns, second.completion_tokens) == (None, None)
    assert third.first_token_ns == SEND + 250 * MS
    assert third.end_ns == SEND + 271 * MS
    assert (third.completion_tokens, third.trace_id) == (2, "ab" * 16)


def test_headers_read_late_are_no_later_than_the_first_event() -> None:
    made = parts(row([30_000], [20_000], header_ms=30))
    assert made[-1].first_byte_ns == made[-1].first_token_ns == SEND + 10 * MS


def test_an_exchange_that_broke_off_is_aborted_and_tells_no_tokens() -> None:
    (broken,) = parts(row([10_000], [0], err="eof_before_done"))
    assert (broken.state, broken.completion_tokens) == ("aborted", None)
    (refused,) = parts(row([], [], err="http_503 busy", status=503))
    assert (refused.state, refused.status, refused.first_token_ns) == ("complete", 503, None)
    (silent,) = parts(row([], [], header_ms=None, err="TimeoutError:"))
    assert (silent.state, silent.status, silent.first_byte_ns) == ("aborted", None, None)


HOST_ROW = {
    "t_ns": "1000000000",
    "lag_us": "50",
    "root_c0_ns": "0",
    "root_c1_ns": "0",
    "lab_engine_c0_ns": "0",
    "lab_engine_c1_ns": "0",
    "cpu0_steal": "0",
    "cpu1_steal": "0",
    "procs_running": "2",
    "thr_ns": "0",
    "thr_n": "0",
    "psi_cpu_us": "10",
    "psi_mem_us": "0",
    "psi_io_us": "0",
    "lo_rx_bytes": "0",
    "tcp_retrans": "3",
    "mem_avail_kb": "1000",
    "worker_utime": "10",
    "worker_stime": "5",
    "worker_minflt": "1",
    "worker_majflt": "0",
    "worker_rss_pages": "100",
    "worker_threads": "4",
    "worker_wait_ns": "1000",
    "worker_vcsw": "1",
    "worker_nvcsw": "2",
    "worker_state": "R",
}


def hosts(*changes: dict[str, str]) -> list[HostSample]:
    rows = [HOST_ROW]
    for change in changes:
        rows.append(rows[-1] | change)
    convert = HostCounters(INSTANCE, "vm", {"worker": 7})
    return [sample for one in rows for sample in convert(one)]


def test_host_counters_become_growth() -> None:
    (sample,) = hosts(
        {
            "t_ns": "1100000000",
            "root_c0_ns": "100000000",
            "root_c1_ns": "60000000",
            "lab_engine_c0_ns": "90000000",
            "cpu0_steal": "1",
            "thr_ns": "7",
            "thr_n": "1",
            "psi_cpu_us": "30",
            "tcp_retrans": "5",
            "worker_utime": "19",
            "worker_wait_ns": "51000",
            "worker_state": "T",
        }
    )
    assert (sample.observed_at_ns, sample.interval_ns) == (1_100_000_000, 100_000_000)
    assert sample.cpu_busy == pytest.approx(0.8)
    assert sample.cpu_others == pytest.approx(0.35)
    assert sample.cpu_steal == pytest.approx(0.05)
    assert (sample.throttled_ns, sample.throttled_periods) == (7, 1)
    assert (sample.psi_cpu_us, sample.tcp_retransmits, sample.runnable) == (20, 2, 2)
    assert sample.memory_available_bytes == 1000 * 1024
    (worker,) = sample.processes
    assert (worker.pid, worker.role, worker.state) == (7, "worker", "T")
    assert (worker.cpu_ns, worker.runqueue_ns) == (90 * MS, 50_000)
    assert worker.rss_bytes == 100 * 4096


def test_what_was_not_seen_is_null_and_a_process_that_is_gone_is_absent() -> None:
    first, second = hosts(
        {"t_ns": "1100000000", "psi_cpu_us": "", "thr_ns": "5", "worker_state": ""},
        {"t_ns": "1200000000", "thr_ns": "0"},
    )
    assert first.psi_cpu_us is None
    assert first.processes == ()
    assert second.throttled_ns is None, "a counter that went back tells nothing"
    assert second.throttled_periods == 0


def test_a_row_without_time_passing_is_skipped() -> None:
    assert len(hosts({"t_ns": "1000000000"}, {"t_ns": "1100000000"})) == 1


def pages(*running: str) -> Iterator[dict[str, str]]:
    base = {
        "t_req_ns": "1000000000",
        "t_resp_ns": "1010000000",
        "ok": "1",
        'vllm:num_requests_running{engine="0",model_name="small"}': "",
        'vllm:generation_tokens_total{engine="0",model_name="small"}': "100",
    }
    for i, value in enumerate(running):
        series = list(base)[3]
        yield base | {
            "t_req_ns": str((i + 1) * 1_000_000_000),
            "t_resp_ns": str((i + 1) * 1_000_000_000 + 10 * MS),
            "ok": "0" if value == "lost" else "1",
            series: value,
            list(base)[4]: str(100 + 50 * i),
        }


def scrapes(*running: str) -> list[EngineSample]:
    convert = MetricsPages(INSTANCE)
    return [sample for page in pages(*running) for sample in convert(page)]


def test_metrics_pages_become_engine_samples() -> None:
    first, lost, third = scrapes("2", "lost", "3")
    assert (first.engine, first.model, first.running) == ("vllm", "small", 2.0)
    assert (first.interval_ns, first.generation_tokens) == (None, None)
    assert (lost.freshness, lost.running, lost.scrape_ms) == ("failed", None, 10.0)
    assert (third.running, third.generation_tokens) == (3.0, 100.0)
    assert third.interval_ns == 2_000_000_000
    assert {sample.source for sample in (first, lost, third)} == {"import"}
    assert third.observed_at_ns == 3_010_000_000


def test_a_series_that_is_not_on_a_page_is_null() -> None:
    (sample,) = scrapes("")
    assert sample.running is None


def trace(folder: Path, *, requests: bytes | None = None, engine: str = "vllm") -> Path:
    """A small trace with one request, one second of host counters and three scrapes."""
    folder.mkdir()
    meta = {"engine": engine, "version": "1", "roles": {"worker": 7}, "uname": "Linux vm 6"}
    (folder / "meta.json").write_text(json.dumps(meta))
    (folder / "faults.jsonl").write_text("")
    (folder / "labels.json").write_text('{"windows": []}')
    line = json.dumps(row([250_000, 20_000], [0, 0])) + "\n"
    plain = {
        "requests.jsonl.gz": requests if requests is not None else line.encode(),
        "metrics.csv.gz": _table(list(pages("1", "2", "3"))),
        "proc.csv.gz": _table([HOST_ROW | {"t_ns": str(i * 100 * MS)} for i in range(10, 20)]),
        "spans.csv.gz": b"trace_id\n",
    }
    for name, data in plain.items():
        (folder / name).write_bytes(gzip.compress(data))
    return folder


def _table(rows: list[dict[str, str]]) -> bytes:
    lines = [",".join('"' + name.replace('"', '""') + '"' for name in rows[0])]
    lines += [",".join(one.values()) for one in rows]
    return ("\n".join(lines) + "\n").encode()


def test_a_trace_becomes_a_recording(tmp_path: Path) -> None:
    counts = import_trace(trace(tmp_path / "t"), tmp_path / "r")
    assert counts == {"telemetry.requests": 2, "telemetry.engine": 3, "telemetry.host": 9}
    recording = Recording(tmp_path / "r")
    assert recording.meta.engine == "vllm"
    assert recording.meta.truth == ("spans.csv.gz",)
    assert (recording.folder / "truth" / "spans.csv.gz").exists()
    assert len(list(recording.merged())) == 14
    for topic in (TELEMETRY_REQUESTS, TELEMETRY_ENGINE, TELEMETRY_HOST):
        assert recording.meta.streams[topic.name] == (INSTANCE,)


def test_broken_rows_cost_themselves(tmp_path: Path) -> None:
    good = json.dumps(row([10_000], [0])).encode()
    broken = b"{nonsense\n[]\n" + json.dumps({"id": 3}).encode() + b"\n" + good + b"\n"
    counts = import_trace(trace(tmp_path / "t", requests=broken), tmp_path / "r")
    assert counts["broken rows"] == 3
    assert counts["telemetry.requests"] >= 1


def test_a_truncated_file_is_used_up_to_the_cut(tmp_path: Path) -> None:
    lines = "".join(json.dumps(row([10_000], [0], id=i)) + "\n" for i in range(2000))
    folder = trace(tmp_path / "t", requests=lines.encode())
    path = folder / "requests.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-200])
    counts = import_trace(folder, tmp_path / "r")
    assert counts["broken rows"] == 1
    assert 100 < counts["telemetry.requests"] < 2000


def test_what_is_no_trace_is_refused_with_words(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"meta\.json"):
        import_trace(tmp_path, tmp_path / "r")
    with pytest.raises(RecordingError, match="mystery"):
        import_trace(trace(tmp_path / "t", engine="mystery"), tmp_path / "r")
    assert not (tmp_path / "r").exists()
