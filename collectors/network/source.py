"""The network source: a thread that drains the rings and reports what the taps make of them."""

import ipaddress
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from latencyprism.collectors.address import endpoint, is_local, port_of
from latencyprism.collectors.namespaces import call_in
from latencyprism.collectors.network.config import NetworkConfig
from latencyprism.collectors.network.namespaces import NEEDS, Assignment, Namespace, Namespaces
from latencyprism.collectors.network.ring import PacketRing, Ring
from latencyprism.collectors.network.tap import Tap
from latencyprism.collectors.network.targets import Targets, Watch
from latencyprism.collectors.source import Emit
from latencyprism.schemas.topics import TELEMETRY_REQUESTS

log = logging.getLogger(__name__)

SKEW_NS: Final = 1_000_000
"""Packets taken by different CPUs may stand in the ring in another order than that of their times,
by far less than this."""
CLOCK_STEP_NS: Final = 50_000_000
"""A change of the wall clock against the monotonic one between two reports that is no slewing."""
LOOK_S: Final = 0.05
"""How often it is looked whether a ring fills up before the next report is due."""
PLACES_S: Final = 2.0
"""How often it is looked where the servers are; more rarely where that takes long."""
PLACES_SHARE: Final = 0.01
"""Share of a core that may be spent on it."""
NAMES_S: Final = 30.0
"""How often host names are resolved again."""


