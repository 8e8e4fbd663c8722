"""A continuous-batching inference engine as a pure state machine: time and chance are passed in.

Whoever drives it (virtual time in :mod:`.run`, a clock in :mod:`.server`) calls
:meth:`Engine.begin`, lets time pass until the step ends, and calls :meth:`Engine.complete`.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from latencyprism.simulator.config import EngineConfig
from latencyprism.simulator.faults import NS_PER_MS, Fault, FaultKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as the engine sees it; no text, only lengths."""

    request_id: str
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    """Tokens it will generate; it always does."""
    blocks: tuple[int, ...] = ()
    """Hashes of its leading prompt blocks, each of them covering all before it; requests that
    share a prefix share them. Blocks beyond the prompt are ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Truth about one engine step."""

    start_ns: int
    end_ns: int
    decode_sequences: int
    prefill_sequences: int
    prefill_tokens: int
    """Prompt tokens computed, cached ones not counted."""
    context_tokens: int
    """Context of the decoding sequences together."""
    running: int
    waiting: int
    preempted: int
    ideal_ms: float
    """What it would have taken without noise, spike and fault."""
    faults: tuple[FaultKind, ...]
    """Faults in force when it began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One generated token, at the end of its step."""

    request_id: str
    index: int
    """Counts the request's tokens from 0."""
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Where the time of one finished request went, as the engine knows it."""

    request: Request
    cached_tokens: int
    scheduled_ns: int
    first_token_ns: int
    finished_ns: int
    preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """What one step brought out."""

    step: Step
    tokens: tuple[Token, ...]
    first_tokens_ms: tuple[float, ...]
    """Time to first token of every request whose first one came out of it."""
    served: tuple[Served, ...]
    """Requests that ended with it."""
    gaps_ms: tuple[float, ...]
    """Time since the token before, one for every token that is not a request's first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """What the engine says about itself at one moment."""

    running: int
    waiting: int
    kv_usage: float


@dataclass(slots=True, kw_only=True, eq=False)
class _Sequence:
    request: Request
    cached: int = 0
    computed: int = 0
    generated: int = 0
    scheduled_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int = 0
    preemptions: int = 0

    @property
    def length(self) -> int:
        return self.request.prompt_tokens + self.generated

    @property
    def decoding(self) -> bool:
        return self.generated > 0 and self.computed == self.length - 1


