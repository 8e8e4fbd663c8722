"""When the windows of an instance open and close: sources, watermarks and silence.

Event time is what the agents' clocks say; wall time (``now_ns``) only tells which sources have
fallen silent and, where the two are near each other, whether a clock is wrong.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from latencyprism.schemas.codec import Pack
from latencyprism.schemas.precedence import precedence
from latencyprism.streams.config import NS_PER_MS, NS_PER_S, StreamsConfig

logger = logging.getLogger(__name__)

SEQUENCES_KEPT: Final = 512
"""Sequence numbers of a source that are remembered to know a pack that comes again."""
PAUSE_NS: Final = 500 * NS_PER_MS
"""Longer between two looks, and the worker itself was away: no source is blamed for it."""
AGENTS_KEPT: Final = 64
"""Agents of which it is remembered how good their sources are."""
LOG_EVERY_NS: Final = 60 * NS_PER_S
"""A trouble that lasts is logged that often."""

Admission = Literal["taken", "duplicate", "old boot", "rival", "clock ahead", "reset"]
"""What becomes of a pack; the samples of all but ``taken`` and ``reset`` are to be left out, and
with ``reset`` everything known of the instance's requests and windows is to be forgotten first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A window that is to be closed now."""

    start_ns: int
    end_ns: int
    closed_ns: int
    """Watermark at which it is closed; never before ``end_ns``."""
    silent_sources: tuple[str, ...]
    """Sources, as topic:agent, that were silent and had not told all of this window."""


@dataclass(slots=True, kw_only=True)
class WindowCounters:
    """What was refused, repaired or skipped since the start."""

    duplicate_packs: int = 0
    old_boot_packs: int = 0
    """Packs of an agent that shares its id with one that started later."""
    rival_packs: int = 0
    """Packs of a second agent that reports an instance on the same topic."""
    clock_ahead_packs: int = 0
    resets: int = 0
    skipped_windows: int = 0


@dataclass(slots=True, kw_only=True)
class _Source:
    """One agent's reports on one topic."""

    topic: str
    agent: str
    boot_ns: int
    moved_ns: int
    """Wall time at which its watermark last moved."""
    watermark_ns: int = 0
    newest: int = -1
    """Highest sequence number seen."""
    forgotten: int = -1
    """Sequence numbers up to this one are no longer remembered."""
    seen: set[int] = field(default_factory=set)
    fell_back: bool = False
    """Whether its clock was set back, and has not caught up with the windows since."""

    @property
    def name(self) -> str:
        return f"{self.topic}:{self.agent}"

    def move(self, watermark_ns: int, now_ns: int) -> None:
        """Take a new watermark."""
        self.watermark_ns = watermark_ns
        self.moved_ns = now_ns

    def first_time(self, sequence: int) -> bool:
        """Whether a sequence number is new; remembers it."""
        if sequence <= self.forgotten or sequence in self.seen:
            return False
        self.seen.add(sequence)
        self.newest = max(self.newest, sequence)
        if len(self.seen) > 2 * SEQUENCES_KEPT:
            kept = sorted(self.seen)[-SEQUENCES_KEPT:]
            self.forgotten = kept[0] - 1
            self.seen = set(kept)
        return True


