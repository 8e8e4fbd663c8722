"""Memory on far NUMA nodes: pages the machine misplaced, and how much of a server's lies far off.

``/proc/PID/numa_maps`` is never read: the kernel walks all page tables of the process for it, while
the process waits for its memory map. The server's control group counts the same without a walk.
"""

from latencyprism.collectors.host.files import Files, Growth

MOST = 8192
"""CPUs, or nodes, that are taken from a list."""


def node_numbers(text: str) -> list[int]:
    """Numbers in a list such as ``0-2,5``; bad parts are left out, and so are those beyond
    ``MOST``.
    """
    found: list[int] = []
    for part in text.strip().split(","):
        first, separator, last = part.partition("-")
        last = last if separator else first
        if first.isdecimal() and last.isdecimal():
            found += range(int(first), min(int(last) + 1, int(first) + MOST - len(found)))
    return found


def numa_miss(numastat: bytes) -> tuple[int] | None:
    """Pages taken on a node because the wished one had none, from the node's numastat."""
    _, found, rest = numastat.partition(b"numa_miss ")
    return (int(rest.split(None, 1)[0]),) if found else None


class Numa:
    """The machine's NUMA nodes; all answers are None on a machine with one node."""

    def __init__(self, files: Files) -> None:
        folder = f"{files.sys}/devices/system/node"
        nodes = node_numbers(files.text(f"{folder}/online"))
        self.nodes = nodes if len(nodes) > 1 else []
        self._misses = [
            Growth(files, f"{folder}/node{node}/numastat", numa_miss) for node in self.nodes
        ]
        self._node_of_cpu = {
            cpu: node
            for node in self.nodes
            for cpu in node_numbers(files.text(f"{folder}/node{node}/cpulist"))
        }

    def misses(self) -> int | None:
        """Pages since the last call that were taken on a node because the wished one had none."""
        total = None
        for node in self._misses:
            grown = node.read()
            if grown is not None:
                total = (total or 0) + (grown[0] or 0)
        return total

    def remote_share(self, memory: dict[int, int], cpus: set[int]) -> float | None:
        """Share of ``memory`` (node → amount) on nodes that hold none of ``cpus``; None when
        either is unknown.
        """
        total = sum(memory.values())
        near = {self._node_of_cpu[cpu] for cpu in cpus if cpu in self._node_of_cpu}
        if not self.nodes or not near or not total:
            return None
        return sum(amount for node, amount in memory.items() if node not in near) / total
