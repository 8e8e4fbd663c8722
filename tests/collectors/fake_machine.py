"""A machine's /proc and /sys as files that a test changes."""

from dataclasses import dataclass, field
from pathlib import Path

INODE = 4242


@dataclass
class FakeProcess:
    ppid: int = 1
    command: str = "llama-server"
    state: str = "S"
    minor: int = 0
    major: int = 0
    ticks: int = 0
    started: int = 1000
    rss_pages: int = 100
    voluntary: int = 0
    involuntary: int = 0
    waits: dict[int, int] = field(default_factory=dict)
    """Thread → nanoseconds waited for a CPU."""
    runs: dict[int, int] = field(default_factory=dict)
    inode: int | None = None
    group: str = "/lab"


class FakeMachine:
    """Writes the files that the host source reads."""

    def __init__(self, root: Path, port: int = 8000) -> None:
        self.root = root
        self.port = port
        self.proc = root / "proc"
        self.sys = root / "sys"
        self.idle = 1000
        self.user = 1000
        self.steal = 0
        self.psi = 0
        self.throttled = (0, 0)
        self.processes: dict[int, FakeProcess] = {}
        self.write("sys/block/sda/device/vendor", "x")
        self.write("sys/block/loop0/size", "0")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def listening(self, inode: int | None = INODE) -> None:
        head = "  sl  local_address rem_address st tx rx tr tm retrnsmt uid timeout inode\n"
        row = f"   0: 0100007F:{self.port:04X} 00000000:0000 0A 0:0 0:0 0 0 0 {inode} 1\n"
        self.write("proc/net/tcp", head + (row if inode is not None else ""))

    def flush(self) -> None:
        """Write everything as it stands now."""
        self.write(
            "proc/stat",
            f"cpu  {self.user} 0 0 {self.idle} 0 0 0 {self.steal} 0 0\n"
            "cpu0 0 0 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0 0 0\nprocs_running 3\n",
        )
        for kind in ("cpu", "memory", "io"):
            self.write(f"proc/pressure/{kind}", f"some avg10=0.00 total={self.psi}\nfull total=0\n")
        self.write("proc/meminfo", "MemTotal: 9 kB\nMemAvailable: 8 kB\n")
        self.write("proc/diskstats", f"8 0 sda 1 2 {self.psi} 4 5 6 20 8\n")
        self.write("proc/net/dev", f"h\nh\nlo: {self.psi} 0 0 0 0 0 0 0 {self.psi} 0\n")
        self.write("proc/net/snmp", f"Tcp: InSegs RetransSegs\nTcp: 5 {self.psi}\n")
        time_ns, periods = self.throttled
        self.write(
            "sys/fs/cgroup/cpu/lab/cpu.stat",
            f"nr_periods 9\nnr_throttled {periods}\nthrottled_time {time_ns}\n",
        )
        for pid, process in self.processes.items():
            self._flush(pid, process)

    def _flush(self, pid: int, p: FakeProcess) -> None:
        folder = f"proc/{pid}"
        self.write(
            f"{folder}/stat",
            f"{pid} (x) {p.state} {p.ppid} 1 1 0 -1 0 {p.minor} 0 {p.major} 0 {p.ticks} 0 0 0 20 0 "
            f"{max(len(p.waits), 1)} 0 {p.started} 0 {p.rss_pages} 0\n",
        )
        self.write(
            f"{folder}/status",
            f"Name:\tx\nvoluntary_ctxt_switches:\t{p.voluntary}\n"
            f"nonvoluntary_ctxt_switches:\t{p.involuntary}\n",
        )
        self.write(f"{folder}/cmdline", p.command.replace(" ", "\0"))
        self.write(f"{folder}/cgroup", f"1:cpu:{p.group}\n0::/\n")
        children = [str(child) for child, other in self.processes.items() if other.ppid == pid]
        self.write(f"{folder}/task/{pid}/children", " ".join(children))
        for tid, wait in p.waits.items():
            self.write(f"{folder}/task/{tid}/schedstat", f"{p.runs.get(tid, 0)} {wait} 1\n")
        (self.proc / str(pid) / "fd").mkdir(exist_ok=True)
        link = self.proc / str(pid) / "fd/3"
        link.unlink(missing_ok=True)
        if p.inode is not None:
            link.symlink_to(f"socket:[{p.inode}]")

    def kill(self, pid: int) -> None:
        """Remove a process and its folder."""
        del self.processes[pid]
        folder = self.proc / str(pid)
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        folder.rmdir()