class Windows:
    """Watermark and windows of one instance.

    The watermark is that of the slowest source that is neither silent nor hopelessly late. It
    never moves back, but for a reset.
    """

    def __init__(self, instance: str, config: StreamsConfig) -> None:
        self._instance = instance
        self._config = config
        self._size_ns = config.window_ms * NS_PER_MS
        self._timeout_ns = config.source_timeout_ms * NS_PER_MS
        self._bound_ns = config.clock_bound_ms * NS_PER_MS
        self._sources: dict[str, _Source] = {}
        """By topic: one agent holds a topic at a time; one with a better source takes it over."""
        self._ranks: dict[tuple[str, str], int] = {}
        """By topic and agent: precedence of the best source seen."""
        self._watermark_ns = 0
        self._origin_ns: int | None = None
        """Earliest event seen before the first window."""
        self._next_ns: int | None = None
        """Start of the window that closes next."""
        self._asked_ns = 0
        """Start of the window before which a stretch without events was last looked for."""
        self._began_ns: int | None = None
        """Wall time of the first pack."""
        self._looked_ns: int | None = None
        self._excused = False
        """Whether an absence of the worker was already made up for since the last pack."""
        self._logged_ns: dict[str, int] = {}
        self.counters = WindowCounters()

    @property
    def closed_until_ns(self) -> int | None:
        """End of the newest window that was closed; None before the first."""
        return self._next_ns

    def admit(self, topic: str, pack: Pack[Any], now_ns: int) -> Admission:
        """Take note of a pack's source and watermark, and tell what becomes of its samples."""
        if self._began_ns is None:
            self._began_ns = now_ns
        if self._config.clock == "wall" and pack.watermark_ns > now_ns + self._bound_ns:
            self.counters.clock_ahead_packs += 1
            ahead_s = (pack.watermark_ns - now_ns) / NS_PER_S
            self._complain(
                "clock ahead",
                now_ns,
                f"the clock of agent {pack.agent} is {ahead_s:.0f} s ahead of this worker's; its "
                "packs are refused until both agree: check time synchronisation",
            )
            return "clock ahead"
        self._note_rank(topic, pack)
        held = self._sources.get(topic)
        if held is not None and not self._silent(held, now_ns):
            refusal = self._refusal(held, pack, now_ns)
            if refusal is not None:
                return refusal
        source = held
        if source is None or (source.agent, source.boot_ns) != (pack.agent, pack.boot_ns):
            source = _Source(topic=topic, agent=pack.agent, boot_ns=pack.boot_ns, moved_ns=now_ns)
            if held is not None and held.agent == pack.agent:
                source.watermark_ns = held.watermark_ns
            self._sources[topic] = source
        later = pack.sequence > source.newest
        if not source.first_time(pack.sequence):
            self.counters.duplicate_packs += 1
            return "duplicate"
        self._excused = False
        if later and 0 < pack.watermark_ns < source.watermark_ns - self._bound_ns:
            source.move(pack.watermark_ns, now_ns)
            source.fell_back = True
            if all(s.fell_back or self._silent(s, now_ns) for s in self._sources.values()):
                self._reset(pack.agent, now_ns)
                return "reset"
        elif pack.watermark_ns > source.watermark_ns:
            source.move(pack.watermark_ns, now_ns)
            if self._next_ns is not None and pack.watermark_ns >= self._next_ns - self._bound_ns:
                source.fell_back = False
        if pack.watermark_ns > 0:
            self.note_event(pack.watermark_ns)
        return "taken"

    def note_event(self, at_ns: int) -> None:
        """Take note of an event, so that the first window is early enough to hold it; a time of
        before the epoch is no time.
        """
        if self._next_ns is None and at_ns > 0:
            self._origin_ns = at_ns if self._origin_ns is None else min(self._origin_ns, at_ns)

    def look(self, now_ns: int, *, hurry: bool = False) -> None:
        """Move the watermark as the sources and, in their silence, the wall clock allow.

        ``hurry`` follows the fastest source instead of the slowest.
        """
        self._excuse(now_ns)
        self._looked_ns = now_ns
        forgotten_ns = now_ns - self._config.forget_after_s * NS_PER_S
        for source in list(self._sources.values()):
            if source.moved_ns < forgotten_ns and len(self._sources) > 1:
                del self._sources[source.topic]
        holding = self._holding(now_ns)
        if holding:
            reached_ns = max(holding) if hurry else min(holding)
        else:
            reached_ns = max((self._alone(s, now_ns) for s in self._sources.values()), default=0)
        self._watermark_ns = max(self._watermark_ns, reached_ns)

    def due(self, now_ns: int, oldest_event: Callable[[], int | None]) -> Window | None:
        """The next window to close, None when its time has not come; to be called after
        :meth:`look` until there is none.

        A stretch without events that is longer than ``catch_up_ms`` is skipped; ``oldest_event``
        tells the time of the oldest event that waits for its window.
        """
        if self._began_ns is None or not self._watermark_ns:
            return None
        if self._next_ns is None:
            if now_ns - self._began_ns < self._config.settle_ms * NS_PER_MS:
                return None
            origin_ns = self._watermark_ns if self._origin_ns is None else self._origin_ns
            self._next_ns = self._floor(min(origin_ns, self._watermark_ns))
        complete_ns = self._watermark_ns - self._config.grace_ms * NS_PER_MS
        self._next_ns = start_ns = self._skip(self._next_ns, complete_ns, oldest_event)
        end_ns = start_ns + self._size_ns
        if end_ns > complete_ns:
            return None
        self._next_ns = end_ns
        return Window(
            start_ns=start_ns,
            end_ns=end_ns,
            closed_ns=self._watermark_ns,
            silent_sources=tuple(
                sorted(
                    source.name
                    for source in self._sources.values()
                    if self._silent(source, now_ns) and source.watermark_ns < end_ns
                )
            ),
        )

    def forgettable(self, now_ns: int) -> bool:
        """Whether every source has been silent for so long that nothing needs to be kept."""
        return bool(self._sources) and all(
            now_ns - source.moved_ns > self._config.forget_after_s * NS_PER_S
            for source in self._sources.values()
        )

    def _refusal(self, held: _Source, pack: Pack[Any], now_ns: int) -> Admission | None:
        """Why a pack is not of the source that holds its topic; None when it is or may follow."""
        if held.agent != pack.agent:
            other = self._ranks.get((held.topic, pack.agent))
            mine = self._ranks.get((held.topic, held.agent))
            if other is not None and mine is not None and other < mine:
                return None
            self.counters.rival_packs += 1
            if other is None or mine is None or other == mine:
                self._complain(
                    "rival",
                    now_ns,
                    f"{held.topic} comes from two agents, {held.agent} and {pack.agent}; only the "
                    "first is read until it falls silent: let one of them not watch this instance",
                )
            return "rival"
        if pack.boot_ns < held.boot_ns:
            self.counters.old_boot_packs += 1
            self._complain(
                "old boot",
                now_ns,
                f"two agents are both called {pack.agent}; the one started later is read: give "
                "each an id of its own",
            )
            return "old boot"
        return None

    def _note_rank(self, topic: str, pack: Pack[Any]) -> None:
        """Take note of how good the sources of a pack's agent are."""
        rank = min((precedence(sample.source) for sample in pack.samples), default=None)
        if rank is None:
            return
        if len(self._ranks) >= AGENTS_KEPT:
            self._ranks.clear()
        key = topic, pack.agent
        self._ranks[key] = min(rank, self._ranks.get(key, rank))

    def _holding(self, now_ns: int) -> list[int]:
        """Watermarks that windows wait for: of sources that are neither silent nor so far behind
        that all they tell comes too late.
        """
        live = [
            source.watermark_ns
            for source in self._sources.values()
            if not source.fell_back and not self._silent(source, now_ns)
        ]
        reached_ns = self._next_ns or 0
        if self._config.clock == "wall":
            reached_ns = max(reached_ns, *live, 0)
        return [watermark for watermark in live if watermark >= reached_ns - self._bound_ns]

    def _silent(self, source: _Source, now_ns: int) -> bool:
        return now_ns - source.moved_ns > self._timeout_ns

    def _alone(self, source: _Source, now_ns: int) -> int:
        """How far a silent source's clock has come by now, as far as windows may go on without
        it.
        """
        if self._config.clock == "event":
            return source.watermark_ns
        alone_ns = min(
            now_ns - source.moved_ns, self._timeout_ns + self._config.silence_s * NS_PER_S
        )
        return source.watermark_ns + alone_ns if source.watermark_ns else 0

    def _reset(self, agent: str, now_ns: int) -> None:
        """Begin anew at the time of the sources whose clocks were set back."""
        self.counters.resets += 1
        self._complain(
            "reset",
            now_ns,
            f"the clock of agent {agent} was set back by more than "
            f"{self._config.clock_bound_ms / 1_000:.0f} s; its requests and windows begin anew",
        )
        self._sources = {topic: s for topic, s in self._sources.items() if s.fell_back}
        for source in self._sources.values():
            source.fell_back = False
        self._watermark_ns = self._asked_ns = 0
        self._next_ns = None
        self._origin_ns = min(source.watermark_ns for source in self._sources.values())
        self._began_ns = now_ns

    def _skip(self, start_ns: int, complete_ns: int, oldest_event: Callable[[], int | None]) -> int:
        """Start of the next window beyond a long stretch without events, if there is one here;
        looked for once in ``catch_up_ms`` of event time, since asking costs.
        """
        catch_up_ns = self._config.catch_up_ms * NS_PER_MS
        if min(complete_ns - start_ns, start_ns - self._asked_ns) <= catch_up_ns:
            return start_ns
        self._asked_ns = start_ns
        event_ns = oldest_event()
        until_ns = complete_ns if event_ns is None else min(event_ns, complete_ns)
        if until_ns - start_ns <= catch_up_ns:
            return start_ns
        beyond_ns = self._floor(until_ns)
        self.counters.skipped_windows += (beyond_ns - start_ns) // self._size_ns
        return beyond_ns

    def _excuse(self, now_ns: int) -> None:
        """Do not take an absence of this worker for silence of its sources; once until the next
        pack, so that real silence is seen even by a worker that looks rarely.
        """
        if self._looked_ns is None or self._excused:
            return
        absent_ns = now_ns - self._looked_ns - PAUSE_NS
        if absent_ns > 0:
            self._excused = True
            for source in self._sources.values():
                source.moved_ns = min(now_ns, source.moved_ns + absent_ns)

    def _floor(self, at_ns: int) -> int:
        return at_ns - at_ns % self._size_ns

    def _complain(self, kind: Admission, now_ns: int, trouble: str) -> None:
        """Log a trouble of this instance, each kind once a minute."""
        if now_ns - self._logged_ns.get(kind, now_ns - LOG_EVERY_NS) >= LOG_EVERY_NS:
            self._logged_ns[kind] = now_ns
            logger.warning("%s: %s", self._instance, trouble)
