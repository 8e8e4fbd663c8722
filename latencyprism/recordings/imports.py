"""Traces of the lab → recordings.

A trace is what the lab's load generator, sampler and scraper wrote about one real engine under
load: client-side times of each request, the operating system's counters at 10 Hz, the engine's
metrics page at 1 Hz. It is turned into what the collectors of a live system would have sent.
"""

import csv
import gzip
import json
import logging
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise, zip_longest
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from latencyprism.collectors.engine.exposition import Parser
from latencyprism.collectors.engine.sample import Tracker
from latencyprism.recordings.format import (
    FAULTS,
    FOREIGN,
    LABELS,
    META,
    TRUTH,
    Damage,
    RecordingError,
    RecordingWriter,
)
from latencyprism.schemas.records import EngineSample, HostSample, ProcessSample, RequestTiming
from latencyprism.schemas.topics import TELEMETRY_ENGINE, TELEMETRY_HOST, TELEMETRY_REQUESTS

log = logging.getLogger(__name__)

R = TypeVar("R")

PART_NS = 100_000_000
"""A live network tap reports an open exchange that often; parts are cut at its multiples."""
PORTS = {"vllm": 8100, "llamacpp": 8200}
"""Where the lab runs each engine."""
MODEL = "small"
"""The model's name in every request of the lab's load generator."""
TRUTHS = ("iterations.csv.gz", "spans.csv.gz", "workload.json")
"""What the engine logged of itself, and the planned load: to compare with, never an input."""
PAGE_COLUMN = 3
"""First column of a series in the table of metrics pages; times and outcome stand before."""
JIFFY_NS = 10_000_000
PAGE_BYTES = 4096
CORES = (0, 1)
"""CPUs of the lab's machine, each with columns of its own."""


def import_trace(trace: Path, out: Path) -> dict[str, int]:
    """Write the recording of a trace; the same trace gives the same bytes.

    Returns the records written by topic name, and the rows left out as ``broken rows`` when there
    are any: a row that can't be used is logged and costs itself. Raises RecordingError when the
    folder is no trace, or when ``out`` holds something already.
    """
    meta = _meta(trace)
    engine = str(meta["engine"])
    instance = f"127.0.0.1:{PORTS[engine]}"
    damage: list[Damage] = []
    rows = _Rows(trace, damage)
    with RecordingWriter(out, engine=engine, source=f"imported from trace {trace.name}") as writer:
        writer.details = {
            key: meta[key] for key in ("version", "plan", "seed", "uname", "cores") if key in meta
        }
        host = str(meta.get("uname", "? ?")).split()[1]
        processes = {str(role): int(pid) for role, pid in meta.get("roles", {}).items()}
        converted = {
            TELEMETRY_REQUESTS: rows.convert(
                "requests.jsonl.gz", partial(request_parts, instance=instance)
            ),
            TELEMETRY_ENGINE: rows.convert("metrics.csv.gz", MetricsPages(instance)),
            TELEMETRY_HOST: rows.convert("proc.csv.gz", HostCounters(instance, host, processes)),
        }
        counts: dict[str, int] = {}
        for topic, records in converted.items():
            ordered = sorted(records, key=attrgetter("observed_at_ns"))
            for record in ordered:
                writer.write(topic, record)
            counts[topic.name] = len(ordered)
        writer.truth = _copy(trace, out)
    for _, broken in groupby(damage, key=attrgetter("file")):
        first, *others = broken
        log.warning("%s: left out %s%s", trace, first, f", and {len(others)} more" * bool(others))
    return counts | ({"broken rows": len(damage)} if damage else {})


