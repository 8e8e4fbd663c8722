"""The processes of an inference server: found by the port they listen on, read by number."""

import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from latencyprism.collectors.host.files import Files
from latencyprism.collectors.host.tcp import listeners
from latencyprism.schemas.records import ProcessSample

logger = logging.getLogger(__name__)

MAX_PROCESSES = 64
"""Processes of one server that are read."""
MAX_ACTIVE = 32
MIN_ACTIVE = 4
"""Threads of a process that are read at every tick: those that move, and at least a few."""
TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

ROLES = (
    ("core", re.compile(r"\w+::EngineCore|sglang::(scheduler|data_parallel)")),
    ("worker", re.compile(r"\w+::Worker|\S*text-generation-server")),
    ("detokenizer", re.compile(r"sglang::detokenizer")),
    ("api", re.compile(r"\w+::APIServer|\S*text-generation-router")),
    ("api", re.compile(r"\S*python\S* (\S*vllm serve|-m (vllm|sglang)\.\S*(api|launch)_server)")),
)
"""Role → how its command line begins; vLLM and SGLang name their processes after their part."""
IGNORED = re.compile(r"multiprocessing\.resource_tracker")


def role_of(command_line: str, *, listens: bool) -> str | None:
    """Part that a process plays in its server, None if it plays none."""
    if IGNORED.search(command_line):
        return None
    named = next((role for role, pattern in ROLES if pattern.match(command_line)), None)
    return named or ("server" if listens else "child")


