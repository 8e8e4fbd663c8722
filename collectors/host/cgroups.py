"""CPU quotas: how long control groups were kept from running."""

from pathlib import Path

from latencyprism.collectors.host.files import Files

MAX_GROUPS = 16
"""Control groups read for one server."""
V1_MOUNTS = ("fs/cgroup/cpu", "fs/cgroup/cpu,cpuacct")
V2_MOUNTS = ("fs/cgroup", "fs/cgroup/unified")


def cpu_groups(files: Files, pid: int) -> list[str]:
    """The ``cpu.stat`` files of a process's control group and of all above it, deepest first.

    A quota of any of them stops the process, and each counts its own. With both versions mounted,
    the one that has the CPU controller is taken.
    """
    text = (files.read_once(f"{files.proc}/{pid}/cgroup") or b"").decode()
    paths = dict(line.split(":", 2)[1:] for line in text.splitlines() if line.count(":") >= 2)
    v1 = next((path for names, path in paths.items() if "cpu" in names.split(",")), None)
    if v1 is not None:
        return _stats_up(files, V1_MOUNTS, v1)
    return _stats_up(files, V2_MOUNTS, paths[""]) if "" in paths else []


def _stats_up(files: Files, mounts: tuple[str, ...], path: str) -> list[str]:
    for mount in mounts:
        root = Path(files.sys, mount)
        folder = root / path.strip("/")
        if (folder / "cpu.stat").exists():
            above = [parent for parent in folder.parents if parent.is_relative_to(root)]
            stats = [group / "cpu.stat" for group in (folder, *above)]
            return [str(stat) for stat in stats if stat.exists()][:MAX_GROUPS]
    return []


def throttling(cpu_stat: bytes | None) -> tuple[int, int] | None:
    """Nanoseconds throttled and periods in which that happened, from a ``cpu.stat`` of either
    version; None for a group that can't have a quota.
    """
    if cpu_stat is None:
        return None
    values = dict(line.split() for line in cpu_stat.decode().splitlines() if " " in line)
    if "throttled_usec" in values:
        time_ns = int(values["throttled_usec"]) * 1000
    elif "throttled_time" in values:
        time_ns = int(values["throttled_time"])
    else:
        return None
    return time_ns, int(values.get("nr_throttled", 0))
