"""All of one instance: packs of telemetry in, judged windows out."""

import hashlib
import json
import logging
import struct
from dataclasses import asdict
from typing import Any, Final

from latencyprism.schemas.codec import Pack
from latencyprism.schemas.records import (
    BatchProfile,
    EngineSample,
    HostSample,
    ModelSnapshot,
    RequestTiming,
    StepBatch,
    XpuSample,
)
from latencyprism.schemas.topics import TELEMETRY_REQUESTS, Topic
from latencyprism.streams.absence import Absence
from latencyprism.streams.config import NS_PER_MS, StreamsConfig
from latencyprism.streams.estimate import Line
from latencyprism.streams.judge import Judge, Judgement
from latencyprism.streams.observation import Floats, Observation
from latencyprism.streams.stages import StageEstimator
from latencyprism.streams.steps import GivenSteps, StepRecovery
from latencyprism.streams.tracking import RequestTracker
from latencyprism.streams.waiting import Samples
from latencyprism.streams.windows import Window, Windows

logger = logging.getLogger(__name__)

FORMAT: Final = 1
"""Layout of a snapshot's state: length of the JSON that follows, the JSON, the judge's state."""
LENGTH: Final = struct.Struct(">I")

MODEL_CHARS: Final = 256
"""Most of a model's name that is kept; every window repeats it."""
DEFAULT_SERVICE: Final = "default"
"""Service of an instance whose model is not known and that none is configured for."""


