"""Recordings → the packs that their collectors would have sent, in time order. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from latencyprism.recordings.format import Recording
from latencyprism.schemas.codec import Pack
from latencyprism.schemas.records import (
    EngineSample,
    HostSample,
    RequestTiming,
    StepBatch,
    XpuSample,
)
from latencyprism.schemas.topics import BY_NAME, TELEMETRY_REQUESTS, Topic

AGENT = "replay"
TICK_NS = 100_000_000
"""Recorded time from one watermark to the next."""
WARM_GAP_NS = 5_000_000_000
"""From the end of the last warm recording to the start of the one that counts."""
FLUSH_NS = 400_000_000
"""How far watermarks go on beyond the end: so that the last window closes, and no further, since
a request that was open at the end would seem to stand still."""

MOMENTS: dict[type[Any], tuple[str, ...]] = {
    RequestTiming: (
        "observed_at_ns",
        "arrival_ns",
        "request_end_ns",
        "first_byte_ns",
        "first_token_ns",
        "end_ns",
        "chunk_base_ns",
    ),
    StepBatch: ("observed_at_ns", "start_ns"),
    EngineSample: ("observed_at_ns",),
    HostSample: ("observed_at_ns",),
    XpuSample: ("observed_at_ns",),
}
"""Fields that hold a moment; the other ``_ns`` fields hold a length of time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """One message of the feed."""

    topic: Topic
    instance: str
    pack: Pack[Any]


def feed(
    target: Recording, *, warm: Sequence[Recording] = (), flush_ns: int = FLUSH_NS
) -> Iterator[tuple[Parcel, ...]]:
    """The recordings' packs, those of one tick of recorded time together.

    ``warm`` recordings come first, one after the other, all their times shifted so that the last
    ends ``WARM_GAP_NS`` before the target starts; the target keeps its own times. At every tick
    each topic and instance of the recording has a pack, an empty one when it said nothing, and all
    of a tick bear the same watermark. The first tick of all carries no samples: it makes every
    topic and instance known before anything is to be decided. Requests that are open at the end of
    a warm recording break off there, or they would seem to stand still for the rest; after the
    end of the target watermarks go on for ``flush_ns``.
    """
    placed = plan(target, warm)
    packer = _Packer(boot_ns=placed[0][1])
    for recording, start_ns, end_ns in placed:
        streams = {
            (name, instance): BY_NAME[name]
            for name, instances in recording.meta.streams.items()
            for instance in instances
        }
        watermark_ns = start_ns
        yield packer.parcels(streams, watermark_ns, {})
        held: dict[tuple[str, str], list[Any]] = {}
        unended: dict[str, RequestTiming] = {}
        for topic, record in shifted(recording.merged(), start_ns - recording.meta.start_ns):
            while record.observed_at_ns >= watermark_ns + TICK_NS:
                watermark_ns += TICK_NS
                yield packer.parcels(streams, watermark_ns, held)
            key = (topic.name, record.instance)
            streams.setdefault(key, topic)
            held.setdefault(key, []).append(record)
            if isinstance(record, RequestTiming):
                _follow(unended, record)
        if recording is not target:
            for part in unended.values():
                key = (TELEMETRY_REQUESTS.name, part.instance)
                held.setdefault(key, []).append(_broken_off(part, end_ns))
        last_ns = end_ns + (flush_ns if recording is target else TICK_NS)
        while watermark_ns < last_ns:
            watermark_ns += TICK_NS
            yield packer.parcels(streams, watermark_ns, held)


def _follow(unended: dict[str, RequestTiming], part: RequestTiming) -> None:
    """Keep the newest part of each request that has not ended."""
    if part.state == "open":
        unended[part.request_id] = part
    else:
        unended.pop(part.request_id, None)


def _broken_off(part: RequestTiming, end_ns: int) -> RequestTiming:
    """The last part of a request whose newest part is ``part``."""
    chunks = 0 if part.chunk_base_ns is None else len(part.chunk_deltas_us) + 1
    return replace(
        part,
        part=part.part + 1,
        state="aborted",
        observed_at_ns=end_ns,
        end_ns=end_ns,
        chunks_before=part.chunks_before + chunks,
        chunk_base_ns=None,
        chunk_deltas_us=(),
    )


class _Packer:
    """Makes packs and counts them by topic and instance."""

    def __init__(self, *, boot_ns: int) -> None:
        self._boot_ns = boot_ns
        self._made: Counter[tuple[str, str]] = Counter()

    def parcels(
        self,
        streams: Mapping[tuple[str, str], Topic],
        watermark_ns: int,
        held: dict[tuple[str, str], list[Any]],
    ) -> tuple[Parcel, ...]:
        """A pack a stream with what is held for it, which is taken out of ``held``."""
        made = []
        for key, topic in streams.items():
            pack: Pack[Any] = Pack(
                agent=AGENT,
                boot_ns=self._boot_ns,
                sequence=self._made[key],
                watermark_ns=watermark_ns,
                samples=tuple(held.pop(key, ())),
            )
            self._made[key] += 1
            made.append(Parcel(topic=topic, instance=key[1], pack=pack))
        return tuple(made)


def plan(target: Recording, warm: Sequence[Recording]) -> list[tuple[Recording, int, int]]:
    """(recording, start, end) in the time of the feed, in order; the target comes last."""
    placed = [(target, target.meta.start_ns, target.meta.end_ns)]
    for recording in reversed(warm):
        end_ns = placed[0][1] - WARM_GAP_NS
        placed.insert(
            0, (recording, end_ns - recording.meta.end_ns + recording.meta.start_ns, end_ns)
        )
    return placed


def shifted(records: Iterable[tuple[Topic, Any]], shift_ns: int) -> Iterator[tuple[Topic, Any]]:
    """The records with every moment moved by ``shift_ns``.

    Requests that are moved get ids of their own, so that a recording can be fed twice.
    """
    for topic, record in records:
        yield topic, shift(record, shift_ns) if shift_ns else record


def shift(record: Any, shift_ns: int) -> Any:
    """One record moved in time; see :func:`shifted`."""
    changes: dict[str, Any] = {
        name: _moved(getattr(record, name), shift_ns) for name in MOMENTS[type(record)]
    }
    if isinstance(record, RequestTiming):
        changes["request_id"] = f"{record.request_id}{shift_ns:+}"
    return replace(record, **changes)


def _moved(moment: int | tuple[int, ...] | None, shift_ns: int) -> int | tuple[int, ...] | None:
    if moment is None:
        return None
    if isinstance(moment, tuple):
        return tuple(one + shift_ns for one in moment)
    return moment + shift_ns
