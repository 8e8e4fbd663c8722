"""What this host lets the collectors see, and what each refusal costs in signal.

Looks only: opens what a source would open and closes it again. A command line prints the findings.
"""

import os
import platform
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from latencyprism.collectors.catalogue import may_capture
from latencyprism.collectors.discovery.config import DiscoveryConfig
from latencyprism.collectors.discovery.source import Discovery
from latencyprism.collectors.host.clock import clock_error
from latencyprism.collectors.host.counts import Counts
from latencyprism.collectors.host.inetdiag import ESTABLISHED, InetDiag
from latencyprism.collectors.kernel.needs import BY_TYPES, GIVES, missing
from latencyprism.collectors.kernel.source import examine as kernel_machine
from latencyprism.collectors.network.namespaces import NEEDS
from latencyprism.collectors.source import UnavailableError
from latencyprism.collectors.stacks.config import StacksConfig
from latencyprism.collectors.stacks.pyspy import program
from latencyprism.collectors.xpu.config import Way as WayName
from latencyprism.collectors.xpu.config import XpuConfig
from latencyprism.collectors.xpu.survey import survey
from latencyprism.collectors.xpu.ways import ways

Answer = Literal["yes", "no", "partly"]

CAPABILITIES = {
    "CAP_NET_RAW": 13,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_PERFMON": 38,
    "CAP_BPF": 39,
}
"""Bits of the capability sets, from linux/capability.h."""
GOOD_CLOCK_US = 10_000.0
"""Clock error up to which times of several hosts can be put in one order."""

GATEWAYS = frozenset({"nginx", "haproxy", "envoy"})
"""Names of the programs whose logs are understood."""
OTLP_PORTS = (4317, 4318)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that a host permits, or does not."""

    name: str
    state: Answer
    seen: str
    """What was looked at, and what it said."""
    lost: str
    """Signal that is missing unless the state is yes."""
    advice: str
    """What to do about it; empty when the state is yes."""


def examine(proc: str = "/proc", sys: str = "/sys", dev: str = "/dev") -> list[Finding]:
    """Findings about this host, in the order to read them; takes some milliseconds, and seconds
    where a sleeping driver has to wake.

    ``proc``, ``sys`` and ``dev`` are the roots that the sources are going to read. Raises nothing.
    """
    machine = _Machine(Path(proc), Path(sys), Path(dev))
    probes: tuple[Callable[[_Machine], Finding], ...] = (
        _kernel,
        _servers,
        _packets,
        _namespaces,
        _bpf,
        _perf,
        _processes,
        _schedstat,
        _pressure,
        _cgroup,
        _connections,
        _nvidia,
        _amd,
        _intel,
        _gaudi,
        _tpu,
        _gateways,
        _spans,
        _stacks,
        _clock,
    )
    return [*(probe(machine) for probe in probes), *_kernel_probes(machine)]


class _Machine:
    def __init__(self, proc: Path, sys: Path, dev: Path) -> None:
        self.proc = proc
        self.sys = sys
        self.dev = dev

    def text(self, path: Path) -> str | None:
        """Content of a file without surrounding space, None if it can't be read."""
        try:
            return path.read_text().strip()
        except (OSError, ValueError):
            return None

    def capabilities(self) -> set[str]:
        """The known capabilities in effect for this process."""
        status = self.text(self.proc / "self/status") or ""
        line = next((li for li in status.splitlines() if li.startswith("CapEff:")), "CapEff: 0")
        mask = int(line.split()[1], 16)
        return {name for name, bit in CAPABILITIES.items() if mask >> bit & 1}


def _finding(name: str, state: Answer, seen: str, *, lost: str, advice: str) -> Finding:
    return Finding(
        name=name, state=state, seen=seen, lost=lost, advice="" if state == "yes" else advice
    )


def _kernel(machine: _Machine) -> Finding:
    release = machine.text(machine.proc / "sys/kernel/osrelease") or platform.release()
    numbers = [int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit()]
    state: Answer = "yes" if numbers >= [5, 8] else "partly" if numbers >= [4, 20] else "no"
    return _finding(
        "kernel",
        state,
        f"Linux {release}",
        lost="pressure stall information needs 4.20, the eBPF ring buffer 5.8",
        advice="use a newer kernel where one can be had; everything else works",
    )


