"""Requests that wait for a target, first come first served, and the adapter that commands it."""

import asyncio
import concurrent.futures
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeVar

from latencyprism.routers.adapter import AdapterError
from latencyprism.routers.balancer import Balancer, Target
from latencyprism.routers.lease import NORMAL, TargetState

APPLY_TIMEOUT_S = 2.0
R = TypeVar("R")


class BusyError(Exception):
    """No target could be had; the text is for the client."""

    def __init__(self, message: str, *, status: int, retry_after_s: int) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class Pool:
    """Hands out targets within one event loop. At most ``queue_limit`` requests wait."""

    def __init__(
        self,
        balancer: Balancer,
        *,
        queue_limit: int,
        queue_timeout_s: float,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.balancer = balancer
        self._queue_limit = queue_limit
        self._queue_timeout_s = queue_timeout_s
        self._clock_ns = clock_ns
        self._waiting: deque[asyncio.Future[Target]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Requests that wait for a target."""
        return len(self._waiting)

    async def acquire(self) -> Target:
        """Wait for a target; give it back with :meth:`release`. Raises :class:`BusyError`."""
        if not self._waiting:
            target = self.balancer.pick(self._clock_ns())
            if target is not None:
                return target
        if len(self._waiting) >= self._queue_limit:
            raise self._busy("the queue is full", status=429)
        future: asyncio.Future[Target] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._dispatch()
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                return await future
        except TimeoutError:
            self._give_up(future)
            raise self._busy(
                f"no server became free within {self._queue_timeout_s:g} s", status=503
            ) from None
        except asyncio.CancelledError:
            self._give_up(future)
            raise

    def release(self, target: Target) -> None:
        """Give a target back; the next that waits may have it."""
        self.balancer.release(target)
        self._dispatch()

    def mark_down(self, target: Target, for_s: float) -> None:
        """Leave a target alone that could not be reached."""
        self.balancer.mark_down(target, self._clock_ns() + round(for_s * 1e9))

    def set_state(self, name: str, state: TargetState) -> None:
        """Put a state into force at once; streams under way go on to their end."""
        self.balancer.set_state(name, state)
        self._dispatch()

    def _dispatch(self) -> None:
        """Give targets to those that wait, and look again when time alone can help."""
        now_ns = self._clock_ns()
        while self._waiting:
            if self._waiting[0].cancelled():  # about to give up
                self._waiting.popleft()
                continue
            target = self.balancer.pick(now_ns)
            if target is None:
                break
            self._waiting.popleft().set_result(target)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ready_ns = self.balancer.ready_ns(now_ns) if self._waiting else None
        if ready_ns is not None:
            self._timer = asyncio.get_running_loop().call_later(
                (ready_ns - now_ns) / 1e9, self._dispatch
            )

    def _give_up(self, future: asyncio.Future[Target]) -> None:
        """Leave the queue; a target that was given in the same moment goes back."""
        if future.cancelled():
            with contextlib.suppress(ValueError):  # a dispatch may have dropped it already
                self._waiting.remove(future)
        else:
            self.release(future.result())

    def _busy(self, what: str, *, status: int) -> BusyError:
        now_ns = self._clock_ns()
        ready_ns = self.balancer.ready_ns(now_ns)
        retry_s = 1 if ready_ns is None else max(1, math.ceil((ready_ns - now_ns) / 1e9))
        limited = ", ".join(
            f"{target.name} is {target.state}"
            for target in self.balancer.targets.values()
            if target.state != NORMAL
        )
        why = f" ({limited})" if limited else ""
        return BusyError(
            f"{what}: {len(self._waiting)} requests wait{why}; try again in {retry_s} s",
            status=status,
            retry_after_s=retry_s,
        )


class PoolAdapter:
    """Commands a :class:`Pool` from the consumer's thread; each call waits for the event loop."""

    def __init__(self, pool: Pool, loop: asyncio.AbstractEventLoop) -> None:
        self._pool = pool
        self._loop = loop

    def apply(self, target: str, state: TargetState) -> str:
        """Put a state into force. Raises AdapterError when the event loop does not answer."""
        self._ask(lambda: self._pool.set_state(target, state))
        return f"proxy: {state}"

    def restore(self, target: str) -> str:
        """Back to normal."""
        return self.apply(target, NORMAL)

    def drifted(self, wanted: Mapping[str, TargetState]) -> tuple[str, ...]:
        """Targets in another state. Raises AdapterError when the event loop does not answer."""
        targets = self._pool.balancer.targets
        return self._ask(lambda: tuple(n for n, s in wanted.items() if targets[n].state != s))

    def _ask(self, call: Callable[[], R]) -> R:
        async def answer() -> R:
            return call()

        future = asyncio.run_coroutine_threadsafe(answer(), self._loop)
        try:
            return future.result(APPLY_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise AdapterError(
                f"the proxy's event loop did not answer within {APPLY_TIMEOUT_S:g} s"
            ) from None
