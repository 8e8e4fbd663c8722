"""Engine iterations recovered from the times at which streams emit.

Under continuous batching every running stream gets one token out of every iteration, so the
streams of one iteration emit together. An iteration ends when its first stream emits: what follows
is the server writing the others out, one after the other.
"""

from dataclasses import fields
from typing import Final

import numpy as np

from latencyprism.schemas.records import StepBatch
from latencyprism.streams.config import NS_PER_MS
from latencyprism.streams.observation import Bools, Floats, Ints, Steps
from latencyprism.streams.tracking import LATEST_NS, Chunks, Occupancy

GAPS_KEPT: Final = 256
"""Gaps between events of one stream that tell how long a step takes at the moment."""
PAUSE_SHARE: Final = 0.7
"""Events further apart than this share of a step's usual time are of two steps."""
BURST_SHARE: Final = 0.1
"""Events of one stream closer than this share of a step's usual time are of one step: several
tokens of one iteration, or bytes that were held up and came together."""
COALESCED_MS: Final = 0.5
"""Shorter gaps of a stream are never steps of their own, whatever is usual."""
UNKNOWN_MS: Final = 2.0
"""What a step is taken to last before any gap is known: longer than writing one out takes."""


class StepRecovery:
    """Finds the steps of one instance, window by window.

    Events that may belong to a step that goes on after the window wait for the next one; the step
    is reported in the window in which it is known to be over.
    """

    def __init__(self) -> None:
        self._held = Chunks.empty()
        self._gaps_ms: Floats = np.empty(0)
        self._last_first_ns: int | None = None
        """First event of the newest step that was reported."""
        self._last_out_ns = 0
        """Its last event."""

    def recover(
        self, chunks: Chunks, chunk_gaps_ms: Floats, occupancy: Occupancy, end_ns: int
    ) -> Steps:
        """Steps that are over by the end of the window.

        Events from before the end of a step that was reported came late and are left out.
        """
        events = Chunks.joined(self._held, chunks)
        if self._last_first_ns is not None and len(events):
            events = events[events.at_ns > self._last_out_ns]
        usual_ms = self._usual(chunk_gaps_ms)
        pause_ns = int(PAUSE_SHARE * usual_ms * NS_PER_MS)
        if not len(events):
            self._held = events
            return Steps()
        burst_ns = int(max(BURST_SHARE * usual_ms, COALESCED_MS) * NS_PER_MS)
        heads = np.flatnonzero(step_starts(events.at_ns, events.serial, pause_ns, burst_ns))
        if end_ns - int(events.at_ns[-1]) <= pause_ns:
            self._held = events[int(heads[-1]) :]
            events, heads = events[: int(heads[-1])], heads[:-1]
        else:
            self._held = Chunks.empty()
        return self._report(events, heads, occupancy) if len(heads) else Steps()

    def forget(self) -> None:
        """Begin anew, as after an interruption."""
        self._held = Chunks.empty()
        self._last_first_ns = None

    def _usual(self, chunk_gaps_ms: Floats) -> float:
        """Usual time of a step, ms: a low quartile, so that a change to shorter steps is
        followed at once.
        """
        told = chunk_gaps_ms[chunk_gaps_ms > COALESCED_MS]
        self._gaps_ms = np.concatenate((self._gaps_ms, told))[-GAPS_KEPT:]
        if not len(self._gaps_ms):
            return UNKNOWN_MS
        return float(np.quantile(self._gaps_ms, 0.25))

    def _report(self, events: Chunks, heads: Ints, occupancy: Occupancy) -> Steps:
        count = len(heads)
        tails = np.append(heads[1:], len(events)) - 1
        end_ns, out_ns = events.at_ns[heads], events.at_ns[tails]
        step = np.repeat(np.arange(count), tails - heads + 1)
        by_stream = np.lexsort((events.serial, step))
        step, events = step[by_stream], events[by_stream]
        changed = (np.diff(step) > 0) | (np.diff(events.serial) != 0)
        first, last = np.append(True, changed), np.append(changed, True)
        joined = events.ordinal[first] == 0
        of_step = step[first]
        streams = events[last]
        going_on = ~joined
        joined_of_step = np.bincount(of_step[joined], minlength=count)
        left_of_step = np.bincount(of_step[streams.final], minlength=count)
        emitted = np.bincount(of_step, minlength=count)
        running = np.maximum(occupancy.decoding_at(out_ns) + left_of_step, emitted)
        context = streams.prompt_tokens + streams.ordinal
        steps = Steps(
            end_ns=end_ns,
            duration_ms=self._durations(end_ns, out_ns, occupancy),
            decode_sequences=running - joined_of_step,
            joined=joined_of_step,
            left=left_of_step,
            prefill_tokens=_sums(of_step[joined], streams.prefill_tokens[joined], count),
            context_tokens=_sums(of_step[going_on], context[going_on], count),
            waiting=occupancy.waiting_at(out_ns),
        )
        known = slice(0, None) if self._last_first_ns is not None else slice(1, None)
        self._last_first_ns = int(end_ns[-1])
        self._last_out_ns = int(out_ns[-1])
        return _part(steps, known)

    def _durations(self, end_ns: Ints, out_ns: Ints, occupancy: Occupancy) -> Floats:
        """From the end of the step before, or from the request that woke an idle engine, ms."""
        before_ns = np.append(self._last_first_ns or end_ns[0], end_ns[:-1])
        before_out_ns = np.append(self._last_out_ns, out_ns[:-1])
        woken_ns = occupancy.next_ready(before_out_ns)
        idle = (occupancy.open_at(before_out_ns) == 0) & (woken_ns < end_ns)
        return (end_ns - np.where(idle, woken_ns, before_ns)) / NS_PER_MS


