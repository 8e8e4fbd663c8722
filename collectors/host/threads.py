"""The threads of one process: how long each ran, and waited for a CPU."""

from collections.abc import MutableMapping
from dataclasses import dataclass
from itertools import islice

from latencyprism.collectors.host.files import Files, Parsed

MAX_ACTIVE = 32
MIN_ACTIVE = 4
"""Threads of a process that are read at every tick: those that move, and at least a few."""
MAX_SWEPT = 256
"""Threads of a process that one sweep reads; those of a larger process take turns."""


Times = tuple[int, int]
"""Nanoseconds that a thread ran, and waited for a CPU, since it was born."""


def parse_schedstat(data: bytes) -> Times | None:
    """From /proc/PID/task/TID/schedstat; None where the kernel does not tell."""
    fields = data.split(None, 2)
    return (int(fields[0]), int(fields[1])) if len(fields) >= 2 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What a thread did since the sweep that read it last."""

    tid: int
    ran_ns: int
    waited_ns: int


class Threads:
    """Reads the threads of one process, from their schedstat.

    Most threads of a server sleep for ever, and reading all costs too much. A sweep reads all and
    finds those that moved since the sweep before; only they are read between sweeps.
    """

    def __init__(self, files: Files, pid: int, counts: MutableMapping[str, int]) -> None:
        self._files = files
        self._tasks = f"{files.proc}/{pid}/task"
        self._counts = counts
        self._files_of: dict[int, Parsed[Times | None]] = {}
        self._swept: dict[int, Times] = {}
        self._waits: dict[int, int] = {}
        self._begun = False
        self._moved: set[int] = set()
        self._children: dict[int, list[int]] = {}

    def waited_ns(self) -> int | None:
        """Time waited since the last call by the threads that are read; None where the kernel
        does not tell, and at first.
        """
        total = None
        for tid, before in self._waits.items():
            times = self._files_of[tid].read()
            if times is not None:
                self._waits[tid] = times[1]
                total = (total or 0) + times[1] - before
        return total

    def sweep(self) -> list[Growth]:
        """Choose anew which threads are read between sweeps, and return those that moved since
        they were read last; none the first time. A thread born since counts from its birth.
        """
        tids = [int(name) for name in self._files.names(self._tasks)]
        chosen = self._turn(tids)
        for gone in self._files_of.keys() - set(tids):
            self._swept.pop(gone, None)
            self._moved.discard(gone)
            self._waits.pop(gone, None)
            self._files_of.pop(gone).close()
        now = {}
        for tid in chosen:
            if tid not in self._files_of:
                path = f"{self._tasks}/{tid}/schedstat"
                self._files_of[tid] = Parsed(self._files, path, parse_schedstat)
            times = self._files_of[tid].read()
            if times is not None:
                now[tid] = times
        growth = [
            self._growth(tid, times, born=len(tids) <= MAX_SWEPT) for tid, times in now.items()
        ]
        self._swept |= now
        begun, self._begun = self._begun, True
        # At first nothing is known but how long each has run since it was born.
        rank = sorted(growth, key=lambda one: (one.ran_ns + one.waited_ns, one.tid), reverse=True)
        moved = [one for one in rank if one.ran_ns or one.waited_ns]
        self._moved |= {one.tid for one in moved}
        count = min(max(len(moved) if begun else 0, MIN_ACTIVE), MAX_ACTIVE)
        active = [one.tid for one in rank[:count]]
        self._waits = {tid: self._waits.get(tid, now[tid][1]) for tid in active}
        return moved if begun else []

    def _turn(self, tids: list[int]) -> list[int]:
        if len(tids) <= MAX_SWEPT:
            return tids
        self._counts["threads_beyond_bound"] += 1
        # The dictionary is in the order in which they were read: those of long ago come first.
        waiting = [tid for tid in tids if tid not in self._swept]
        waiting += [tid for tid in self._swept if tid not in self._waits]
        active = [tid for tid in self._waits if tid in set(tids)]
        return [*active, *islice(waiting, MAX_SWEPT - len(active))]

    def _growth(self, tid: int, now: Times, *, born: bool) -> Growth:
        before = self._swept.pop(tid, None)
        if before is None or now[0] < before[0]:
            before = (0, 0) if born else now
        return Growth(tid=tid, ran_ns=now[0] - before[0], waited_ns=max(now[1] - before[1], 0))

    def name(self, tid: int) -> str:
        """Name of a thread; empty when it is gone."""
        return self._files.text(f"{self._tasks}/{tid}/comm").rstrip("\n")

    def cpu(self, tid: int) -> int | None:
        """CPU on which a thread ran last; None when it is gone."""
        fields = self._files.text(f"{self._tasks}/{tid}/stat").rpartition(")")[2].split()
        return int(fields[36]) if len(fields) > 36 else None

    def children(self, *, anew: bool) -> list[int]:
        """Processes that the threads have started and that may still live.

        Each thread has a list of its own. Unless they are to be read ``anew``, or a thread has
        ended and left its children to another, only lists of threads that moved are read: a thread
        that did not has started nothing.
        """
        tids = {int(name) for name in self._files.names(self._tasks)}
        ended = self._children.keys() - tids
        if anew or not self._swept or any(self._children[tid] for tid in ended):
            stale = tids
        else:
            stale = {tid for tid in tids if tid in self._moved or tid not in self._children}
        for tid in ended:
            del self._children[tid]
        for tid in stale:
            started = self._files.read_once(f"{self._tasks}/{tid}/children") or b""
            self._children[tid] = [int(child) for child in started.split()]
        self._moved.clear()
        return [child for started in self._children.values() for child in started]

    def close(self) -> None:
        """Close what is kept open."""
        for file in self._files_of.values():
            file.close()
        self._files_of.clear()
        self._waits.clear()
