from collections import Counter, defaultdict
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from latencyprism.collectors import packing
from latencyprism.collectors.packing import Backlog, Message, Packer, estimated_bytes
from latencyprism.schemas.records import EngineSample, HostSample, ProcessSample, RequestTiming
from latencyprism.schemas.topics import (
    TELEMETRY_ENGINE,
    TELEMETRY_HOST,
    TELEMETRY_REQUESTS,
    Topic,
)


@dataclass(frozen=True)
class Numbered:
    """A sample that only the packer sees."""

    number: int


def packer(bound: int = 100, pack_samples: int = 10) -> Packer:
    return Packer(agent="a", boot_ns=7, bound=bound, pack_samples=pack_samples)


def test_samples_of_one_key_share_a_pack_and_keys_do_not_mix() -> None:
    packs = packer()
    packs.offer(TELEMETRY_HOST, "x:1", Numbered(0))
    packs.offer(TELEMETRY_ENGINE, "x:1", Numbered(1))
    packs.offer(TELEMETRY_HOST, "y:2", Numbered(2))
    packs.offer(TELEMETRY_HOST, "x:1", Numbered(3))

    drained = packs.drain()

    assert [
        (p.topic.name, p.key, p.pack.sequence, [s.number for s in p.pack.samples]) for p in drained
    ] == [
        ("telemetry.host", "x:1", 0, [0, 3]),
        ("telemetry.engine", "x:1", 0, [1]),
        ("telemetry.host", "y:2", 0, [2]),
    ]
    assert all((p.pack.agent, p.pack.boot_ns) == ("a", 7) for p in drained)
    assert packs.drain() == []


def test_only_a_moved_watermark_makes_an_empty_pack() -> None:
    packs = packer()
    packs.watermark(TELEMETRY_HOST, "x:1", 50)

    (first,) = packs.drain()
    packs.watermark(TELEMETRY_HOST, "x:1", 50)

    assert (first.pack.watermark_ns, first.pack.samples) == (50, ())
    assert packs.drain() == []


def test_watermark_goes_with_the_last_pack_of_its_key() -> None:
    packs = packer(pack_samples=2)
    packs.watermark(TELEMETRY_HOST, "x:1", 10)
    packs.drain()
    for number in range(5):
        packs.offer(TELEMETRY_HOST, "x:1", Numbered(number))
    packs.watermark(TELEMETRY_HOST, "x:1", 20)

    drained = [p.pack for p in packs.drain()]

    assert [p.watermark_ns for p in drained] == [10, 10, 20]
    assert [p.sequence for p in drained] == [1, 2, 3]
    assert [len(p.samples) for p in drained] == [2, 2, 1]


def test_oldest_sample_of_all_gives_way_and_is_counted_by_its_topic() -> None:
    packs = packer(bound=2)
    packs.offer(TELEMETRY_ENGINE, "x:1", Numbered(0))
    packs.offer(TELEMETRY_HOST, "x:1", Numbered(1))
    packs.offer(TELEMETRY_HOST, "x:1", Numbered(2))
    packs.watermark(TELEMETRY_ENGINE, "x:1", 9)

    drained = {p.topic.name: p.pack for p in packs.drain()}

    assert packs.drops == {("telemetry.engine", "queue full"): 1}
    assert [s.number for s in drained["telemetry.host"].samples] == [1, 2]
    assert drained["telemetry.engine"].watermark_ns == 9
    assert drained["telemetry.engine"].samples == ()


def test_keys_are_bounded(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(packing, "MAX_KEYS", 2)
    packs = packer()
    for key in ("a:1", "b:1", "c:1"):
        packs.offer(TELEMETRY_HOST, key, Numbered(0))
        packs.watermark(TELEMETRY_HOST, key, 5)

    assert [p.key for p in packs.drain()] == ["a:1", "b:1"]
    assert packs.drops == {("telemetry.host", "too many instances"): 1}


def test_large_samples_are_spread_over_packs() -> None:
    def timing(chunks: int) -> RequestTiming:
        return RequestTiming(
            request_id="r",
            part=0,
            state="open",
            instance="x:1",
            source="network",
            observed_at_ns=0,
            endpoint="/",
            arrival_ns=0,
            chunks_before=0,
            chunk_deltas_us=(1,) * chunks,
        )

    packs = packer()
    for _ in range(4):
        packs.offer(TELEMETRY_REQUESTS, "x:1", timing(60_000))

    assert [len(p.pack.samples) for p in packs.drain()] == [1, 1, 1, 1]
    assert estimated_bytes(timing(0)) < estimated_bytes(timing(10))


def test_estimate_grows_with_the_lists_of_a_record() -> None:
    process = ProcessSample(pid=1, role="core", state="R")
    host = HostSample(
        instance="x:1", source="host", observed_at_ns=0, host="h", interval_ns=1, processes=()
    )
    many = HostSample(
        instance="x:1",
        source="host",
        observed_at_ns=0,
        host="h",
        interval_ns=1,
        processes=(process,) * 10,
    )
    engine = EngineSample(
        instance="x:1",
        source="engine",
        observed_at_ns=0,
        freshness="fresh",
        scrape_ms=1.0,
        restarted=False,
    )

    assert estimated_bytes(many) == estimated_bytes(host) + 1000
    assert estimated_bytes(engine) == 500


KEYS = st.sampled_from(["x:1", "y:2"])
TOPICS = st.sampled_from([TELEMETRY_HOST, TELEMETRY_ENGINE])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("sample"), TOPICS, KEYS),
        st.tuples(st.just("watermark"), TOPICS, KEYS),
        st.tuples(st.just("drain"), TOPICS, KEYS),
    ),
    max_size=80,
)


