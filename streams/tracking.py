"""Exchanges assembled from their parts, and cut into windows.

Parts may come in any order and more than once; what they say of one exchange is merged by one
rule, so that order does not matter: where two parts tell different values, the larger holds.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar

import numpy as np

from latencyprism.schemas.precedence import REQUEST_SOURCES, precedence
from latencyprism.schemas.records import RequestState, RequestTiming
from latencyprism.streams.config import NS_PER_MS, NS_PER_S, StreamsConfig
from latencyprism.streams.estimate import Line
from latencyprism.streams.observation import Bools, FirstTokens, Floats, Ints, OpenRequests

NEVER_NS = np.iinfo(np.int64).max
LATEST_NS = 1 << 62
"""In the year 2116; a later time is no time."""
QUIET_MS = 1_000
"""A stream silent for longer no longer counts as part of the steps of the others."""
PARTS_MAX = 65_536
"""Parts of one exchange; at ten a second a stream of nearly two hours."""

UNJUDGED = ("otlp",)
"""Sources that tell of requests too late for their windows; what they say is kept for history."""
BETTER_NS = 60 * NS_PER_S
"""So long before an exchange a better source must have been silent for a worse one to count: the
same exchange is told by both, and by the worse one first when it is short."""

RANK: Mapping[RequestState, int] = {"open": 0, "aborted": 1, "complete": 2}
"""Which of two states told of one exchange holds."""

V = TypeVar("V", int, str)


@dataclass(slots=True, kw_only=True, eq=False)
class Exchange:
    """What is known of one request and its answer; times in ns, None where not seen yet."""

    request_id: str
    arrival_ns: int
    parts: int = 0
    """Bit n is set when part n was taken."""
    serial: int = -1
    """Number in order of arrival, given when the arrival's window closes; -1 before."""
    model: str | None = None
    streaming: bool = False
    state: RequestState = "open"
    lost: bool = False
    """Whether its end is only that of what its collector saw."""
    status: int | None = None
    request_end_ns: int | None = None
    first_byte_ns: int | None = None
    first_token_ns: int | None = None
    last_chunk_ns: int | None = None
    """Newest content event of all that was taken, windows still open included."""
    end_ns: int | None = None
    heard_ns: int = 0
    """Newest event of any kind."""
    request_bytes: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    chunks: int = -1
    """Content events counted so far, those of parts that were never seen included; -1 before the
    first part with any."""
    counted_ns: int | None = None
    """Newest content event that was counted in a window."""
    pending: list[int] = field(default_factory=list)
    """Content events that wait for their window."""
    first_counted: bool = False
    """Whether the first token was counted in a window."""
    prefill_ms: float | None = None
    """Time of the steps that computed the prompt; set by :mod:`.stages`."""
    prefill_error_ms: float | None = None
    """Half width of its 90 % interval where it does not come from steps."""
    decoding_at_arrival: int = 0
    ahead_at_arrival: int = 0
    ahead_tokens: float = 0.0

    @property
    def done_ns(self) -> int:
        """When the engine was done with it, as seen from outside; ``NEVER_NS`` while open."""
        if self.end_ns is None:
            return NEVER_NS
        return self.end_ns if self.last_chunk_ns is None else self.last_chunk_ns

    @property
    def failed(self) -> bool:
        """Whether the server failed it: a status of 500 or more, or an answer that broke off."""
        broke_off = self.state == "aborted" and not self.lost
        return broke_off or (self.status is not None and self.status >= 500)

    @property
    def served(self) -> bool:
        """Whether the server took it up; a client can ask for any model."""
        if self.status is None:
            return self.first_token_ns is not None
        return self.status < 400

    @property
    def ready_ns(self) -> int:
        """When the server had the whole request, as far as was seen."""
        return max(self.arrival_ns, self.request_end_ns or 0)


