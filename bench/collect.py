"""What the collectors cost, and how well the packet tap sees."""

import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from latencyprism.bench.agent import Times, measure_agent, measure_server
from latencyprism.bench.engine import measure_engine
from latencyprism.bench.figures import Figure, median
from latencyprism.bench.network import measure_network, measure_offline
from latencyprism.collectors.host.config import HostConfig
from latencyprism.collectors.host.source import HostSource
from latencyprism.schemas.topics import Topic

RUNS = 3
OFFLINE_RUNS = 9
HOST_S = 10.0
UNITS = {"pct": "%", "us": "µs", "lost": "count", "events": "count"}


def measure(engine: str | None = None) -> tuple[Mapping[str, Figure], Mapping[str, str]]:
    """Figures of the collectors on this machine; takes about four minutes.

    ``engine`` is the URL of a live server from which it is measured what the agent takes; a
    simulated one stands in for it.
    """
    figures = {"host.cpu_pct": median([_host_cpu_pct() for _ in range(RUNS)], "%")}
    skipped: dict[str, str] = {}
    try:
        figures |= measure_engine()
    except FileNotFoundError as e:
        skipped["engine.parse_ms"] = f"{e.filename} is not here; run from a checkout"
    figures["network.offline_pkts_per_s"] = median(
        [measure_offline() for _ in range(OFFLINE_RUNS)], "1/s"
    )
    try:
        figures |= _network()
        figures |= measure_agent(Times())
        figures |= measure_server(engine, Times())
    except PermissionError as e:
        skipped |= dict.fromkeys(
            ("network.cpu_pct", "agent.cpu_pct", "server.throughput_delta_pct"),
            f"needs CAP_NET_RAW ({e})",
        )
    return figures, skipped


def _network() -> dict[str, Figure]:
    runs: dict[str, list[float]] = defaultdict(list)
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close()
    for _ in range(RUNS):
        for name, value in measure_network().items():
            runs[name].append(value)
    return {
        name: median(values, UNITS[name.rpartition("_")[2].rpartition(".")[2]])
        for name, values in runs.items()
    }


class _Nowhere:
    """Takes samples and forgets them."""

    def sample(self, topic: Topic, sample: Any) -> None:
        """Forget it."""

    def watermark(self, topic: Topic, instance: str, watermark_ns: int) -> None:
        """Forget it."""


def _host_cpu_pct() -> float:
    with _server() as url:
        stop = threading.Event()
        source = HostSource([url], HostConfig())
        thread = threading.Thread(target=source.run, args=(_Nowhere(), stop))
        thread.start()
        time.sleep(1.0)
        began, cpu = time.monotonic(), time.process_time()
        time.sleep(HOST_S)
        used = 100 * (time.process_time() - cpu) / (time.monotonic() - began)
        stop.set()
        thread.join()
    return used


@contextmanager
def _server() -> Iterator[str]:
    """A server process to watch."""
    command = [sys.executable, "-m", "latencyprism.simulator.server", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()