@given(steps=STEPS, bound=st.integers(1, 8), pack_samples=st.integers(1, 4))
def test_nothing_is_lost_uncounted_and_no_watermark_passes_a_sample(
    steps: list[tuple[str, Topic, str]], bound: int, pack_samples: int
) -> None:
    packs = packer(bound, pack_samples)
    offered: dict[tuple[str, str], list[int]] = defaultdict(list)
    marks: dict[tuple[str, str], int] = {}
    seen: dict[tuple[str, str], list[int]] = defaultdict(list)
    sequences: dict[tuple[str, str], list[int]] = defaultdict(list)
    last_mark: dict[tuple[str, str], int] = Counter()

    def drain() -> None:
        for packed in packs.drain():
            identity = (packed.topic.name, packed.key)
            sequences[identity].append(packed.pack.sequence)
            assert len(packed.pack.samples) <= pack_samples
            for sample in packed.pack.samples:
                # Sample n was offered when the watermark promised nothing beyond n.
                assert sample.number >= last_mark[identity]
                seen[identity].append(sample.number)
            assert packed.pack.watermark_ns >= last_mark[identity]
            last_mark[identity] = packed.pack.watermark_ns

    for clock, (verb, topic, key) in enumerate(steps, start=1):
        identity = (topic.name, key)
        if verb == "sample":
            packs.offer(topic, key, Numbered(clock))
            offered[identity].append(clock)
        elif verb == "watermark":
            packs.watermark(topic, key, clock)
            marks[identity] = clock
        else:
            drain()
        assert len(packs) <= bound
    drain()

    for identity, numbers in offered.items():
        lost = len(numbers) - len(seen[identity])
        assert seen[identity] == numbers[len(numbers) - len(seen[identity]) :] or lost > 0
        assert set(seen[identity]) <= set(numbers)
        assert seen[identity] == sorted(seen[identity])
    for name in {name for name, _ in offered}:
        total = sum(len(v) for (n, _), v in offered.items() if n == name)
        arrived = sum(len(v) for (n, _), v in seen.items() if n == name)
        assert packs.drops[name, "queue full"] == total - arrived
    for identity, mark in marks.items():
        assert last_mark[identity] == mark
    for numbers in sequences.values():
        assert numbers == list(range(len(numbers)))


def message(size: int, samples: int = 1) -> Message:
    return Message(TELEMETRY_HOST, "x:1", bytes(size), samples)


def test_backlog_drops_its_oldest_beyond_the_bound() -> None:
    backlog = Backlog(10)
    backlog.push(message(4, samples=3))
    backlog.push(message(4, samples=0))
    backlog.push(message(5, samples=2))

    assert backlog.drops == {("telemetry.host", "queue full"): 3}
    assert (len(backlog), backlog.bytes) == (2, 9)
    first = backlog.pop()
    backlog.put_back(first)
    assert backlog.pop() is first
    assert (len(backlog), backlog.bytes) == (1, 5)


@given(sizes=st.lists(st.integers(0, 20), max_size=40), bound=st.integers(1, 30))
def test_backlog_never_exceeds_its_bound_and_keeps_order(sizes: list[int], bound: int) -> None:
    backlog = Backlog(bound)
    pushed = [Message(TELEMETRY_HOST, str(i), bytes(size), 1) for i, size in enumerate(sizes)]
    for one in pushed:
        backlog.push(one)
        assert backlog.bytes <= bound

    kept = [backlog.pop() for _ in range(len(backlog))]

    assert kept == pushed[len(pushed) - len(kept) :]
    assert backlog.drops.total() == len(pushed) - len(kept)
    assert backlog.bytes == 0