def _larger(known: V | None, told: V | None) -> V | None:
    if known is None or told is None:
        return told if known is None else known
    return max(known, told)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """Content events in order of time; parallel arrays, one element an event."""

    at_ns: Ints
    serial: Ints
    """Which exchange, by :attr:`Exchange.serial`."""
    ordinal: Ints
    """0 for the first content event of its exchange."""
    final: Bools
    """Whether it is the last content event of an exchange that ended."""
    prompt_tokens: Floats
    prefill_tokens: Floats
    """Prompt tokens less cached ones."""

    def __len__(self) -> int:
        return len(self.at_ns)

    def __getitem__(self, part: slice | Bools | Ints) -> "Chunks":
        return Chunks(
            at_ns=self.at_ns[part],
            serial=self.serial[part],
            ordinal=self.ordinal[part],
            final=self.final[part],
            prompt_tokens=self.prompt_tokens[part],
            prefill_tokens=self.prefill_tokens[part],
        )

    @classmethod
    def empty(cls) -> "Chunks":
        """No events."""
        ints, floats = np.empty(0, np.int64), np.empty(0, np.float64)
        return cls(
            at_ns=ints,
            serial=ints,
            ordinal=ints,
            final=np.empty(0, np.bool_),
            prompt_tokens=floats,
            prefill_tokens=floats,
        )

    @classmethod
    def joined(cls, earlier: "Chunks", later: "Chunks") -> "Chunks":
        """Both, in order of time."""
        if not len(earlier):
            return later
        both = cls(
            at_ns=np.concatenate((earlier.at_ns, later.at_ns)),
            serial=np.concatenate((earlier.serial, later.serial)),
            ordinal=np.concatenate((earlier.ordinal, later.ordinal)),
            final=np.concatenate((earlier.final, later.final)),
            prompt_tokens=np.concatenate((earlier.prompt_tokens, later.prompt_tokens)),
            prefill_tokens=np.concatenate((earlier.prefill_tokens, later.prefill_tokens)),
        )
        return both[np.lexsort((both.serial, both.at_ns))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """When requests came, began to decode and were done, each sorted; tells how busy the engine
    was at a time.
    """

    ready_ns: Ints
    """When each request was complete at the server."""
    first_ns: Ints
    """First token of each, or its end where there was none."""
    done_ns: Ints
    """Last content event of each that ended, or its end where there was none."""
    streams_first_ns: Ints
    """First token of each that had one."""
    streams_last_ns: Ints
    """Last content event of each that ended or has been silent for a second."""

    def open_at(self, at_ns: Ints) -> Ints:
        """Requests complete at the server and not done, just after each time."""
        return _counts(self.ready_ns, at_ns) - _counts(self.done_ns, at_ns)

    def waiting_at(self, at_ns: Ints) -> Ints:
        """Requests complete at the server without a first token, just after each time."""
        waiting = _counts(self.ready_ns, at_ns) - _counts(self.first_ns, at_ns)
        return np.asarray(np.maximum(waiting, 0), np.int64)

    def decoding_at(self, at_ns: Ints) -> Ints:
        """Streams that had a first token and go on, just after each time."""
        first, last = self.streams_first_ns, self.streams_last_ns
        going_on = _counts(first, at_ns) - _counts(last, at_ns)
        return np.asarray(np.maximum(going_on, 0), np.int64)

    def next_ready(self, at_ns: Ints) -> Ints:
        """First request after each time; ``NEVER_NS`` when none came."""
        following: Ints = np.append(self.ready_ns, NEVER_NS)[_counts(self.ready_ns, at_ns)]
        return following


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What the exchanges of one instance did in one window."""

    chunks: Chunks
    chunk_gaps_ms: Floats
    started: int
    first_tokens: FirstTokens
    first: tuple[Exchange, ...]
    """Exchanges of ``first_tokens``."""
    ended: tuple[Exchange, ...]
    open_requests: OpenRequests
    occupancy: Occupancy


@dataclass(slots=True, kw_only=True)
class TrackingCounters:
    """What the tracker refused, repaired or gave up, since it was made."""

    duplicate_parts: int = 0
    refused_parts: int = 0
    """Parts whose number or times cannot be."""
    secondary_parts: int = 0
    """Parts that a better source tells of as well, or that come too late to be judged."""
    dropped_chunks: int = 0
    evicted_requests: int = 0
    abandoned_requests: int = 0
    orphaned_requests: int = 0
    """Open requests whose collector was followed by another or started again."""


class RequestTracker:
    """Follows the exchanges of one instance. Bounded by ``open_requests`` open exchanges, as many
    that ended in the last ``clock_bound_ms``, and ``buffered_chunks`` content events.
    """

    def __init__(self, config: StreamsConfig) -> None:
        self._config = config
        self._open: OrderedDict[str, Exchange] = OrderedDict()
        """Not counted as ended yet, in order of their last news."""
        self._ended: OrderedDict[str, Exchange] = OrderedDict()
        """Counted as ended; kept to know what comes late or again."""
        self._late: dict[str, Exchange] = {}
        """Of these, the ones with content events that came late."""
        self._just_ended: tuple[Exchange, ...] = ()
        """Those that ended in the newest window: a step may span its end."""
        self._serial = 0
        self._heard_ns = [0] * len(REQUEST_SOURCES)
        """Newest event that each kind of source told of, best first."""
        self.buffered_chunks = 0
        """Content events that wait for their window."""
        self.model: str | None = None
        """Model of the newest exchange that was served and named one."""
        self.counters = TrackingCounters()
        self.tokens_of_bytes = Line()
        """Prompt tokens of body bytes, learned from exchanges that told both."""

    def __len__(self) -> int:
        return len(self._open)

    def add(self, part: RequestTiming) -> bool:
        """Take one part; False when it was taken before, cannot be, or does not count because a
        better source tells of the same exchanges.
        """
        if not _possible(part):
            self.counters.refused_parts += 1
            return False
        if self._is_secondary(part):
            self.counters.secondary_parts += 1
            return False
        exchange = self._open.get(part.request_id)
        if exchange is not None:
            self._open.move_to_end(part.request_id)
        else:
            exchange = self._ended.get(part.request_id) or self._begin(part)
        bit = 1 << part.part
        if exchange.parts & bit:
            self.counters.duplicate_parts += 1
            return False
        exchange.parts |= bit
        _merge(exchange, part)
        if part.chunk_base_ns is not None:
            self._buffer(exchange, part, part.chunk_base_ns)
        return True

    def close(self, end_ns: int) -> Traffic:
        """Count all that happened before ``end_ns`` and was not counted yet.

        Windows are to be closed in order; what came late for an earlier one counts here.
        """
        present = sorted(
            (e for e in self._open.values() if e.serial >= 0 or e.arrival_ns < end_ns),
            key=lambda e: (e.arrival_ns, e.request_id),
        )
        started = self._count_arrivals(present)
        ended = tuple(
            sorted(
                (e for e in present if e.end_ns is not None and e.end_ns < end_ns),
                key=lambda e: (e.end_ns, e.serial),
            )
        )
        active = sorted(
            (e for e in (*present, *self._late.values()) if e.pending), key=lambda e: e.serial
        )
        chunks, gaps = self._count_chunks(active, end_ns)
        first = self._count_first_tokens(present, end_ns)
        named = [e.model for e in (*ended, *first) if e.served and e.model is not None]
        self.model = named[-1] if named else self.model
        occupancy = _occupancy((*self._just_ended, *present), end_ns)
        self._just_ended = ended
        for exchange in ended:
            self._retire(exchange)
        still = [e for e in present if e.end_ns is None or e.end_ns >= end_ns]
        traffic = Traffic(
            chunks=chunks,
            chunk_gaps_ms=gaps,
            started=started,
            first_tokens=self._first_tokens(first),
            first=first,
            ended=ended,
            open_requests=self._open_requests(still, end_ns),
            occupancy=occupancy,
        )
        self._abandon(end_ns)
        return traffic

    def tokens(self, exchange: Exchange) -> float:
        """Prompt tokens: told, or estimated from the body's size; NaN when neither is known."""
        if exchange.prompt_tokens is not None:
            return float(exchange.prompt_tokens)
        if exchange.request_bytes is not None and self.tokens_of_bytes.ready:
            return self.tokens_of_bytes.predict(exchange.request_bytes)
        return float("nan")

    def prefill_tokens(self, exchange: Exchange) -> float:
        """Prompt tokens that had to be computed: less the cached ones, as far as told."""
        return max(0.0, self.tokens(exchange) - (exchange.cached_tokens or 0))

    def next_event_ns(self) -> int | None:
        """Oldest event that was not counted yet; None when all were."""
        times: list[int] = []
        for exchange in self._open.values():
            if exchange.serial < 0:
                times.append(exchange.arrival_ns)
            if exchange.end_ns is not None:
                times.append(exchange.end_ns)
            times.extend(exchange.pending)
        for exchange in self._late.values():
            times.extend(exchange.pending)
        return min(times, default=None)

    def orphan(self) -> None:
        """End the open exchanges where they were last heard of: who told of them is gone, and how
        they ended will not be known.
        """
        for exchange in self._open.values():
            if exchange.end_ns is None:
                exchange.end_ns = max(exchange.heard_ns, exchange.arrival_ns)
                exchange.lost = True
                self.counters.orphaned_requests += 1

    def forget(self) -> None:
        """Drop every exchange; what was learned stays."""
        self._open.clear()
        self._ended.clear()
        self._late.clear()
        self._just_ended = ()
        self._heard_ns = [0] * len(REQUEST_SOURCES)
        self.buffered_chunks = 0

    def _is_secondary(self, part: RequestTiming) -> bool:
        rank = precedence(part.source)
        self._heard_ns[rank] = max(self._heard_ns[rank], part.observed_at_ns)
        better_ns = max(self._heard_ns[:rank], default=0)
        return part.source in UNJUDGED or better_ns > part.arrival_ns - BETTER_NS

    def _begin(self, part: RequestTiming) -> Exchange:
        if len(self._open) >= self._config.open_requests:
            _, lost = self._open.popitem(last=False)
            self.buffered_chunks -= len(lost.pending)
            self.counters.evicted_requests += 1
        exchange = Exchange(request_id=part.request_id, arrival_ns=part.arrival_ns)
        self._open[part.request_id] = exchange
        return exchange

    def _buffer(self, exchange: Exchange, part: RequestTiming, base_ns: int) -> None:
        count = len(part.chunk_deltas_us) + 1
        if self.buffered_chunks + count > self._config.buffered_chunks:
            self.counters.dropped_chunks += count
            return
        self.buffered_chunks += count
        base_ns = max(base_ns, exchange.arrival_ns)
        offsets_us = accumulate(part.chunk_deltas_us, initial=0)
        exchange.pending.extend([base_ns + 1_000 * offset_us for offset_us in offsets_us])
        exchange.last_chunk_ns = _larger(exchange.last_chunk_ns, exchange.pending[-1])
        if exchange.counted_ns is None:
            before = exchange.chunks if exchange.chunks >= 0 else part.chunks_before
            exchange.chunks = min(before, part.chunks_before)
        if exchange.request_id in self._ended:
            self._late[exchange.request_id] = exchange

    def _count_arrivals(self, present: Sequence[Exchange]) -> int:
        """Number the new exchanges and note what each found on arrival."""
        new = [e for e in present if e.serial < 0]
        if not new:
            return 0
        arrival = np.array([e.arrival_ns for e in present])
        done = np.array([e.done_ns for e in present])
        first = np.minimum(done, [e.first_token_ns or NEVER_NS for e in present])
        tokens = np.array([self.tokens(e) for e in present])
        for exchange in new:
            exchange.serial = self._serial
            self._serial += 1
            at = exchange.arrival_ns
            ahead = (arrival < at) & (first > at)
            exchange.ahead_at_arrival = int(ahead.sum())
            exchange.ahead_tokens = float(tokens[ahead].sum())
            exchange.decoding_at_arrival = int(((first <= at) & (done > at)).sum())
        return len(new)

    def _count_chunks(self, active: Sequence[Exchange], end_ns: int) -> tuple[Chunks, Floats]:
        times: list[int] = []
        counts: list[int] = []
        for exchange in active:
            pending = exchange.pending
            pending.sort()
            count = bisect_left(pending, end_ns)
            counts.append(count)
            times.extend(pending[:count])
            del pending[:count]
            if not pending:
                self._late.pop(exchange.request_id, None)
        self.buffered_chunks -= len(times)
        if not times:
            return Chunks.empty(), np.empty(0)
        at_ns = np.array(times, np.int64)
        sizes = np.array(counts)
        streams = [e for e, count in zip(active, counts, strict=True) if count]
        sizes = sizes[sizes > 0]
        heads = np.cumsum(sizes) - sizes
        tails = heads + sizes - 1
        before = np.empty_like(at_ns)
        before[1:] = at_ns[:-1]
        before[heads] = [NEVER_NS if e.counted_ns is None else e.counted_ns for e in streams]
        gaps = (at_ns - before)[at_ns >= before] / NS_PER_MS
        ordinal = np.arange(len(at_ns)) + np.repeat([e.chunks for e in streams] - heads, sizes)
        final = np.zeros(len(at_ns), np.bool_)
        final[tails] = [
            e.end_ns is not None and e.end_ns < end_ns and not e.pending for e in streams
        ]
        for exchange, size, tail in zip(streams, sizes.tolist(), tails.tolist(), strict=True):
            exchange.chunks += size
            exchange.counted_ns = _larger(exchange.counted_ns, times[tail])
        chunks = Chunks(
            at_ns=at_ns,
            serial=np.repeat([e.serial for e in streams], sizes),
            ordinal=ordinal,
            final=final,
            prompt_tokens=np.repeat([self.tokens(e) for e in streams], sizes),
            prefill_tokens=np.repeat([self.prefill_tokens(e) for e in streams], sizes),
        )
        return chunks[np.argsort(at_ns, kind="stable")], gaps

    def _count_first_tokens(self, present: Sequence[Exchange], end_ns: int) -> tuple[Exchange, ...]:
        new = sorted(
            (e.first_token_ns, e.serial, e)
            for e in present
            if e.first_token_ns is not None and e.first_token_ns < end_ns and not e.first_counted
        )
        for _, _, exchange in new:
            exchange.first_counted = True
        return tuple(exchange for _, _, exchange in new)

    def _first_tokens(self, first: Sequence[Exchange]) -> FirstTokens:
        if not first:
            return FirstTokens()
        arrival = np.array([e.arrival_ns for e in first], np.int64)
        at_ns = np.array([e.first_token_ns for e in first], np.int64)
        return FirstTokens(
            at_ns=at_ns,
            ttft_ms=np.maximum(at_ns - arrival, 0) / NS_PER_MS,
            headers_ms=_since(arrival, [e.first_byte_ns for e in first]),
            upload_ms=_since(arrival, [e.request_end_ns for e in first]),
            prompt_tokens=np.array([self.tokens(e) for e in first]),
            tokens_estimated=np.array([e.prompt_tokens is None for e in first]),
            cached_tokens=_optional([e.cached_tokens for e in first]),
            request_bytes=_optional([e.request_bytes for e in first]),
            decoding=np.array([e.decoding_at_arrival for e in first], np.int64),
            ahead=np.array([e.ahead_at_arrival for e in first], np.int64),
            ahead_tokens=np.array([e.ahead_tokens for e in first]),
        )

    def _open_requests(self, still: Sequence[Exchange], end_ns: int) -> OpenRequests:
        decoding = [e for e in still if e.first_counted]
        waiting = [e for e in still if not e.first_counted]
        latest = [e.counted_ns or e.first_token_ns or e.arrival_ns for e in decoding]
        return OpenRequests(
            decoding=len(decoding),
            waiting=len(waiting),
            waiting_ms=(end_ns - np.array([e.arrival_ns for e in waiting], np.int64)) / NS_PER_MS,
            waiting_tokens=np.array([self.tokens(e) for e in waiting], np.float64),
            silence_ms=(end_ns - np.array(latest, np.int64)) / NS_PER_MS,
        )

    def _retire(self, exchange: Exchange) -> None:
        if exchange.prompt_tokens is not None and exchange.request_bytes is not None:
            self.tokens_of_bytes.learn(exchange.request_bytes, exchange.prompt_tokens)
        del self._open[exchange.request_id]
        self._ended[exchange.request_id] = exchange
        if exchange.pending:
            self._late[exchange.request_id] = exchange
        if len(self._ended) > self._config.open_requests:
            self._forget_oldest_ended()

    def _forget_oldest_ended(self) -> None:
        request_id, exchange = self._ended.popitem(last=False)
        self._late.pop(request_id, None)
        self.buffered_chunks -= len(exchange.pending)

    def _abandon(self, end_ns: int) -> None:
        """Give up open requests that are silent for too long, and drop ended ones of which nothing
        may come any more.
        """
        silent_since = end_ns - self._config.request_timeout_s * NS_PER_S
        while self._open:
            exchange = next(iter(self._open.values()))
            if exchange.heard_ns >= silent_since:
                break
            del self._open[exchange.request_id]
            self.buffered_chunks -= len(exchange.pending)
            self.counters.abandoned_requests += 1
        too_late = end_ns - self._config.clock_bound_ms * NS_PER_MS
        while self._ended and (next(iter(self._ended.values())).end_ns or 0) < too_late:
            self._forget_oldest_ended()


def _possible(part: RequestTiming) -> bool:
    """Whether a part's number and times are ones that a clock can have told."""
    times_ns = [part.arrival_ns, part.observed_at_ns]
    optional = (part.request_end_ns, part.first_byte_ns, part.first_token_ns, part.end_ns)
    times_ns += [at_ns for at_ns in optional if at_ns is not None]
    if part.chunk_base_ns is not None:
        times_ns += [part.chunk_base_ns, part.chunk_base_ns + 1_000 * sum(part.chunk_deltas_us)]
    return (
        0 <= part.part < PARTS_MAX
        and part.chunks_before >= 0
        and min(times_ns) >= 0
        and max(times_ns) < LATEST_NS
        and min(part.chunk_deltas_us, default=0) >= 0
    )


def _merge(exchange: Exchange, part: RequestTiming) -> None:
    """Take over what a part tells of its exchange."""
    exchange.arrival_ns = max(exchange.arrival_ns, part.arrival_ns)
    exchange.heard_ns = max(exchange.heard_ns, part.observed_at_ns)
    exchange.streaming = exchange.streaming or bool(part.streaming)
    if RANK[part.state] > RANK[exchange.state]:
        exchange.state = part.state
        exchange.lost = "state" in part.estimated
    end_ns = part.end_ns
    if end_ns is None and part.state != "open":
        end_ns = part.observed_at_ns
    if end_ns is not None:
        exchange.end_ns = max(end_ns, exchange.end_ns or 0, exchange.arrival_ns)
    first_ns = part.first_token_ns
    if first_ns is None and part.chunks_before == 0:
        first_ns = part.chunk_base_ns
    if first_ns is not None:
        exchange.first_token_ns = max(first_ns, exchange.first_token_ns or 0, exchange.arrival_ns)
    exchange.model = _larger(exchange.model, part.model)
    exchange.status = _larger(exchange.status, part.status)
    exchange.request_end_ns = _larger(exchange.request_end_ns, part.request_end_ns)
    exchange.first_byte_ns = _larger(exchange.first_byte_ns, part.first_byte_ns)
    exchange.request_bytes = _larger(exchange.request_bytes, part.request_bytes)
    exchange.prompt_tokens = _larger(exchange.prompt_tokens, part.prompt_tokens)
    exchange.cached_tokens = _larger(exchange.cached_tokens, part.cached_tokens)
    exchange.completion_tokens = _larger(exchange.completion_tokens, part.completion_tokens)


def _occupancy(present: Sequence[Exchange], end_ns: int) -> Occupancy:
    streams = [e for e in present if e.first_token_ns is not None]
    quiet_ns = end_ns - QUIET_MS * NS_PER_MS
    return Occupancy(
        ready_ns=_sorted(e.ready_ns for e in present),
        first_ns=_sorted(min(e.done_ns, e.first_token_ns or NEVER_NS) for e in present),
        done_ns=_sorted(e.done_ns for e in present),
        streams_first_ns=_sorted(e.first_token_ns for e in streams if e.first_token_ns),
        streams_last_ns=_sorted(
            e.last_chunk_ns
            for e in streams
            if e.last_chunk_ns is not None and (e.end_ns is not None or e.last_chunk_ns < quiet_ns)
        ),
    )


def _sorted(times_ns: Iterable[int]) -> Ints:
    return np.array(sorted(times_ns), np.int64)


def _since(from_ns: Ints, until_ns: Sequence[int | None]) -> Floats:
    """Milliseconds from one time to the other, at least 0; NaN where the second is None."""
    return np.array(
        [
            np.nan if until is None else max(0, until - start) / NS_PER_MS
            for start, until in zip(from_ns.tolist(), until_ns, strict=True)
        ]
    )


def _counts(times_ns: Ints, at_ns: Ints) -> Ints:
    """How many of the sorted times are not after each moment."""
    return np.asarray(np.searchsorted(times_ns, at_ns, side="right"), np.int64)


def _optional(values: Sequence[int | None]) -> Floats:
    return np.array([np.nan if value is None else value for value in values], np.float64)
