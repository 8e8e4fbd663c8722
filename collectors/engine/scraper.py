"""Reads one engine's metrics page once a second, whatever the engine does."""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from latencyprism.collectors.address import instance_of
from latencyprism.collectors.engine.aliases import WANTED
from latencyprism.collectors.engine.client import REFUSALS, Refusal, ScrapeError
from latencyprism.collectors.engine.config import EngineConfig
from latencyprism.collectors.engine.exposition import ExpositionError, Parser
from latencyprism.collectors.engine.sample import Tracker
from latencyprism.collectors.engine.server import Server, Told
from latencyprism.collectors.source import Emit
from latencyprism.schemas.records import EngineSample, Freshness
from latencyprism.schemas.topics import TELEMETRY_ENGINE

logger = logging.getLogger(__name__)

SLICE_S = 0.1
"""Time between two looks at the stop event, and between two watermarks."""
LATENESS = 0.1
"""Share of the interval by which a scrape may begin late without moving those after it."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What came of one call of the worker: what the engine told, or why it told nothing."""

    took_s: float
    told: Told | None = None
    version: str | None = None
    refusal: Refusal = "unreachable"
    error: str = ""


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


def next_due(due: float, now: float, interval_s: float) -> float:
    """When the scrape after one that was due and begins now is due: at a steady beat, unless this
    one is so late that the next would follow too soon."""
    return (due if now - due < LATENESS * interval_s else now) + interval_s


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
        """Raises ValueError for a URL or a setting that is wrong."""
        self.instance = instance_of(url)
        self.name = f"engine {self.instance}"
        self._config = config
        self._server = Server(url, config)
        self._parser = Parser(WANTED, config.max_series)
        self._tracker = Tracker(self.instance, stale_s=config.stale_s)
        self._freshness: Freshness | None = None
        self._counts: Counter[str] = Counter(dict.fromkeys(("fresh", "stale", *REFUSALS), 0))
        self._wall_ns = wall_ns
        self._monotonic_ns = monotonic_ns

    @property
    def counts(self) -> Mapping[str, int]:
        """Scrapes by what came of them, and names given up for having too many series."""
        return {**self._counts, "crowded_names": self._parser.crowded}

    def run(self, emit: Emit, stop: threading.Event) -> None:
        """See :meth:`Source.run`."""
        worker = _Worker(f"{self.name} http", at_end=self._server.close)
        due = self._seconds()
        deadline: float | None = None
        try:
            while not stop.is_set():
                now = self._seconds()
                if deadline is not None and now >= deadline:
                    self._server.abort()
                    deadline = None
                    due = max(due, now + SLICE_S)
                    self._emit(emit, self._late())
                if deadline is None and now >= due:
                    due = next_due(due, now, self._config.interval_s)
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
            self._server.abort()
            worker.end()

    def _scrape(self) -> _Answer:
        """In the worker: fetch the page, and the version too while it is not known."""
        began = self._seconds()
        try:
            told = self._server.ask()
        except ScrapeError as error:
            return _Answer(self._seconds() - began, refusal=error.kind, error=str(error))
        except Exception as error:  # told in the sample like any other failed scrape
            logger.exception("Scrape of %s failed in an unforeseen way", self.instance)
            self._server.close()
            reason = f"{type(error).__name__}: {error}"
            return _Answer(self._seconds() - began, error=reason)
        took_s = self._seconds() - began
        engine = self._tracker.engine
        if engine is None or self._tracker.version is not None:
            return _Answer(took_s, told)
        return _Answer(took_s, told, self._server.version(engine))

    def _sample(self, answer: _Answer) -> EngineSample:
        scrape_ms = answer.took_s * 1000
        told = answer.told
        if told is None:
            return self._failed(answer.refusal, answer.error, scrape_ms)
        if answer.version is not None:
            self._tracker.version = answer.version
        observed_at_ns = self._wall_ns()
        if told.without_page is not None:
            return self._tracker.answered(
                told.without_page, told.model, observed_at_ns=observed_at_ns, scrape_ms=scrape_ms
            )
        try:
            page = self._parser.parse(told.page)
        except ExpositionError as malformed:
            return self._failed("not_metrics", f"not a metrics page: {malformed}", scrape_ms)
        return self._tracker.page(
            page,
            observed_at_ns=observed_at_ns,
            monotonic_ns=self._monotonic_ns(),
            scrape_ms=scrape_ms,
        )

    def _late(self) -> EngineSample:
        timeout_s = self._config.timeout_s
        return self._failed("timeout", f"no whole answer within {timeout_s:g} s", timeout_s * 1000)

    def _failed(self, refusal: Refusal, error: str, scrape_ms: float) -> EngineSample:
        self._counts[refusal] += 1
        if refusal == "unreachable":  # another version may come back
            self._tracker.version = None
        return self._tracker.failed(error, observed_at_ns=self._wall_ns(), scrape_ms=scrape_ms)

    def _emit(self, emit: Emit, sample: EngineSample) -> None:
        if sample.freshness != "failed":
            self._counts[sample.freshness] += 1
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
