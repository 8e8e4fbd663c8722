"""Configuration of the stream workers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from latencyprism.streams.detection.config import DetectionConfig
from latencyprism.streams.fleet import FleetConfig
from latencyprism.streams.sculpting import SculptingConfig

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


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
