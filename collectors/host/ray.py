"""Ray's workers, which descend from Ray's own daemon rather than from the server they work for.

A server that joined a running Ray cluster is one of its drivers, and both it and its workers keep
log files open whose names tell the cluster's session and, for a worker that was started for one
job, that job (seen with Ray 2.60). A worker that Ray started in advance tells no job: it is counted
to a server only while that is the only one watched in its session.
"""

import re
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass

from latencyprism.collectors.host.files import Files

WORKER = re.compile(r"ray::\w*(Worker|EngineCore)")
"""Actors of inference engines; other actors and idle workers are not the server's."""
_NO_JOB = "ffffffff"
_DRIVER = re.compile(r"/(session_[^/]+)/logs/python-core-driver-([0-9a-f]{8})[0-9a-f]*_")
_OUTPUT = re.compile(r"/(session_[^/]+)/logs/worker-[0-9a-f]+-([0-9a-f]{8})-\d+\.(?:out|err)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One driver's work in one Ray session."""

    session: str
    job: str


class RayWorkers:
    """Which Ray workers belong to which of the watched servers; shared by all servers."""

    def __init__(self, files: Files, counts: MutableMapping[str, int]) -> None:
        self._files = files
        self._counts = counts
        self._jobs: dict[str, set[Job]] = {}

    def of(self, instance: str, pids: Iterable[int]) -> list[int]:
        """Workers of the server ``instance``, whose other processes are ``pids``; empty unless one
        of them is a driver. Looks at every process of the machine if so.
        """
        jobs = {job for pid in pids for job in self._match(pid, _DRIVER)}
        self._jobs[instance] = jobs
        if not jobs:
            return []
        return [pid for pid in self._files.pids() if self._works_for(instance, pid)]

    def _works_for(self, instance: str, pid: int) -> bool:
        if not WORKER.match(self._files.text(f"{self._files.proc}/{pid}/cmdline")):
            return False
        mine = self._jobs[instance]
        for job in self._match(pid, _OUTPUT):
            if job in mine:
                return True
            if job.job == _NO_JOB and job.session in {one.session for one in mine}:
                return self._alone(instance, job.session)
        return False

    def _alone(self, instance: str, session: str) -> bool:
        others = {
            other
            for other, jobs in self._jobs.items()
            if other != instance and any(job.session == session for job in jobs)
        }
        if others:
            self._counts["ambiguous_ray_workers"] += 1
        return not others

    def _match(self, pid: int, pattern: re.Pattern[str]) -> set[Job]:
        folder = f"{self._files.proc}/{pid}/fd"
        links = (self._files.link(f"{folder}/{name}") for name in self._files.names(folder))
        matches = (pattern.search(link) for link in links)
        return {Job(session=match[1], job=match[2]) for match in matches if match}
