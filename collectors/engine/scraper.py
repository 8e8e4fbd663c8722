"""Reads one engine's metrics page once a second, whatever the engine does."""

import http.client
import json
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from latencyprism.collectors.address import endpoint, instance_of
from latencyprism.collectors.engine.config import EngineConfig
from latencyprism.collectors.engine.exposition import ExpositionError, Parser
from latencyprism.collectors.engine.sample import Tracker
from latencyprism.collectors.source import Emit
from latencyprism.schemas.records import EngineSample, Freshness
from latencyprism.schemas.topics import TELEMETRY_ENGINE

logger = logging.getLogger(__name__)

MAX_BYTES = 8_000_000
"""Longest answer that is read."""
SLICE_S = 0.1
"""Time between two looks at the stop event, and between two watermarks."""
HINTS = {
    401: "the engine wants a key for its metrics",
    404: "no metrics there; SGLang needs --enable-metrics",
    501: "metrics are off; llama.cpp needs --metrics",
}


class ScrapeError(Exception):
    """No usable answer; the message says why."""


class Client:
    """One kept-alive connection to one engine; used by one thread, aborted by another."""

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = endpoint(url)
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self._base = parts.path.rstrip("/")
        self._aborted = False
        self._connection = kind(str(parts.hostname), parts.port, timeout=timeout_s)

    def get(self, path: str) -> tuple[str, bytes]:
        """Content type and body; blocks up to the timeout for each read. Raises ScrapeError."""
        reused = self._connection.sock is not None
        self._aborted = False
        try:
            try:
                response = self._request(path)
            except (http.client.RemoteDisconnected, ConnectionError):
                if not reused or self._aborted:
                    raise
                # The server closed the idle connection, as it may at any time.
                self.close()
                response = self._request(path)
            return self._read(response)
        except http.client.IncompleteRead as error:
            self.close()
            raise ScrapeError(f"truncated after {len(error.partial)} bytes") from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise ScrapeError(str(error) or type(error).__name__) from error

    def _request(self, path: str) -> http.client.HTTPResponse:
        headers = {"Accept": "text/plain;version=0.0.4", "User-Agent": "latencyprism"}
        self._connection.request("GET", self._base + path, headers=headers)
        return self._connection.getresponse()

    def _read(self, response: http.client.HTTPResponse) -> tuple[str, bytes]:
        body = response.read(MAX_BYTES + 1)
        if len(body) > MAX_BYTES:
            self.close()
            raise ScrapeError(f"answer of more than {MAX_BYTES} bytes")
        if response.length:  # what read(n) leaves unsaid when the connection ended early
            self.close()
            raise ScrapeError(f"truncated after {len(body)} bytes, {response.length} missing")
        if response.will_close:
            self.close()
        if response.status != http.client.OK:
            hint = HINTS.get(response.status, response.reason)
            raise ScrapeError(f"HTTP {response.status}: {hint}")
        return response.headers.get_content_type(), body

    def abort(self) -> None:
        """Make a :meth:`get` that is under way in another thread fail at once."""
        self._aborted = True
        sock = self._connection.sock
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; the next :meth:`get` opens a new one."""
        self._connection.close()


def checked_page(content_type: str, body: bytes) -> bytes:
    """A body that can be a whole metrics page. Raises ScrapeError for one that can't."""
    if content_type == "text/html" or body.lstrip()[:1] == b"<":
        raise ScrapeError("the answer is HTML, not metrics")
    if not body.strip():
        raise ScrapeError("the page is empty")
    if not body.endswith(b"\n"):
        raise ScrapeError(f"truncated: no line end after {len(body)} bytes")
    return body


@dataclass(frozen=True, slots=True)
class _Answer:
    """What came of one call of the worker: a page, or why there is none."""

    took_s: float
    page: bytes = b""
    version: str | None = None
    error: str | None = None


class _Worker:
    """Does one blocking call at a time, in a thread that can be left behind when it hangs."""

    def __init__(self, name: str, at_end: Callable[[], None]) -> None:
        self.busy = False
        self._at_end = at_end
        self._calls: queue.SimpleQueue[Callable[[], _Answer] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, call: Callable[[], _Answer]) -> None:
        """Begin a call; only when not ``busy``."""
        self.busy = True
        self._calls.put(call)

    def answer(self, timeout_s: float) -> _Answer | None:
        """The answer of the call under way, None if it has not come after ``timeout_s``."""
        try:
            answer = self._answers.get(timeout=max(timeout_s, 0.001))
        except queue.Empty:
            return None
        self.busy = False
        return answer

    def end(self) -> None:
        """End the thread after the call under way, without waiting for it."""
        self._calls.put(None)

    def _run(self) -> None:
        while call := self._calls.get():
            self._answers.put(call())
        self._at_end()


