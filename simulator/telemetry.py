"""Turns a run in virtual time into the telemetry that collectors would have made of it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from latencyprism.schemas.codec import Pack
from latencyprism.schemas.records import (
    EngineSample,
    HistogramDelta,
    RequestState,
    RequestTiming,
    StepBatch,
)
from latencyprism.schemas.topics import (
    TELEMETRY_ENGINE,
    TELEMETRY_REQUESTS,
    TELEMETRY_STEPS,
    Topic,
)
from latencyprism.simulator.engine import Request, Served
from latencyprism.simulator.run import Arrived, Run, Scraped, Stepped

PART_NS = 100_000_000
UPLOAD_NS = 200_000
SCRAPE_MS = 3.0
BYTES_PER_TOKEN = 5
BYTES_PER_EVENT = 220


@dataclass(slots=True, kw_only=True)
class _Exchange:
    request: Request
    first_byte_ns: int
    chunks_ns: list[int] = field(default_factory=list)
    """Not yet reported, oldest first; may lie in the future under network delay."""
    served: Served | None = None
    part: int = 0
    chunks_before: int = 0
    first_token_ns: int | None = None


def records(run: Run, *, truth: bool = False) -> Iterator[tuple[Topic, Any]]:
    """Records of a run, in order of ``observed_at_ns``.

    Requests in parts every 100 ms while they are open and have news, the engine's metrics once a
    second. With ``truth``, also every step as ``telemetry.steps`` (source simulator), which tells
    streams what they would otherwise have to recover.
    """
    requests, scrapes, steps = _Requests(run), _Scrapes(run), _Steps(run)
    tick_ns = run.start_ns + PART_NS

    def tick() -> list[tuple[Topic, Any]]:
        made = [*requests.parts(tick_ns), *(steps.batch() if truth else ())]
        return sorted(made, key=lambda pair: pair[1].observed_at_ns)

    for moment in run.moments():
        while moment.at_ns >= tick_ns:
            yield from tick()
            tick_ns += PART_NS
        match moment:
            case Arrived():
                requests.arrived(moment)
            case Stepped():
                requests.stepped(moment)
                steps.stepped(moment)
            case Scraped():
                yield TELEMETRY_ENGINE, scrapes.sample(moment)
    while requests.open:
        yield from tick()
        tick_ns += PART_NS


def packs(
    run: Run, records: Iterable[tuple[Topic, Any]], *, agent: str = "simulator"
) -> Iterator[tuple[Topic, Pack[Any]]]:
    """Records packed as an agent would, every 100 ms, with watermarks: also of topics that have
    nothing to tell. A last pack of each topic carries a watermark beyond all samples.
    """
    topics = (TELEMETRY_REQUESTS, TELEMETRY_ENGINE)
    held: dict[str, list[Any]] = {topic.name: [] for topic in (*topics, TELEMETRY_STEPS)}
    sequences = dict.fromkeys(held, 0)

    def flush(watermark_ns: int) -> Iterator[tuple[Topic, Pack[Any]]]:
        for topic in (*topics, TELEMETRY_STEPS):
            samples = held[topic.name]
            if samples or topic in topics:
                yield (
                    topic,
                    Pack(
                        agent=agent,
                        boot_ns=run.start_ns,
                        sequence=sequences[topic.name],
                        watermark_ns=watermark_ns,
                        samples=tuple(samples),
                    ),
                )
                sequences[topic.name] += 1
                samples.clear()

    watermark_ns = run.start_ns
    for topic, record in records:
        while record.observed_at_ns >= watermark_ns + PART_NS:
            watermark_ns += PART_NS
            yield from flush(watermark_ns)
        held[topic.name].append(record)
    yield from flush(watermark_ns + 10 * PART_NS)


class _Requests:
    def __init__(self, run: Run) -> None:
        self._run = run
        self.open: dict[str, _Exchange] = {}

    def arrived(self, moment: Arrived) -> None:
        ingress_ns = round(self._run.config.ingress_ms * 1e6)
        self.open[moment.request.request_id] = _Exchange(
            request=moment.request, first_byte_ns=moment.at_ns + ingress_ns
        )

    def stepped(self, moment: Stepped) -> None:
        for token in moment.completed.tokens:
            self.open[token.request_id].chunks_ns.append(moment.sent_ns)
        for served in moment.completed.served:
            self.open[served.request.request_id].served = served

    def parts(self, tick_ns: int) -> list[tuple[Topic, RequestTiming]]:
        """Parts of all exchanges with news before the tick."""
        made = [self._part(exchange, tick_ns) for exchange in list(self.open.values())]
        return [(TELEMETRY_REQUESTS, part) for part in made if part is not None]

    def _part(self, exchange: _Exchange, tick_ns: int) -> RequestTiming | None:
        request, waiting = exchange.request, exchange.chunks_ns
        chunks = [chunk_ns for chunk_ns in waiting if chunk_ns < tick_ns]
        ended = exchange.served is not None and len(chunks) == len(waiting)
        headers = exchange.first_byte_ns < tick_ns
        if not chunks and not (exchange.part == 0 and headers):
            return None
        if exchange.first_token_ns is None and chunks:
            exchange.first_token_ns = chunks[0]
        served = exchange.served if ended else None
        state: RequestState = "complete" if ended else "open"
        newest_ns = max(chunks) if chunks else exchange.first_byte_ns
        since_us = [(chunk_ns - chunks[0]) // 1000 for chunk_ns in chunks]
        seen = exchange.chunks_before + len(chunks)
        part = RequestTiming(
            request_id=request.request_id,
            part=exchange.part,
            state=state,
            instance=self._run.instance,
            source="network",
            observed_at_ns=newest_ns,
            endpoint="/v1/completions",
            model=self._run.model,
            streaming=True,
            status=200,
            arrival_ns=request.arrival_ns,
            request_end_ns=request.arrival_ns + UPLOAD_NS,
            first_byte_ns=exchange.first_byte_ns,
            first_token_ns=exchange.first_token_ns,
            end_ns=newest_ns if ended else None,
            chunks_before=exchange.chunks_before,
            chunk_base_ns=chunks[0] if chunks else None,
            chunk_deltas_us=tuple(b - a for a, b in pairwise(since_us)),
            request_bytes=request.prompt_tokens * BYTES_PER_TOKEN,
            response_bytes=seen * BYTES_PER_EVENT,
            prompt_tokens=request.prompt_tokens if served else None,
            cached_tokens=served.cached_tokens if served else None,
            completion_tokens=request.output_tokens if served else None,
        )
        exchange.part += 1
        exchange.chunks_before = seen
        exchange.chunks_ns = waiting[len(chunks) :]
        if ended:
            del self.open[request.request_id]
        return part


class _Scrapes:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._before: Scraped | None = None

    def sample(self, scraped: Scraped) -> EngineSample:
        before, self._before = self._before, scraped

        def growth(name: str) -> float | None:
            if before is None:
                return None
            return float(getattr(scraped.totals, name) - getattr(before.totals, name))

        return EngineSample(
            instance=self._run.instance,
            source="engine",
            observed_at_ns=scraped.at_ns,
            engine="vllm",
            model=self._run.model,
            freshness="fresh",
            scrape_ms=SCRAPE_MS,
            interval_ns=scraped.at_ns - before.at_ns if before else None,
            running=float(scraped.gauges.running),
            waiting=float(scraped.gauges.waiting),
            kv_usage=scraped.gauges.kv_usage,
            prompt_tokens=growth("prompt_tokens"),
            cached_tokens=growth("cached_tokens"),
            generation_tokens=growth("generated_tokens"),
            finished_requests=growth("finished"),
            preemptions=growth("preemptions"),
            iterations=growth("steps"),
            restarted=False,
            histograms=_grown(before, scraped) if before else (),
        )


class _Steps:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._held: list[Stepped] = []

    def stepped(self, moment: Stepped) -> None:
        self._held.append(moment)

    def batch(self) -> Sequence[tuple[Topic, StepBatch]]:
        """The steps since the last batch; none when there were none."""
        held, self._held = self._held, []
        if not held:
            return ()
        done = [moment.completed for moment in held]
        steps = [completed.step for completed in done]
        batch = StepBatch(
            instance=self._run.instance,
            source="simulator",
            observed_at_ns=steps[-1].end_ns,
            model=self._run.model,
            start_ns=tuple(step.start_ns for step in steps),
            duration_us=tuple((step.end_ns - step.start_ns) // 1000 for step in steps),
            decode_sequences=tuple(step.decode_sequences for step in steps),
            joined=tuple(len(completed.first_tokens_ms) for completed in done),
            left=tuple(len(completed.served) for completed in done),
            prefill_tokens=tuple(step.prefill_tokens for step in steps),
            context_tokens=tuple(step.context_tokens for step in steps),
        )
        return ((TELEMETRY_STEPS, batch),)


def _grown(before: Scraped, now: Scraped) -> tuple[HistogramDelta, ...]:
    return tuple(
        HistogramDelta(
            stage=stage,
            count=float(histogram.count - before.histograms[stage].count),
            sum=histogram.sum - before.histograms[stage].sum,
            bounds=histogram.bounds,
            counts=tuple(
                float(later - earlier)
                for earlier, later in zip(
                    before.histograms[stage].counts, histogram.counts, strict=True
                )
            ),
        )
        for stage, histogram in now.histograms.items()
    )
