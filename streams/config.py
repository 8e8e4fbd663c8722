"""Configuration of the stream workers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from latencyprism.streams.detection.config import DetectionConfig

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """When verdicts of windows become alerts, and when these end."""

    workload_s: Annotated[float, Gt(0)] = 2.0
    """A slowdown that its workload explains is told once it has lasted this long."""
    resolve_s: Annotated[float, Gt(0)] = 2.0
    """An alert resolves after this long without a window of its verdict."""
    update_s: Annotated[float, Gt(0)] = 2.0
    """Least time between two updates of an alert."""
    peer_s: Annotated[float, Gt(0)] = 3.0
    """Replicas that reported within this time are peers; troubles within it are simultaneous."""
    silence_s: Annotated[float, Gt(0)] = 15.0
    """Alerts of a replica that reports nothing for this long resolve."""
    new_cause_s: Annotated[float, Gt(0)] = 5.0
    """A cause that is seen at work for the first time for this long makes a new alert."""
    worse_ratio: Annotated[float, Gt(1)] = 1.3
    """A stage that slows by this factor once more, for a second, makes a new alert too."""
    critical_ratio: Annotated[float, Gt(1)] = 3.0
    """An alert is critical from this slowdown on, or when nothing moves at all."""
    forget_s: Annotated[float, Gt(0)] = 300.0
    """Replicas silent for this long are forgotten."""
    max_replicas: Annotated[int, Ge(1)] = 4_096
    """Replicas remembered; the one silent the longest makes room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SculptingConfig:
    """What the policy may do, how far, and how often."""

    mode: Literal["off", "dry_run", "on"] = "dry_run"
    """off: no commands; dry_run: commands that routers answer and don't follow; on: in force."""
    lease_ms: Annotated[int, Ge(1_000)] = 5_000
    """Commands end by themselves this long after the last renewal, sent three times a lease."""
    weight_floor: Annotated[float, Gt(0), Le(1)] = 0.1
    """Share of its traffic that a slow replica keeps, so that its recovery shows."""
    max_share: Annotated[float, Gt(0), Le(1)] = 0.5
    """Share of the replicas that may be rerouted around at once."""
    decision_s: Annotated[float, Gt(0)] = 3.0
    """Least time between two new decisions about one target."""
    step_s: Annotated[float, Gt(0)] = 4.0
    """On the way back, how long each weight is tried; doubled with each relapse, up to 8 times."""
    back_weights: tuple[float, ...] = (0.25, 0.5)
    """Weights tried on the way back to 1."""
    relapse_s: Annotated[float, Gt(0)] = 60.0
    """A fault within this time after a restore counts as a relapse."""
    ttft_objective_ms: Annotated[float, Gt(0)] = 2_000.0
    """Time to first token that the service promises; overload is what breaks it."""
    overload_s: Annotated[float, Gt(0)] = 5.0
    """Replicas must queue beyond the objective for this long before they are throttled."""
    concurrency_floor: Annotated[int, Ge(1)] = 4
    """No replica is limited to fewer requests in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """How a service is alerted on and steered."""

    fleet: FleetConfig = field(default_factory=FleetConfig)
    sculpting: SculptingConfig = field(default_factory=SculptingConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsConfig:
    """How telemetry becomes windows, and how much of it is kept meanwhile."""

    window_ms: Annotated[int, Gt(0)] = 250
    """Length of a window, event time; windows begin at whole multiples of it."""
    grace_ms: Annotated[int, Ge(0)] = 20
    """A window closes when the watermark is this far beyond its end."""
    settle_ms: Annotated[int, Ge(0)] = 1_000
    """Wall time after an instance's first message before its first window may close, so that all
    its sources have shown themselves."""
    source_timeout_ms: Annotated[int, Gt(0)] = 2_000
    """Wall time without progress after which a source no longer holds the watermark."""
    silence_s: Annotated[int, Ge(0)] = 30
    """How long windows go on closing on the wall clock when every source is silent."""
    forget_after_s: Annotated[int, Gt(0)] = 120
    """Wall time of silence after which an instance is forgotten."""
    clock: Literal["wall", "event"] = "wall"
    """Whether event times are near the wall clock (wall) or of another day, as in a replay
    (event)."""
    clock_bound_ms: Annotated[int, Gt(0)] = 10_000
    """A watermark further ahead of the wall clock is refused; one that falls back further resets
    the instance; a sample that comes later than this after its window closed is refused."""
    catch_up_ms: Annotated[int, Gt(0)] = 10_000
    """A longer stretch of event time that holds no sample is skipped, not closed window by
    window."""
    open_requests: Annotated[int, Gt(0)] = 4_096
    """Open requests followed per instance; the one longest without news makes room."""
    request_timeout_s: Annotated[int, Gt(0)] = 600
    """Event time without news after which an open request is given up."""
    buffered_chunks: Annotated[int, Gt(0)] = 262_144
    """Content events per instance that may wait for their window; beyond it the slowest source no
    longer holds the watermark, and what still does not fit is dropped and counted."""
    buffered_samples: Annotated[int, Gt(0)] = 16_384
    """The same for scrapes, host and accelerator samples and steps, each kind by itself."""
    services: Mapping[str, str] = field(default_factory=dict)
    """Service of an instance; the model's name for those not listed."""
    detection: DetectionConfig = field(default_factory=DetectionConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    sculpting: SculptingConfig = field(default_factory=SculptingConfig)
