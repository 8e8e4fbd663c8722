"""Packs samples into messages under fixed bounds; pure, and deterministic for a given input."""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from latencyprism.schemas.codec import Pack
from latencyprism.schemas.records import EngineSample, HostSample, RequestTiming, StepBatch
from latencyprism.schemas.topics import Topic

MAX_KEYS = 4096
"""Pairs of topic and instance that are kept apart; samples of more are dropped and counted."""

PACK_BYTES = 600_000
"""Estimated size at which a pack is cut, well below Kafka's limit of 10^6 bytes."""

QUEUE_FULL = "queue full"
TOO_MANY_KEYS = "too many instances"


@dataclass(frozen=True, slots=True)
class Packed:
    """A pack and where it goes."""

    topic: Topic
    key: str
    pack: Pack[Any]


@dataclass(slots=True)
class _Key:
    topic: Topic
    key: str
    sequence: int = 0
    watermark_ns: int = 0
    sent_ns: int = 0


class Packer:
    """Collects samples and watermarks, and hands them out as packs, one topic and instance each.

    Holds at most ``bound`` samples; a new one then pushes out the oldest of all topics, because
    what happens now decides whether to act, and the oldest is the likeliest to come too late
    for its window. Drops are counted in ``drops`` by topic and reason. Not thread-safe.
    """

    def __init__(self, *, agent: str, boot_ns: int, bound: int, pack_samples: int) -> None:
        self.drops: Counter[tuple[str, str]] = Counter()
        self._agent = agent
        self._boot_ns = boot_ns
        self._bound = bound
        self._pack_samples = pack_samples
        self._waiting: deque[tuple[_Key, Any]] = deque()
        self._keys: dict[tuple[str, str], _Key] = {}

    def __len__(self) -> int:
        """Samples that wait to be packed."""
        return len(self._waiting)

    def offer(self, topic: Topic, key: str, sample: Any) -> None:
        """Take a sample; the caller gives the samples of a key in the order of their time."""
        state = self._state(topic, key)
        if state is None:
            self.drops[topic.name, TOO_MANY_KEYS] += 1
            return
        if len(self._waiting) >= self._bound:
            oldest, _ = self._waiting.popleft()
            self.drops[oldest.topic.name, QUEUE_FULL] += 1
        self._waiting.append((state, sample))

    def watermark(self, topic: Topic, key: str, watermark_ns: int) -> None:
        """Note that no sample of this topic and key before ``watermark_ns`` will be offered.

        The last value given stands, a smaller one too: only the source knows that its clock was
        set back.
        """
        state = self._state(topic, key)
        if state is not None:
            state.watermark_ns = watermark_ns

    def topics(self) -> set[str]:
        """Names of the topics that :meth:`drain` would give packs of."""
        waiting = {state.topic.name for state, _ in self._waiting}
        moved = (s.topic.name for s in self._keys.values() if s.watermark_ns != s.sent_ns)
        return waiting.union(moved)

    def drain(self) -> list[Packed]:
        """Everything that waits, as packs of at most ``pack_samples`` and about ``PACK_BYTES``.

        A watermark goes out with the last pack of its key, so after every sample offered before
        it; a key of which only the watermark moved gets an empty pack. Samples dropped on the
        way do not hold a watermark back.
        """
        groups: dict[tuple[str, str], tuple[_Key, list[Any]]] = {}
        for state, sample in self._waiting:
            groups.setdefault((state.topic.name, state.key), (state, []))[1].append(sample)
        self._waiting.clear()
        for identity, state in self._keys.items():
            if state.watermark_ns != state.sent_ns and identity not in groups:
                groups[identity] = (state, [])
        return [pack for state, samples in groups.values() for pack in self._packs(state, samples)]

    def _packs(self, state: _Key, samples: list[Any]) -> list[Packed]:
        chunks = list(self._chunks(samples)) or [()]
        packs = []
        for index, chunk in enumerate(chunks):
            if index == len(chunks) - 1:
                state.sent_ns = state.watermark_ns
            pack = Pack(
                agent=self._agent,
                boot_ns=self._boot_ns,
                sequence=state.sequence,
                watermark_ns=state.sent_ns,
                samples=chunk,
            )
            state.sequence += 1
            packs.append(Packed(state.topic, state.key, pack))
        return packs

    def _chunks(self, samples: list[Any]) -> Iterator[tuple[Any, ...]]:
        start = size = 0
        for index, sample in enumerate(samples):
            length = estimated_bytes(sample)
            if index - start >= self._pack_samples or (
                index > start and size + length > PACK_BYTES
            ):
                yield tuple(samples[start:index])
                start, size = index, 0
            size += length
        if samples:
            yield tuple(samples[start:])

    def _state(self, topic: Topic, key: str) -> _Key | None:
        identity = (topic.name, key)
        state = self._keys.get(identity)
        if state is None and len(self._keys) < MAX_KEYS:
            state = self._keys[identity] = _Key(topic, key)
        return state


def estimated_bytes(sample: Any) -> int:
    """Generous guess of the encoded size of a record, without encoding it."""
    match sample:
        case RequestTiming(chunk_deltas_us=deltas):
            return 500 + 5 * len(deltas)
        case HostSample(processes=processes):
            return 500 + 100 * len(processes)
        case EngineSample(histograms=histograms):
            return 500 + sum(50 + 18 * len(h.bounds) for h in histograms)
        case StepBatch(start_ns=starts):
            return 500 + 40 * len(starts)
        case _:
            return 500


@dataclass(frozen=True, slots=True)
class Message:
    """An encoded pack on its way to the broker."""

    topic: Topic
    key: str
    data: bytes
    samples: int


@dataclass(slots=True)
class Backlog:
    """Encoded messages in order, at most ``bound`` bytes of them; the oldest give way."""

    bound: int
    bytes: int = 0
    drops: Counter[tuple[str, str]] = field(default_factory=Counter)
    _messages: deque[Message] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self._messages)

    def push(self, message: Message) -> None:
        """Append a message; drops and counts the samples of the oldest ones that do not fit."""
        self._messages.append(message)
        self.bytes += len(message.data)
        while self.bytes > self.bound:
            dropped = self.pop()
            self.drops[dropped.topic.name, QUEUE_FULL] += dropped.samples

    def pop(self) -> Message:
        """Remove and return the oldest message. Raises IndexError when there is none."""
        message = self._messages.popleft()
        self.bytes -= len(message.data)
        return message

    def put_back(self, message: Message) -> None:
        """Make a message that was popped the oldest again; never drops."""
        self._messages.appendleft(message)
        self.bytes += len(message.data)
