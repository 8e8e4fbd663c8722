"""Control groups of either version: quotas of CPU time, memory, and who shares a container.

Which hierarchy has a controller, and where it is mounted, is told by ``/proc/PID/cgroup`` and
``/proc/self/mountinfo``; see cgroups(7). Version 1, version 2 and hybrids of both come out alike.
Paths in both files are relative to this process's cgroup namespace.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from latencyprism.collectors.host.files import Files, Growth

MAX_GROUPS = 16
"""Control groups read for one server."""
UNLIMITED = 1 << 62
"""Version 1 has no word for no limit: it shows the greatest multiple of a page instead."""

_ESCAPED = re.compile(r"\\([0-7]{3})")
_CONTAINER = re.compile(
    r"""
    /[a-z-]*?(docker|libpod|crio|cri-containerd|containerd|nerdctl)[-:][0-9a-f]{12,64}(\.scope)?$
    | /[0-9a-f]{64}$                      # docker, podman and Kubernetes with the cgroupfs driver
    | /lxc(\.payload)?[./][^/]+$
    | /job_\d+/step_[^/]+(/.*)?$          # Slurm
    """,
    re.VERBOSE,
)
_SERVICE = re.compile(r"/(?P<name>[^/]+)\.service$")
_SHARED_SERVICE = re.compile(
    r"user@\d+|(open)?sshd?(@.*)?|crond?|atd|docker|containerd|podman|crio|kubelet|k3s(-agent)?"
    r"|rke2-(server|agent)|supervisord?|getty@.*|slurmd"
)
"""Services that start programs of all kinds, or keep those of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A hierarchy of control groups that is mounted; ``controllers`` is empty for version 2."""

    controllers: frozenset[str]
    root: PurePosixPath
    point: PurePosixPath


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A control group in the file system: its folder and that of the hierarchy's root."""

    folder: PurePosixPath
    top: PurePosixPath
    unified: bool

    def upwards(self) -> list["Group"]:
        """The group and all above it but the root, deepest first, at most ``MAX_GROUPS``.

        The root has neither quota nor limit of its own.
        """
        folders = [self.folder, *self.folder.parents]
        below = folders[: folders.index(self.top)][:MAX_GROUPS]
        return [Group(folder=f, top=self.top, unified=self.unified) for f in below]


def mounts(mountinfo: str) -> list[Mount]:
    """Mounted hierarchies, from /proc/PID/mountinfo."""
    found = []
    for line in mountinfo.splitlines():
        place, separator, kind = line.partition(" - ")
        fields, types = place.split(" "), kind.split(" ")
        if not separator or len(fields) < 5 or types[0] not in ("cgroup", "cgroup2"):
            continue
        controllers = types[2].split(",") if types[0] == "cgroup" and len(types) > 2 else []
        root, point = (PurePosixPath(_unescape(fields[i])) for i in (3, 4))
        found.append(Mount(controllers=frozenset(controllers), root=root, point=point))
    return found


def _unescape(path: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), path)


def memberships(cgroup: str) -> dict[str, str]:
    """Controller → path of a process's group, from /proc/PID/cgroup; "" stands for version 2."""
    found: dict[str, str] = {}
    for line in cgroup.splitlines():
        _, _, rest = line.partition(":")
        names, separator, path = rest.partition(":")
        if separator:
            found |= dict.fromkeys(names.split(","), path)
    return found


class Hierarchies:
    """Finds the groups of processes."""

    def __init__(self, files: Files) -> None:
        self._files = files
        everywhere = mounts(files.text(f"{files.proc}/self/mountinfo"))
        below = [m for m in everywhere if m.point.is_relative_to(files.sys)]
        self._mounts = below or everywhere

    def memberships(self, pid: int) -> dict[str, str]:
        """Controller → path of a process's group; empty when it can't be read."""
        return memberships(self._files.text(f"{self._files.proc}/{pid}/cgroup"))

    def group(self, paths: dict[str, str], controller: str) -> Group | None:
        """Group that holds a controller for the process with these :meth:`memberships`; None when
        the hierarchy is not mounted here, or not as far as that group.
        """
        name = controller if controller in paths else ""
        if name not in paths:
            return None
        path = PurePosixPath(paths[name])
        for mount in self._mounts:
            fits = name in mount.controllers if name else not mount.controllers
            if fits and path.is_relative_to(mount.root):
                below = path.relative_to(mount.root)
                if ".." not in below.parts:
                    return Group(
                        folder=mount.point / below, top=mount.point, unified=not mount.controllers
                    )
        return None

    def container(self, paths: dict[str, str]) -> Group | None:
        """Group that holds a container, a service or a batch job, and nothing else; None when the
        process lives in none, such as in a login session.
        """
        for controller, path in paths.items():
            if is_container(path):
                group = self.group(paths, controller)
                if group is not None:
                    return group
        return None

    def members(self, group: Group) -> list[int]:
        """Processes of a group, those of groups below left out."""
        procs = self._files.text(f"{group.folder}/cgroup.procs")
        return [int(pid) for pid in procs.split() if pid.isdigit() and pid != "0"]


