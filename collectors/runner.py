"""One source in a thread of its own: started again when it fails, counted, ended."""

import logging
import random
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Literal

from latencyprism.collectors.packing import estimated_bytes
from latencyprism.collectors.shedding import NOTHING, Share
from latencyprism.collectors.source import (
    Counting,
    Emit,
    Preparing,
    Source,
    UnavailableError,
)
from latencyprism.schemas.records import SourceHealth
from latencyprism.schemas.topics import Topic

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
HEALTHY_S = 60.0
"""After running so long, a source that fails again is started again at once, almost."""
CPUCLOCK_THREAD = 6
"""Low bits of the clock id of a thread's CPU time: CPUCLOCK_SCHED of one thread, as the kernel's
posix-timers.h has them; the thread's id stands above them, inverted."""

SourceState = Literal["running", "backoff", "shed", "unavailable", "stopped"]


def backoff_s(failures: int, rng: random.Random) -> float:
    """Pause before the start after so many failures in a row: doubling, bounded, with jitter."""
    return float(
        min(FIRST_BACKOFF_S * 2 ** min(failures - 1, 16), LONGEST_BACKOFF_S) * rng.uniform(0.5, 1)
    )


class ThreadClock:
    """CPU time of this process's threads, between one call and the next."""

    def __init__(self) -> None:
        self._seen: dict[int, float] = {}
        self.spent_s()

    def spent_s(self) -> Mapping[str, float]:
        """Seconds by name of the thread since the last call.

        Threads that ended in between are left out, and so are those of C libraries, which Python
        does not know. Takes some microseconds a thread.
        """
        spent: defaultdict[str, float] = defaultdict(float)
        seen: dict[int, float] = {}
        for thread in threading.enumerate():
            if thread.native_id is None:
                continue
            try:
                now = time.clock_gettime(~thread.native_id << 3 | CPUCLOCK_THREAD)
            except OSError:  # it has just ended
                continue
            before = self._seen.get(thread.native_id, 0.0)
            # The kernel gives an ended thread's id away again.
            spent[thread.name] += now - before if now >= before else now
            seen[thread.native_id] = now
        self._seen = seen
        return spent


class _Counted:
    """An :class:`Emit` that counts what goes through it."""

    def __init__(self, emit: Emit) -> None:
        self.samples = 0
        self.bytes = 0
        self.watermark = emit.watermark
        self._sample = emit.sample

    def sample(self, topic: Topic, sample: Any) -> None:
        self.samples += 1
        self.bytes += estimated_bytes(sample)
        self._sample(topic, sample)


class Runner:
    """One source in its thread, started again when it fails."""

    def __init__(self, source: Source, emit: Emit, rng: random.Random) -> None:
        self.kind = source.name.partition(" ")[0]
        self.name = source.name
        self.share = NOTHING
        """What it took over the last interval; bytes are those of its samples, estimated."""
        self._source = source
        self._emit = _Counted(emit)
        self._measured_bytes = 0
        self._rng = rng
        self._state: SourceState = "stopped"
        self._failures = 0
        self._error: str | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def status(self) -> SourceHealth:
        """How the source does; from any thread."""
        counts = dict(self._source.counts) if isinstance(self._source, Counting) else {}
        return SourceHealth(
            name=self.name,
            state=self._state,
            failures=self._failures,
            error=self._error,
            cpu_pct=self.share.cpu_pct,
            counts=counts | {"samples": self._emit.samples},
        )

    @property
    def shed(self) -> bool:
        """Whether it was ended because of its cost."""
        return self._state == "shed"

    @property
    def refused(self) -> bool:
        """Whether the machine did not permit it."""
        return self._state == "unavailable"

    @property
    def sheddable(self) -> bool:
        """Whether ending it would save anything."""
        return self._state in ("running", "backoff")

    def measure(self, spent_s: Mapping[str, float], interval_s: float) -> None:
        """Take what the threads spent over the last interval, by their names."""
        mine = f"{self.name} "
        cpu_s = sum(s for name, s in spent_s.items() if name == self.name or name.startswith(mine))
        grown = self._emit.bytes - self._measured_bytes
        self._measured_bytes = self._emit.bytes
        self.share = Share(cpu_pct=100 * cpu_s / interval_s, bytes_s=grown / interval_s)

    def prepare(self) -> None:
        """Have the source open what needs privileges; a failure is told when it runs."""
        if isinstance(self._source, Preparing):
            try:
                self._source.prepare()
            except Exception as error:  # noqa: BLE001 - the others must be prepared, too
                logger.warning("Source %s could not be prepared: %s", self.name, error)

    def start(self) -> None:
        """Run the source from now on."""
        self._stop = threading.Event()
        self._state = "running"
        self._thread = threading.Thread(
            target=self._run, args=(self._stop,), name=self.name, daemon=True
        )
        self._thread.start()

    def stop(self, state: SourceState = "stopped", error: str | None = None) -> None:
        """Ask the source to end, without waiting for it."""
        self._stop.set()
        if self._state != "unavailable":
            self._state, self._error = state, error or self._error

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; whether it came."""
        if self._thread is None:
            return True
        self._thread.join(max(timeout_s, 0.0))
        return not self._thread.is_alive()

    def _run(self, stop: threading.Event) -> None:
        in_a_row = 0
        while not stop.is_set():
            began = time.monotonic()
            try:
                self._source.run(self._emit, stop)
                error = "ended by itself"
            except (PermissionError, UnavailableError) as refused:
                self._give_up(refused, stop)
                return
            except OSError as trouble:  # of the machine or the network, and says which
                error = str(trouble)
            except Exception as crash:  # the other sources must go on
                logger.exception("Source %s crashed", self.name)
                error = f"{type(crash).__name__}: {crash}"
            if stop.is_set():
                return
            known = in_a_row > 0 and error == self._error
            in_a_row = 1 if time.monotonic() - began > HEALTHY_S else in_a_row + 1
            pause_s = backoff_s(in_a_row, self._rng)
            self._failures += 1
            self._state, self._error = "backoff", error
            logger.log(
                logging.DEBUG if known else logging.WARNING,
                "Source %s: %s; starting it again in %.1f s",
                *(self.name, error, pause_s),
            )
            if not stop.wait(pause_s):
                self._state = "running"

    def _give_up(self, refused: Exception, stop: threading.Event) -> None:
        if not stop.is_set():
            self._state, self._error = "unavailable", str(refused)
            logger.warning("Source %s is not permitted: %s", self.name, refused)
