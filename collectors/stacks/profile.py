"""Profiles of all Python processes of one server."""

import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from latencyprism.collectors.host.files import Files
from latencyprism.collectors.host.server import roles_on
from latencyprism.collectors.stacks.config import StacksConfig
from latencyprism.collectors.stacks.pyspy import Sampled, sample
from latencyprism.schemas.records import Alert, StackCount, StackProfile, StageShare

ROLES = ("core", "worker", "api", "server", "detokenizer")
"""Parts of a server, those whose stacks say most first."""


def processes_of(port: int, *, proc: str = "/proc") -> dict[int, str]:
    """Process → its part of the server that listens on a port of this machine; empty when none
    can be seen.
    """
    return roles_on(Files(proc), port)


def take_profiles(
    instance: str,
    processes: Mapping[int, str],
    config: StacksConfig,
    *,
    alert: Alert | None = None,
    stop: threading.Event | None = None,
) -> list[StackProfile]:
    """Profiles of the processes (with their parts), taken side by side, as records.

    One that cannot be sampled is a record that says why. Blocks for ``config.duration_s`` and
    some seconds, less when ``stop`` is set. Raises
    :class:`~latencyprism.collectors.source.UnavailableError` without py-spy.
    """
    chosen = sorted(processes, key=lambda pid: (_rank(processes[pid]), pid))[: config.processes]
    if not chosen:
        return []
    with ThreadPoolExecutor(len(chosen), thread_name_prefix="stacks sampling") as pool:
        sampled = list(pool.map(lambda pid: sample(pid, config, stop), chosen))
    return [
        _record(instance, pid, processes[pid], found, config, alert)
        for pid, found in zip(chosen, sampled, strict=True)
    ]


def _rank(role: str) -> int:
    return ROLES.index(role) if role in ROLES else len(ROLES)


def _record(
    instance: str,
    pid: int,
    role: str,
    sampled: Sampled,
    config: StacksConfig,
    alert: Alert | None,
) -> StackProfile:
    profile = sampled.profile
    return StackProfile(
        instance=instance,
        source="stacks",
        observed_at_ns=time.time_ns(),
        host=socket.gethostname(),
        alert_id=alert.alert_id if alert else None,
        fingerprint=alert.fingerprint if alert else None,
        pid=pid,
        role=role,
        duration_ms=sampled.duration_s * 1000,
        rate_hz=float(config.rate_hz),
        samples=profile.samples if profile else 0,
        failed=sampled.failed,
        stages=tuple(StageShare(stage=stage, samples=count) for stage, count in profile.stages)
        if profile
        else (),
        stacks=tuple(StackCount(stack=stack, samples=count) for stack, count in profile.stacks)
        if profile
        else (),
        error=sampled.error,
    )