def request_parts(row: Mapping[str, Any], instance: str) -> Iterator[RequestTiming]:
    """One request as a network tap beside the client would have told it, in parts.

    ``kl_us`` is how long an event lay in the client's kernel, so a packet came that much before
    its event was read; where it is not known (-1) the time of reading stands for it. The prompt
    is one write on a local connection: its last byte went with its first.
    """
    arrival = int(row["t_send"])
    chunks = _packet_times(row)
    headers = int(row["t_hdr"]) or None
    if headers is not None and chunks:
        headers = min(headers, chunks[0])  # read together with the first event, and no later
    end = max([int(row["t_end"]), *chunks[-1:]])
    whole = row["err"] is None or str(row["err"]).startswith("http_")
    moments = sorted([arrival, *chunks, end] + ([headers] if headers is not None else []))
    reported = 0
    for part, tick in enumerate(sorted({moment // PART_NS for moment in moments})):
        limit = (tick + 1) * PART_NS
        seen = [moment for moment in moments if moment < limit]
        here = [chunk for chunk in chunks if tick * PART_NS <= chunk < limit]
        since_us = [(chunk - here[0]) // 1000 for chunk in here]
        answered = headers is not None and headers < limit
        ended = end < limit
        yield RequestTiming(
            request_id=f"{arrival}-{row['id']}",
            part=part,
            state=("complete" if whole else "aborted") if ended else "open",
            instance=instance,
            source="import",
            observed_at_ns=seen[-1],
            endpoint="/v1/completions",
            model=MODEL,
            streaming=True if answered else None,
            status=int(row["status"]) if answered else None,
            arrival_ns=arrival,
            request_end_ns=arrival,
            first_byte_ns=headers if answered else None,
            first_token_ns=chunks[0] if chunks and chunks[0] < limit else None,
            end_ns=end if ended else None,
            chunks_before=reported,
            chunk_base_ns=here[0] if here else None,
            chunk_deltas_us=tuple(later - earlier for earlier, later in pairwise(since_us)),
            prompt_tokens=int(row["plen"]),
            completion_tokens=int(row["out"]) if ended and whole else None,
            trace_id=row["trace"],
        )
        reported += len(here)


def _packet_times(row: Mapping[str, Any]) -> list[int]:
    times: list[int] = []
    read = int(row["t_send"])
    for gap_us, lay_us in zip(row["dt_us"], row["kl_us"], strict=True):
        read += int(gap_us) * 1000
        arrived = read - max(int(lay_us), 0) * 1000
        times.append(max(arrived, times[-1]) if times else arrived)
    return times


class MetricsPages:
    """The engine's metrics pages as the engine source reads them, put together from their table.

    A column is named as its series is written on the page; a series that was not on a page has no
    value.
    """

    def __init__(self, instance: str) -> None:
        self._parser = Parser()
        self._tracker = Tracker(instance)

    def __call__(self, row: Mapping[str, str]) -> Iterator[EngineSample]:
        """The sample of one scrape."""
        asked_ns, observed_ns = int(row["t_req_ns"]), int(row["t_resp_ns"])
        scrape_ms = (observed_ns - asked_ns) / 1e6
        if row["ok"] != "1":
            sample = self._tracker.failed(
                "no page", observed_at_ns=observed_ns, scrape_ms=scrape_ms
            )
        else:
            series = list(row.items())[PAGE_COLUMN:]
            page = "\n".join(f"{name} {value}" for name, value in series if value)
            sample = self._tracker.page(
                self._parser.parse(page.encode()),
                observed_at_ns=observed_ns,
                monotonic_ns=asked_ns,
                scrape_ms=scrape_ms,
            )
        yield replace(sample, source="import")


class HostCounters:
    """Growth of the operating system's counters from each row to the next.

    CPU of the machine and of the server are the kernel's accounts of the root control group and
    the server's. Run-queue time and switches are those of each process's main thread, and network
    bytes those of the loopback interface, which carried all of the lab's traffic: no more was
    recorded.
    """

    def __init__(self, instance: str, host: str, processes: Mapping[str, int]) -> None:
        """``processes``: pid by role."""
        self._instance = instance
        self._host = host
        self._processes = processes
        self._last: Mapping[str, str] | None = None

    def __call__(self, row: Mapping[str, str]) -> Iterator[HostSample]:
        """The sample from the row before to this one; none for the first."""
        now_ns = int(row["t_ns"])
        last, self._last = self._last, row
        if last is not None and now_ns > int(last["t_ns"]):
            yield _host_sample(_Growth(last, row), self._instance, self._host, self._processes)


class _Growth:
    """What changed between two rows of counters; None where either row does not tell."""

    def __init__(self, last: Mapping[str, str], row: Mapping[str, str]) -> None:
        self.row = row
        self._last = last

    def __call__(self, *columns: str, scale: int = 1) -> int | None:
        """Growth of the sum of these counters; None for one that went back."""
        values = [(self._last.get(column), self.row.get(column)) for column in columns]
        if any(not before or not after for before, after in values):
            return None
        grown = sum(int(after or 0) - int(before or 0) for before, after in values)
        return grown * scale if grown >= 0 else None

    def gauge(self, column: str, scale: int = 1) -> int | None:
        value = self.row.get(column)
        return int(value) * scale if value else None


def _host_sample(
    grown: _Growth, instance: str, host: str, processes: Mapping[str, int]
) -> HostSample:
    interval_ns = grown("t_ns") or 0
    machine = grown(*(f"root_c{core}_ns" for core in CORES))
    engine = grown(*(f"lab_engine_c{core}_ns" for core in CORES))
    stolen = grown(*(f"cpu{core}_steal" for core in CORES), scale=JIFFY_NS)
    capacity_ns = interval_ns * len(CORES)
    others = None if machine is None or engine is None else max(0, machine - engine)
    return HostSample(
        instance=instance,
        source="import",
        observed_at_ns=int(grown.row["t_ns"]),
        host=host,
        interval_ns=interval_ns,
        lateness_us=grown.gauge("lag_us"),
        processes=tuple(
            _process(grown, role, pid)
            for role, pid in processes.items()
            if grown.row.get(f"{role}_state")
        ),
        throttled_ns=grown("thr_ns"),
        throttled_periods=grown("thr_n"),
        cpu_busy=_share(machine, capacity_ns),
        cpu_others=_share(others, capacity_ns),
        cpu_steal=_share(stolen, capacity_ns),
        runnable=grown.gauge("procs_running"),
        psi_cpu_us=grown("psi_cpu_us"),
        psi_memory_us=grown("psi_mem_us"),
        psi_io_us=grown("psi_io_us"),
        memory_available_bytes=grown.gauge("mem_avail_kb", 1024),
        net_rx_bytes=grown("lo_rx_bytes"),
        net_tx_bytes=grown("lo_rx_bytes"),
        tcp_retransmits=grown("tcp_retrans"),
    )


def _share(part_ns: int | None, whole_ns: int) -> float | None:
    return None if part_ns is None else min(1.0, part_ns / whole_ns)


def _process(grown: _Growth, role: str, pid: int) -> ProcessSample:
    return ProcessSample(
        pid=pid,
        role=role,
        state=grown.row[f"{role}_state"],
        cpu_ns=grown(f"{role}_utime", f"{role}_stime", scale=JIFFY_NS),
        runqueue_ns=grown(f"{role}_wait_ns"),
        major_faults=grown(f"{role}_majflt"),
        minor_faults=grown(f"{role}_minflt"),
        involuntary_switches=grown(f"{role}_nvcsw"),
        voluntary_switches=grown(f"{role}_vcsw"),
        rss_bytes=grown.gauge(f"{role}_rss_pages", PAGE_BYTES),
        threads=grown.gauge(f"{role}_threads"),
    )


def _meta(trace: Path) -> dict[str, Any]:
    path = trace / META
    try:
        meta: dict[str, Any] = json.loads(path.read_text())
        engine = meta["engine"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise RecordingError(
            f"{trace} is no trace of the lab: {META}: {type(e).__name__} {e}"
        ) from e
    if engine not in PORTS:
        raise RecordingError(f"{path}: engine {engine!r} is none of {', '.join(PORTS)}")
    return meta


def _copy(trace: Path, out: Path) -> tuple[str, ...]:
    """Copy what scoring and comparing need; names of the files put under ``truth/``."""
    for name in (FAULTS, LABELS, FOREIGN):
        if (trace / name).exists():
            shutil.copyfile(trace / name, out / name)
    (out / TRUTH).mkdir()
    present = tuple(name for name in TRUTHS if (trace / name).exists())
    for name in present:
        shutil.copyfile(trace / name, out / TRUTH / name)
    return present


class _Rows:
    """Rows of a trace's files; what can't be read is noted and left out."""

    def __init__(self, folder: Path, damage: list[Damage]) -> None:
        self._folder = folder
        self._damage = damage

    def convert(
        self, name: str, convert: Callable[[Mapping[str, Any]], Iterable[R]]
    ) -> Iterator[R]:
        """What ``convert`` makes of each row of a file of JSON lines or a table."""
        rows = self._table(name) if ".csv" in name else self._objects(name)
        for number, row in rows:
            try:
                yield from convert(row)
            except (KeyError, TypeError, ValueError) as e:
                self._damaged(name, number, f"{type(e).__name__} {e}")

    def _objects(self, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in enumerate(self._lines(name)):
            try:
                yield number, dict(json.loads(line))
            except (ValueError, TypeError) as e:
                self._damaged(name, number, str(e))

    def _table(self, name: str) -> Iterator[tuple[int, dict[str, str]]]:
        lines = self._lines(name)
        columns = next(csv.reader(lines), [])
        for number, line in enumerate(lines):
            values = next(csv.reader([line]))
            if len(values) > len(columns):
                self._damaged(name, number, f"{len(values)} values for {len(columns)} columns")
            else:  # columns that came while the trace was written have no values before
                yield number, dict(zip_longest(columns, values, fillvalue=""))

    def _lines(self, name: str) -> Iterator[str]:
        path = self._folder / name
        number = 0
        try:
            with gzip.open(path, "rt") as file:
                for line in file:
                    yield line
                    number += 1
        except (OSError, EOFError, UnicodeDecodeError, zlib.error) as e:
            self._damaged(name, number, f"{type(e).__name__} {e}")

    def _damaged(self, name: str, record: int, reason: str) -> None:
        self._damage.append(Damage(file=name, record=record, reason=reason))
