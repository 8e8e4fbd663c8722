"""Which network namespace a server's packets are taken in: this one, or that of its container."""

import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final

from latencyprism.collectors.discovery.sockets import listening
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

_CONTAINER = re.compile(r"[0-9a-f]{12,64}")


@dataclass(frozen=True, slots=True)
class Namespace:
    """A network namespace: where a file of it is, and what it is (device and inode of that file),
    by which two are the same.
    """

    path: str = field(compare=False)
    identity: tuple[int, int]

    @classmethod
    def at(cls, path: str) -> "Namespace | None":
        """The one whose file this is; None when it is gone, or may not be looked at."""
        try:
            found = os.stat(path)  # noqa: PTH116 - a Path for each process costs more than the call
        except OSError:
            return None
        return cls(path, (found.st_dev, found.st_ino))


class Namespaces:
    """Finds namespaces below ``/proc`` and ``/run/netns``, or below other roots in tests."""

    def __init__(self, *, proc: Path = Path("/proc"), named: Path = Path("/run/netns")) -> None:
        self._proc = str(proc)
        self._named = named
        self.own = self._of("self")

    def named(self, name: str) -> Namespace | None:
        """The namespace that a setting names: a path, a name of ``ip netns``, the number of a
        process, or the start of a container's id; None when there is none now.

        A container's processes are found by their cgroups, which costs a file a process.
        """
        if "/" in name:
            return Namespace.at(name)
        found = Namespace.at(str(self._named / name))
        if found is None and name.isdigit():
            found = self._of(name)
        if found is None and _CONTAINER.fullmatch(name):
            spaces = (self._of(pid) for pid in self._processes() if self._is_in(pid, name))
            found = next((space for space in spaces if space is not None), None)
        return found

    def all(self) -> Iterator[Namespace]:
        """Each other namespace that a process is in and that may be looked at, once."""
        seen = {self.own}
        for pid in self._processes():
            space = self._of(pid)
            if space is not None and space not in seen:
                seen.add(space)
                yield space

    def ports(self, space: Namespace | None) -> set[int]:
        """Ports that something listens on, in a namespace or (None) in this one.

        Raises OSError when it may not be entered, which is needed where no process is in it.
        """
        process = f"{self._proc}/self" if space is None else space.path.removesuffix("/ns/net")
        if process.startswith(self._proc):  # its tables can be read from here
            return listening_ports(Path(process) / "net")
        assert space is not None
        return call_in(space.path, lambda: listening_ports(Path("/proc/thread-self/net")))

    def _of(self, pid: str) -> Namespace | None:
        return Namespace.at(f"{self._proc}/{pid}/ns/net")

    def _processes(self) -> Iterator[str]:
        names = os.listdir(self._proc)  # noqa: PTH208 - see above
        return islice((name for name in names if name.isdigit()), MAX_PROCESSES)

    def _is_in(self, pid: str, container: str) -> bool:
        try:
            return container in Path(f"{self._proc}/{pid}/cgroup").read_text()
        except OSError:
            return False


def listening_ports(tables: Path) -> set[int]:
    """Ports with a listening TCP socket, from ``net/tcp`` and ``net/tcp6`` of a process."""
    ports: set[int] = set()
    for name in ("tcp", "tcp6"):
        with suppress(OSError), (tables / name).open() as table:
            ports.update(listener.port for listener in islice(listening(table), MAX_SOCKETS))
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
