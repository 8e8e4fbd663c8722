"""The HTTP exchanges of a capture file, one by one, for a person or a script."""

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import RenderableType

from latencyprism.collectors.network.config import NetworkConfig
from latencyprism.collectors.network.pcap import AnyServer, replay
from latencyprism.collectors.network.tap import Tap
from latencyprism.rows import rows_of
from latencyprism.schemas.records import RequestTiming

BOUNDS: Final = NetworkConfig(
    max_connections=1 << 16, max_exchanges=1 << 16, max_pipelined=256, max_gaps=4096
)
"""A file is read once and by nobody in a hurry: more is remembered than live."""
REPORT_S: Final = 10
"""How often, on the clock of the packets, news of open exchanges are taken in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a file holds: its exchanges by the time of their request, and what was not understood,
    by kind.
    """

    exchanges: Sequence[dict[str, Any]]
    counts: Counter[str]


class _Exchange:
    """The newest part of an exchange, and the times of its content events so far."""

    def __init__(self) -> None:
        self.last: RequestTiming | None = None
        self._times_ns = array("q")

    def add(self, part: RequestTiming) -> None:
        self.last = part
        if part.chunk_base_ns is not None:
            deltas_ns = (1000 * delta_us for delta_us in part.chunk_deltas_us)
            self._times_ns.extend(accumulate(deltas_ns, initial=part.chunk_base_ns))

    def row(self) -> dict[str, Any]:
        """What is told of it; None where nobody knows."""
        part = self.last
        assert part is not None
        gaps = [later - earlier for earlier, later in pairwise(self._times_ns)]
        return {
            "method": part.method,
            "path": part.endpoint,
            "status": part.status,
            "streaming": part.streaming,
            "chunks": len(self._times_ns) if part.streaming else None,
            "prompt_tokens": part.prompt_tokens,
            "completion_tokens": part.completion_tokens,
            "ttft_ms": _ms(part.first_token_ns, part.arrival_ns),
            "e2e_ms": _ms(part.end_ns, part.arrival_ns),
            "itl_p50_ms": round(median(gaps) / 1e6, 3) if gaps else None,
            "estimated": list(part.estimated),
            "state": part.state,
            "model": part.model,
            "max_tokens": part.max_tokens,
            "cached_tokens": part.cached_tokens,
            "server": part.instance,
            "start_ns": part.arrival_ns,
        }


def _ms(end_ns: int | None, start_ns: int) -> float | None:
    return None if end_ns is None else round((end_ns - start_ns) / 1e6, 3)


def exchanges_of(path: Path, *, ports: Collection[int] = ()) -> Found:
    """Every HTTP exchange in a capture file (pcap, pcapng), with servers on these ports or, without
    any, on all to which a request is sent.

    Raises as :func:`~latencyprism.collectors.network.capture_file.read`.
    """
    tap = Tap(AnyServer(ports), BOUNDS, every_path=True)
    exchanges: dict[str, _Exchange] = {}
    for part in replay(path, tap, interval_ms=1000 * REPORT_S):
        exchanges.setdefault(part.request_id, _Exchange()).add(part)
    rows = sorted((e.row() for e in exchanges.values()), key=itemgetter("start_ns"))
    counts = Counter({kind: n for kind, n in tap.counts.items() if kind != "exchanges"})
    return Found(exchanges=rows, counts=counts)


def rendered(found: Found, *, width: int) -> RenderableType:
    """The exchanges for a person with a terminal of so many characters."""
    columns: dict[str, Callable[[dict[str, Any]], object]] = {
        "request": lambda row: f"{row['method'] or '?'} {row['path']}",
        "server": itemgetter("server"),
        "status": itemgetter("status"),
        "chunks": itemgetter("chunks"),
        "prompt": itemgetter("prompt_tokens"),
        "output": itemgetter("completion_tokens"),
        "TTFT ms": itemgetter("ttft_ms"),
        "ITL p50 ms": itemgetter("itl_p50_ms"),
        "whole ms": itemgetter("e2e_ms"),
        "remark": _remark,
    }
    rows = [[value(row) for value in columns.values()] for row in found.exchanges]
    return rows_of(tuple(columns), rows, width=width)


def _remark(row: dict[str, Any]) -> str:
    """What is special about an exchange."""
    state = "" if row["state"] == "complete" else row["state"]
    estimated = "estimated: " + ", ".join(row["estimated"]) if row["estimated"] else ""
    return "; ".join(filter(None, (state, estimated)))


def remarks(found: Found) -> str:
    """One line about what was seen beside, lost, or not understood; empty when nothing was."""
    return ", ".join(f"{n:,} {kind}" for kind, n in sorted(found.counts.items()))