def _servers(machine: _Machine) -> Finding:
    looking = Discovery(DiscoveryConfig(), proc=machine.proc)
    try:
        found = looking.look(0.0)
    except OSError as error:
        found, seen = (), str(error)
    else:
        hidden = looking.counts["not permitted"]
        seen = ", ".join(found) or "none of a known program listens"
        seen += f"; {hidden} programs could not be looked into" if hidden else ""
    return _finding(
        "inference servers",
        "yes" if found else "no",
        seen,
        lost="what to watch, unless the settings name it: collectors.engines or --engine",
        advice="start one, name it, or name its program in collectors.discovery.programs; servers "
        "in other network namespaces have to be named",
    )


def _packets(machine: _Machine) -> Finding:
    allowed = may_capture()
    has = "CAP_NET_RAW" in machine.capabilities()
    return _finding(
        "packet capture",
        "yes" if allowed else "no",
        f"{'has' if has else 'lacks'} CAP_NET_RAW, a packet socket "
        f"{'opens' if allowed else 'is refused'}",
        lost="request and token times from the network: TTFT, gaps between tokens, stalls of "
        "single streams",
        advice="run as root or with AmbientCapabilities=CAP_NET_RAW; in a container add the "
        "capability NET_RAW and use the host's network",
    )


def _namespaces(machine: _Machine) -> Finding:
    needed = {"CAP_SYS_ADMIN", "CAP_NET_RAW", "CAP_SYS_PTRACE"}
    missing = sorted(needed - machine.capabilities())
    return _finding(
        "other network namespaces",
        "no" if missing else "yes",
        f"lacks {', '.join(missing)}" if missing else f"has {', '.join(sorted(needed))}",
        lost="requests of servers in containers whose clients are in the same container",
        advice=f"only where network.namespaces is set: {NEEDS}",
    )


def _bpf(machine: _Machine) -> Finding:
    has = machine.capabilities() & {"CAP_BPF", "CAP_PERFMON", "CAP_SYS_ADMIN"}
    full = "CAP_SYS_ADMIN" in has or {"CAP_BPF", "CAP_PERFMON"} <= has
    unprivileged = machine.text(machine.proc / "sys/kernel/unprivileged_bpf_disabled")
    return _finding(
        "eBPF",
        "yes" if full else "partly" if has else "no",
        f"capabilities {', '.join(sorted(has)) or 'none'}, "
        f"unprivileged_bpf_disabled {unprivileged or 'unknown'}",
        lost="exact steps and token counts from the engine's own frames, run-queue histograms",
        advice="give CAP_BPF and CAP_PERFMON (before Linux 5.8 CAP_SYS_ADMIN); the other sources "
        "do without",
    )


def _kernel_probes(machine: _Machine) -> list[Finding]:
    """One for each tier of the kernel source."""
    found = kernel_machine(str(machine.proc), str(machine.sys), machine.capabilities())
    common = f"Linux {'.'.join(map(str, found.version))} on {found.arch}"
    return [
        _finding(
            f"kernel probes: {tier}",
            "no" if lacks else "yes",
            f"{common}, BTF: {_yes(found.btf)}, lockdown: {found.lockdown or 'unknown'}"
            if tier in BY_TYPES
            else f"{common}, uprobes: {_yes(found.uprobes)}",
            lost=GIVES[tier],
            advice=f"needs {'; '.join(lacks)}",
        )
        for tier, lacks in missing(found).items()
    ]


def _yes(there: bool) -> str:  # noqa: FBT001 - its only argument
    return "yes" if there else "no"


def _perf(machine: _Machine) -> Finding:
    level = machine.text(machine.proc / "sys/kernel/perf_event_paranoid")
    privileged = bool(machine.capabilities() & {"CAP_PERFMON", "CAP_SYS_ADMIN"})
    open_to_all = level is not None and level.lstrip("-").isdigit() and int(level) <= 1
    return _finding(
        "performance counters",
        "yes" if level is not None and (privileged or open_to_all) else "no",
        f"perf_event_paranoid {level or 'missing'}",
        lost="cycles, cache misses and memory stalls of the server's processes",
        advice="set kernel.perf_event_paranoid to 1, or give CAP_PERFMON",
    )


