"""One way of reading accelerators, in a thread of its own.

A driver that hangs, a library that crashes and an exporter that is slow cost their own devices
only: the others are read all the same.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from latencyprism.collectors.source import UnavailableError
from latencyprism.collectors.xpu.reading import Devices, Reading

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Way:
    """A way of reading accelerators."""

    name: str
    open: Callable[[], Devices]
    """Finds the devices. Raises :class:`UnavailableError` when there are none."""
    interval_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What one reading gave."""

    way: str
    at_ns: int
    """When it was read, ns since the epoch."""
    readings: list[Reading]


class Poller:
    """Reads the devices of one way at its pace, and hands the readings over."""

    def __init__(
        self,
        way: Way,
        hand_over: Callable[[Answer], None],
        *,
        retry_s: float,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = way.name
        self._way = way
        self._hand_over = hand_over
        self._retry_s = retry_s
        self._wall_ns = wall_ns
        self._monotonic_s = monotonic_s
        self._ended = threading.Event()
        self._counts: Counter[str] = Counter()
        self._devices: Devices | None = None
        self._retry_due_s = 0.0
        self._last: list[Reading] = []
        self._busy_since_s: float | None = None
        self.reason: str | None = None
        """Why it has no devices; None while it has, and before it has looked."""
        self.tried = threading.Event()
        """Set once it has looked for devices."""
        self.found = threading.Event()
        """Set once it has found some."""
        self._thread = threading.Thread(target=self._run, name=f"xpu {way.name}", daemon=True)

    @property
    def counts(self) -> Mapping[str, int]:
        """What it met so far, by kind; from any thread."""
        devices = self._devices
        return {**self._counts, **(devices.counts if devices is not None else {})}

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """Ask it to end, without waiting for it."""
        self._ended.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; whether it came. A call that hangs is left behind."""
        self._thread.join(max(timeout_s, 0.0))
        return not self._thread.is_alive()

    def silent_s(self) -> float:
        """For how long the call that is under way has not answered."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else self._monotonic_s() - since_s

    def unanswered(self) -> list[Reading]:
        """Its devices, with the silence as their error."""
        error = f"no answer for {self.silent_s():.0f} s: its driver hangs"
        return [
            Reading(
                device=reading.device,
                vendor=reading.vendor,
                aliases=reading.aliases,
                parent=reading.parent,
                name=reading.name,
                error=error,
            )
            for reading in self._last
        ]

    def _run(self) -> None:
        while not self._ended.is_set():
            began_s = self._monotonic_s()
            self._busy_since_s = began_s
            self._step()
            self._busy_since_s = None
            self.tried.set()
            pause_s = self._retry_s if self._devices is None else self._way.interval_s
            self._ended.wait(max(pause_s - (self._monotonic_s() - began_s), 0.0))
        self._close()

    def _step(self) -> None:
        """Open, or read once. Does not raise."""
        try:
            self._read(self._devices or self._open())
        except UnavailableError as missing:
            self.reason = str(missing)
        except OSError as failure:
            self._failed("failures", str(failure))
        except Exception as crash:  # the other ways must go on
            self._failed("crashes", f"{type(crash).__name__}: {crash}")
            logger.debug("%s crashed", self.name, exc_info=True)
            self._close()

    def _open(self) -> Devices:
        self._devices = devices = self._way.open()
        self.found.set()
        self.reason = None
        self._retry_due_s = self._monotonic_s() + self._retry_s
        return devices

    def _read(self, devices: Devices) -> None:
        if self._monotonic_s() >= self._retry_due_s and self._wanting():
            self._retry_due_s = self._monotonic_s() + self._retry_s
            devices.reopen()
        self._last = devices.read()
        self.reason = None
        self._hand_over(Answer(self.name, self._wall_ns(), self._last))

    def _wanting(self) -> bool:
        return not self._last or any(reading.error for reading in self._last)

    def _failed(self, kind: str, why: str) -> None:
        if why != self.reason:
            logger.warning("Accelerators by %s: %s", self.name, why)
        self.reason = why
        self._counts[kind] += 1

    def _close(self) -> None:
        devices, self._devices = self._devices, None
        if devices is not None:
            try:
                devices.close()
            except Exception:  # a crash while cleaning up after one
                logger.debug("%s cannot be closed", self.name, exc_info=True)
