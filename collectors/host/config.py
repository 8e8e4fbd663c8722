"""Settings of the host source."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt, Le


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig:
    """How the operating system's counters are read."""

    interval_ms: Annotated[int, Gt(0), Le(1000)] = 100
    """Time between two samples; lengthened by itself while a sample costs too much CPU time."""
    cpu_pct: Annotated[float, Gt(0), Le(100)] = 2.0
    """CPU time of the source, % of a core, above which it lengthens its interval."""
    proc: str = "/proc"
    """Root of the proc file system, such as a bind mount of the host's in a container."""
    sys: str = "/sys"
    """Root of the sys file system."""
