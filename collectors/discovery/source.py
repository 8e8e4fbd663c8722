"""Looks for inference servers on this host and says which ones there are."""

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

from latencyprism.collectors.address import port_of
from latencyprism.collectors.discovery.config import DiscoveryConfig
from latencyprism.collectors.discovery.probe import Answer, probe
from latencyprism.collectors.discovery.sockets import (
    Listener,
    held,
    listeners,
    own_name,
    processes,
)
from latencyprism.collectors.source import Emit

logger = logging.getLogger(__name__)

USUAL_PORTS = frozenset({80, 3000, 8000, 8080, 11434, 23333, 30000})
"""Where the known servers listen unless told otherwise."""
MAX_PORTS = 4
"""Ports of one program that are asked, where nothing tells which one serves HTTP."""
FIRST_RETRY_S = 5.0
LONGEST_RETRY_S = 300.0
"""Pauses before a server that is not ready is asked again, doubling."""
MAX_SERVERS = 64

_PORT = re.compile(r"(?:^| )--port[ =](\d{1,5})(?: |$)|(?:^| )-p (\d{1,5})(?: |$)")

Probe = Callable[[str, int], Answer]


@dataclass(slots=True)
class _Candidate:
    """A listening socket of a program that is known."""

    listener: Listener
    program: int
    """Process id of the program."""
    answer: Answer = "later"
    due_s: float = 0.0
    pause_s: float = FIRST_RETRY_S


class Discovery:
    """The servers there are, from look to look. Not thread-safe.

    Processes are looked through only when the listening sockets have changed; a socket of a known
    program is asked once, again only while its server is not ready. ``engines`` are the base URLs
    that are watched anyway; their ports are left alone. ``ask`` tells what answers at an address.
    """

    def __init__(
        self,
        config: DiscoveryConfig,
        engines: Sequence[str] = (),
        *,
        proc: Path = Path("/proc"),
        ask: Probe | None = None,
        own_name: Callable[[], str] = own_name,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._config = config
        self._programs = re.compile("|".join(f"(?:{program})" for program in config.programs))
        self._known_ports = {port_of(url) for url in engines}
        self._proc = proc
        self._ask = ask or (lambda host, port: probe(host, port, timeout_s=config.timeout_s))
        self._own_name = own_name
        self._inodes: frozenset[int] = frozenset()
        self._candidates: dict[int, _Candidate] = {}
        self._seen_s: dict[str, float] = {}

    def look(self, now_s: float) -> tuple[str, ...]:
        """Base URLs of the servers there are, or were within the grace; ``now_s`` is monotonic.

        Usually microseconds; after a change some milliseconds, and for a new server as long as it
        takes to answer.
        """
        self.counts["looks"] += 1
        there = listeners(self._proc)
        if there.keys() != self._inodes:
            self._inodes = frozenset(there)
            self._find(there)
        answering = {c.program for c in self._candidates.values() if c.answer == "yes"}
        for candidate in self._candidates.values():
            asking = candidate.answer == "later" and candidate.due_s <= now_s
            if asking and candidate.program not in answering:
                self._question(candidate, now_s)
            if candidate.answer == "yes":
                self._seen_s[self._url(candidate.listener)] = now_s
        self._seen_s = {
            url: seen_s
            for url, seen_s in self._seen_s.items()
            if now_s - seen_s <= self._config.grace_s
        }
        return tuple(sorted(self._seen_s))[:MAX_SERVERS]

    def _find(self, there: Mapping[int, Listener]) -> None:
        self.counts["searches"] += 1
        listening = {
            inode: listener
            for inode, listener in there.items()
            if listener.port not in self._known_ports
        }
        self._candidates = {
            listener.inode: self._candidates.get(listener.inode) or _Candidate(listener, pid)
            for pid, command, family in self._programs_running()
            for listener in self._ports(command, family, listening)
        }

    def _programs_running(self) -> Iterator[tuple[int, str, list[int]]]:
        """Known programs: process id, command line, and they with all processes below them."""
        children: dict[int, list[int]] = {}
        known: dict[int, str] = {}
        for process in processes(self._proc):
            children.setdefault(process.parent, []).append(process.pid)
            if self._programs.search(process.command):
                known[process.pid] = process.command
        for program, command in known.items():
            family = [program]
            for pid in family:
                family += children.get(pid, ())
            yield program, command, family

    def _ports(
        self, command: str, family: Iterable[int], listening: Mapping[int, Listener]
    ) -> Iterable[Listener]:
        """Where a program may serve HTTP; its processes talk among each other on ports, too."""
        named = {int(port) for match in _PORT.findall(command) for port in match if port}
        inodes: set[int] = set()
        for pid in family:
            held_by_it = held(self._proc, pid)
            if held_by_it is None:
                self.counts["not permitted"] += 1
                return [listener for listener in listening.values() if listener.port in named]
            inodes |= held_by_it
        own = [listening[inode] for inode in inodes & listening.keys()]
        for ports in (named, USUAL_PORTS):
            if sure := [listener for listener in own if listener.port in ports]:
                return sure
        return sorted(own, key=lambda listener: listener.port)[:MAX_PORTS]

    def _question(self, candidate: _Candidate, now_s: float) -> None:
        listener = candidate.listener
        self.counts["questions"] += 1
        candidate.answer = self._ask(_reachable(listener.address), listener.port)
        candidate.due_s = now_s + candidate.pause_s
        candidate.pause_s = min(2 * candidate.pause_s, LONGEST_RETRY_S)
        logger.info("Is port %d an inference server's? %s", listener.port, candidate.answer)

    def _url(self, listener: Listener) -> str:
        address = listener.address
        if address.is_unspecified:
            host = self._config.host or self._own_name()
        else:
            host = f"[{address}]" if address.version == 6 else str(address)
        return f"http://{host}:{listener.port}"


def _reachable(address: IPv4Address | IPv6Address) -> str:
    if not address.is_unspecified:
        return str(address)
    return "127.0.0.1" if address.version == 4 else "::1"


class DiscoverySource:
    """Runs a :class:`Discovery` as a source that emits nothing; ``found`` is told what there is."""

    name = "discovery"

    def __init__(
        self,
        config: DiscoveryConfig,
        engines: Sequence[str],
        found: Callable[[tuple[str, ...]], None],
    ) -> None:
        self._config = config
        self._found = found
        self._discovery = Discovery(config, engines)
        self._servers: tuple[str, ...] = ()

    @property
    def counts(self) -> Mapping[str, int]:
        """See :class:`~latencyprism.collectors.source.Counting`."""
        return dict(self._discovery.counts) | {"servers": len(self._servers)}

    def run(self, emit: Emit, stop: threading.Event) -> None:  # noqa: ARG002 - it has no samples
        """See :meth:`Source.run`; while a new server is asked, the end can take longer."""
        while not stop.is_set():
            servers = self._discovery.look(time.monotonic())
            if servers != self._servers:
                logger.info("Inference servers found: %s", ", ".join(servers) or "none")
                self._servers = servers
                self._found(servers)
            stop.wait(self._config.interval_s)