def _processes(machine: _Machine) -> Finding:
    readable = total = 0
    with suppress(OSError):
        for entry in machine.proc.iterdir():
            if entry.name.isdigit():
                total += 1
                readable += os.access(entry / "fd", os.R_OK | os.X_OK)
    mounts = machine.text(machine.proc / "self/mounts") or ""
    hidden = next(
        (
            option
            for line in mounts.splitlines()
            if line.split()[1:3] == [str(machine.proc), "proc"]
            for option in line.split()[3].split(",")
            if option.startswith("hidepid=") and option not in ("hidepid=0", "hidepid=off")
        ),
        None,
    )
    return _finding(
        "processes of others",
        "yes" if total and readable == total else "partly" if readable else "no",
        f"descriptors of {readable} of {total} processes can be read"
        + (f", {machine.proc} is mounted with {hidden}" if hidden else ""),
        lost="CPU time, run-queue waits, faults and stops of the server's processes, which are "
        "found by the socket they hold",
        advice="run as the server's user, as root or with CAP_SYS_PTRACE; in a container share "
        "the host's pid namespace; mount /proc without hidepid",
    )


def _schedstat(machine: _Machine) -> Finding:
    text = machine.text(machine.proc / "self/schedstat")
    counts = text is not None and text.split()[:1] != ["0"]
    return _finding(
        "run-queue waits",
        "yes" if counts else "no",
        f"/proc/self/schedstat {text or 'missing'}",
        lost="time that threads were ready but had no CPU: the sign of noisy neighbours",
        advice="needs CONFIG_SCHED_INFO; CPU pressure and CPU time are still read",
    )


def _pressure(machine: _Machine) -> Finding:
    kinds = [k for k in ("cpu", "memory", "io") if machine.text(machine.proc / "pressure" / k)]
    return _finding(
        "pressure stall information",
        "yes" if len(kinds) == 3 else "partly" if kinds else "no",
        f"/proc/pressure: {', '.join(kinds) or 'none'}",
        lost="time in which somebody waited for CPU, memory or disk",
        advice="boot with psi=1",
    )


def _cgroup(machine: _Machine) -> Finding:
    root = machine.sys / "fs/cgroup"
    unified = (root / "cgroup.controllers").exists()
    legacy = next((n for n in ("cpu", "cpu,cpuacct") if (root / n / "cpu.stat").exists()), None)
    if legacy:
        seen = f"version 1, {root / legacy}"
    else:
        seen = "version 2" if unified else f"nothing at {root}"
    return _finding(
        "control groups",
        "yes" if unified or legacy else "no",
        seen,
        lost="time in which a CPU quota kept the server from running, its memory and the limit of "
        "it, kills for want of memory, and the processes that share its container",
        advice="mount /sys/fs/cgroup into the container",
    )


def _connections(machine: _Machine) -> Finding:
    try:
        probe = InetDiag(Counts())
        try:
            probe.sockets(1, [ESTABLISHED], family=socket.AF_INET)
        finally:
            probe.close()
        refused = None
    except OSError as error:
        refused = str(error)
    listed = machine.text(machine.proc / "net/tcp") is not None
    state: Answer = "yes" if refused is None and listed else "partly" if listed else "no"
    return _finding(
        "TCP connections",
        state,
        f"inet_diag {refused or 'answers'}, {machine.proc}/net/tcp "
        f"{'is' if listed else 'is not'} readable",
        lost="round trip times, retransmits and slow clients of the server's connections, those "
        "that wait to be accepted, and its processes without net/tcp",
        advice="load the module tcp_diag",
    )


def _nvidia(machine: _Machine) -> Finding:
    files = sorted(path.name for path in machine.dev.glob("nvidia[0-9]*"))
    return _accelerators(
        machine,
        "nvidia",
        "NVIDIA GPUs",
        seen=f"device files {', '.join(files) or 'none'}",
        advice="install latencyprism[collectors] and the driver, and run containers with NVIDIA's "
        "runtime (utility capability) and the host's pid namespace",
    )


def _amd(machine: _Machine) -> Finding:
    return _accelerators(
        machine,
        "amd",
        "AMD GPUs",
        advice="load the amdgpu driver, and mount the host's /sys into a container",
    )


