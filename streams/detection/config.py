"""Settings of the detector."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionConfig:
    """How a :class:`~latencyprism.streams.detection.judge.MixtureJudge` learns and decides."""

    false_alarms_per_hour: Annotated[float, Gt(0), Le(60)] = 0.02
    """The one knob of sensitivity: alarms by chance that one stage of one instance may give."""
    minimum_effect: Annotated[float, Gt(0), Le(10)] = 0.25
    """Least relative slowdown worth a fault when other evidence speaks for one."""
    unexplained_spreads: Annotated[float, Gt(0), Le(10)] = 3.5
    """How far a stage must leave its usual wander (over some seconds, standard deviations) for a
    fault when the latency alone speaks for one."""
    stall_ms: Annotated[float, Gt(0)] = 1_500.0
    """Open requests without any token for this long are a stall, if the engine stood still too."""
    first_fit_steps: Annotated[int, Ge(50)] = 300
    """Engine steps to see before the first verdict."""
    window_seconds: Annotated[float, Gt(0)] = 0.25
    """Length of the windows that are judged."""
    components: Annotated[int, Ge(1), Le(16)] = 6
    """Most components of a mixture."""
    fit_rows: Annotated[int, Ge(200)] = 1_500
    """Most observations that one fit takes; its time grows with them."""
    reservoir_rows: Annotated[int, Ge(200), Le(8_192)] = 3_072
    """Observations a stage remembers of all its past (slow reference)."""
    recent_rows: Annotated[int, Ge(100), Le(8_192)] = 1_024
    """Newest observations a stage remembers (fast reference)."""
    history_windows: Annotated[int, Ge(100), Le(14_400)] = 1_800
    """Windows over which the natural tail of surprise and evidence is learned."""
    refit_seconds: Annotated[float, Gt(0)] = 120.0
    """Least event time between two refits, once the reference no longer grows fast."""
    quarantine_windows: Annotated[int, Ge(1), Le(240)] = 16
    """Windows wait this long before they are learned, so that a fault found late isn't."""
