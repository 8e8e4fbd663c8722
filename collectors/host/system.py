"""Counters of the whole machine, as the kernel gives them: totals since boot."""

from dataclasses import dataclass
from pathlib import Path

from latencyprism.collectors.host.files import Files

SECTOR_BYTES = 512
"""Unit of /proc/diskstats, whatever the disk's own sectors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTimes:
    """The first line of /proc/stat, in ticks over all CPUs, and the number of CPUs."""

    total: int
    idle: int
    steal: int
    cpus: int
    runnable: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemCounters:
    """Totals since boot; None where the kernel does not tell."""

    cpu: CpuTimes | None
    psi_cpu_us: int | None
    psi_memory_us: int | None
    psi_io_us: int | None
    disk_read_bytes: int | None
    disk_write_bytes: int | None
    net_rx_bytes: int | None
    net_tx_bytes: int | None
    tcp_retransmits: int | None


def cpu_times(stat: bytes | None) -> CpuTimes | None:
    """From /proc/stat; time of guests is part of user time, so it is not added."""
    if not stat or not stat.startswith(b"cpu "):
        return None
    user, nice, system, idle, iowait, irq, softirq, steal, *_ = map(
        int, stat[: stat.index(b"\n")].split()[1:9]
    )
    _, found, rest = stat.partition(b"\nprocs_running ")
    return CpuTimes(
        total=user + nice + system + idle + iowait + irq + softirq + steal,
        idle=idle + iowait,
        steal=steal,
        cpus=stat.count(b"\ncpu"),
        runnable=int(rest.split(None, 1)[0]) if found else None,
    )


def pressure_us(pressure: bytes | None) -> int | None:
    """Time in which some task waited, from /proc/pressure/*."""
    _, found, rest = (pressure or b"").partition(b"total=")
    return int(rest.split(None, 1)[0]) if found else None


def available_bytes(meminfo: bytes | None) -> int | None:
    """MemAvailable of /proc/meminfo."""
    _, found, rest = (meminfo or b"").partition(b"\nMemAvailable:")
    return int(rest.split(None, 1)[0]) * 1024 if found else None


def disk_bytes(diskstats: bytes | None, disks: frozenset[str]) -> tuple[int, int] | None:
    """Bytes read from and written to ``disks``, from /proc/diskstats."""
    if diskstats is None or not disks:
        return None
    read = written = 0
    for line in diskstats.decode().splitlines():
        fields = line.split()
        if fields[2] in disks:
            read += int(fields[5]) * SECTOR_BYTES
            written += int(fields[9]) * SECTOR_BYTES
    return read, written


def net_bytes(dev: bytes | None) -> tuple[int, int] | None:
    """Bytes received and sent on all interfaces, from /proc/net/dev."""
    if dev is None:
        return None
    received = sent = 0
    for line in dev.decode().splitlines()[2:]:
        fields = line.partition(":")[2].split()
        received += int(fields[0])
        sent += int(fields[8])
    return received, sent


def retransmits(snmp: bytes | None) -> int | None:
    """RetransSegs of the Tcp lines of /proc/net/snmp."""
    lines = [line.split() for line in (snmp or b"").splitlines() if line.startswith(b"Tcp:")]
    if len(lines) != 2 or b"RetransSegs" not in lines[0]:
        return None
    return int(lines[1][lines[0].index(b"RetransSegs")])


class System:
    """Reads the machine's counters."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._disks: frozenset[str] = frozenset()
        self.find_disks()

    def find_disks(self) -> None:
        """Look for disks anew: those with a device behind them, so that neither partitions nor
        stacked devices count twice.
        """
        block = Path(self._files.sys, "block")
        self._disks = frozenset(
            name for name in self._files.names(str(block)) if (block / name / "device").exists()
        )

    def read(self) -> SystemCounters:
        """All counters now."""
        read, proc = self._files.read, self._files.proc
        disk = disk_bytes(read(f"{proc}/diskstats"), self._disks) or (None, None)
        net = net_bytes(read(f"{proc}/net/dev")) or (None, None)
        return SystemCounters(
            cpu=cpu_times(read(f"{proc}/stat")),
            psi_cpu_us=pressure_us(read(f"{proc}/pressure/cpu")),
            psi_memory_us=pressure_us(read(f"{proc}/pressure/memory")),
            psi_io_us=pressure_us(read(f"{proc}/pressure/io")),
            disk_read_bytes=disk[0],
            disk_write_bytes=disk[1],
            net_rx_bytes=net[0],
            net_tx_bytes=net[1],
            tcp_retransmits=retransmits(read(f"{proc}/net/snmp")),
        )

    def memory_available(self) -> int | None:
        """Bytes of memory the machine could still hand out."""
        return available_bytes(self._files.read(f"{self._files.proc}/meminfo"))