def _intel(machine: _Machine) -> Finding:
    return _accelerators(
        machine,
        "intel",
        "Intel GPUs",
        advice="load the i915 or xe driver; load and memory are told by the exporter of Intel XPU "
        "Manager only",
    )


def _gaudi(machine: _Machine) -> Finding:
    return _accelerators(
        machine,
        "gaudi",
        "Gaudi accelerators",
        advice="load the habanalabs driver; load and memory are told by Habana's exporter only",
    )


def _tpu(machine: _Machine) -> Finding:
    return _accelerators(
        machine,
        "tpu",
        "Google TPUs",
        advice="install latencyprism[tpu], and start the server first: its runtime answers on "
        "port 8431 while it uses the TPU",
    )


def _accelerators(
    machine: _Machine, way: WayName, name: str, *, advice: str, seen: str = ""
) -> Finding:
    config = XpuConfig(ways=(way,), proc=str(machine.proc), sys=str(machine.sys))
    found = survey(ways(config)[0])
    told = found.missing or ", ".join(found.devices)
    untold = f"; not told: {', '.join(found.untold)}" if found.untold and found.devices else ""
    complete = not found.untold and not found.failing
    return _finding(
        name,
        "no" if found.missing else "yes" if complete else "partly",
        f"{told}{untold}{'; ' if seen else ''}{seen}",
        lost="load, memory, clocks, throttling, temperature, power and errors of such devices, as "
        "far as they are not told",
        advice=f"none needed without such a device; else {advice}",
    )


def _gateways(machine: _Machine) -> Finding:
    names: set[str | None] = set()
    with suppress(OSError):
        names = {machine.text(path) for path in machine.proc.glob("[0-9]*/comm")}
    running = sorted(GATEWAYS.intersection(names))
    return _finding(
        "gateways",
        "yes" if running else "no",
        f"{', '.join(running) or 'none'} running",
        lost="requests as a gateway logs them, with the wait in its own queue",
        advice="none needed without a gateway on this host; else let it log as the gateway "
        "source's README shows",
    )


def _spans(_: _Machine) -> Finding:
    libraries = [name for name in ("grpc", "uvicorn") if find_spec(name) is not None]
    taken = [port for port in OTLP_PORTS if not _bindable(port)]
    state: Answer = "yes" if len(libraries) == 2 and not taken else "partly" if libraries else "no"
    return _finding(
        "spans",
        state,
        f"libraries {', '.join(libraries) or 'missing'}, ports of OTLP "
        f"{'in use: ' + ', '.join(map(str, taken)) if taken else 'free'}",
        lost="queue, prefill and decode times as the engine itself tells them",
        advice="install latencyprism[otlp]; where another receiver has the ports, set "
        "collectors.otlp.grpc and collectors.otlp.http and have it forward",
    )


def _bindable(port: int) -> bool:
    """Whether a source could listen on a port of the loopback."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def _stacks(machine: _Machine) -> Finding:
    state: Answer
    try:
        seen = program(StacksConfig())
    except UnavailableError as error:
        state, seen = "no", str(error)
    else:
        state = "yes" if "CAP_SYS_PTRACE" in machine.capabilities() else "partly"
    return _finding(
        "call stacks",
        state,
        seen,
        lost="what a slow server's Python processes were doing: `latencyprism stacks`, and "
        "profiles at alerts",
        advice="install the extra latencyprism[stacks]; run as the server's user, as root or with "
        "CAP_SYS_PTRACE",
    )


def _clock(machine: _Machine) -> Finding:
    state = clock_error()
    source = machine.text(
        machine.sys / "devices/system/clocksource/clocksource0/current_clocksource"
    )
    if state is None:
        answer: Answer = "no"
        seen = "adjtimex is refused"
    else:
        error_us, disciplined = state
        answer = "partly" if not disciplined else "yes" if error_us <= GOOD_CLOCK_US else "partly"
        seen = f"{'' if disciplined else 'not '}disciplined, error up to {error_us / 1000:.1f} ms"
    return _finding(
        "clock",
        answer,
        f"{seen}, clock source {source or 'unknown'}",
        lost="the order of events on several hosts; what happens on one host is not affected",
        advice="run chrony or systemd-timesyncd",
    )
