"""Streaming load on an OpenAI-compatible server, and what its clients saw."""

import asyncio
import json
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any

import aiohttp
import numpy as np
from annotated_types import Ge, Gt

from latencyprism.simulator.workload import PREFIX_GROUPS, PREFIX_TOKENS, Ask, Draw, Phase

VOCABULARY = 4000
MAX_ERROR_TEXT = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """Where the load goes and what bounds it."""

    url: str
    """Address of the server or gateway, such as http://127.0.0.1:8080."""
    model: str = "small"
    chat: bool = False
    """Chat completions instead of completions; prompts are words instead of token ids then."""
    seed: int = 0
    """The same seed asks the same; only open phases also send at the same times."""
    max_in_flight: Annotated[int, Ge(1)] = 128
    """A request beyond it is not sent but counted as failed."""
    grace_s: Annotated[float, Ge(0)] = 10.0
    """After the last phase, answers under way get this long."""
    timeout_s: Annotated[float, Gt(0)] = 60.0
    """Longest silence of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request as its client saw it; times in ns since the epoch."""

    number: int
    phase: int
    prompt_tokens: int
    output_tokens: int
    """Asked for."""
    sent_ns: int
    status: int | None = None
    """HTTP status; None when no answer came."""
    error: str | None = None
    """What went wrong, in words; None for a whole answer."""
    served_by: str | None = None
    """Target named by the gateway, if it names one."""
    first_byte_ns: int | None = None
    chunks_ns: tuple[int, ...] = ()
    """Events with content."""
    end_ns: int | None = None
    completion_tokens: int | None = None

    @property
    def ttft_ms(self) -> float | None:
        """Sending to first event with content; None without one."""
        return (self.chunks_ns[0] - self.sent_ns) / 1e6 if self.chunks_ns else None

    @property
    def itl_ms(self) -> tuple[float, ...]:
        """Gaps between events with content."""
        return tuple((b - a) / 1e6 for a, b in pairwise(self.chunks_ns))

    @property
    def e2e_ms(self) -> float | None:
        """Sending to the end of a whole answer."""
        if self.end_ns is None or self.error is not None:
            return None
        return (self.end_ns - self.sent_ns) / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Of one latency, ms; NaN of nothing."""

    p50: float
    p95: float
    p99: float
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Outcomes in figures."""

    requests: int
    failed: int
    ttft_ms: Percentiles
    itl_ms: Percentiles
    e2e_ms: Percentiles


def summarise(
    outcomes: Iterable[Outcome], *, from_ns: int = 0, until_ns: int | None = None
) -> Summary:
    """Figures of the requests sent in ``[from_ns, until_ns)``."""
    chosen = [
        o for o in outcomes if from_ns <= o.sent_ns and (until_ns is None or o.sent_ns < until_ns)
    ]
    return Summary(
        requests=len(chosen),
        failed=sum(o.error is not None for o in chosen),
        ttft_ms=_percentiles([o.ttft_ms for o in chosen if o.ttft_ms is not None]),
        itl_ms=_percentiles([gap for o in chosen for gap in o.itl_ms]),
        e2e_ms=_percentiles([o.e2e_ms for o in chosen if o.e2e_ms is not None]),
    )