class EngineSource:
    """Watches one engine; a source of its own for each, so that a hung one holds up no other."""

    def __init__(
        self,
        url: str,
        config: EngineConfig,
        *,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.instance = instance_of(url)
        self.name = f"engine {self.instance}"
        self._config = config
        self._client = Client(url, config.timeout_s)
        self._parser = Parser()
        self._tracker = Tracker(self.instance)
        self._freshness: Freshness | None = None
        self._wall_ns = wall_ns
        self._monotonic_ns = monotonic_ns

    def run(self, emit: Emit, stop: threading.Event) -> None:
        """See :meth:`Source.run`."""
        worker = _Worker(f"{self.name} http", at_end=self._client.close)
        due = self._seconds()
        deadline: float | None = None
        try:
            while not stop.is_set():
                now = self._seconds()
                if deadline is not None and now >= deadline:
                    self._client.abort()
                    deadline = None
                    due = max(due, now + SLICE_S)
                    self._emit(emit, self._late())
                if deadline is None and now >= due:
                    due = now + self._config.interval_s
                    if worker.busy:  # in name resolution, say, which nothing interrupts
                        self._emit(emit, self._late())
                    else:
                        deadline = now + self._config.timeout_s
                        worker.submit(self._scrape)
                answer = worker.answer(min(SLICE_S, (deadline or due) - now))
                if answer is not None and deadline is not None:
                    deadline = None
                    self._emit(emit, self._sample(answer))
                # Samples are stamped in this thread, so none that follows is older than now.
                emit.watermark(TELEMETRY_ENGINE, self.instance, self._wall_ns())
        finally:
            self._client.abort()
            worker.end()

    def _scrape(self) -> _Answer:
        """In the worker: fetch the page, and the version too while it is not known."""
        began = self._seconds()
        try:
            page = checked_page(*self._client.get(self._config.path))
        except ScrapeError as error:
            return _Answer(self._seconds() - began, error=str(error))
        except Exception as error:  # told in the sample like any other failed scrape
            logger.exception("Scrape of %s failed in an unforeseen way", self.instance)
            self._client.close()
            return _Answer(self._seconds() - began, error=f"{type(error).__name__}: {error}")
        took_s = self._seconds() - began
        return _Answer(took_s, page, self._fetch_version())

    def _fetch_version(self) -> str | None:
        engine = self._tracker.engine
        if engine is None or engine.version_path is None or self._tracker.version is not None:
            return None
        try:
            _, body = self._client.get(engine.version_path)
            return str(json.loads(body)[engine.version_key])
        except (ScrapeError, ValueError, KeyError, TypeError):
            return ""

    def _sample(self, answer: _Answer) -> EngineSample:
        observed_at_ns, scrape_ms = self._wall_ns(), answer.took_s * 1000
        error = answer.error
        if error is None:
            try:
                page = self._parser.parse(answer.page)
            except ExpositionError as malformed:
                error = f"not a metrics page: {malformed}"
        if error is not None:
            return self._tracker.failed(error, observed_at_ns=observed_at_ns, scrape_ms=scrape_ms)
        if answer.version is not None:
            self._tracker.version = answer.version
        return self._tracker.page(
            page,
            observed_at_ns=observed_at_ns,
            monotonic_ns=self._monotonic_ns(),
            scrape_ms=scrape_ms,
        )

    def _late(self) -> EngineSample:
        return self._tracker.failed(
            f"no whole answer within {self._config.timeout_s:g} s",
            observed_at_ns=self._wall_ns(),
            scrape_ms=self._config.timeout_s * 1000,
        )

    def _emit(self, emit: Emit, sample: EngineSample) -> None:
        if sample.freshness != self._freshness:
            self._freshness = sample.freshness
            logger.info(
                "Metrics of %s are %s%s",
                self.instance,
                sample.freshness,
                f": {sample.error}" if sample.error else "",
            )
        emit.sample(TELEMETRY_ENGINE, sample)

    def _seconds(self) -> float:
        return self._monotonic_ns() / 1e9