class InstancePipeline:
    """Pure: no clock, no I/O; wall times are passed in. Not thread-safe.

    Give it every pack of the instance with :meth:`add` and call :meth:`advance` at least every
    100 ms. The first window closes ``settle_ms`` of wall time after the first pack. A pack that
    comes again changes nothing, nor does a part of a request in another pack. Memory is bounded by
    the bounds of the configuration.
    """

    def __init__(self, instance: str, *, config: StreamsConfig, judge: Judge) -> None:
        self.instance = instance
        self.judge = judge
        self._config = config
        self._windows = Windows(instance, config)
        self._tracker = RequestTracker(config)
        self._recovery = StepRecovery()
        self._given = GivenSteps(config.buffered_samples)
        self._stages = StageEstimator()
        self._engine: Samples[EngineSample] = Samples(config.buffered_samples)
        self._host: Samples[HostSample] = Samples(config.buffered_samples)
        self._xpu: Samples[XpuSample] = Samples(config.buffered_samples)
        self._absence = Absence()
        self._last_engine: EngineSample | None = None
        self._teller: tuple[str, int] | None = None
        """Agent and boot that tell of requests."""
        self._late = 0
        """Samples that came late since the last window."""
        self._late_samples = 0
        self._refused_samples = 0

    def add(self, topic: Topic, pack: Pack[Any], now_ns: int) -> None:
        """Take a pack of one of the telemetry topics. Never raises for what is in it: packs and
        samples that cannot be used are counted.
        """
        admission = self._windows.admit(topic.name, pack, now_ns)
        if admission == "reset":
            self._forget()
        elif admission != "taken":
            return
        if topic is TELEMETRY_REQUESTS and self._teller != (pack.agent, pack.boot_ns):
            self._teller = pack.agent, pack.boot_ns
            self._tracker.orphan()
        closed_ns = self._windows.closed_until_ns
        bound_ns = self._config.clock_bound_ms * NS_PER_MS
        oldest_ns = closed_ns - bound_ns if closed_ns is not None else 0
        newest_ns = pack.watermark_ns + bound_ns
        if self._config.clock == "wall":
            newest_ns = max(newest_ns, now_ns + bound_ns)
        for sample in pack.samples:
            at_ns = sample.observed_at_ns
            if not oldest_ns <= at_ns <= newest_ns or sample.instance != self.instance:
                self._refused_samples += 1
                continue
            if self._take(sample):
                self._late += closed_ns is not None and at_ns < closed_ns
                self._windows.note_event(_first_event_ns(sample))

    def advance(self, now_ns: int, *, limit: int | None = None) -> list[BatchProfile]:
        """Close and judge the windows whose time has come, at most ``limit``, oldest first.

        Takes about a millisecond a window; whoever shares an event loop passes a limit and calls
        again while the list comes back full.
        """
        hurry = 2 * self._tracker.buffered_chunks > self._config.buffered_chunks or any(
            2 * len(samples) > self._config.buffered_samples
            for samples in (self._engine, self._host, self._xpu, self._given)
        )
        self._windows.look(now_ns, hurry=hurry)
        profiles: list[BatchProfile] = []
        while limit is None or len(profiles) < limit:
            window = self._windows.due(now_ns, self._oldest_event_ns)
            if window is None:
                break
            observation = self._observe(window)
            self._absence.follow(observation.engine)
            judged = self.judge.judge(observation)
            judged = self._absence.overrule(judged, chunks=observation.chunks)
            profiles.append(self._profile(observation, judged))
        return profiles

    def forgettable(self, now_ns: int) -> bool:
        """Whether the instance has been silent for so long that it is to be dropped."""
        return self._windows.forgettable(now_ns)

    def snapshot(self) -> ModelSnapshot:
        """All that was learned of the instance."""
        learned = {
            "tokens_of_bytes": self._tracker.tokens_of_bytes.state(),
            "prefill_of_tokens": self._stages.prefill_of_tokens.state(),
            "differences_ms": list(self._stages.differences_ms),
        }
        text = json.dumps(learned).encode()
        return ModelSnapshot(
            instance=self.instance,
            model=self._model,
            version=self.judge.version,
            taken_ns=self._windows.closed_until_ns or 0,
            format=FORMAT,
            state=LENGTH.pack(len(text)) + text + self.judge.state(),
        )

    def restore(self, snapshot: ModelSnapshot) -> bool:
        """Go on with what a snapshot learned; False, and a cold start, when it cannot be read."""
        if snapshot.instance != self.instance or snapshot.format != FORMAT:
            logger.warning(
                "%s: a snapshot of %s in format %d is not for this version (format %d); learning "
                "begins anew",
                self.instance,
                snapshot.instance,
                snapshot.format,
                FORMAT,
            )
            return False
        try:
            (length,) = LENGTH.unpack_from(snapshot.state)
            learned = json.loads(snapshot.state[LENGTH.size : LENGTH.size + length])
            tokens_of_bytes = Line.restored(learned["tokens_of_bytes"])
            prefill_of_tokens = Line.restored(learned["prefill_of_tokens"])
            differences_ms = [float(ms) for ms in learned["differences_ms"]]
            self.judge.restore(snapshot.state[LENGTH.size + length :])
        except (ValueError, KeyError, TypeError, struct.error) as e:
            logger.warning(
                "%s: the snapshot of version %s cannot be read (%s); learning begins anew",
                self.instance,
                snapshot.version,
                e,
            )
            return False
        self._tracker.model = self._tracker.model or snapshot.model
        self._tracker.tokens_of_bytes = tokens_of_bytes
        self._stages.prefill_of_tokens = prefill_of_tokens
        self._stages.differences_ms.extend(differences_ms)
        return True

    def counters(self) -> dict[str, int]:
        """What was refused, repaired or lost since the start, by name."""
        return {
            **asdict(self._windows.counters),
            **asdict(self._tracker.counters),
            "late_samples": self._late_samples,
            "refused_samples": self._refused_samples,
            "dropped_samples": sum(
                samples.dropped for samples in (self._engine, self._host, self._xpu, self._given)
            ),
        }

    @property
    def _model(self) -> str | None:
        model = self._tracker.model
        if model is None and self._last_engine is not None:
            model = self._last_engine.model
        return model if model is None else model[:MODEL_CHARS]

    def _take(self, sample: Any) -> bool:
        """Put a sample where it waits for its window; False when it is there already."""
        match sample:
            case RequestTiming():
                return self._tracker.add(sample)
            case StepBatch():
                return self._given.add(sample)
            case EngineSample():
                return self._engine.add(sample)
            case HostSample():
                return self._host.add(sample)
            case XpuSample():
                return self._xpu.add(sample)
            case _:
                self._refused_samples += 1
                return False

    def _oldest_event_ns(self) -> int | None:
        times = (
            self._tracker.next_event_ns(),
            self._given.oldest_ns(),
            self._engine.oldest_ns(),
            self._host.oldest_ns(),
            self._xpu.oldest_ns(),
        )
        return min((at_ns for at_ns in times if at_ns is not None), default=None)

    def _observe(self, window: Window) -> Observation:
        end_ns = window.end_ns
        traffic = self._tracker.close(end_ns)
        derived = self._recovery.recover(
            traffic.chunks, traffic.chunk_gaps_ms, traffic.occupancy, end_ns
        )
        given = self._given.take(end_ns, traffic.occupancy)
        steps = given if len(given.end_ns) else derived
        engine = self._engine.take(end_ns)
        fresh = [sample for sample in engine if sample.freshness == "fresh"]
        self._last_engine = fresh[-1] if fresh else self._last_engine
        self._stages.learn(steps, traffic.first, self._tracker)
        stages = self._stages.summary(traffic.ended)
        self._stages.compare(engine)
        late, self._late = self._late, 0
        self._late_samples += late
        return Observation(
            instance=self.instance,
            model=self._model,
            start_ns=window.start_ns,
            end_ns=end_ns,
            closed_ns=window.closed_ns,
            requests_started=traffic.started,
            requests_finished=len(traffic.ended),
            requests_failed=sum(exchange.failed for exchange in traffic.ended),
            chunks=len(traffic.chunks),
            steps=steps,
            first_tokens=traffic.first_tokens,
            open_requests=traffic.open_requests,
            chunk_gaps_ms=traffic.chunk_gaps_ms,
            stages=stages.stages,
            ttft_ms=_mean(traffic.first_tokens.ttft_ms),
            tpot_ms=_mean(traffic.chunk_gaps_ms),
            e2e_ms=stages.e2e_ms,
            remainder_ms=stages.remainder_ms,
            engine=engine,
            last_engine=self._last_engine,
            host=self._host.take(end_ns),
            xpu=self._xpu.take(end_ns),
            late_samples=late,
            silent_sources=window.silent_sources,
        )

    def _profile(self, seen: Observation, judged: Judgement) -> BatchProfile:
        return BatchProfile(
            batch_id=batch_id(self.instance, seen.model, seen.start_ns),
            instance=self.instance,
            service=self._config.services.get(self.instance) or seen.model or DEFAULT_SERVICE,
            model=seen.model,
            window_start_ns=seen.start_ns,
            window_end_ns=seen.end_ns,
            closed_at_ns=seen.closed_ns,
            requests_started=seen.requests_started,
            requests_finished=seen.requests_finished,
            requests_failed=seen.requests_failed,
            requests_open=seen.open_requests.decoding + seen.open_requests.waiting,
            chunks=seen.chunks,
            steps=len(seen.steps.end_ns),
            late_samples=seen.late_samples,
            silent_sources=seen.silent_sources,
            features=judged.features,
            ttft_ms=seen.ttft_ms,
            tpot_ms=seen.tpot_ms,
            e2e_ms=seen.e2e_ms,
            stages=seen.stages,
            remainder_ms=seen.remainder_ms,
            scores=judged.scores,
            stage=judged.stage,
            observed_ms=judged.observed_ms,
            expected_ms=judged.expected_ms,
            score=judged.score,
            threshold=judged.threshold,
            verdict=judged.verdict,
            reason=judged.reason,
            evidence=judged.evidence,
            model_version=judged.version,
        )

    def _forget(self) -> None:
        """Drop all that waits and all that is open; what was learned stays."""
        self._tracker.forget()
        self._recovery.forget()
        self._stages.forget()
        for samples in (self._engine, self._host, self._xpu, self._given):
            samples.forget()
        self._last_engine = None


def batch_id(instance: str, model: str | None, start_ns: int) -> str:
    """Id of a window's profile; the same whoever closes the window."""
    name = f"{instance}|{model or ''}|{start_ns}".encode()
    return hashlib.blake2b(name, digest_size=16).hexdigest()


def _first_event_ns(sample: Any) -> int:
    """Oldest event that a sample tells of and that is not told by others before it."""
    at_ns: int = sample.observed_at_ns
    match sample:
        case RequestTiming(chunk_base_ns=int(first_ns)) | StepBatch(start_ns=(first_ns, *_)):
            return min(at_ns, first_ns)
        case _:
            return at_ns


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if len(values) else None