async def run_load(config: LoadConfig, phases: Sequence[Phase]) -> list[Outcome]:
    """Play the phases against the server; one outcome a request, in the order of sending.

    Ends within ``grace_s`` of the last phase whatever the server does. A server that is away
    costs failed outcomes, nothing is raised.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_read=config.timeout_s, sock_connect=5.0)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        return await _Load(config, session).run(phases)


class _Load:
    def __init__(self, config: LoadConfig, session: aiohttp.ClientSession) -> None:
        self._config = config
        self._session = session
        rng = np.random.default_rng(config.seed)
        self._draw = Draw(rng)
        self._rng = rng
        self._prefixes = {
            group: np.random.default_rng(group).integers(VOCABULARY, size=PREFIX_TOKENS).tolist()
            for group in range(PREFIX_GROUPS)
        }
        self._outcomes: list[Outcome] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_flight = 0

    async def run(self, phases: Sequence[Phase]) -> list[Outcome]:
        loop = asyncio.get_running_loop()
        begins = loop.time()
        for index, phase in enumerate(phases):
            ends = begins + phase.duration_s
            match phase.mode:
                case "open":
                    await self._open(index, phase, begins, ends)
                case "closed":
                    for _ in range(phase.concurrency):
                        self._start(self._caller(index, phase, ends))
                case "burst":
                    for _ in range(phase.requests):
                        self._start(self._ask(index, self._draw.ask(phase)))
            await asyncio.sleep(max(0.0, ends - loop.time()))
            begins = ends
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._config.grace_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return sorted(self._outcomes, key=lambda outcome: outcome.number)

    async def _open(self, index: int, phase: Phase, begins: float, ends: float) -> None:
        loop = asyncio.get_running_loop()
        at = begins
        while True:
            ask = self._draw.ask(phase)
            at += self._draw.gap_s(phase)
            if at >= ends:
                return
            await asyncio.sleep(max(0.0, at - loop.time()))
            self._start(self._ask(index, ask))

    async def _caller(self, index: int, phase: Phase, ends: float) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < ends:
            await self._ask(index, self._draw.ask(phase))
            # A server that refuses at once must not be asked without end.
            await asyncio.sleep(max(self._draw.think_s(phase), 0.001))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, phase: int, ask: Ask) -> None:
        number = len(self._outcomes)
        outcome = Outcome(
            number=number,
            phase=phase,
            prompt_tokens=ask.prompt_tokens,
            output_tokens=ask.output_tokens,
            sent_ns=time.time_ns(),
            error="cut off at the end of the load",
        )
        self._outcomes.append(outcome)
        if self._in_flight >= self._config.max_in_flight:
            error = f"not sent: {self._in_flight} were in flight"
            self._outcomes[number] = replace(outcome, error=error)
            return
        path = "/v1/chat/completions" if self._config.chat else "/v1/completions"
        body = json.dumps(self._body(ask), separators=(",", ":")).encode()
        seen = _Seen()
        self._in_flight += 1
        outcome = replace(outcome, sent_ns=time.time_ns())
        try:
            async with self._session.post(
                self._config.url + path, data=body, headers={"Content-Type": "application/json"}
            ) as response:
                seen.status = response.status
                seen.first_byte_ns = time.time_ns()
                seen.served_by = response.headers.get("x-served-by")
                if response.status == 200:
                    await seen.read(response)
                else:
                    seen.error = (await response.text())[:MAX_ERROR_TEXT]
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            seen.error = f"{type(error).__name__}: {error}"
        finally:
            self._in_flight -= 1
            self._outcomes[number] = replace(
                outcome,
                status=seen.status,
                error=seen.error,
                served_by=seen.served_by,
                first_byte_ns=seen.first_byte_ns,
                chunks_ns=tuple(seen.chunks_ns),
                end_ns=seen.end_ns,
                completion_tokens=seen.completion_tokens,
            )

    def _body(self, ask: Ask) -> dict[str, Any]:
        prefix = [] if ask.prefix is None else self._prefixes[ask.prefix]
        own = self._rng.integers(VOCABULARY, size=ask.prompt_tokens - len(prefix)).tolist()
        tokens = [*prefix, *own]
        prompt: dict[str, Any] = {"prompt": tokens}
        if self._config.chat:
            words = " ".join(f"w{token}" for token in tokens)
            prompt = {"messages": [{"role": "user", "content": words}]}
        return {
            "model": self._config.model,
            **prompt,
            "max_tokens": ask.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(slots=True)
class _Seen:
    """An answer as far as it has come."""

    status: int | None = None
    error: str | None = "cut off at the end of the load"
    served_by: str | None = None
    first_byte_ns: int | None = None
    chunks_ns: list[int] = field(default_factory=list)
    end_ns: int | None = None
    completion_tokens: int | None = None

    async def read(self, response: aiohttp.ClientResponse) -> None:
        """Read the events of a stream; whole only with its [DONE]."""
        done = False
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            now_ns = time.time_ns()
            if line[6:].strip() == b"[DONE]":
                done = True
                continue
            event = json.loads(line[6:])
            if any(
                c.get("text") or (c.get("delta") or {}).get("content") for c in event["choices"]
            ):
                self.chunks_ns.append(now_ns)
            if event.get("usage"):
                self.completion_tokens = event["usage"]["completion_tokens"]
        self.end_ns = time.time_ns()
        self.error = None if done else "the answer ended before [DONE]"


def _percentiles(values: Sequence[float]) -> Percentiles:
    if not values:
        return Percentiles(p50=float("nan"), p95=float("nan"), p99=float("nan"), n=0)
    p50, p95, p99 = (float(p) for p in np.percentile(values, (50, 95, 99)))
    return Percentiles(p50=p50, p95=p95, p99=p99, n=len(values))
