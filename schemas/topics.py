"""The one declaration of every topic: what it carries, how it is keyed, kept and spread."""

from dataclasses import dataclass
from typing import Any

from latencyprism.schemas.records import (
    Ack,
    AgentSample,
    Alert,
    BatchProfile,
    Command,
    DeadLetter,
    EngineSample,
    HostSample,
    KernelSample,
    ModelSnapshot,
    RequestTiming,
    StackProfile,
    StepBatch,
    XpuSample,
)

MINUTE_MS = 60_000
DAY_MS = 24 * 60 * MINUTE_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """A topic's contract.

    ``packed`` topics carry a :class:`~latencyprism.schemas.codec.Pack` of records a message, the
    others one record. ``partitions`` of None means the configured number; topics with the same
    key must have the same number so that one worker sees all the evidence about an instance.
    """

    name: str
    record: type[Any]
    key: str
    packed: bool
    retention_ms: int
    partitions: int | None = None
    compacted: bool = False


TELEMETRY_REQUESTS = Topic(
    name="telemetry.requests",
    record=RequestTiming,
    key="instance",
    packed=True,
    retention_ms=DAY_MS,
)
TELEMETRY_STEPS = Topic(
    name="telemetry.steps",
    record=StepBatch,
    key="instance",
    packed=True,
    retention_ms=DAY_MS,
)
TELEMETRY_ENGINE = Topic(
    name="telemetry.engine",
    record=EngineSample,
    key="instance",
    packed=True,
    retention_ms=DAY_MS,
)
TELEMETRY_HOST = Topic(
    name="telemetry.host",
    record=HostSample,
    key="instance",
    packed=True,
    retention_ms=DAY_MS,
)
TELEMETRY_XPU = Topic(
    name="telemetry.xpu",
    record=XpuSample,
    key="instance",
    packed=True,
    retention_ms=DAY_MS,
)
TELEMETRY_KERNEL = Topic(
    name="telemetry.kernel",
    record=KernelSample,
    key="instance",
    packed=True,
    retention_ms=DAY_MS,
)
TELEMETRY_STACKS = Topic(
    name="telemetry.stacks",
    record=StackProfile,
    key="instance",
    packed=True,
    retention_ms=7 * DAY_MS,
    partitions=1,
)
TELEMETRY_AGENTS = Topic(
    name="telemetry.agents",
    record=AgentSample,
    key="instance",
    packed=True,
    retention_ms=DAY_MS,
    partitions=1,
)
LATENCY_BATCHES = Topic(
    name="latency.batches",
    record=BatchProfile,
    key="service",
    packed=True,
    retention_ms=7 * DAY_MS,
)
ALERTS = Topic(
    name="alerts",
    record=Alert,
    key="service",
    packed=False,
    retention_ms=30 * DAY_MS,
    partitions=1,
)
CONTROL_COMMANDS = Topic(
    name="control.commands",
    record=Command,
    key="target",
    packed=False,
    retention_ms=DAY_MS,
    partitions=1,
)
CONTROL_ACKS = Topic(
    name="control.acks",
    record=Ack,
    key="target",
    packed=False,
    retention_ms=7 * DAY_MS,
    partitions=1,
)
MODELS = Topic(
    name="models",
    record=ModelSnapshot,
    key="instance",
    packed=False,
    retention_ms=-1,
    compacted=True,
)
DEADLETTER = Topic(
    name="deadletter",
    record=DeadLetter,
    key="topic",
    packed=False,
    retention_ms=30 * DAY_MS,
    partitions=1,
)

TELEMETRY = (
    TELEMETRY_REQUESTS,
    TELEMETRY_STEPS,
    TELEMETRY_ENGINE,
    TELEMETRY_HOST,
    TELEMETRY_XPU,
)
"""What windows are made of."""
TOPICS = (
    *TELEMETRY,
    TELEMETRY_KERNEL,
    TELEMETRY_STACKS,
    TELEMETRY_AGENTS,
    LATENCY_BATCHES,
    ALERTS,
    CONTROL_COMMANDS,
    CONTROL_ACKS,
    MODELS,
    DEADLETTER,
)
BY_NAME = {topic.name: topic for topic in TOPICS}


def full_name(prefix: str, topic: Topic) -> str:
    """Name of a topic on the broker, such as ``prism.telemetry.requests``; no prefix, no dot."""
    return f"{prefix}.{topic.name}" if prefix else topic.name
