"""What a source emitted, kept."""

from typing import Any

from latencyprism.schemas.records import RequestTiming
from latencyprism.schemas.topics import Topic


class Collected:
    """Keeps what a source emits."""

    def __init__(self) -> None:
        self.requests: list[RequestTiming] = []
        self.watermarks: dict[str, int] = {}

    def sample(self, topic: Topic, sample: Any) -> None:
        assert (topic.name, type(sample)) == ("telemetry.requests", RequestTiming)
        self.requests.append(sample)

    def watermark(self, topic: Topic, instance: str, watermark_ns: int) -> None:
        assert topic.name == "telemetry.requests"
        self.watermarks[instance] = watermark_ns
