"""A machine's /proc and /sys as files that a test changes."""

from dataclasses import dataclass, field
from pathlib import Path

INODE = 4242
HERE = 4026531840
"""The network namespace of this process."""
TABLE_HEAD = "  sl  local_address rem_address st tx rx tr tm retrnsmt uid timeout inode\n"


def row(port: int, inode: int, state: str = "0A") -> str:
    """A line of /proc/net/tcp."""
    return f"   0: 0100007F:{port:04X} 00000000:0000 {state} 0:0 0:0 0 0 0 {inode} 1\n"


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
    cpu: int = 0
    voluntary: int = 0
    involuntary: int = 0
    waits: dict[int, int] = field(default_factory=dict)
    """Thread → nanoseconds waited for a CPU."""
    runs: dict[int, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    inode: int | None = None
    cgroup: str = "1:cpu:/lab\n0::/\n"
    namespace: int = HERE
    opened: tuple[str, ...] = ()
    """Further files that it holds open."""


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
        self.busy_ms = 0
        self.throttled = (0, 0)
        self.processes: dict[int, FakeProcess] = {}
        self.write("sys/block/sda/device/vendor", "x")
        self.write("sys/block/loop0/size", "0")
        self.mount("cgroup", "cpu", "cpu")
        self.mount("cgroup2", "unified")
        self.link("proc/self/ns/net", f"net:[{HERE}]")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def link(self, path: str, target: str) -> None:
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(target)

    def mount(self, kind: str, folder: str, controllers: str = "", root: str = "/") -> None:
        """Mount a hierarchy of control groups at a folder below sys/fs/cgroup."""
        file = self.proc / "self/mountinfo"
        before = file.read_text() if file.exists() else ""
        point = self.sys / "fs/cgroup" / folder
        line = f"30 25 0:26 {root} {point} rw,nosuid shared:9 - {kind} {kind} rw,{controllers}\n"
        self.write("proc/self/mountinfo", before + line)

    def listening(self, inode: int | None = INODE) -> None:
        rows = row(self.port, inode) if inode is not None else ""
        self.write("proc/net/tcp", TABLE_HEAD + rows)

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
        self.write("sys/block/sda/stat", f"1 2 {self.psi} 4 5 6 20 8 0 {self.busy_ms} 0\n")
        self.write("proc/net/dev", f"h\nh\nlo: {self.psi} 0 0 0 0 0 0 0 {self.psi} 0\n")
        self.write("proc/net/snmp", f"Ip: A\nIp: 1\nTcp: InSegs RetransSegs\nTcp: 5 {self.psi}\n")
        time_ns, periods = self.throttled
        self.write(
            "sys/fs/cgroup/cpu/lab/cpu.stat",
            f"nr_periods 9\nnr_throttled {periods}\nthrottled_time {time_ns}\n",
        )
        for pid, process in self.processes.items():
            self._flush(pid, process)

    def _flush(self, pid: int, p: FakeProcess) -> None:
        folder = f"proc/{pid}"
        stat = (
            f"{pid} (x) {p.state} {p.ppid} 1 1 0 -1 0 {p.minor} 0 {p.major} 0 {p.ticks} 0 0 0 20 0 "
            f"{max(len(p.waits), 1)} 0 {p.started} 0 {p.rss_pages} 0{' 0' * 13} {p.cpu} 0 0\n"
        )
        self.write(f"{folder}/stat", stat)
        self.write(
            f"{folder}/status",
            f"Name:\tx\nvoluntary_ctxt_switches:\t{p.voluntary}\n"
            f"nonvoluntary_ctxt_switches:\t{p.involuntary}\n",
        )
        self.write(f"{folder}/cmdline", p.command.replace(" ", "\0"))
        self.write(f"{folder}/cgroup", p.cgroup)
        self.link(f"{folder}/ns/net", f"net:[{p.namespace}]")
        children = [str(child) for child, other in self.processes.items() if other.ppid == pid]
        self.write(f"{folder}/task/{pid}/children", " ".join(children))
        for tid, wait in p.waits.items():
            self.write(f"{folder}/task/{tid}/schedstat", f"{p.runs.get(tid, 0)} {wait} 1\n")
            self.write(f"{folder}/task/{tid}/comm", f"{p.names.get(tid, 'x')}\n")
            self.write(f"{folder}/task/{tid}/stat", stat)
        (self.proc / str(pid) / "fd").mkdir(exist_ok=True)
        opened = [f"socket:[{p.inode}]"] if p.inode is not None else []
        for number, target in enumerate([*opened, *p.opened], start=3):
            self.link(f"{folder}/fd/{number}", target)

    def kill(self, pid: int) -> None:
        """Remove a process and its folder."""
        del self.processes[pid]
        folder = self.proc / str(pid)
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        folder.rmdir()
