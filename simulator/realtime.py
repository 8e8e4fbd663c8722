"""Drives an engine by the clock of the event loop and hands each stream its tokens."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from latencyprism.simulator.engine import Engine, Request, Served, Token
from latencyprism.simulator.stats import EngineStats

_BEHIND_NS = 50_000_000
"""Further behind than this (the process was starved), lost time is not made up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One token on its way to the client."""

    token: Token
    due_ns: int
    """Not to be sent earlier, monotonic clock; later than its step only under network delay."""
    served: Served | None
    """Set with the last token."""


@dataclass(slots=True, kw_only=True)
class RealTimeEngine:
    """Runs steps as tasks of one event loop; a step ends on time to about 1 ms, without drift.

    Times are :func:`time.monotonic_ns`. Each stream's queue holds at most its own tokens.
    """

    engine: Engine
    stats: EngineStats = field(default_factory=EngineStats)
    _streams: dict[str, asyncio.Queue[Delivery]] = field(default_factory=dict, init=False)
    _wake: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _sent_ns: int = field(default=0, init=False)

    async def run(self) -> None:
        """Run steps until cancelled."""
        ended_ns = 0
        while True:
            self._wake.clear()
            now_ns = time.monotonic_ns()
            # Steps follow one another without the event loop's lateness between them.
            start_ns = ended_ns if now_ns - ended_ns < _BEHIND_NS else now_ns
            step = self.engine.begin(start_ns)
            if step is None:
                hung_ns = self.engine.hung_until_ns(now_ns)
                await self._woken(None if hung_ns is None else hung_ns - now_ns)
                ended_ns = 0
                continue
            await _until(step.end_ns)
            ended_ns = step.end_ns
            self._deliver()

    async def stream(self, request: Request) -> AsyncGenerator[Delivery, None]:
        """Tokens of a request that was submitted with :meth:`submit`, each when it is due.

        Closing the iterator before its end aborts the request.
        """
        queue = self._streams[request.request_id]
        try:
            while True:
                delivery = await queue.get()
                await _until(delivery.due_ns)
                yield delivery
                if delivery.token.last:
                    return
        finally:
            if self._streams.pop(request.request_id, None) is not None:
                self.engine.abort(request.request_id)

    def submit(self, request: Request) -> None:
        """Queue a request; :meth:`stream` must be iterated for it. Raises TooLongError."""
        self.engine.submit(request)
        self._streams[request.request_id] = asyncio.Queue()
        self._wake.set()

    def wake(self) -> None:
        """Look again: faults have changed."""
        self._wake.set()

    def _deliver(self) -> None:
        completed = self.engine.complete()
        self.stats.take(completed)
        delay_ns = self.engine.output_delay_ns(completed.step.end_ns)
        # A delay that has just ended lets nothing overtake what is still held back.
        self._sent_ns = max(self._sent_ns, completed.step.end_ns + delay_ns)
        served = {s.request.request_id: s for s in completed.served}
        for token in completed.tokens:
            queue = self._streams.get(token.request_id)
            if queue is not None:
                queue.put_nowait(
                    Delivery(token=token, due_ns=self._sent_ns, served=served.get(token.request_id))
                )

    async def _woken(self, timeout_ns: int | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if timeout_ns is None else timeout_ns / 1e9):
                await self._wake.wait()


async def _until(moment_ns: int) -> None:
    left_ns = moment_ns - time.monotonic_ns()
    await asyncio.sleep(max(0, left_ns) / 1e9)
