"""The gateway source: a thread that reads the logs and reports the requests they tell of."""

import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from latencyprism.collectors.address import endpoint
from latencyprism.collectors.gateway.access import Access, LineError
from latencyprism.collectors.gateway.config import GatewayConfig
from latencyprism.collectors.gateway.datagrams import Datagrams, udp_address
from latencyprism.collectors.gateway.follow import Follower
from latencyprism.collectors.gateway.lines import message, read
from latencyprism.collectors.gateway.upstreams import Upstreams
from latencyprism.collectors.network.endpoints import dialect_of
from latencyprism.collectors.source import Emit, UnavailableError
from latencyprism.schemas.records import RequestTiming
from latencyprism.schemas.topics import TELEMETRY_REQUESTS

logger = logging.getLogger(__name__)

SOURCE: Final = "gateway"
TICK_S: Final = 0.05


class Log(Protocol):
    """Where lines come from."""

    @property
    def behind(self) -> bool:
        """Whether the last :meth:`read` left something unread."""

    def read(self, most: int) -> Iterator[bytes]:
        """The new lines, of about ``most`` bytes; does not block."""


def request_id(told: str, nth: int) -> str:
    """Id of a request: the same whenever its line is read.

    ``told`` is the line without its syslog header, ``nth`` counts the servers that were tried.
    """
    digest = hashlib.blake2b(told.encode(), digest_size=16)
    digest.update(b"%d" % nth)
    return digest.hexdigest()


class Reports:
    """What happens in one tick: lines in, requests and watermarks out. No threads, no files.

    All that a log holds is read before the watermark moves to ``lateness_ms`` ago; while one has
    more than was read, it stays where it is.
    """

    def __init__(
        self,
        upstreams: Upstreams,
        config: GatewayConfig,
        counts: Counter[str],
        *,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._upstreams = upstreams
        self._config = config
        self._counts = counts
        self._wall_ns = wall_ns
        self._watermark_ns = 0
        self._told: set[str] = set()
        """Refusals that were logged."""

    def tick(self, logs: Sequence[Log], emit: Emit) -> None:
        """Read what is new in the logs."""
        sure_ns = self._wall_ns() - self._config.lateness_ms * 1_000_000
        for log in logs:
            for line in log.read(self._config.tick_bytes):
                self._line(line, emit)
        if not any(log.behind for log in logs):
            self._watermark_ns = sure_ns
        if self._watermark_ns:
            for instance in self._upstreams.instances:
                emit.watermark(TELEMETRY_REQUESTS, instance, self._watermark_ns)

    def _line(self, line: bytes, emit: Emit) -> None:
        self._counts["lines"] += 1
        told = message(line)
        try:
            accesses = read(told)
        except LineError as refused:
            self._refuse(refused)
            return
        if not accesses:
            self._counts["answered by the gateway"] += 1
            return
        self._counts["further tries"] += len(accesses) - 1
        for nth, access in enumerate(accesses):
            self._access(access, request_id(told, nth), emit)

    def _access(self, access: Access, identity: str, emit: Emit) -> None:
        if dialect_of(access.path) is None:
            self._counts["other paths"] += 1
            return
        instance = self._upstreams.find(access.upstream)
        if instance is None:
            self._counts["other servers"] += 1
            return
        self._counts["requests"] += 1
        self._counts["late requests"] += access.end_ns < self._watermark_ns
        emit.sample(TELEMETRY_REQUESTS, timing(access, identity, instance))

    def _refuse(self, refused: LineError) -> None:
        self._counts[f"refused lines: {refused.kind}"] += 1
        if refused.kind not in self._told:
            self._told.add(refused.kind)
            logger.warning("A line of an access log is left out (%s): %s", refused.kind, refused)


def timing(access: Access, identity: str, instance: str) -> RequestTiming:
    """The record of one access."""
    return RequestTiming(
        request_id=identity,
        part=0,
        state=access.state,
        instance=instance,
        source=SOURCE,
        observed_at_ns=access.end_ns,
        endpoint=access.path,
        streaming=access.streaming,
        status=access.status,
        arrival_ns=access.arrival_ns,
        request_end_ns=access.request_end_ns,
        first_byte_ns=access.first_byte_ns,
        end_ns=access.end_ns,
        chunks_before=0,
        request_bytes=access.request_bytes,
        response_bytes=access.response_bytes,
        trace_id=access.trace_id,
        estimated=access.estimated,
        method=access.method,
        proxy_queue_us=access.proxy_queue_us,
    )


class GatewaySource:
    """Reads the logs of the settings; see :class:`~latencyprism.collectors.source.Source`.

    Where it stood in each file is kept over a restart of the source, not of the agent. Raises
    ValueError for a setting that is wrong, :class:`UnavailableError` without any log.
    """

    name = "gateway"

    def __init__(self, engines: Sequence[str], config: GatewayConfig) -> None:
        if not config.files and not config.syslog:
            raise UnavailableError(
                "no access log is named; set collectors.gateway.files or collectors.gateway.syslog"
            )
        for url in engines:
            endpoint(url)
        for address in config.syslog:
            udp_address(address)
        self._engines = tuple(engines)
        self._config = config
        self._counts: Counter[str] = Counter()
        self._followers = [
            Follower(
                path,
                self._counts,
                from_start=config.from_start,
                linger_s=config.linger_ms / 1_000,
                max_line_bytes=config.max_line_bytes,
                max_behind_bytes=config.max_behind_bytes,
            )
            for path in dict.fromkeys(config.files)
        ]
        self._listeners: list[Datagrams] = []

    @property
    def counts(self) -> Mapping[str, int]:
        """What was read, refused and lost since the start, by kind; a copy."""
        return dict(self._counts)

    def prepare(self) -> None:
        """Bind the sockets and open the logs, as long as that is allowed.

        Raises OSError when a socket cannot be bound.
        """
        self._listen()
        for follower in self._followers:
            follower.open()

    def run(self, emit: Emit, stop: threading.Event) -> None:
        """Read until ``stop``; returns within 100 ms of it.

        Raises OSError when a socket cannot be bound or a host name of an engine does not resolve.
        """
        upstreams = Upstreams(
            self._engines, self._config.servers, all_upstreams=self._config.all_upstreams
        )
        reports = Reports(upstreams, self._config, self._counts)
        self._listen()
        try:
            while not stop.wait(TICK_S):
                reports.tick((*self._followers, *self._listeners), emit)
        finally:
            for listener in self._listeners:
                listener.close()
            self._listeners = []

    def _listen(self) -> None:
        """Bind the sockets that are not bound."""
        for address in self._config.syslog[len(self._listeners) :]:
            self._listeners.append(
                Datagrams(
                    address,
                    self._counts,
                    max_line_bytes=self._config.max_line_bytes,
                    mode=self._config.socket_mode,
                )
            )