def is_container(path: str) -> bool:
    """Whether the path of a group is that of a container, a service or a batch job."""
    service = _SERVICE.search(path)
    if service:
        return _SHARED_SERVICE.fullmatch(service["name"]) is None
    return _CONTAINER.search(path) is not None


def throttling(cpu_stat: bytes) -> tuple[int, int] | None:
    """Nanoseconds throttled and periods in which that happened, from a ``cpu.stat`` of either
    version; None for a group that can't have a quota.
    """
    values = _values(cpu_stat)
    if "throttled_usec" in values:
        time_ns = values["throttled_usec"] * 1000
    elif "throttled_time" in values:
        time_ns = values["throttled_time"]
    else:
        return None
    return time_ns, values.get("nr_throttled", 0)


def _values(text: bytes) -> dict[str, int]:
    """Lines of a name and a number."""
    pairs = (line.split() for line in text.decode(errors="replace").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


class Quotas:
    """Time that quotas kept a server from running: each group above a process may have one, and
    counts its own.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._groups: dict[str, Growth] = {}

    def watch(self, groups: Iterable[Group]) -> None:
        """Watch these groups and all above them, at most ``MAX_GROUPS`` together."""
        stats = (f"{above.folder}/cpu.stat" for group in groups for above in group.upwards())
        paths = list(dict.fromkeys(stats))[:MAX_GROUPS]
        for gone in self._groups.keys() - set(paths):
            self._groups.pop(gone).close()
        for path in paths:
            if path not in self._groups:
                self._groups[path] = Growth(self._files, path, throttling)

    def throttled(self) -> tuple[int, int] | None:
        """Nanoseconds and periods since the last call; None without a group that can have a quota,
        and at first.
        """
        time_ns = periods = 0
        known = False
        for group in self._groups.values():
            grown = group.read()
            if grown is not None:
                known = True
                time_ns += grown[0] or 0
                periods += grown[1] or 0
        return (time_ns, periods) if known else None

    def close(self) -> None:
        """Close what is kept open."""
        self.watch(())


class Memory:
    """Memory of a control group and those below it; all unknown for the root, which is the whole
    machine.
    """

    def __init__(self, files: Files, group: Group) -> None:
        self.group = group
        levels = group.upwards()
        if group.unified:
            used, limit, events = "memory.current", "memory.max", "memory.events"
        else:
            used, limit, events = (
                "memory.usage_in_bytes",
                "memory.limit_in_bytes",
                "memory.oom_control",
            )
        self._files = files
        self._limits = [f"{level.folder}/{limit}" for level in levels]
        self._used = f"{group.folder}/{used}" if levels else None
        self._kills = Growth(files, f"{group.folder}/{events}", oom_kills) if levels else None
        self._limit: int | None = None
        self.find_limit()

    def find_limit(self) -> None:
        """Read the limits of the group and those above; the tightest holds."""
        limits = (_number(self._files.read_once(path)) for path in self._limits)
        known = [number for number in limits if number is not None and number < UNLIMITED]
        self._limit = min(known, default=None)

    def read(self) -> dict[str, int | None]:
        """Fields of a HostSample; kills since the last call."""
        kills = self._kills.read() if self._kills else None
        return {
            "cgroup_memory_bytes": _number(self._files.read(self._used)) if self._used else None,
            "cgroup_memory_limit_bytes": self._limit,
            "oom_kills": kills[0] if kills else None,
        }

    def close(self) -> None:
        """Close what is kept open."""
        if self._used:
            self._files.forget(self._used)
        if self._kills:
            self._kills.close()


def oom_kills(events: bytes) -> tuple[int] | None:
    """Processes killed for want of memory since the group was made, from ``memory.events`` or
    version 1's ``memory.oom_control``.
    """
    kills = _values(events).get("oom_kill")
    return None if kills is None else (kills,)


def _number(text: bytes | None) -> int | None:
    stripped = (text or b"").strip()
    return int(stripped) if stripped.isdigit() else None


def memory_by_node(files: Files, group: Group) -> dict[int, int]:
    """NUMA node → memory of a group and those below it on that node, bytes in version 2 and pages
    in version 1; empty where the kernel does not tell.
    """
    text = files.text(f"{group.folder}/memory.numa_stat")
    lines = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)
    if group.unified:
        rows = [lines[name] for name in ("anon", "file") if name in lines]
    else:
        totals = {name.partition("=")[0]: row for name, row in lines.items()}
        rows = [totals[name] for name in ("hierarchical_total", "total") if name in totals][:1]
    nodes: dict[int, int] = {}
    for row in rows:
        for word in row.split():
            node, _, amount = word.partition("=")
            if node[:1] == "N" and node[1:].isdigit() and amount.isdigit():
                nodes[int(node[1:])] = nodes.get(int(node[1:]), 0) + int(amount)
    return nodes
