"""What a worker holds: tokens, snapshots, partitions, and what earlier workers left."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from latencyprism.recordings.feed import feed
from latencyprism.recordings.format import Recording
from latencyprism.recordings.replay import replay_config
from latencyprism.schemas.codec import Pack
from latencyprism.schemas.records import Alert, BatchProfile, HostSample, ModelSnapshot
from latencyprism.schemas.topics import TELEMETRY_ENGINE, TELEMETRY_HOST
from latencyprism.streams.config import StreamsConfig
from latencyprism.streams.judge import Judgement
from latencyprism.streams.observation import Observation
from latencyprism.streams.service import ServicePipeline
from latencyprism.streams.shard import HOLD_NS, InstanceShard, ServiceShard

SHORT = Path(__file__).parents[1] / "data" / "vllm-short"
MS = 1_000_000
START = 1_796_000_000_000_000_000
LATER = START + 60_000_000_000
A, B = "10.0.0.1:8000", "10.0.0.2:8000"
CONFIG = StreamsConfig(settle_ms=0)


class CountingJudge:
    """Learns how many windows it saw; asks for a refit at every fourth."""

    def __init__(self) -> None:
        self.windows = 0
        self.fits = 0

    @property
    def version(self) -> str:
        return f"counting-{self.fits}"

    def judge(self, observation: Observation) -> Judgement:
        self.windows += 1
        if any(sample.host == "poison" for sample in observation.host):
            raise RuntimeError("poison")
        return Judgement(verdict="normal", reason="as expected", version=self.version)

    def refit(self) -> Callable[[], Callable[[], None]] | None:
        if self.windows % 4:
            return None

        def install() -> None:
            self.fits += 1

        return lambda: install

    def state(self) -> bytes:
        return str(self.windows).encode()

    def restore(self, state: bytes) -> None:
        self.windows = int(state)


def shard(config: StreamsConfig = CONFIG) -> InstanceShard[int]:
    return InstanceShard(config, judge=lambda _: CountingJudge())


def give(
    to: InstanceShard[int],
    number: int,
    *,
    instance: str = A,
    topic: Any = TELEMETRY_HOST,
    partition: int = 0,
    host: str = "h",
) -> int:
    """Pack ``number`` of 100 ms at its own time; returns that time."""
    at_ns = START + number * 100 * MS
    sample = HostSample(
        instance=instance,
        source="host",
        observed_at_ns=at_ns - 50 * MS,
        host=host,
        interval_ns=100 * MS,
    )
    samples = (sample,) if topic is TELEMETRY_HOST else ()
    pack: Pack[Any] = Pack(
        agent="x", boot_ns=1, sequence=number, watermark_ns=at_ns, samples=samples
    )
    to.add(topic, instance, pack, at_ns, partition=partition, token=number)
    return at_ns


def closed(of: InstanceShard[int], now_ns: int) -> list[BatchProfile]:
    """Windows that are due, as if published."""
    for instance in of:
        of.advance(instance, now_ns)
    done = of.drain()
    of.published(done, now_ns)
    return list(done.profiles)


def test_windows_come_once_and_in_order() -> None:
    held = shard()
    profiles: list[BatchProfile] = []
    for number in range(1, 41):
        profiles += closed(held, give(held, number))
    starts = [profile.window_start_ns for profile in profiles]
    assert starts == list(range(starts[0], starts[-1] + 1, 250 * MS))
    assert len(starts) == 15


def test_tokens_come_back_once_their_windows_are_published() -> None:
    held = shard()
    back: list[int] = []
    for number in range(1, 31):
        now_ns = give(held, number)
        held.advance(A, now_ns)
        done = held.drain()
        back += held.published(done, now_ns)
        until_ns = done.until_ns[A]
        kept = [n for n in range(1, number + 1) if n not in back]
        assert kept[0] == 1 or START + kept[0] * 100 * MS <= until_ns, "one earlier is kept"
        assert all(START + n * 100 * MS <= until_ns for n in back)
    assert back == sorted(back)
    assert len(back) > 20


def test_whoever_starts_from_the_kept_messages_closes_the_other_windows_complete() -> None:
    first = shard()
    published: list[BatchProfile] = []
    back: list[int] = []
    for number in range(1, 31):
        now_ns = give(first, number)
        first.advance(A, now_ns)
        done = first.drain()
        published += done.profiles
        back += first.published(done, now_ns)
    undisturbed = shard()
    whole: list[BatchProfile] = []
    for number in range(1, 61):
        whole += closed(undisturbed, give(undisturbed, number))

    second = shard()
    second.prepare([], {A: published[-1].window_end_ns})
    more: list[BatchProfile] = []
    for number in [n for n in range(1, 61) if n not in back]:
        more += closed(second, give(second, number))
    assert [p.batch_id for p in published + more] == [p.batch_id for p in whole]


def test_a_message_is_not_held_for_ever() -> None:
    held = shard(replace(CONFIG, settle_ms=10_000_000))
    now_ns = give(held, 1)
    assert held.published(held.drain(), now_ns + HOLD_NS) == []
    assert held.published(held.drain(), now_ns + HOLD_NS + 1) == [1]


def test_forgotten_tokens_do_not_come_back() -> None:
    held = shard()
    for number in range(1, 21):
        now_ns = give(held, number)
    held.forget_tokens()
    held.advance(A, now_ns)
    assert held.published(held.drain(), now_ns) == []


def test_a_snapshot_is_taken_up_by_whoever_hears_of_the_instance_next() -> None:
    first = shard()
    for number in range(1, 41):
        closed(first, give(first, number, partition=3))
    ((partition, snapshot),) = first.snapshots(LATER, every_s=0)
    assert partition == 3
    assert list(first.snapshots(LATER, every_s=0)) == [], "nothing was learned since"
    second = shard()
    second.prepare([snapshot], {})
    for number in range(41, 61):
        closed(second, give(second, number, partition=3))
    ((_, later),) = second.snapshots(LATER, every_s=0)
    learned = [int(one.state.rpartition(b"}")[2]) for one in (snapshot, later)]
    assert learned == [15, 15 + 7]


def test_a_snapshot_that_cannot_be_read_starts_cold() -> None:
    held = shard()
    broken = ModelSnapshot(instance=A, version="v", taken_ns=1, format=1, state=b"\xff")
    held.prepare([broken], {})
    assert closed(held, give(held, 30)) == []
    assert len(closed(held, give(held, 40))) == 4


def test_snapshots_are_taken_when_they_are_due() -> None:
    held = shard()
    for number in range(1, 11):
        now_ns = give(held, number)
        closed(held, now_ns)
    began_ns = START + 100 * MS
    assert list(held.snapshots(began_ns + 29_000_000_000, every_s=30)) == []
    assert len(list(held.snapshots(began_ns + 30_000_000_000, every_s=30))) == 1


def test_an_instance_that_is_silent_for_very_long_is_saved_and_dropped() -> None:
    held = shard()
    for number in range(1, 11):
        now_ns = give(held, number)
        closed(held, now_ns)
    later_ns = now_ns + (CONFIG.forget_after_s + 1) * 1_000_000_000
    assert len(list(held.snapshots(later_ns, every_s=1e9))) == 1
    assert len(held) == 0


def test_instances_of_other_partitions_are_dropped() -> None:
    held = shard()
    give(held, 1, instance=A, partition=0)
    give(held, 1, instance=B, partition=1)
    held.keep([1])
    assert list(held) == [B]


def test_refits_are_told_once_on_the_wall_clock_and_done_at_once_on_the_event_clock() -> None:
    wall = shard()
    told = 0
    for number in range(1, 61):
        closed(wall, give(wall, number))
        told += len(wall.refits())
    assert told == 5
    event = shard(replace(CONFIG, clock="event"))
    versions = []
    for number in range(1, 61):
        give(event, number)
        versions += [profile.model_version for profile in event.drain().profiles]
    assert event.refits() == []
    assert versions[:9] == ["counting-0"] * 4 + ["counting-1"] * 4 + ["counting-2"]


def test_an_instance_whose_pipeline_fails_begins_anew_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    held = shard()
    windows: dict[str, int] = {A: 0, B: 0}
    for number in range(1, 41):
        host = "poison" if number == 15 else "h"
        give(held, number, instance=A, host=host)
        for profile in closed(held, give(held, number, instance=B)):
            windows[profile.instance] += 1
    assert "its windows cannot be closed" in caplog.text
    assert windows[B] == 15
    assert 5 <= windows[A] < 15


def test_a_second_topic_holds_the_windows_until_it_has_come_as_far() -> None:
    held = shard()
    for number in range(1, 11):
        give(held, number, topic=TELEMETRY_ENGINE)
        now_ns = give(held, number)
    before = closed(held, now_ns)
    for number in range(11, 21):
        now_ns = give(held, number)
    assert closed(held, now_ns) == []
    for number in range(11, 21):
        give(held, number, topic=TELEMETRY_ENGINE)
    assert len(closed(held, now_ns)) == 4
    assert len(before) == 3


def test_services_follow_the_profiles_and_drop_with_their_partitions() -> None:
    config = replay_config(StreamsConfig())
    instances: InstanceShard[int] = InstanceShard(config)
    services = ServiceShard(config)
    alerts: list[Alert] = []
    for tick in feed(Recording(SHORT)):
        for parcel in tick:
            watermark_ns = parcel.pack.watermark_ns
            instances.add(parcel.topic, parcel.instance, parcel.pack, watermark_ns)
        for profile in instances.drain().profiles:
            outs = services.follow(profile, partition=1)
            alerts += [out for out in outs if isinstance(out, Alert)]
    assert [alert.state for alert in alerts if alert.verdict == "fault"][:1] == ["firing"]
    end_ns = Recording(SHORT).meta.end_ns
    services.keep([0])
    assert services.tick(end_ns + 3_600_000_000_000) == []


def test_a_service_whose_decisions_fail_begins_anew_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    profile = BatchProfile(
        batch_id="b",
        instance=A,
        service="good",
        window_start_ns=START,
        window_end_ns=START + 250 * MS,
        closed_at_ns=START + 250 * MS,
        requests_started=0,
        requests_finished=0,
        requests_failed=0,
        requests_open=0,
        chunks=0,
        steps=0,
        late_samples=0,
        verdict="fault",
        reason="r",
        stage="decode",
        score=9.0,
        threshold=1.0,
        observed_ms=5.0,
        expected_ms=1.0,
        model_version="v",
    )
    add, tick = ServicePipeline.add, ServicePipeline.tick

    def failing_add(self: ServicePipeline, given: BatchProfile, now_ns: int) -> Any:
        if given.reason == "poison":
            raise ValueError("math domain error")
        return add(self, given, now_ns)

    def failing_tick(self: ServicePipeline, now_ns: int) -> Any:
        if now_ns == LATER:
            raise ValueError("math domain error")
        return tick(self, now_ns)

    monkeypatch.setattr(ServicePipeline, "add", failing_add)
    monkeypatch.setattr(ServicePipeline, "tick", failing_tick)
    services = ServiceShard(CONFIG)
    now_ns = profile.closed_at_ns
    assert services.add(profile, now_ns)
    assert services.add(replace(profile, service="bad", reason="poison"), now_ns) == []
    assert "service bad: its profiles cannot be decided on" in caplog.text
    assert services.add(replace(profile, service="bad"), now_ns)
    assert services.tick(LATER) == []
    assert services.add(replace(profile, window_start_ns=LATER), now_ns)
