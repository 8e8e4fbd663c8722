"""Which network namespace a server's packets are taken in: this one, or that of its container."""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from latencyprism.collectors.namespaces import call_in
from latencyprism.collectors.network.targets import Watch

log = logging.getLogger(__name__)

AUTO: Final = "auto"
MAX_PROCESSES: Final = 50_000
"""Processes whose namespace is looked at."""
MAX_SOCKETS: Final = 10_000
"""Listening sockets of a namespace that are read."""

NEEDS: Final = (
    "another network namespace takes CAP_SYS_ADMIN to enter and CAP_NET_RAW to capture in it, "
    "and CAP_SYS_PTRACE to find it by a process of another user: run as root, or give the service "
    "these capabilities (in a container, also pid: host)"
)

_LISTEN: Final = "0A"
_CONTAINER = re.compile(r"[0-9a-f]{12,64}")


@dataclass(frozen=True, slots=True)
class Namespace:
    """A network namespace: where a file of it is, and what it is (device and inode of that file),
    by which two are the same.
    """

    path: Path = field(compare=False)
    identity: tuple[int, int]

    @classmethod
    def at(cls, path: Path) -> "Namespace | None":
        """The one whose file this is; None when it is gone, or may not be looked at."""
        try:
            found = path.stat()
        except OSError:
            return None
        return cls(path, (found.st_dev, found.st_ino))


class Namespaces:
    """Finds namespaces below ``/proc`` and ``/run/netns``, or below other roots in tests."""

    def __init__(self, *, proc: Path = Path("/proc"), named: Path = Path("/run/netns")) -> None:
        self._proc = proc
        self._named = named
        self.own = Namespace.at(proc / "self/ns/net")

    def named(self, name: str) -> Namespace | None:
        """The namespace that a setting names: a path, a name of ``ip netns``, the number of a
        process, or the start of a container's id; None when there is none now.

        A container's processes are found by their cgroups, which costs a file a process.
        """
        if "/" in name:
            return Namespace.at(Path(name))
        found = Namespace.at(self._named / name)
        if found is None and name.isdigit():
            found = Namespace.at(self._proc / name / "ns/net")
        if found is None and _CONTAINER.fullmatch(name):
            within = (pid for pid in self._processes() if self._is_in(pid, name))
            spaces = (Namespace.at(self._proc / pid / "ns/net") for pid in within)
            found = next((space for space in spaces if space is not None), None)
        return found

    def all(self) -> Iterator[Namespace]:
        """Each other namespace that a process is in and that may be looked at, once."""
        seen = {self.own}
        for pid in self._processes():
            space = Namespace.at(self._proc / pid / "ns/net")
            if space is not None and space not in seen:
                seen.add(space)
                yield space

    def ports(self, space: Namespace | None) -> set[int]:
        """Ports that something listens on, in a namespace or (None) in this one.

        Raises OSError when it may not be entered, which is needed where no process is in it.
        """
        if space is None:
            return listening(self._proc / "self/net")
        process = space.path.parent.parent
        if process.parent == self._proc:  # its tables can be read from here
            return listening(process / "net")
        return call_in(str(space.path), lambda: listening(Path("/proc/thread-self/net")))

    def _processes(self) -> Iterator[str]:
        pids = (entry.name for entry in self._proc.iterdir() if entry.name.isdigit())
        for _, pid in zip(range(MAX_PROCESSES), pids, strict=False):
            yield pid

    def _is_in(self, pid: str, container: str) -> bool:
        try:
            return container in (self._proc / pid / "cgroup").read_text()
        except OSError:
            return False


def listening(tables: Path) -> set[int]:
    """Ports with a listening TCP socket, from ``net/tcp`` and ``net/tcp6`` of a process. The kernel
    shows those sockets before all others, of which nothing is read.
    """
    ports = set()
    for name in ("tcp", "tcp6"):
        with suppress(OSError), (tables / name).open() as table:
            next(table, None)
            for _, line in zip(range(MAX_SOCKETS), table, strict=False):
                fields = line.split(None, 4)
                if len(fields) < 4 or fields[3] != _LISTEN:
                    break
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


class Assignment:
    """Decides in which namespace each server is watched: in exactly one, so that no packet counts
    twice.

    One that is named by the settings and listens on the server's port takes precedence, in their
    order. With ``auto``, a server that should be here (by its address) and does not listen here is
    looked for in the namespaces of all processes, and watched there if it is in one alone. All
    others are watched here: packets of containers pass through the host's own namespace too, unless
    their client is in the container as well.
    """

    def __init__(self, names: Sequence[str], *, spaces: Namespaces, here: Iterable[Watch]) -> None:
        self._names = tuple(name for name in names if name != AUTO)
        self._auto = AUTO in names
        self._spaces = spaces
        self._here = frozenset(watch.instance for watch in here)
        self._told: set[str] = set()

    def decide(
        self, watches: Iterable[Watch], counts: Counter[str]
    ) -> Mapping[Namespace | None, list[Watch]]:
        """Servers by namespace, None for this one, which is always there.

        Looks through processes for names of containers and for ``auto``, so it may take some
        milliseconds. What cannot be found or looked at is counted, and told once.
        """
        decided: dict[Namespace | None, list[Watch]] = {None: []}
        named = self._open(counts)
        own_ports = self._spaces.ports(None) if self._auto else set()
        others: list[tuple[Namespace, set[int]]] | None = None
        for watch in watches:
            space = next((space for space, ports in named if watch.port in ports), None)
            sought = self._auto and watch.instance in self._here and watch.port not in own_ports
            if space is None and sought:
                if others is None:
                    others = [(other, self._spaces.ports(other)) for other in self._spaces.all()]
                space = self._only(watch, [other for other, ports in others if watch.port in ports])
            decided.setdefault(space, []).append(watch)
        return decided

    def _open(self, counts: Counter[str]) -> list[tuple[Namespace, set[int]]]:
        found = []
        for name in self._names:
            space = self._spaces.named(name)
            if space is None:
                counts["namespaces not found"] += 1
                self._tell(name, "there is none of this name now; it is looked for again")
                continue
            if space == self._spaces.own:
                continue
            try:
                found.append((space, self._spaces.ports(space)))
            except OSError as e:
                counts["namespaces not permitted"] += 1
                self._tell(name, f"{e}; {NEEDS}")
            else:
                self._told.discard(name)
        return found

    def _only(self, watch: Watch, found: Sequence[Namespace]) -> Namespace | None:
        if len(found) > 1:
            self._tell(
                watch.instance,
                f"port {watch.port} is listened on in {len(found)} namespaces, so none is chosen; "
                "name the server's",
            )
        return found[0] if len(found) == 1 else None

    def _tell(self, what: str, why: str) -> None:
        if what not in self._told:
            self._told.add(what)
            log.warning("network namespace of %s: %s", what, why)
