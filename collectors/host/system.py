"""Counters of the whole machine, as the kernel gives them: totals since boot."""

import os
from collections.abc import Container
from typing import Any

from latencyprism.collectors.host.files import Files, Growth, Parsed, delta

SECTOR_BYTES = 512
"""Unit of /proc/diskstats, whatever the disk's own sectors."""
FEW_DISKS = 6
"""Up to so many disks, their own files cost less than the table of all."""

CPU_NS = 150_000_000
"""At least between two readings of CPU time: the dearest table, the more so with many CPUs, whose
ticks of 10 ms say little about less."""

Totals = tuple[int, ...]


def cpu_ticks(stat: bytes) -> Totals | None:
    """Ticks over all CPUs: all, those free or waiting for a disk, and those stolen, from
    /proc/stat; time of guests is part of user time, so it is not added.
    """
    if not stat.startswith(b"cpu "):
        return None
    ticks = [int(part) for part in stat[5 : stat.index(b"\n")].split(None, 8)[:8]]
    return sum(ticks), ticks[3] + ticks[4], ticks[7]


def runnable(stat: bytes) -> int | None:
    """Threads that run or could, from /proc/stat."""
    _, found, rest = stat.partition(b"\nprocs_running ")
    return int(rest.split(None, 1)[0]) if found else None


def pressure_us(pressure: bytes) -> Totals | None:
    """Time in which some task waited, from /proc/pressure/*."""
    _, found, rest = pressure.partition(b"total=")
    return (int(rest.split(None, 1)[0]),) if found else None


def available_bytes(meminfo: bytes) -> int | None:
    """MemAvailable of /proc/meminfo."""
    _, found, rest = meminfo.partition(b"\nMemAvailable:")
    return int(rest.split(None, 1)[0]) * 1024 if found else None


def disk_totals(stat: bytes) -> Totals | None:
    """Bytes read, bytes written and milliseconds with work, from /sys/block/DISK/stat, whose
    columns also end a line of /proc/diskstats.
    """
    fields = stat.split(None, 10)
    if len(fields) < 10:
        return None
    return int(fields[2]) * SECTOR_BYTES, int(fields[6]) * SECTOR_BYTES, int(fields[9])


def disk_table(diskstats: bytes, disks: Container[str]) -> dict[str, Totals]:
    """The totals of ``disks``, from /proc/diskstats."""
    found = {}
    for line in diskstats.splitlines():
        fields = line.split(None, 3)
        totals = disk_totals(fields[3]) if len(fields) > 3 and fields[2].decode() in disks else None
        if totals is not None:
            found[fields[2].decode()] = totals
    return found


def net_bytes(dev: bytes) -> Totals | None:
    """Bytes received and sent on all interfaces, from /proc/net/dev."""
    rows = dev.splitlines()[2:]
    if not rows:
        return None
    received = sent = 0
    for row in rows:
        fields = row.partition(b":")[2].split(None, 9)
        received += int(fields[0])
        sent += int(fields[8])
    return received, sent


def retransmits(snmp: bytes) -> Totals | None:
    """RetransSegs of the Tcp lines of /proc/net/snmp."""
    _, _, rest = snmp.partition(b"Tcp: ")
    names, _, rest = rest.partition(b"Tcp: ")
    columns = names.split()
    if b"RetransSegs" not in columns:
        return None
    at = columns.index(b"RetransSegs")
    values = rest.split(None, at + 1)
    return (int(values[at]),) if len(values) > at else None


