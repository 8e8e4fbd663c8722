"""Processes of the machine: found by what they hold and who started them, read by number."""

import os
import re
from collections.abc import Callable, Iterable, MutableMapping
from typing import NamedTuple

from latencyprism.collectors.host.files import Files, Parsed
from latencyprism.collectors.host.threads import Growth, Threads
from latencyprism.schemas.records import ProcessSample

MAX_PROCESSES = 64
"""Processes of one server that are read."""
TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

ROLES = (
    ("core", re.compile(r"\w+::EngineCore|sglang::(scheduler|data_parallel)|ray::\w*EngineCore")),
    (
        "worker",
        re.compile(r"\w+::Worker|\S*text-generation-server|\S*ollama runner|ray::\w*Worker"),
    ),
    ("detokenizer", re.compile(r"sglang::detokenizer")),
    ("launcher", re.compile(r"\S*text-generation-launcher")),
    ("api", re.compile(r"\w+::APIServer|\S*text-generation-router|\S*ollama serve")),
    ("api", re.compile(r"\S*python\S* (\S*vllm serve|-m (vllm|sglang)\.\S*(api|launch)_server)")),
    ("api", re.compile(r"\S*python\S* \S*(trtllm-serve|lmdeploy serve api_server)")),
)
"""Role → how its command line begins; vLLM and SGLang name their processes after their part."""
LAUNCHER = re.compile(r"\S*text-generation-launcher|\S*python\S* \S*vllm serve")
"""Starts the listening process as one child among others that serve too."""
IGNORED = re.compile(r"multiprocessing\.resource_tracker")


def role_of(command_line: str, *, listens: bool) -> str | None:
    """Part that a process plays in its server, None if it plays none."""
    if IGNORED.search(command_line):
        return None
    named = next((role for role, pattern in ROLES if pattern.match(command_line)), None)
    return named or ("server" if listens else "child")


def holders(files: Files, inodes: set[int], pids: Iterable[int] | None = None) -> dict[int, str]:
    """Process → descriptor, as a path, of those that hold one of these sockets; looks through
    ``pids``, or through every process that may be read.
    """
    wanted = {f"socket:[{inode}]" for inode in inodes}
    found = {}
    for pid in files.pids() if pids is None else pids:
        folder = f"{files.proc}/{pid}/fd"
        paths = (f"{folder}/{name}" for name in files.names(folder))
        path = next((path for path in paths if files.link(path) in wanted), None)
        if path is not None:
            found[pid] = path
    return found


def descendants(
    files: Files, pids: Iterable[int], children: Callable[[int], list[int]] | None = None
) -> list[int]:
    """Processes and all their children, parents first, at most ``MAX_PROCESSES``; ``children`` of
    a process are read from ``/proc`` unless the caller knows better.
    """
    found: dict[int, None] = {}
    waiting = list(pids)
    while waiting and len(found) < MAX_PROCESSES:
        pid = waiting.pop(0)
        if pid not in found:
            found[pid] = None
            waiting += children(pid) if children else children_of(files, pid)
    return list(found)


def children_of(files: Files, pid: int) -> list[int]:
    """Processes that any thread of a process has started."""
    tasks = f"{files.proc}/{pid}/task"
    lists = (files.text(f"{tasks}/{tid}/children") for tid in files.names(tasks))
    return [int(child) for some in lists for child in some.split()]


class Stat(NamedTuple):
    """What is used of /proc/PID/stat; times in ticks, ``cpu`` the one it ran on last."""

    state: str
    minor_faults: int
    major_faults: int
    cpu_ticks: int
    threads: int
    started_ticks: int
    rss_pages: int
    cpu: int


def parse_stat(stat: bytes) -> Stat | None:
    """From /proc/PID/stat; the command in parentheses may hold anything, parentheses too. None
    when it is cut short, as of a process that is gone.
    """
    fields = stat.rpartition(b")")[2].split(None, 37)
    if len(fields) < 37:
        return None
    return Stat(
        state=fields[0].decode(),
        minor_faults=int(fields[7]),
        major_faults=int(fields[9]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        threads=int(fields[17]),
        started_ticks=int(fields[19]),
        rss_pages=int(fields[21]),
        cpu=int(fields[36]),
    )


def parse_switches(status: bytes) -> tuple[int, int] | None:
    """Voluntary and involuntary context switches, from /proc/PID/status."""
    _, found, rest = status.partition(b"\nvoluntary_ctxt_switches:")
    if not found:
        return None
    voluntary, _, involuntary = rest.partition(b"nonvoluntary_ctxt_switches:")
    return int(voluntary), int(involuntary.split(None, 1)[0])


class Process:
    """Reads one process; its deltas span the time between two calls."""

    def __init__(self, files: Files, pid: int, role: str, counts: MutableMapping[str, int]) -> None:
        self.pid = pid
        self.role = role
        self.threads = Threads(files, pid, counts)
        self.cpu: int | None = None
        """CPU on which its main thread ran last."""
        self._stat_file = Parsed(files, f"{files.proc}/{pid}/stat", parse_stat)
        self._status_file = Parsed(files, f"{files.proc}/{pid}/status", parse_switches)
        self._stat: Stat | None = None
        self._switches: tuple[int, int] | None = None
        self._stirred = True

    def sweep(self) -> list[Growth]:
        """Its threads that moved since the last sweep, see :meth:`Threads.sweep`; none of a process
        that has not used a tick of CPU time since.
        """
        if not self._stirred:
            return []
        self._stirred = False
        return self.threads.sweep()

    def sweep_next(self) -> None:
        """Let the next sweep read the threads even if nothing seems to have moved."""
        self._stirred = True

    def read(self) -> ProcessSample | None:
        """The process since the last call, deltas null the first time; None when it is gone."""
        stat = self._stat_file.read()
        before, self._stat = self._stat, stat
        if stat is None or (before and before.started_ticks != stat.started_ticks):
            return None
        self.cpu = stat.cpu
        waited = self.threads.waited_ns()
        if waited or before is None or stat.cpu_ticks > before.cpu_ticks:
            self._stirred = True
        switches = self._status_file.read()
        last, self._switches = self._switches, switches
        switched = (switches[0] - last[0], switches[1] - last[1]) if switches and last else None
        return ProcessSample(
            pid=self.pid,
            role=self.role,
            state=stat.state,
            cpu_ns=(stat.cpu_ticks - before.cpu_ticks) * TICK_NS if before else None,
            runqueue_ns=waited,
            major_faults=stat.major_faults - before.major_faults if before else None,
            minor_faults=stat.minor_faults - before.minor_faults if before else None,
            involuntary_switches=switched[1] if switched else None,
            voluntary_switches=switched[0] if switched else None,
            rss_bytes=stat.rss_pages * PAGE_BYTES,
            threads=stat.threads,
        )

    def close(self) -> None:
        """Close what is kept open."""
        self.threads.close()
        self._stat_file.close()
        self._status_file.close()