class Reports:
    """What happens between two waits: drain, flush, move the watermark. No threads, no sockets.

    Packets are taken all at once when a report is due, which costs half as much as taking each
    block when it comes; or earlier, when the ring fills up.

    The watermark is what was seen for sure. A drained ring has handed over every packet older than
    its ``hold_ns``, and everything older than the newest packet handed over, give or take
    :data:`SKEW_NS`; of the two the later counts. All news up to there are emitted first, so a
    window that ends before the watermark is complete.
    """

    def __init__(
        self,
        ring: PacketRing,
        tap: Tap,
        targets: Targets,
        *,
        interval_ms: int,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._ring = ring
        self._tap = tap
        self._targets = targets
        self._interval_ns = interval_ms * 1_000_000
        self._wall_ns = wall_ns
        self._monotonic_ns = monotonic_ns
        self._next_ns = monotonic_ns()
        self._offset_ns = wall_ns() - monotonic_ns()

    def step(self, emit: Emit) -> float:
        """Do what is due now; seconds until the next report is."""
        late_ns = self._monotonic_ns() - self._next_ns
        if late_ns < 0:
            if self._ring.filling():
                self._ring.drain(self._tap.packet)
            return -late_ns / 1e9
        self._next_ns += (1 + late_ns // self._interval_ns) * self._interval_ns
        self._check_clock()
        self._report(emit)
        return max(0.0, (self._next_ns - self._monotonic_ns()) / 1e9)

    def _check_clock(self) -> None:
        """Times from before a step of the wall clock mean nothing after it."""
        offset_ns = self._wall_ns() - self._monotonic_ns()
        step_ns, self._offset_ns = offset_ns - self._offset_ns, offset_ns
        if abs(step_ns) > CLOCK_STEP_NS:
            log.warning("the clock was set by %.3f s: open exchanges are given up", step_ns / 1e9)
            self._ring.drain(self._tap.packet)
            self._tap.forget("clock set")
            self._ring.newest_ns = 0

    def _report(self, emit: Emit) -> None:
        now_ns = self._wall_ns()
        if self._ring.interrupted():
            log.warning(
                "the network interface went down; its packets are taken again when it is up"
            )
            self._tap.counts["interface down"] += 1
        drained = self._ring.drain(self._tap.packet)
        sure_ns = now_ns - self._ring.hold_ns if drained else 0
        watermark_ns = max(sure_ns, self._ring.newest_ns - SKEW_NS)
        lost = self._ring.lost()
        if lost:
            log.warning("the kernel dropped %d packets: the ring was full", lost)
            self._tap.packets_lost(lost, watermark_ns)
        for part in self._tap.flush(watermark_ns):
            emit.sample(TELEMETRY_REQUESTS, part)
        for instance in self._targets.instances:
            emit.watermark(TELEMETRY_REQUESTS, instance, watermark_ns)

    def finish(self, emit: Emit, reason: str) -> None:
        """Report what there is for the last time; what is open is given up."""
        self._ring.drain(self._tap.packet)
        self._tap.forget(reason)
        for part in self._tap.flush(self._wall_ns()):
            emit.sample(TELEMETRY_REQUESTS, part)


class _Place:
    """A network namespace in which packets are taken; None is this process's own."""

    def __init__(
        self,
        space: Namespace | None,
        watches: Iterable[Watch],
        ports: Sequence[int],
        config: NetworkConfig,
    ) -> None:
        self.space = space
        self.watches = tuple(watches)
        self._interface = config.interface if space is None else ""
        make = partial(
            Ring,
            self._interface,
            ports,
            ring_mib=config.ring_mib,
            block_timeout_ms=config.block_timeout_ms,
        )
        self.ring = make() if space is None else call_in(space.path, make)
        self._index = self._interface_index()
        self._targets = Targets(self._seen(), local=self._local)
        self.tap = Tap(self._targets, config)
        self.reports = Reports(
            self.ring, self.tap, self._targets, interval_ms=config.part_interval_ms
        )

    def assign(self, watches: Sequence[Watch]) -> None:
        """Watch these from now on, on the ports it was made for."""
        if self.watches != tuple(watches):
            self.watches = tuple(watches)
            self._targets.assign(self._seen())

    @property
    def stale(self) -> bool:
        """Whether the interface was made anew, of which this ring hears nothing."""
        return self._interface_index() not in (None, self._index)

    def _seen(self) -> Sequence[Watch]:
        """The servers as seen from inside: a container does not know the host's addresses."""
        if self.space is None:
            return self.watches
        return [Watch(instance=watch.instance, port=watch.port) for watch in self.watches]

    def _local(self, address: str) -> bool:
        if self.space is None:
            return is_local(address)
        with suppress(OSError):  # the process by which it is entered has just ended
            return call_in(self.space.path, lambda: is_local(address))
        return False

    def _interface_index(self) -> int | None:
        with suppress(OSError):
            return socket.if_nametoindex(self._interface) if self._interface else None
        return None


class _Names:
    """The servers of base URLs. Host names are resolved again from time to time, in a thread of
    its own: an answer may take seconds.
    """

    def __init__(self, engines: Sequence[str], counts: Counter[str]) -> None:
        self._engines = engines
        self._counts = counts
        self._named = any(map(_has_name, engines))
        self._thread: threading.Thread | None = None
        self._due = time.monotonic() + NAMES_S
        self.watches: Sequence[Watch] = ()
        """Those whose names resolved, or once did."""
        error = self._resolve()
        if error is not None and not self.watches:
            raise error

    def refresh(self) -> None:
        """Resolve again if it is time to; does not wait for it."""
        if self._named and time.monotonic() >= self._due:
            self._due = time.monotonic() + NAMES_S
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._resolve, name="network names", daemon=True
                )
                self._thread.start()

    def _resolve(self) -> OSError | None:
        failed = None
        known = {watch.instance: watch for watch in self.watches}
        for url in self._engines:
            try:
                watch = Watch.of(url)
            except OSError as error:
                log.warning("not watched unless it resolved before: %s", error)
                self._counts["names not resolved"] += 1
                failed = error
            else:
                known[watch.instance] = watch
        self.watches = tuple(known.values())
        return failed


def _has_name(url: str) -> bool:
    try:
        ipaddress.ip_address(str(endpoint(url).hostname))
    except ValueError:
        return True
    return False


class _Places:
    """Where packets are taken: here always, and in the namespaces that servers are found in."""

    def __init__(self, engines: Sequence[str], config: NetworkConfig, counts: Counter[str]) -> None:
        if not engines:
            raise ValueError("no server to watch")
        self._ports = sorted(set(map(port_of, engines)))
        self._names = _Names(engines, counts)
        self._config = config
        self._counts = counts
        self._told: set[Namespace] = set()
        self._due = 0.0
        here = [watch for watch in self._names.watches if watch.here(is_local)]
        self._assignment = Assignment(config.namespaces, spaces=Namespaces(), here=here)
        self._own = self._open_own(self._names.watches)
        self._others: dict[Namespace, _Place] = {}
        try:
            self._look(None)
        except BaseException:
            self.close()
            raise
        everywhere = [place.space.path for place in self._others.values() if place.space]
        log.info("watching ports %s in %s", self._ports, ", ".join(["this namespace", *everywhere]))

    @property
    def taps(self) -> Sequence[Tap]:
        """Taps of all places."""
        return [self._own.tap, *(place.tap for place in self._others.copy().values())]

    def step(self, emit: Emit) -> float:
        """Do what is due; seconds until something is."""
        if time.monotonic() >= self._due:
            self._look(emit)
        places = [self._own, *self._others.values()]
        return min(place.reports.step(emit) for place in places)

    def close(self) -> None:
        """Give all rings back."""
        for place in (self._own, *self._others.values()):
            place.ring.close()

    def _look(self, emit: Emit | None) -> None:
        """Find out where the servers are, and be there; without ``emit`` for the first time."""
        began_s, spent_s = time.monotonic(), time.thread_time()
        self._names.refresh()
        wanted = self._assignment.decide(self._names.watches, self._counts)
        own = list(wanted.get(None, ()))
        for gone in self._others.keys() - wanted.keys():
            self._leave(self._others.pop(gone), emit, "namespace gone")
        for space, watches in wanted.items():
            if space is None:
                continue
            place = self._others.get(space)
            if place is not None and place.watches == tuple(watches):
                place.space = space  # the same by another process
                continue
            if place is not None:
                self._leave(self._others.pop(space), emit, "servers moved")
            place = self._enter(space, watches, emit)
            if place is None:
                own += watches
        if self._own.stale:
            self._leave(self._own, emit, "interface made anew")
            self._own = self._open_own(own)
        self._own.assign(own)
        spent_s = time.thread_time() - spent_s
        self._due = began_s + max(PLACES_S, spent_s / PLACES_SHARE)

    def _open_own(self, watches: Sequence[Watch]) -> _Place:
        return _Place(None, watches, self._ports, self._config)

    def _enter(
        self, space: Namespace, watches: Sequence[Watch], emit: Emit | None
    ) -> _Place | None:
        """Take packets in another namespace; None, told once, where that is not permitted."""
        ports = sorted({watch.port for watch in watches})
        try:
            place = _Place(space, watches, ports, self._config)
        except OSError as e:
            self._counts["namespaces not permitted"] += 1
            if space not in self._told:
                self._told.add(space)
                log.warning("%s; %s", e, NEEDS)
            if emit is None and len(watches) == len(self._names.watches):
                raise PermissionError(e.errno, f"{e}; {NEEDS}") from e
            return None
        log.info("watching ports %s in %s", ports, space.path)
        self._others[space] = place
        return place

    def _leave(self, place: _Place, emit: Emit | None, reason: str) -> None:
        if emit is not None:
            place.reports.finish(emit, reason)
        self._counts.update(place.tap.counts)
        place.ring.close()


class NetworkSource:
    """Watches the servers of the base URLs; see :class:`~latencyprism.collectors.source.Source`."""

    name = "network"

    def __init__(self, engines: Sequence[str], config: NetworkConfig) -> None:
        self._engines = tuple(engines)
        self._config = config
        self._past: Counter[str] = Counter()
        """What was counted by what is closed, or outside of any tap."""
        self._places: _Places | None = None

    @property
    def counts(self) -> Mapping[str, int]:
        """What was seen, refused and lost since the source was made, by kind; a copy."""
        total = Counter(dict(self._past))
        places = self._places
        for tap in places.taps if places is not None else ():
            total.update(dict(tap.counts))
        return dict(total)

    def prepare(self) -> None:
        """Open the rings, while it is permitted; raises as :meth:`run`."""
        self._places = _Places(self._engines, self._config, self._past)

    def run(self, emit: Emit, stop: threading.Event) -> None:
        """Capture until ``stop``; returns within 100 ms of it.

        Raises PermissionError without CAP_NET_RAW, or when all servers are in namespaces that may
        not be entered; OSError when no host name resolves or the interface does not exist,
        ValueError for a URL that names no server, and when there is none.
        """
        if self._places is None:
            self.prepare()
        places = self._places
        assert places is not None
        try:
            while not stop.is_set():
                time.sleep(min(places.step(emit), LOOK_S))
        finally:
            self._places = None
            for tap in places.taps:
                self._past.update(tap.counts)
            places.close()