class System:
    """Reads the machine's counters."""

    def __init__(self, files: Files) -> None:
        proc = files.proc
        self.cpus = 0
        """CPUs that are in use."""
        self.cpu_interval_ns = 0
        """Time between the last two readings of CPU time."""
        self._cpu_read_ns = -CPU_NS
        self._files = files
        self._cpu = Growth(files, f"{proc}/stat", cpu_ticks)
        self._pressure = [
            (f"psi_{kind}_us", Growth(files, f"{proc}/pressure/{kind}", pressure_us))
            for kind in ("cpu", "memory", "io")
        ]
        self._net = Growth(files, f"{proc}/net/dev", net_bytes)
        self._tcp = Growth(files, f"{proc}/net/snmp", retransmits)
        self._memory = Parsed(files, f"{proc}/meminfo", available_bytes)
        self._disks: dict[str, Parsed[Totals | None]] = {}
        self._disk_totals: dict[str, Totals] = {}
        self._disks_ns = 0

    def find(self) -> None:
        """Count CPUs and look for disks anew: those with a device behind them, so that neither
        partitions nor stacked devices count twice.
        """
        self.cpus = self._cpu.data.count(b"\ncpu")
        block = f"{self._files.sys}/block"
        names = {
            name
            for name in self._files.names(block)
            if os.path.exists(f"{block}/{name}/device")  # noqa: PTH110 - a Path for each is dear
        }
        for gone in self._disks.keys() - names:
            self._disks.pop(gone).close()
        for name in names - self._disks.keys():
            self._disks[name] = Parsed(self._files, f"{block}/{name}/stat", disk_totals)

    def read(self, monotonic_ns: int) -> dict[str, Any]:
        """Fields of a HostSample: growth since the last call, null the first time; shares of CPU
        time are read at most every ``CPU_NS`` and are over :attr:`cpu_interval_ns`.
        """
        fields: dict[str, Any] = {}
        for name, pressure in self._pressure:
            grown = pressure.read()
            fields[name] = grown[0] if grown else None
        grown = self._net.read()
        fields["net_rx_bytes"], fields["net_tx_bytes"] = grown or (None, None)
        # Nothing is sent again without a byte on an interface, so the dear table can wait.
        quiet = grown == (0, 0) and self._tcp.data
        grown = (0,) if quiet else self._tcp.read()
        fields["tcp_retransmits"] = grown[0] if grown else None
        if monotonic_ns - self._cpu_read_ns >= CPU_NS:
            fields |= self._read_cpu(monotonic_ns)
        return fields

    def _read_cpu(self, monotonic_ns: int) -> dict[str, Any]:
        grown = self._cpu.read()
        self.cpu_interval_ns = monotonic_ns - self._cpu_read_ns
        self._cpu_read_ns = monotonic_ns
        fields: dict[str, Any] = {"runnable": runnable(self._cpu.data)}
        total = grown[0] if grown else None
        if grown and total:
            # The kernel lets idle time go back a little when a CPU wakes.
            fields["cpu_busy"] = 1.0 - min((grown[1] or 0) / total, 1.0)
            fields["cpu_steal"] = min((grown[2] or 0) / total, 1.0)
        return fields

    def read_slow(self, monotonic_ns: int) -> dict[str, Any]:
        """Further fields, whose growth is that since the last call of this method."""
        now = self._read_disks()
        before, self._disk_totals = self._disk_totals, now
        interval_ns, self._disks_ns = monotonic_ns - self._disks_ns, monotonic_ns
        grown = [
            tuple(map(delta, before[name], totals))
            for name, totals in now.items()
            if name in before
        ]
        read, written, busy_ms = (
            [one[which] for one in grown if one[which] is not None] for which in range(3)
        )
        return {
            "memory_available_bytes": self._memory.read(),
            "disk_read_bytes": sum(filter(None, read)) if read else None,
            "disk_write_bytes": sum(filter(None, written)) if written else None,
            "disk_busy": min(max(filter(None, busy_ms), default=0) * 1e6 / interval_ns, 1.0)
            if busy_ms and interval_ns > 0
            else None,
        }

    def _read_disks(self) -> dict[str, Totals]:
        if len(self._disks) > FEW_DISKS:
            table = self._files.read(f"{self._files.proc}/diskstats")
            return disk_table(table or b"", self._disks)
        read = ((name, file.read()) for name, file in self._disks.items())
        return {name: totals for name, totals in read if totals is not None}
