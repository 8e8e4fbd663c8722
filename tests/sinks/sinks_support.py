"""What the tests of the sinks share beside their fixtures."""

from collections.abc import Sequence
from typing import Any

from latencyprism.schemas.codec import Codec, Pack
from latencyprism.schemas.topics import Topic
from latencyprism.sinks.clickhouse_rows import ClickHouseRows
from latencyprism.sinks.config import StoreConfig
from latencyprism.sinks.memory import MemoryBroker, MemoryLetterBox, MemoryLog
from latencyprism.sinks.ports import RowStore
from latencyprism.sinks.sink import Sink

T0 = 1_750_000_000_000_000_000
"""2025-06-15 15:06:40 UTC, ns."""
MS = 1_000_000
S = 1_000 * MS

KEYS = {
    "request_parts": ("instance", "arrival", "request_id", "part"),
    "step_batches": ("instance", "observed_at", "source", "agent"),
    "engine_samples_raw": ("instance", "observed_at", "source", "agent"),
    "host_samples_raw": ("instance", "observed_at", "source", "agent"),
    "xpu_samples_raw": ("instance", "observed_at", "device", "source", "agent"),
    "kernel_samples_raw": ("instance", "observed_at", "source", "agent"),
    "stack_profiles_raw": ("instance", "observed_at", "pid", "source", "agent"),
    "agent_samples_raw": ("instance", "observed_at", "boot", "source", "agent"),
    "batches_raw": ("instance", "window_start", "batch_id"),
    "alerts_raw": ("instance", "fired", "alert_id"),
    "commands_raw": ("target", "issued", "command_id", "epoch"),
    "acks_raw": ("target", "command_id", "ack_id"),
    "dead_letters_raw": ("topic", "partition", "offset", "letter_id"),
}
"""By which columns rows of a table replace each other; a test proves that the store agrees."""


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def s(self) -> float:
        """Seconds of a monotonic clock."""
        return self.now_s

    def ns(self) -> int:
        """Wall clock, ns since the epoch."""
        return T0 + int(self.now_s * 1e9)


def memory_sink(
    broker: MemoryBroker, store: RowStore, clock: Clock, **config: Any
) -> tuple[Sink, MemoryLog]:
    """A sink on a broker in memory, and its log."""
    log = MemoryLog(broker)
    codec = Codec()
    sink = Sink(
        StoreConfig(**config),
        log=log,
        store=store,
        letterbox=MemoryLetterBox(broker, codec),
        codec=codec,
        clock_s=clock.s,
        clock_ns=clock.ns,
    )
    return sink, log


def pack(*samples: Any, agent: str = "agent-1", sequence: int = 0) -> Pack[Any]:
    """A pack of one agent."""
    return Pack(agent=agent, boot_ns=T0, sequence=sequence, watermark_ns=T0, samples=samples)


def write(config: StoreConfig, topic: Topic, records: Sequence[Any]) -> None:
    """Bring records to the real store through codec, buffers and the sink's loop."""
    broker = MemoryBroker()
    codec = Codec()
    messages = [pack(*records)] if topic.packed else records
    for message in messages:
        broker.append(topic, codec.encode(topic, message))
    rows = ClickHouseRows(config)
    sink, _ = memory_sink(broker, rows, Clock())
    sink.step(0)
    assert sink.finish(), "the store did not take the records"
    assert sink.counts.letters == 0, "records became dead letters"
    rows.close()
