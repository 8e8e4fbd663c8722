"""One HTTP exchange with an inference server, reported in parts while it lasts."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from operator import attrgetter, sub
from typing import TYPE_CHECKING, Final, Protocol

from latencyprism.collectors.network.body import TokenField
from latencyprism.collectors.network.drafts import maker
from latencyprism.schemas.records import RequestState, RequestTiming

SOURCE: Final = "network"

if TYPE_CHECKING:
    _timing = RequestTiming
else:
    _timing = maker(RequestTiming)


def request_id(key: bytes, arrival_ns: int, nth: int) -> str:
    """Id of an exchange, 32 hex digits: the same whoever sees it.

    ``key`` is the connection's addresses and ports, client first; ``nth`` counts requests of the
    connection that arrived at the same time (in one segment), from 0.
    """
    digest = hashlib.blake2b(key, digest_size=16)
    digest.update(b"%d %d" % (arrival_ns, nth))
    return digest.hexdigest()


class Exchange:
    """What is known of one exchange; numbers and names, never text.

    Times are ns since the epoch and do not go back. ``part`` takes the news out.
    """

    __slots__ = (
        "_chunks",
        "_chunks_before",
        "_ledger",
        "_news",
        "_part",
        "arrival_ns",
        "cached_tokens",
        "completion_tokens",
        "done",
        "end_ns",
        "endpoint",
        "estimated",
        "first_byte_ns",
        "first_token_ns",
        "held",
        "instance",
        "max_tokens",
        "method",
        "model",
        "observed_ns",
        "prompt_tokens",
        "request_bytes",
        "request_end_ns",
        "request_id",
        "response_bytes",
        "state",
        "status",
        "streaming",
        "trace_id",
    )

    def __init__(
        self,
        ledger: "Ledger",
        *,
        request_id: str,
        instance: str,
        method: str | None,
        endpoint: str,
        arrival_ns: int,
        trace_id: str | None,
        held: bool,
    ) -> None:
        self.request_id = request_id
        self.instance = instance
        self.method = method
        self.endpoint = endpoint
        self.arrival_ns = arrival_ns
        self.trace_id = trace_id
        self.state: RequestState = "open"
        self.observed_ns = arrival_ns
        self.model: str | None = None
        self.max_tokens: int | None = None
        self.streaming: bool | None = None
        self.status: int | None = None
        self.request_end_ns: int | None = None
        self.first_byte_ns: int | None = None
        self.first_token_ns: int | None = None
        self.end_ns: int | None = None
        self.request_bytes = 0
        self.response_bytes = 0
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.estimated: tuple[str, ...] = ()
        self.done = False
        """Whether the stream said that it is over, although its HTTP message is not."""
        self.held = held
        """Whether it is kept back until it is known what it is; see :meth:`Ledger.open`."""
        self._ledger = ledger
        self._news = False
        self._part = 0
        self._chunks: list[int] = []
        self._chunks_before = 0
        self._touch(arrival_ns)

    def request_ended(self, at_ns: int) -> None:
        """The last byte of the request came."""
        if self.state == "open":
            self.request_end_ns = at_ns
            self._touch(at_ns)

    def answered(
        self, began_ns: int, at_ns: int, *, status: int | None, streaming: bool | None
    ) -> None:
        """The headers of the answer came; its first byte at ``began_ns``. None: not told."""
        self.first_byte_ns = began_ns
        self.status = status
        self.streaming = streaming
        self._touch(at_ns)

    def content(self, at_ns: int) -> None:
        """A content event came."""
        if self.first_token_ns is None:
            self.first_token_ns = at_ns
        self._chunks.append(at_ns)
        self.observed_ns = at_ns
        if not self._news:
            self._touch(at_ns)

    def more_content(self, at_ns: int, size: int) -> None:
        """A content event came that was not the first, with so many bytes of the answer."""
        self.response_bytes += size
        self._chunks.append(at_ns)
        self.observed_ns = at_ns
        if not self._news:
            self._touch(at_ns)

    def reveal(self) -> None:
        """Report it from now on, with all that came before, if it was held."""
        if self.held:
            self.held = False
            self._ledger.counts["exchanges"] += 1
            self._touch(self.observed_ns)

    def count_tokens(self, counts: Mapping[TokenField, int]) -> None:
        """The answer told token counts; later ones stand."""
        self.prompt_tokens = counts.get("prompt_tokens", self.prompt_tokens)
        self.cached_tokens = counts.get("cached_tokens", self.cached_tokens)
        self.completion_tokens = counts.get("completion_tokens", self.completion_tokens)

    def estimate(self, *fields: str) -> None:
        """Mark fields as estimates from now on."""
        self.estimated += tuple(name for name in fields if name not in self.estimated)

    def close(self, state: RequestState, at_ns: int, *, estimated: tuple[str, ...] = ()) -> None:
        """It is over; later news are ignored. ``estimated`` names further fields that are
        guesses.
        """
        self.state = state
        self.end_ns = at_ns
        self.estimate(*estimated)
        self._touch(at_ns)

    def part(self) -> RequestTiming:
        """Everything known, and the content events since the last part."""
        chunks = self._chunks
        times_us = [at_ns // 1000 for at_ns in chunks]
        timing = _timing(
            request_id=self.request_id,
            part=self._part,
            state=self.state,
            instance=self.instance,
            source=SOURCE,
            observed_at_ns=self.observed_ns,
            endpoint=self.endpoint,
            model=self.model,
            streaming=self.streaming,
            status=self.status,
            arrival_ns=self.arrival_ns,
            request_end_ns=self.request_end_ns,
            first_byte_ns=self.first_byte_ns,
            first_token_ns=self.first_token_ns,
            end_ns=self.end_ns,
            chunks_before=self._chunks_before,
            chunk_base_ns=chunks[0] if chunks else None,
            chunk_deltas_us=tuple(map(sub, times_us[1:], times_us)),
            request_bytes=self.request_bytes,
            response_bytes=None if self.first_byte_ns is None else self.response_bytes,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            trace_id=self.trace_id,
            estimated=self.estimated,
            method=self.method,
            max_tokens=self.max_tokens,
        )
        self._part += 1
        self._chunks_before += len(chunks)
        self._chunks = []
        self._news = False
        return timing

    def _touch(self, at_ns: int) -> None:
        self.observed_ns = at_ns
        if not self._news and not self.held:
            self._news = True
            self._ledger.changed.append(self)


class Timed(Protocol):
    """Something that ends because nothing comes."""

    def settle(self, now_ns: int) -> None:
        """Close what was silent for too long: every packet older than ``now_ns`` was taken."""


class Ledger:
    """The exchanges of all connections: how many are open, and which have news.

    At most ``max_exchanges`` are open at once. ``every_path`` asks for those of all paths, not only
    of the endpoints that answer with tokens. ``counts`` says how often what was refused or seen, by
    kind.
    """

    def __init__(self, max_exchanges: int, *, every_path: bool = False) -> None:
        self.every_path = every_path
        self.changed: list[Exchange] = []
        self.counts: Counter[str] = Counter()
        self.timed: dict[Timed, None] = {}
        """Who is told the time before each flush, in the order in which they asked for it."""
        self.marks_ends: dict[str, bool] = {}
        """Whether an instance's streams inside TLS say when they are over, each as far as seen."""
        self._max_exchanges = max_exchanges
        self._open = 0

    def __len__(self) -> int:
        """Exchanges that are open, as of the last flush."""
        return self._open

    def open(
        self,
        *,
        key: bytes,
        nth: int,
        instance: str,
        method: str | None,
        endpoint: str,
        arrival_ns: int,
        trace_id: str | None,
        held: bool = False,
    ) -> Exchange | None:
        """A new exchange; None, counted, when too many are open.

        One that is ``held`` is not reported before :meth:`Exchange.reveal`, and takes a place until
        :meth:`drop`: for protocols that hide what is asked for.
        """
        if self._open >= self._max_exchanges:
            self.counts["too many exchanges"] += 1
            return None
        self._open += 1
        if not held:
            self.counts["exchanges"] += 1
        return Exchange(
            self,
            request_id=request_id(key, arrival_ns, nth),
            instance=instance,
            method=method,
            endpoint=endpoint,
            arrival_ns=arrival_ns,
            trace_id=trace_id,
            held=held,
        )

    def drop(self, exchange: Exchange) -> None:
        """Forget a held exchange: it turned out to be of no interest."""
        assert exchange.held
        self._open -= 1

    def flush(self, now_ns: int) -> list[RequestTiming]:
        """One part of each exchange with news since the last flush, by the time of the newest.

        ``now_ns`` is the time up to which packets were taken.
        """
        for timed in tuple(self.timed):
            timed.settle(now_ns)
        parts = [exchange.part() for exchange in self.changed]
        self.changed.clear()
        self._open -= sum(part.state != "open" for part in parts)
        parts.sort(key=attrgetter("observed_at_ns"))
        return parts
