"""What speaks for a cause: every signal compared with its own history, and causes ranked by it."""

import itertools
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from latencyprism.schemas.records import Cause, EngineSample, Evidence, XpuSample
from latencyprism.streams.detection.threshold import TailCalibrator
from latencyprism.streams.observation import Observation

Floats = npt.NDArray[np.float64]

HOLD_NS = 1_250_000_000
"""How long a value of a source that reports once a second stays in force."""
SCRAPE_SLACK_NS = 100_000_000
"""An engine counts a token up to this long after, or before, it is seen on the wire."""
OTHERS_SHARE = 0.15
"""Share of the engine's work that is not observed from which it explains a slow stage."""
CORROBORATION = 2.0
"""Surprise of a signal, in decades, from which it speaks for a cause."""
OTHERS_HOLD_NS = 3_000_000_000
"""How long others' load, once counted, may still be at work: prompts count when they are done."""
IDLE_SHARE = 0.1
"""Share of a core that a server must use before waiting for one says anything."""
NOTABLE = 1.5
"""Surprise from which a signal is worth telling."""


ENGINE_STAGES = ("ingress", "prefill", "decode", "egress", "flow")
WIRE_STAGES = ("ingress", "prefill", "egress", "flow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """One measured quantity that speaks for a family of causes when it is unusually large."""

    name: str
    family: str
    cause: str
    floor: float
    """Least deviation that matters, unit of the signal."""
    weight: float = 1.0
    """How far the signal alone tells this family from the others."""
    decisive: bool = False
    """A slow stage needs no other explanation when this signal is surprising."""
    slows: tuple[str, ...] = ENGINE_STAGES
    """Stages that it supports the suspicion of; none for a signal too common to speak for a
    fault, which only helps to rank causes."""


SIGNALS = (
    Signal(
        name="engine.stopped_share",
        family="engine",
        cause="a process of the server was stopped",
        floor=0.01,
        weight=3.0,
        decisive=True,
    ),
    Signal(
        name="engine.preemptions_per_s",
        family="engine",
        cause="the engine preempts sequences: its KV cache is full",
        floor=0.5,
    ),
    Signal(
        name="engine.restarted",
        family="engine",
        cause="the engine restarted",
        floor=0.1,
        weight=2.0,
        decisive=True,
    ),
    Signal(
        name="host.throttled_ratio",
        family="host",
        cause="a CPU quota throttles the server",
        floor=0.02,
        weight=2.5,
        decisive=True,
    ),
    Signal(
        name="host.runqueue_ratio",
        family="host",
        cause="the server's threads wait for a CPU",
        floor=0.05,
    ),
    Signal(name="host.cpu_others", family="host", cause="other programs use the CPUs", floor=0.1),
    Signal(
        name="host.cpu_steal",
        family="host",
        cause="the hypervisor takes CPU time",
        floor=0.03,
        weight=1.5,
    ),
    Signal(name="host.psi_cpu", family="host", cause="tasks wait for a CPU", floor=0.2, weight=0.6),
    Signal(
        name="host.psi_memory", family="host", cause="tasks wait for memory", floor=0.1, weight=1.2
    ),
    Signal(
        name="host.psi_io",
        family="host",
        cause="tasks wait for disks",
        floor=0.3,
        slows=(),
        weight=0.5,
    ),
    Signal(
        name="host.major_faults_per_s",
        family="host",
        cause="the server's memory is read back from disk",
        floor=20.0,
        weight=1.2,
    ),
    Signal(
        name="neighbour.log_scrape_ms",
        family="neighbour",
        cause="the server's HTTP side is busy with others: a scrape takes longer",
        floor=0.4,
        weight=0.5,
    ),
    Signal(
        name="neighbour.api_cpu_ratio",
        family="neighbour",
        cause="the server's HTTP process works for others: its CPU use outgrew the tokens",
        floor=0.08,
        weight=1.3,
    ),
    Signal(
        name="neighbour.switches_per_chunk",
        family="neighbour",
        cause="the server is woken for others: its context switches outgrew the tokens",
        floor=0.7,
        slows=(),
        weight=0.8,
    ),
    Signal(
        name="neighbour.log_network_bytes",
        family="neighbour",
        cause="the machine's traffic outgrew the tokens",
        floor=1.0,
        slows=(),
        weight=0.7,
    ),
    Signal(
        name="neighbour.uncached_share",
        family="neighbour",
        cause="prompts are no longer found in the prefix cache",
        floor=0.3,
        weight=0.8,
    ),
    Signal(
        name="workload.others_prompt_tokens",
        family="workload",
        cause="prompts of clients that are not observed fill the batch",
        floor=200.0,
        slows=(),
    ),
    Signal(
        name="workload.others_sequences",
        family="workload",
        cause="requests of clients that are not observed run beside",
        floor=1.0,
        slows=(),
    ),
    Signal(
        name="network.log_headers_ms",
        family="network",
        cause="the first byte of the answers takes longer on its way",
        floor=0.5,
        slows=(),
        weight=0.5,
    ),
    Signal(
        name="network.desynchrony",
        family="network",
        cause="tokens of one step no longer arrive together",
        floor=0.12,
        slows=("ingress", "egress"),
        weight=1.2,
    ),
    Signal(
        name="network.bunched_share",
        family="network",
        cause="tokens arrive in bunches: they were held back on their way",
        floor=0.04,
        slows=WIRE_STAGES,
        weight=1.4,
    ),
    Signal(
        name="network.transit_first_ms",
        family="network",
        cause="first tokens leave the engine in time and arrive late",
        floor=15.0,
        slows=(),
        weight=1.4,
    ),
    Signal(
        name="network.transit_gap_ms",
        family="network",
        cause="tokens leave the engine in time and arrive late",
        floor=3.0,
        slows=(),
        weight=1.4,
    ),
    Signal(
        name="network.log_rtt",
        family="network",
        cause="the round trip to the clients grew",
        floor=0.7,
        slows=WIRE_STAGES,
        weight=1.2,
    ),
    Signal(
        name="network.retransmits_per_s",
        family="network",
        cause="TCP segments are sent again",
        floor=5.0,
        slows=WIRE_STAGES,
    ),
    Signal(
        name="hardware.clock_deficit",
        family="hardware",
        cause="the accelerator runs below its clock",
        floor=0.08,
        weight=1.5,
    ),
    Signal(
        name="hardware.throttle_reasons",
        family="hardware",
        cause="the accelerator throttles itself",
        floor=0.1,
        weight=1.5,
    ),
    Signal(
        name="hardware.errors",
        family="hardware",
        cause="the accelerator reports errors, or is lost",
        floor=0.1,
        weight=2.0,
        decisive=True,
    ),
)
"""Every signal, in the order of the arrays of this module."""
BY_NAME: Mapping[str, int] = {signal.name: index for index, signal in enumerate(SIGNALS)}
IDLE_REASONS = frozenset({"gpu_idle", "idle", "none", "applications_clocks_setting"})


class Ledger:
    """What the observed connections brought, to be set against the engine's own counters.

    Remembers the newest 1,024 first tokens and 32 windows.
    """

    def __init__(self) -> None:
        self._firsts: deque[tuple[int, float, float]] = deque(maxlen=1_024)
        self._gaps: deque[tuple[int, float, int]] = deque(maxlen=32)
        self._open: deque[int] = deque(maxlen=3)
        self._pending_tokens = 0.0
        self.values: dict[str, float] = {}
        """Signals that the newest scrape gave."""
        self.share = 0.0
        """Share of the engine's work, at the newest scrape, that is not observed."""
        self.scraped_ns = 0
        self.others_ns = 0
        """Newest scrape at which others had a good part of the work; 0 for never."""

    def add(self, observation: Observation) -> None:
        """Take in one window."""
        first = observation.first_tokens
        self._firsts.extend(
            zip(
                first.at_ns.tolist(),
                first.prompt_tokens.tolist(),
                first.ttft_ms.tolist(),
                strict=True,
            )
        )
        gaps = observation.chunk_gaps_ms
        self._gaps.append((observation.end_ns, float(gaps.sum()), len(gaps)))
        here = observation.open_requests
        self._open.append(here.decoding + here.waiting + observation.requests_finished)
        self._pending_tokens = float(np.nansum(here.waiting_tokens))
        self.values = {}
        for sample in observation.engine:
            if sample.freshness == "fresh":
                self._compare(sample)

    def _compare(self, sample: EngineSample) -> None:
        self.scraped_ns = sample.observed_at_ns
        self.values = {}
        self.share = 0.0
        if sample.running is not None:
            engine = sample.running + (sample.waiting or 0.0)
            others = max(0.0, engine - max(self._open))
            self.values["workload.others_sequences"] = others
            self.share = others / engine if engine else 0.0
        if sample.interval_ns is not None:
            since_ns = sample.observed_at_ns - sample.interval_ns
            self._compare_prompts(sample, since_ns)
            if self.share < OTHERS_SHARE:
                self._compare_times(sample, since_ns)
        if self.share >= OTHERS_SHARE or self.values.get("workload.others_sequences", 0.0) >= 1:
            self.others_ns = sample.observed_at_ns

    def _compare_prompts(self, sample: EngineSample, since_ns: int) -> None:
        """At least how many prompt tokens came from others.

        The engine may have done a pending prompt already whose first token is on its way; that
        explains nothing once others were seen at work.
        """
        if sample.prompt_tokens is None:
            return
        firsts = self._first_tokens(since_ns - SCRAPE_SLACK_NS)
        own = math.fsum(tokens for _, tokens, _ in firsts)
        seen_before = self.others_ns and sample.observed_at_ns - self.others_ns <= OTHERS_HOLD_NS
        if not self.values.get("workload.others_sequences") and not seen_before:
            own += self._pending_tokens
        if math.isfinite(own):
            others = max(0.0, sample.prompt_tokens - own)
            self.values["workload.others_prompt_tokens"] = others
            if sample.prompt_tokens > 0:
                self.share = max(self.share, others / sample.prompt_tokens)

    def _compare_times(self, sample: EngineSample, since_ns: int) -> None:
        """How much longer tokens take to the observer than the engine says they took."""
        inside = {
            histogram.stage: histogram.sum / histogram.count * 1e3
            for histogram in sample.histograms
            if histogram.count > 0
        }
        ttft = [ms for _, _, ms in self._first_tokens(since_ns)]
        if "ttft" in inside and ttft:
            self.values["network.transit_first_ms"] = sum(ttft) / len(ttft) - inside["ttft"]
        recent = [(total, count) for end, total, count in self._gaps if end > since_ns]
        count = sum(count for _, count in recent)
        if "itl" in inside and count >= 8:
            mean = sum(total for total, _ in recent) / count
            self.values["network.transit_gap_ms"] = mean - inside["itl"]

    def _first_tokens(self, since_ns: int) -> list[tuple[int, float, float]]:
        return list(itertools.takewhile(lambda first: first[0] >= since_ns, reversed(self._firsts)))


class EvidenceBook:
    """Histories of all signals of one instance, ``history`` windows long."""

    def __init__(self, history: int) -> None:
        self.ledger = Ledger()
        self._calibrators = [
            TailCalibrator(history, prior_spread=2 * signal.floor, least_scale=signal.floor / 2)
            for signal in SIGNALS
        ]
        self._values = np.full(len(SIGNALS), np.nan)
        self._seen_ns = np.zeros(len(SIGNALS), np.int64)
        self._fresh = np.zeros(len(SIGNALS), bool)

    def observe(self, observation: Observation) -> Floats:
        """Measure the window; returns every signal's surprise, 0 where usual or unknown."""
        self.ledger.add(observation)
        values = self._measure(observation)
        self._fresh = np.isfinite(values)
        held = ~self._fresh & (observation.end_ns - self._seen_ns <= HOLD_NS)
        self._seen_ns[self._fresh] = observation.end_ns
        self._values = np.where(self._fresh, values, np.where(held, self._values, np.nan))
        surprise = np.zeros(len(SIGNALS))
        for index in np.flatnonzero(np.isfinite(self._values)).tolist():
            calibrator, value = self._calibrators[index], float(self._values[index])
            if len(calibrator) and calibrator.exceeds(value):
                surprise[index] = calibrator.surprise(value)
        return surprise

    @property
    def values(self) -> Floats:
        """What the newest window brought, or what still holds; NaN where nothing is known."""
        return self._values

    def fresh_values(self) -> Floats:
        """Values that the newest window brought itself, NaN elsewhere; for :meth:`learn`."""
        return np.where(self._fresh, self._values, np.nan)

    def learn(self, values: Floats) -> None:
        """Add the :meth:`fresh_values` of a window that was not a fault to the histories."""
        for index in np.flatnonzero(np.isfinite(values)).tolist():
            self._calibrators[index].learn(float(values[index]))

    def notable(self, surprise: Floats, values: Floats, *, most: int = 8) -> tuple[Evidence, ...]:
        """The most surprising signals, strongest first, with the values that surprised."""
        if surprise.max() < NOTABLE:
            return ()
        order = np.argsort(-surprise)[:most]
        return tuple(
            Evidence(
                family=SIGNALS[index].family,
                signal=SIGNALS[index].name,
                observed=float(values[index]),
                baseline=self._calibrators[index].center,
                surprise=float(surprise[index]),
            )
            for index in order.tolist()
            if surprise[index] >= NOTABLE
        )

    def histories(self) -> dict[str, Floats]:
        """Histories by signal, for a snapshot."""
        return {
            signal.name: calibrator.values()
            for signal, calibrator in zip(SIGNALS, self._calibrators, strict=True)
        }

    def restore(self, histories: Mapping[str, Floats]) -> None:
        """Take up a snapshot; signals that it doesn't know begin anew."""
        for signal, calibrator in zip(SIGNALS, self._calibrators, strict=True):
            if signal.name in histories:
                calibrator.restore(histories[signal.name])

    def _measure(self, observation: Observation) -> Floats:
        named = (
            _host_values(observation)
            | _engine_values(observation)
            | _wire_values(observation)
            | _xpu_values(observation.xpu)
            | self.ledger.values
        )
        values = np.full(len(SIGNALS), np.nan)
        for name, value in named.items():
            values[BY_NAME[name]] = value
        return values


def _host_values(observation: Observation) -> dict[str, float]:
    samples = observation.host
    seconds = sum(sample.interval_ns for sample in samples) / 1e9
    if seconds <= 0:
        return {}
    processes = [process for sample in samples for process in sample.processes]
    named: dict[str, float] = {}
    throttled = _total(sample.throttled_ns for sample in samples)
    if throttled is not None:
        named["host.throttled_ratio"] = throttled / 1e9 / seconds
    if processes:
        named["engine.stopped_share"] = sum(p.state in "Tt" for p in processes) / len(processes)
        waited = _total(process.runqueue_ns for process in processes)
        ran = _total(process.cpu_ns for process in processes)
        if waited is not None and ran is not None:
            waited = max(0.0, waited - (throttled or 0.0))
            named["host.runqueue_ratio"] = waited / (waited + ran + IDLE_SHARE * seconds * 1e9)
        api = _total(process.cpu_ns for process in processes if process.role == "api")
        if api is not None:
            named["neighbour.api_cpu_ratio"] = api / 1e9 / seconds
        faults = _total(process.major_faults for process in processes)
        if faults is not None:
            named["host.major_faults_per_s"] = faults / seconds
        switches = _total(process.voluntary_switches for process in processes)
        if switches is not None:
            named["neighbour.switches_per_chunk"] = math.log(
                (switches + 1) / (observation.chunks + 4)
            )
    for name in ("cpu_others", "cpu_steal"):
        value = _mean(getattr(sample, name) for sample in samples)
        if value is not None:
            named[f"host.{name}"] = value
    for name in ("cpu", "memory", "io"):
        pressure = _total(getattr(sample, f"psi_{name}_us") for sample in samples)
        if pressure is not None:
            named[f"host.psi_{name}"] = pressure / 1e6 / seconds
    traffic = _total(sample.net_rx_bytes for sample in samples)
    if traffic is not None:
        named["neighbour.log_network_bytes"] = math.log(
            (traffic + 1_000) / (observation.chunks + observation.requests_started + 4)
        )
    sent_again = _total(sample.tcp_retransmits for sample in samples)
    if sent_again is not None:
        named["network.retransmits_per_s"] = sent_again / seconds
    rtt = _mean(sample.tcp_rtt_us for sample in samples)
    if rtt:
        named["network.log_rtt"] = math.log(rtt)
    return named


def _engine_values(observation: Observation) -> dict[str, float]:
    fresh = [sample for sample in observation.engine if sample.freshness == "fresh"]
    if not fresh:
        return {}
    sample = fresh[-1]
    named = {
        "neighbour.log_scrape_ms": math.log(max(sample.scrape_ms, 0.1)),
        "engine.restarted": float(sample.restarted),
    }
    if sample.interval_ns and sample.preemptions is not None:
        named["engine.preemptions_per_s"] = sample.preemptions / sample.interval_ns * 1e9
    if sample.prompt_tokens and sample.cached_tokens is not None and sample.prompt_tokens >= 200:
        named["neighbour.uncached_share"] = 1 - sample.cached_tokens / sample.prompt_tokens
    return named


def _wire_values(observation: Observation) -> dict[str, float]:
    named: dict[str, float] = {}
    headers = observation.first_tokens.headers_ms
    headers = headers[np.isfinite(headers)]
    if len(headers):
        named["network.log_headers_ms"] = float(np.log(np.maximum(headers, 0.1)).min())
    gaps = observation.chunk_gaps_ms
    if len(gaps) >= 8:
        named["network.bunched_share"] = float((gaps < 0.3).mean())
    steps, streams = observation.steps, observation.open_requests.decoding
    if streams >= 2 and len(steps.end_ns) >= 4:
        together = float(steps.decode_sequences.mean()) / streams
        named["network.desynchrony"] = max(0.0, 1 - together)
    return named


def _xpu_values(samples: tuple[XpuSample, ...]) -> dict[str, float]:
    if not samples:
        return {}
    good = [sample for sample in samples if sample.error is None]
    unreadable = {sample.device for sample in samples if sample.error is not None}
    named: dict[str, float] = {}
    deficits = [
        1 - sample.core_clock_mhz / sample.core_clock_max_mhz
        for sample in good
        if sample.core_clock_mhz is not None and sample.core_clock_max_mhz
    ]
    if deficits:
        named["hardware.clock_deficit"] = max(deficits)
    reasons = [sample.throttle_reasons for sample in good if sample.throttle_reasons is not None]
    if reasons:
        named["hardware.throttle_reasons"] = float(
            max(len(set(names) - IDLE_REASONS) for names in reasons)
        )
    named["hardware.errors"] = float(
        len(unreadable)
        + sum((sample.ecc_uncorrected or 0) + (sample.xid is not None) for sample in samples)
    )
    return named


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(sum(known)) if known else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(sum(known)) / len(known) if known else None


def is_decisive(found: Evidence) -> bool:
    """Whether it shows a cause at work that needs no other explanation."""
    index = BY_NAME.get(found.signal)
    return index is not None and SIGNALS[index].decisive and found.surprise >= CORROBORATION


def rank_causes(evidence: Mapping[str, Evidence], stage: str) -> tuple[Cause, ...]:
    """Causes by family, best first; empty when nothing speaks.

    ``evidence`` is by signal; one that is none of ours counts for what it says. A family weighs
    as its strongest signal, with a little for each further one; scores sum to at most 1.
    """
    families: dict[str, list[tuple[float, Evidence]]] = {}
    for name, found in evidence.items():
        if found.surprise < NOTABLE:
            continue
        index = BY_NAME.get(name)
        weight = 1.0
        if index is not None:
            weight = SIGNALS[index].weight * stage_weight(SIGNALS[index], stage)
        families.setdefault(found.family, []).append((weight * min(found.surprise, 8.0), found))
    weighed = {
        family: max(w for w, _ in found) + 0.2 * sum(w for w, _ in found)
        for family, found in families.items()
    }
    total = sum(weighed.values()) + 1.0
    causes = []
    for family in sorted(weighed, key=lambda name: -weighed[name]):
        ranked = sorted(families[family], key=lambda pair: -pair[0])
        causes.append(
            Cause(
                family=family,
                cause=_cause(ranked[0][1].signal),
                score=weighed[family] / total,
                evidence=tuple(item for _, item in ranked),
            )
        )
    return tuple(causes)


def _cause(name: str) -> str:
    index = BY_NAME.get(name)
    return f"{name} is unusual" if index is None else SIGNALS[index].cause


def stage_weight(signal: Signal, stage: str) -> float:
    """How far a signal can explain a slow stage: the network doesn't lengthen an engine's step."""
    if signal.family == "network" and stage == "decode":
        return 0.7
    if signal.family in {"host", "hardware"} and stage in {"ingress", "egress"}:
        return 0.7
    return 1.0
