"""Parsers of the host source: netlink answers, and files that others' names get into."""

from latencyprism.collectors.host import cgroups, inetdiag, numa, processes, system, threads
from latencyprism.collectors.host.counts import Counts
from latencyprism.collectors.host.locate import addresses, proxied


def target_inet_diag(data: bytes) -> None:
    sequence = int.from_bytes(data[8:12], "little")
    try:
        found, _ = inetdiag.parse(data, sequence=sequence, counts=Counts())
    except OSError:
        return
    assert len(found) <= len(data) // 88


def target_cgroup_files(data: bytes) -> None:
    text = data.decode(errors="replace")
    cgroups.mounts(text)
    for path in cgroups.memberships(text).values():
        cgroups.is_container(path)
    cgroups.throttling(data)
    cgroups.oom_kills(data)
    assert len(numa.node_numbers(text)) <= numa.MOST


def target_process_files(data: bytes) -> None:
    text = data.decode(errors="replace")
    # The kernel writes the numbers; the name of the process in between is anybody's.
    stat = b"7 (" + data + b") S " + b" ".join(b"%d" % field for field in range(1, 50))
    parsed = processes.parse_stat(stat)
    assert parsed is not None
    assert parsed.cpu == 36
    processes.role_of(text, listens=False)
    proxied(text)
    addresses(text, text)


def target_truncated_counters(data: bytes) -> None:
    """What the kernel writes, cut short anywhere."""
    whole = (
        b"cpu  1 2 3 4 5 6 7 8 9 10\ncpu0 1 2\nprocs_running 3\n",
        b"Ip: A\nIp: 1\nTcp: A RetransSegs B\nTcp: 1 42 -1\n",
        b"1 2 10 4 5 6 20 8 0 30 0\n",
        b"12 34 5\n",
    )
    cut = data[0] if data else 0
    system.runnable(whole[0] + data)
    system.retransmits(whole[1][:cut])
    system.disk_totals(whole[2][:cut])
    threads.parse_schedstat(whole[3][:cut])
