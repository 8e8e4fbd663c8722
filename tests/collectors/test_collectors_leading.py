"""Several sources of one thing, one watermark."""

from latencyprism.collectors.leading import PATIENCE_S, Leading
from latencyprism.collectors.publisher import MemoryPublisher
from latencyprism.schemas.topics import TELEMETRY_HOST, TELEMETRY_REQUESTS

INSTANCE = "127.0.0.1:8000"


class Race:
    """A network and a gateway source of one agent."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.publisher = MemoryPublisher()
        leading = Leading(self.publisher, monotonic=lambda: self.now_s)
        self.network, self.gateway = leading.of("network"), leading.of("gateway")

    def published(self) -> int | None:
        packs = self.publisher.flush()
        return packs[-1].pack.watermark_ns if packs else None


def test_the_better_source_leads() -> None:
    race = Race()
    seen = []
    for source, at in (
        (race.gateway, 10),
        (race.network, 20),
        (race.gateway, 15),
        (race.network, 30),
    ):
        source.watermark(TELEMETRY_REQUESTS, INSTANCE, at)
        seen.append(race.published())

    assert seen == [10, 20, None, 30]


def test_the_other_leads_once_the_better_one_is_gone() -> None:
    race = Race()
    race.network.watermark(TELEMETRY_REQUESTS, INSTANCE, 100)
    seen = [race.published()]
    for after_s, at in ((PATIENCE_S, 200), (0.1, 90), (0.1, 150), (0.1, 250)):
        race.now_s += after_s
        race.gateway.watermark(TELEMETRY_REQUESTS, INSTANCE, at)
        seen.append(race.published())
    race.network.watermark(TELEMETRY_REQUESTS, INSTANCE, 260)

    assert seen == [100, None, None, 150, 250]
    assert race.published() == 260


def test_a_source_may_set_its_own_watermark_back() -> None:
    race = Race()
    for at in (100, 50):
        race.network.watermark(TELEMETRY_REQUESTS, INSTANCE, at)

    assert race.published() == 50


def test_other_topics_and_instances_have_leads_of_their_own() -> None:
    race = Race()
    race.network.watermark(TELEMETRY_REQUESTS, INSTANCE, 100)
    race.gateway.watermark(TELEMETRY_REQUESTS, "127.0.0.1:8001", 70)
    race.gateway.watermark(TELEMETRY_HOST, INSTANCE, 80)

    assert sorted(packed.pack.watermark_ns for packed in race.publisher.flush()) == [70, 80, 100]
