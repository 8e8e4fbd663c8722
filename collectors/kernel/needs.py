"""What each tier needs of a machine, and what it gives. Pure."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Final

from latencyprism.collectors.kernel.arch import ARCHES
from latencyprism.collectors.kernel.config import TierName

OLDEST_KERNEL: Final = (5, 8)
"""The first with CAP_BPF, CAP_PERFMON, the ring buffer and all helpers that are used."""
INITIAL_PID_NAMESPACE: Final = "pid:[4026531836]"
"""PROC_PID_INIT_INO: the numbers of processes as the kernel, and so a program, knows them."""

GIVES: Final[Mapping[TierName, str]] = {
    "run_queue": "how long the server's threads waited for a CPU, as a histogram",
    "sockets": "times between a request, its answer and the writes of it, TLS or not",
    "frames": "exact engine steps and waits from vLLM's own messages",
    "tls": "first event and cadence of streams inside TLS",
    "gpu": "how long the server waited for its GPU, and launched graphs on it",
}
BY_TYPES: Final[Set[TierName]] = frozenset(("run_queue", "sockets", "frames"))
"""Tiers at the kernel's tracepoints; the others put probes into functions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a machine has; None where it does not tell."""

    version: tuple[int, int]
    arch: str
    capabilities: Set[str]
    btf: bool
    """Whether the kernel describes its types."""
    uprobes: bool
    pid_namespace: str | None
    lockdown: str | None
    """Content of /sys/kernel/security/lockdown."""


def missing(machine: Machine) -> dict[TierName, list[str]]:
    """What each tier lacks on the machine; an empty list means that it may run."""
    common = _common(machine)
    by_types = [] if machine.btf else ["a kernel built with CONFIG_DEBUG_INFO_BTF"]
    by_functions = [] if machine.uprobes else ["a kernel built with CONFIG_UPROBES"]
    return {tier: common + (by_types if tier in BY_TYPES else by_functions) for tier in GIVES}


def _common(machine: Machine) -> list[str]:
    lacks = []
    if machine.version < OLDEST_KERNEL:
        lacks.append(f"Linux {'.'.join(map(str, OLDEST_KERNEL))} or newer")
    if machine.arch not in ARCHES:
        lacks.append(f"one of the architectures {', '.join(ARCHES)}")
    if "CAP_SYS_ADMIN" not in machine.capabilities:
        lacks += sorted({"CAP_BPF", "CAP_PERFMON"} - machine.capabilities)
    if machine.pid_namespace not in (None, INITIAL_PID_NAMESPACE):
        lacks.append("the host's pid namespace, or its /proc with proc set to that")
    if "[confidentiality]" in (machine.lockdown or ""):
        lacks.append("a kernel that is not locked down for confidentiality")
    return lacks