def step_starts(at_ns: Ints, serial: Ints, pause_ns: int, burst_ns: int) -> Bools:
    """Which events, in order of time, are the first of a step.

    A step begins after a pause longer than ``pause_ns``. One must also have begun between two
    events of one stream, unless they are within ``burst_ns``: at the longest pause between them.
    """
    starts = np.empty(len(at_ns), np.bool_)
    pauses = np.diff(at_ns, prepend=at_ns[:1])
    starts[:1] = True
    starts[1:] = pauses[1:] > pause_ns
    position = np.arange(len(at_ns))
    by_stream = np.lexsort((position, serial))
    before = np.full(len(at_ns), -1)
    same = serial[by_stream][1:] == serial[by_stream][:-1]
    before[by_stream[1:][same]] = by_stream[:-1][same]
    again = (before >= 0) & (at_ns - at_ns[before] > burst_ns)
    start_of = np.maximum.accumulate(np.where(starts, position, 0))
    unseparated = np.flatnonzero(again & (before >= start_of))
    newest = 0
    for event, earlier in zip(unseparated.tolist(), before[unseparated].tolist(), strict=True):
        if earlier >= newest:
            newest = earlier + 1 + int(pauses[earlier + 1 : event + 1].argmax())
            starts[newest] = True
    return starts


class GivenSteps:
    """Steps that the engine's own frames told, at most ``bound`` of them that wait for their
    window; more are dropped and counted.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._waiting: set[tuple[int, ...]] = set()
        """Rows of a batch, each with the end of its step in front."""
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, batch: StepBatch) -> bool:
        """Take a batch; False when it told nothing new. Steps that lack a value or whose time is
        none are left out.
        """
        before = len(self._waiting)
        for row in zip(
            batch.start_ns,
            batch.duration_us,
            batch.decode_sequences,
            batch.joined,
            batch.left,
            batch.prefill_tokens,
            batch.context_tokens,
            strict=False,
        ):
            end_ns = row[0] + 1_000 * row[1]
            if not 0 <= row[0] <= end_ns < LATEST_NS:
                continue
            if len(self._waiting) < self._bound:
                self._waiting.add((end_ns, *row))
            else:
                self.dropped += 1
        return len(self._waiting) > before

    def take(self, before_ns: int, occupancy: Occupancy) -> Steps:
        """Remove and return the steps that ended before that time, oldest first."""
        rows = sorted(row for row in self._waiting if row[0] < before_ns)
        if not rows:
            return Steps()
        self._waiting.difference_update(rows)
        end_ns, _, duration_us, *counts = np.array(rows, np.int64).T
        decode_sequences, joined, left, prefill_tokens, context_tokens = counts
        return Steps(
            end_ns=end_ns,
            duration_ms=duration_us / 1_000,
            decode_sequences=decode_sequences,
            joined=joined,
            left=left,
            prefill_tokens=np.where(prefill_tokens < 0, np.nan, prefill_tokens),
            context_tokens=np.where(context_tokens < 0, np.nan, context_tokens),
            waiting=occupancy.waiting_at(end_ns),
        )

    def oldest_ns(self) -> int | None:
        """End of the oldest step; None when none waits."""
        return min((row[0] for row in self._waiting), default=None)

    def forget(self) -> None:
        """Drop all."""
        self._waiting.clear()


def _sums(of_step: Ints, values: Floats, count: int) -> Floats:
    sums: Floats = np.zeros(count)
    np.add.at(sums, of_step, values)
    return sums


def _part(steps: Steps, part: slice) -> Steps:
    return Steps(**{field.name: getattr(steps, field.name)[part] for field in fields(Steps)})