@dataclass(slots=True, kw_only=True)
class Totals:
    """Counters that only grow."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    preemptions: int = 0
    steps: int = 0


class TooLongError(ValueError):
    """A request that can never be served."""


@dataclass(slots=True, kw_only=True)
class Engine:
    """First come, first served; decodes before prefills; prefills in chunks.

    Holds at most what was submitted; the prefix cache holds at most ``kv_tokens`` of blocks.
    Not thread-safe.
    """

    config: EngineConfig
    rng: np.random.Generator
    faults: list[Fault] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    _waiting: deque[_Sequence] = field(default_factory=deque, init=False)
    _running: list[_Sequence] = field(default_factory=list, init=False)
    _plan: list[tuple[_Sequence, int]] = field(default_factory=list, init=False)
    _step: Step | None = field(default=None, init=False)
    _kv_used: int = field(default=0, init=False)
    _blocks: OrderedDict[int, None] = field(default_factory=OrderedDict, init=False)
    _log_noise: float = field(default=0.0, init=False)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._waiting or self._running)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises :class:`TooLongError` for one that does not fit."""
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise TooLongError(
                f"{request.prompt_tokens} prompt and {request.output_tokens} output tokens: "
                "there must be one of each at least"
            )
        length = request.prompt_tokens + request.output_tokens
        if length > self.config.max_model_len:
            raise TooLongError(
                f"{request.prompt_tokens} prompt and {request.output_tokens} output tokens are "
                f"{length} together, this model takes {self.config.max_model_len}"
            )
        self.totals.requests += 1
        self._waiting.append(_Sequence(request=request))

    def abort(self, request_id: str) -> bool:
        """Forget a request that is not finished; False if there is none."""
        for queue in (self._running, self._waiting):
            for sequence in queue:
                if sequence.request.request_id == request_id:
                    queue.remove(sequence)
                    if queue is self._running:
                        self._kv_used -= sequence.computed
                    self._plan = [item for item in self._plan if item[0] is not sequence]
                    self.totals.aborted += 1
                    return True
        return False

    def reset_prefix_cache(self) -> None:
        """Forget every cached block; running sequences keep what they have."""
        self._blocks.clear()

    def active_faults(self, now_ns: int) -> tuple[Fault, ...]:
        """Faults in force now; those that are over are forgotten."""
        if self.faults:
            self.faults = [fault for fault in self.faults if fault.until_ns > now_ns]
        return tuple(fault for fault in self.faults if fault.active(now_ns))

    def hung_until_ns(self, now_ns: int) -> int | None:
        """When the hang in force now ends; None without one."""
        ends = [fault.until_ns for fault in self.active_faults(now_ns) if fault.kind == "hang"]
        return max(ends, default=None)

    def output_delay_ns(self, now_ns: int) -> int:
        """How long a chunk that leaves now is held back."""
        delays = (f.value for f in self.active_faults(now_ns) if f.kind == "network_delay")
        return round(sum(delays) * NS_PER_MS)

    def gauges(self, now_ns: int) -> Gauges:
        """What it says about itself; a hung engine says that it is idle."""
        if self.hung_until_ns(now_ns) is not None:
            return Gauges(running=0, waiting=0, kv_usage=0.0)
        return Gauges(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_usage=self._kv_used / self.config.kv_tokens,
        )

    def begin(self, now_ns: int) -> Step | None:
        """Schedule the next step; None while there is nothing to do or the engine hangs."""
        assert self._step is None, "the step before was not completed"
        if self.idle or self.hung_until_ns(now_ns) is not None:
            return None
        self._plan, preempted = self._schedule(now_ns)
        decoding = [sequence for sequence, _ in self._plan if sequence.decoding]
        prefill = sum(tokens for sequence, tokens in self._plan if not sequence.decoding)
        context = sum(sequence.length for sequence in decoding)
        cost = self.config.coefficients
        decode_ms = (
            cost.base_ms
            + cost.per_sequence_ms * len(decoding)
            + cost.per_context_token_ms * context
        )
        prefill_ms = cost.per_prefill_token_ms * prefill
        faults = self.active_faults(now_ns)
        self._step = Step(
            start_ns=now_ns,
            end_ns=self._end_ns(now_ns, decode_ms, prefill_ms, faults),
            decode_sequences=len(decoding),
            prefill_sequences=len(self._plan) - len(decoding),
            prefill_tokens=prefill,
            context_tokens=context,
            running=len(self._running),
            waiting=len(self._waiting),
            preempted=preempted,
            ideal_ms=decode_ms + prefill_ms,
            faults=tuple(fault.kind for fault in faults),
        )
        return self._step

    def complete(self) -> Completed:
        """End the step that was begun: its tokens come out at ``step.end_ns``."""
        step = self._step
        assert step is not None, "no step was begun"
        now_ns = step.end_ns
        tokens: list[Token] = []
        served: list[Served] = []
        gaps: list[float] = []
        first: list[float] = []
        for sequence, computed in self._plan:
            sequence.computed += computed
            self._kv_used += computed
            if sequence.computed < sequence.length:
                continue
            if sequence.generated:
                gaps.append((now_ns - sequence.last_token_ns) / NS_PER_MS)
            else:
                first.append((now_ns - sequence.request.arrival_ns) / NS_PER_MS)
                sequence.first_token_ns = now_ns
                self._cache(sequence)
                self.totals.prompt_tokens += sequence.request.prompt_tokens
                self.totals.cached_tokens += sequence.cached
            last = sequence.generated + 1 == sequence.request.output_tokens
            tokens.append(
                Token(request_id=sequence.request.request_id, index=sequence.generated, last=last)
            )
            sequence.generated += 1
            sequence.last_token_ns = now_ns
            if last:
                served.append(self._retire(sequence, now_ns))
        self.totals.generated_tokens += len(tokens)
        self.totals.steps += 1
        self._plan, self._step = [], None
        return Completed(
            step=step,
            tokens=tuple(tokens),
            first_tokens_ms=tuple(first),
            served=tuple(served),
            gaps_ms=tuple(gaps),
        )

    def _schedule(self, now_ns: int) -> tuple[list[tuple[_Sequence, int]], int]:
        """Who computes how many tokens in this step, and how many were preempted for it."""
        budget = self.config.max_batched_tokens
        free = self.config.kv_tokens - self._kv_used
        plan: list[tuple[_Sequence, int]] = []
        preempted = 0
        position = 0
        while position < len(self._running) and budget:
            sequence = self._running[position]
            tokens = min(sequence.length - sequence.computed, budget)
            while tokens > free and len(self._running) > position + 1:
                free += self._preempt(self._running.pop())
                preempted += 1
            tokens = min(tokens, free)
            if tokens:
                plan.append((sequence, tokens))
            budget -= tokens
            free -= tokens
            position += 1
        while (
            self._waiting
            and budget
            and not preempted
            and len(self._running) < self.config.max_num_seqs
        ):
            sequence = self._waiting[0]
            cached = self._cached_tokens(sequence)
            tokens = min(sequence.length - cached, budget)
            if cached + tokens > free:
                break
            self._waiting.popleft()
            self._running.append(sequence)
            sequence.computed = cached
            self._kv_used += cached
            if sequence.scheduled_ns is None:
                sequence.scheduled_ns, sequence.cached = now_ns, cached
            plan.append((sequence, tokens))
            budget -= tokens
            free -= cached + tokens
        return plan, preempted

    def _preempt(self, sequence: _Sequence) -> int:
        """Put a sequence back to the head of the queue; returns the KV tokens it frees."""
        freed, sequence.computed = sequence.computed, 0
        self._kv_used -= freed
        sequence.preemptions += 1
        self.totals.preemptions += 1
        self._waiting.appendleft(sequence)
        return freed

    def _cached_tokens(self, sequence: _Sequence) -> int:
        """Leading tokens found in the prefix cache; the last prompt token is always computed."""
        size = self.config.block_tokens
        whole = (sequence.request.prompt_tokens - 1) // size
        hits = 0
        for block in sequence.request.blocks[:whole]:
            if block not in self._blocks:
                break
            self._blocks.move_to_end(block)
            hits += 1
        return hits * size

    def _cache(self, sequence: _Sequence) -> None:
        whole = sequence.request.prompt_tokens // self.config.block_tokens
        for block in sequence.request.blocks[:whole]:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self.config.kv_tokens // self.config.block_tokens:
            self._blocks.popitem(last=False)

    def _retire(self, sequence: _Sequence, now_ns: int) -> Served:
        assert sequence.scheduled_ns is not None
        assert sequence.first_token_ns is not None
        self._running.remove(sequence)
        self._kv_used -= sequence.computed
        self.totals.finished += 1
        return Served(
            request=sequence.request,
            cached_tokens=sequence.cached,
            scheduled_ns=sequence.scheduled_ns,
            first_token_ns=sequence.first_token_ns,
            finished_ns=now_ns,
            preemptions=sequence.preemptions,
        )

    def _end_ns(
        self, now_ns: int, decode_ms: float, prefill_ms: float, faults: Iterable[Fault]
    ) -> int:
        cost = self.config.coefficients
        self._log_noise = cost.noise_memory * self._log_noise + cost.noise_sigma * math.sqrt(
            1 - cost.noise_memory**2
        ) * float(self.rng.standard_normal())
        factor, added_ms = math.exp(self._log_noise), 0.0
        if self.rng.random() < cost.spike_share:
            added_ms += cost.spike_ms * float(self.rng.standard_exponential())
        pauses: list[Fault] = []
        for fault in faults:
            match fault.kind:
                case "slowdown":
                    factor *= fault.value
                case "prefill_slowdown":
                    prefill_ms *= fault.value
                case "added":
                    added_ms += fault.value
                case "pause":
                    pauses.append(fault)
        work_ns = max(1, round(((decode_ms + prefill_ms) * factor + added_ms) * NS_PER_MS))
        end_ns = now_ns + work_ns
        for fault in pauses:
            end_ns = fault.through_pauses(now_ns, end_ns - now_ns)
        return end_ns


def rng(seed: int) -> np.random.Generator:
    """A generator of its own for one engine; the same seed gives the same noise."""
    return np.random.default_rng(seed)
