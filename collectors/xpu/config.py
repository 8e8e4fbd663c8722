"""Settings of the accelerator source."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le


@dataclass(frozen=True, slots=True, kw_only=True)
class XpuConfig:
    """How often accelerators are read."""

    interval_ms: Annotated[int, Ge(20), Le(200)] = 200
    """Time between two readings of every device; each has about 15 calls of the driver."""
    pcie_interval_ms: Annotated[int, Ge(100)] = 1000
    """Time between two readings of the bus traffic; each takes the driver 20 ms a direction, so
    they have a thread of their own."""
    owners_interval_ms: Annotated[int, Ge(100)] = 5000
    """Time between two searches for the processes of the watched servers."""
    retry_ms: Annotated[int, Ge(1000)] = 30_000
    """Time after which the driver is opened anew while a device cannot be read."""
    proc: str = "/proc"
    """Root of the proc file system, such as a bind mount of the host's in a container."""