def holders(files: Files, inodes: set[int]) -> list[int]:
    """Processes that hold one of these sockets; looks through every process that may be read."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    return [
        int(name)
        for name in files.names(files.proc)
        if name.isdigit() and _holds(files, int(name), wanted)
    ]


def _holds(files: Files, pid: int, wanted: set[str]) -> bool:
    folder = f"{files.proc}/{pid}/fd"
    return any(_link(f"{folder}/{name}") in wanted for name in files.names(folder))


def _link(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115 - a Path for each descriptor costs more than the call
    except OSError:
        return ""


def descendants(files: Files, pids: Iterable[int]) -> list[int]:
    """Processes and all their children, parents first, at most ``MAX_PROCESSES``."""
    found: dict[int, None] = {}
    waiting = list(pids)
    while waiting and len(found) < MAX_PROCESSES:
        pid = waiting.pop(0)
        if pid not in found:
            found[pid] = None
            waiting += _children(files, pid)
    return list(found)


def _children(files: Files, pid: int) -> list[int]:
    tasks = f"{files.proc}/{pid}/task"
    lists = (files.read_once(f"{tasks}/{tid}/children") or b"" for tid in files.names(tasks))
    return [int(child) for some in lists for child in some.split()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """What is used of /proc/PID/stat; times in ticks."""

    state: str
    minor_faults: int
    major_faults: int
    cpu_ticks: int
    threads: int
    started_ticks: int
    rss_pages: int


def parse_stat(stat: bytes) -> Stat:
    """From /proc/PID/stat; the command in parentheses may hold anything, parentheses too."""
    fields = stat[stat.rindex(b")") + 2 :].split(None, 22)
    return Stat(
        state=fields[0].decode(),
        minor_faults=int(fields[7]),
        major_faults=int(fields[9]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        threads=int(fields[17]),
        started_ticks=int(fields[19]),
        rss_pages=int(fields[21]),
    )


def parse_switches(status: bytes | None) -> tuple[int, int] | None:
    """Voluntary and involuntary context switches, from /proc/PID/status."""
    _, found, rest = (status or b"").partition(b"\nvoluntary_ctxt_switches:")
    if not found:
        return None
    voluntary, _, involuntary = rest.partition(b"nonvoluntary_ctxt_switches:")
    return int(voluntary), int(involuntary.split(None, 1)[0])


class Threads:
    """Time that the threads of a process waited for a CPU, from their schedstat.

    Most threads of a server sleep for ever, and reading all costs too much. A sweep finds those
    that moved since the sweep before; only they are read between sweeps, and at least a few.
    """

    def __init__(self, files: Files, pid: int) -> None:
        self._files = files
        self._tasks = f"{files.proc}/{pid}/task"
        self._swept: dict[int, tuple[int, int]] = {}
        self._waits: dict[int, int | None] = {}

    def sweep(self) -> None:
        """Choose anew which threads are read; opens and closes a file for each thread."""
        now = {}
        for name in self._files.names(self._tasks):
            times = _schedstat(self._files.read_once(self._path(int(name))))
            if times is not None:
                now[int(name)] = times
        if self._swept:
            growth = {tid: sum(now[tid]) - sum(self._swept.get(tid, (0, 0))) for tid in now}
            moved = sum(1 for tid in now if growth[tid] > 0)
        else:  # nothing is known yet but how long each has run since it was born
            growth = {tid: sum(now[tid]) for tid in now}
            moved = 0
        ranked = sorted(now, key=lambda tid: (growth[tid], now[tid]), reverse=True)
        active = ranked[: min(max(moved, MIN_ACTIVE), MAX_ACTIVE)]
        for tid in self._waits.keys() - set(active):
            self._files.forget(self._path(tid))
        self._waits = {tid: self._waits.get(tid) for tid in active}
        self._swept = now

    def waited_ns(self) -> int | None:
        """Time waited since the last call by the threads that are read; None where the kernel
        does not tell, and at first.
        """
        total = None
        for tid, before in self._waits.items():
            times = _schedstat(self._files.read(self._path(tid)))
            self._waits[tid] = times[1] if times else None
            if times is not None and before is not None:
                total = (total or 0) + times[1] - before
        return total

    def _path(self, tid: int) -> str:
        return f"{self._tasks}/{tid}/schedstat"

    def close(self) -> None:
        """Close what is kept open."""
        for tid in self._waits:
            self._files.forget(self._path(tid))
        self._waits.clear()


def _schedstat(data: bytes | None) -> tuple[int, int] | None:
    if not data:
        return None
    run, wait, _ = data.split()
    return int(run), int(wait)


class Process:
    """Reads one process; its deltas span the time between two calls."""

    def __init__(self, files: Files, pid: int, role: str) -> None:
        self.pid = pid
        self.role = role
        self._files = files
        self._stat_path = f"{files.proc}/{pid}/stat"
        self._status_path = f"{files.proc}/{pid}/status"
        self._threads = Threads(files, pid)
        self._stat: Stat | None = None
        self._switches: tuple[int, int] | None = None

    def sweep(self) -> None:
        """Choose anew which threads are read."""
        self._threads.sweep()

    def read(self) -> ProcessSample | None:
        """The process since the last call, deltas null the first time; None when it is gone."""
        data = self._files.read(self._stat_path)
        stat = parse_stat(data) if data else None
        before, self._stat = self._stat, stat
        if stat is None or (before and before.started_ticks != stat.started_ticks):
            return None
        switches = parse_switches(self._files.read(self._status_path))
        last, self._switches = self._switches, switches
        switched = (switches[0] - last[0], switches[1] - last[1]) if switches and last else None
        return ProcessSample(
            pid=self.pid,
            role=self.role,
            state=stat.state,
            cpu_ns=(stat.cpu_ticks - before.cpu_ticks) * TICK_NS if before else None,
            runqueue_ns=self._threads.waited_ns(),
            major_faults=stat.major_faults - before.major_faults if before else None,
            minor_faults=stat.minor_faults - before.minor_faults if before else None,
            involuntary_switches=switched[1] if switched else None,
            voluntary_switches=switched[0] if switched else None,
            rss_bytes=stat.rss_pages * PAGE_BYTES,
            threads=stat.threads,
        )

    def close(self) -> None:
        """Close what is kept open."""
        self._threads.close()
        self._files.forget(self._stat_path)
        self._files.forget(self._status_path)


class Server:
    """The processes behind one port, found anew when one dies and every few seconds."""

    def __init__(self, files: Files, port: int) -> None:
        self.port = port
        self.processes: dict[int, Process] = {}
        self._files = files
        self._inodes: set[int] = set()
        self._holders: list[int] = []

    def discover(self) -> bool:
        """Find the processes again; whether they changed.

        Looks through all processes of the machine only when the listening socket is a new one or
        nobody of those known holds it any more.
        """
        inodes = listeners(self._files, self.port)
        wanted = {f"socket:[{inode}]" for inode in inodes}
        known = [pid for pid in self._holders if _holds(self._files, pid, wanted)]
        if inodes != self._inodes or (self._holders and not known):
            known = holders(self._files, inodes) if inodes else []
            if inodes and not known:
                logger.warning("Port %d is open, but no process that may be read", self.port)
        self._inodes, self._holders = inodes, known
        roles = self._roles()
        before = {process.pid: process.role for process in self.processes.values()}
        for pid in set(self.processes) - set(roles):
            self.processes.pop(pid).close()
        for pid, role in roles.items():
            if pid in self.processes:
                self.processes[pid].role = role
            else:
                self.processes[pid] = Process(self._files, pid, role)
            self.processes[pid].sweep()
        return roles != before

    def _roles(self) -> dict[int, str]:
        roles = {}
        for pid in descendants(self._files, self._holders):
            line = (self._files.read_once(f"{self._files.proc}/{pid}/cmdline") or b"").decode(
                errors="replace"
            )
            role = role_of(line.replace("\0", " "), listens=pid in self._holders)
            if role is not None:
                roles[pid] = role
        if "core" in roles.values():
            # The process that talks to the engine's core is its web server, whatever its title.
            roles |= {pid: "api" for pid in self._holders if roles.get(pid) == "server"}
        return roles

    def read(self) -> tuple[list[ProcessSample], bool]:
        """Samples of the living processes, and whether one died since the last discovery."""
        samples = []
        died = False
        for pid, process in list(self.processes.items()):
            sample = process.read()
            if sample is None:
                died = True
                self.processes.pop(pid).close()
            else:
                samples.append(sample)
        return samples, died

    def close(self) -> None:
        """Close what is kept open."""
        for process in self.processes.values():
            process.close()
        self.processes.clear()
