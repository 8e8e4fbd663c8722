"""What the whole agent costs, and what it takes from the server that it watches.

The agent runs as in production: ``latencyprism collect`` as a process of its own, with the sources
engine, host and network, publishing to the mock broker inside librdkafka in this process, so that
its side of Kafka is real and no broker takes CPU time from the server.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from confluent_kafka import Producer

from latencyprism.bench.figures import Figure, median
from latencyprism.bench.traffic import Seen, load, paced_server
from latencyprism.collectors.catalogue import may_capture

STREAMS: Final = 32
TOKENS_PER_S: Final = 50.0
TOKENS: Final = 100
LIVE_STREAMS: Final = 8
"""On a live server, which may be a small one."""
SETTLE_S: Final = 4.0
"""After its start, the agent has read its code and looked for the server's processes."""
READY_S: Final = 30.0
UNBOUNDED: Final = {"cpu_pct": 1e6, "rss_mb": 1e6, "bytes_s": 1e12}
"""An agent that sheds its dearest source would be measured without it."""
TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")

Blocks = Sequence[tuple[float, float]]
"""Beginning and end of each measured stretch, seconds of the monotonic clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """How long each part is measured."""

    runs: int = 3
    run_s: float = 8.0
    """Of the agent's own cost."""
    rounds: int = 4
    block_s: float = 5.0
    """Of the server, once with and once without the agent in each round."""


def measure_agent(times: Times) -> dict[str, Figure]:
    """``agent.cpu_pct`` of a core and ``agent.rss_mb``, at 32 streams of 50 tokens/s.

    Raises PermissionError without CAP_NET_RAW, OSError when something does not start.
    """
    if not may_capture():
        raise PermissionError("without CAP_NET_RAW the agent leaves out what costs most")
    cpu_pct, rss_mb = [], []
    with (
        broker() as bootstrap,
        paced_server(tokens_per_s=TOKENS_PER_S, streams=STREAMS) as url,
        load(url, streams=STREAMS, tokens=TOKENS),
    ):
        for _ in range(times.runs):
            with agent(url, bootstrap) as pid:
                cpu_s, at = _cpu_s(pid), time.monotonic()
                time.sleep(times.run_s)
                cpu_pct.append(100 * (_cpu_s(pid) - cpu_s) / (time.monotonic() - at))
                rss_mb.append(_rss_mb(pid))
    return {"agent.cpu_pct": median(cpu_pct, "%"), "agent.rss_mb": median(rss_mb, "MB")}


def measure_server(url: str | None, times: Times) -> dict[str, Figure]:
    """What the agent takes from a server under load, and what chance alone takes.

    Stretches without the agent alternate with stretches that have, in turns, the agent
    (``server.*``) and nothing (``noise.*``) beside the server; each is compared with the mean of
    the two around it, so that a drift of the machine counts for neither. ``throughput_delta_pct``
    is of the chunks a second (less than 0: fewer with it), ``p99_delta_pct`` of the 99th percentile
    of the time that clients waited for a chunk. ``url`` None takes a simulated server. Raises
    OSError when something does not start, ValueError when the server sent nothing.
    """
    with (
        broker() as bootstrap,
        _server(url) as watched,
        load(watched, streams=LIVE_STREAMS if url else STREAMS, tokens=TOKENS) as traffic,
    ):
        time.sleep(SETTLE_S)
        blocks = [_block(times)]
        for _ in range(times.rounds):
            with agent(watched, bootstrap):
                blocks.append(_block(times))
            blocks.append(_block(times))
            time.sleep(SETTLE_S)  # as long as the agent had to settle
            blocks.append(_block(times))
            blocks.append(_block(times))
        seen = traffic.end()
    return compare(seen, blocks)


def compare(seen: Seen, blocks: Blocks) -> dict[str, Figure]:
    """The figures; every second block is compared with its neighbours, and of those every other
    one had the agent, the first of them first.
    """
    windows = [seen.between(*block) for block in blocks]
    deltas: dict[str, list[float]] = {}
    for at in range(1, len(windows) - 1, 2):
        before, middle, after = windows[at - 1 : at + 2]
        group = "server" if at % 4 == 1 else "noise"
        throughput = (before.chunks_s + after.chunks_s) / 2
        p99_ms = (before.p99_ms + after.p99_ms) / 2
        for name, value in (
            ("throughput", middle.chunks_s / throughput),
            ("p99", middle.p99_ms / p99_ms),
        ):
            deltas.setdefault(f"{group}.{name}_delta_pct", []).append(100 * (value - 1))
    return {
        **{name: median(values, "%") for name, values in deltas.items()},
        "server.chunks_per_s": median([window.chunks_s for window in windows], "1/s"),
        "server.p99_ms": median([window.p99_ms for window in windows], "ms"),
        "server.failed_requests": Figure(value=seen.failed, unit="count"),
    }


def _block(times: Times) -> tuple[float, float]:
    began = time.monotonic()
    time.sleep(times.block_s)
    return began, time.monotonic()


@contextmanager
def _server(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    with paced_server(tokens_per_s=TOKENS_PER_S, streams=STREAMS) as simulated:
        yield simulated


@contextmanager
def broker() -> Iterator[str]:
    """Address of the mock broker inside librdkafka, in this process."""
    owner = Producer({"test.mock.num.brokers": 1, "log_level": 2})
    (found,) = owner.list_topics(timeout=10).brokers.values()
    yield f"{found.host}:{found.port}"
    owner.flush(0)


@contextmanager
def agent(url: str, bootstrap: str) -> Iterator[int]:
    """Process id of an agent that watches the server and has settled.

    Raises OSError with what it complained of when it does not start, ends, or one of its sources
    does not run: it would seem cheaper than it is.
    """
    settings = {
        "kafka": {"bootstrap": bootstrap},
        "collectors": {
            "engines": [url],
            "sources": ["engine", "host", "network"],
            "cost": UNBOUNDED,
        },
    }
    with tempfile.TemporaryDirectory(prefix="latencyprism-bench-") as temporary:
        folder = Path(temporary)
        config, ready, log = folder / "settings.json", folder / "ready", folder / "log"
        config.write_text(json.dumps(settings))
        command = [sys.executable, "-m", "latencyprism", "--config", str(config), "collect"]
        with (
            log.open("w") as output,
            subprocess.Popen(
                [*command, "--ready", str(ready)], stdout=output, stderr=output
            ) as process,
        ):
            try:
                deadline = time.monotonic() + READY_S
                while not ready.exists():
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise OSError(f"the agent did not start:\n{log.read_text()[-2000:]}")
                    time.sleep(0.05)
                time.sleep(SETTLE_S)
                yield process.pid
                if process.poll() is not None:
                    raise OSError(f"the agent ended:\n{log.read_text()[-2000:]}")
                if told := [line for line in log.read_text().splitlines() if " WARNING " in line]:
                    raise OSError("the agent did not run as it should:\n" + "\n".join(told))
            finally:
                process.terminate()


def _cpu_s(pid: int) -> float:
    """CPU time of all threads of a process, to a hundredth of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def _rss_mb(pid: int) -> float:
    status: Mapping[str, str] = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return int(status["VmRSS"].split()[0]) * 1024 / 1e6
