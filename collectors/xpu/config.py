"""Settings of the accelerator source."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

Way = Literal["nvidia", "amd", "intel", "gaudi", "tpu"]
"""A way of reading accelerators on the machine itself; exporters are given by URL instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class XpuConfig:
    """Which accelerators are read, and how often."""

    ways: tuple[Way, ...] = ("nvidia", "amd", "intel", "gaudi", "tpu")
    """Ways that are tried; one that finds nothing here costs a look now and then."""
    exporters: tuple[str, ...] = ()
    """Pages of exporters, such as ``http://127.0.0.1:9400/metrics``: DCGM, AMD, Ascend, Intel XPU
    Manager and Habana are recognised by their metrics. Read once each ``slow_interval_ms``; a
    device that is read on the machine itself is not told again."""
    tpu_addresses: tuple[str, ...] = ("127.0.0.1:8431",)
    """Where the TPU runtime of a serving process tells its metrics, one address a process
    (``TPU_RUNTIME_METRICS_PORTS``)."""
    interval_ms: Annotated[int, Ge(20), Le(200)] = 200
    """Time between two readings of every device through its driver."""
    slow_interval_ms: Annotated[int, Ge(100)] = 1000
    """Time between two readings of what is dear: bus traffic (20 ms a direction and GPU), error
    counters in files, TPU runtimes and exporters."""
    owners_interval_ms: Annotated[int, Ge(100)] = 5000
    """Time between two searches for the processes of the watched servers, and for MIG slices."""
    retry_ms: Annotated[int, Ge(1000)] = 30_000
    """Time after which devices are looked for anew while one cannot be read or a way finds none."""
    silence_ms: Annotated[int, Ge(1000)] = 10_000
    """Time after which a driver that does not answer is reported as an error of its devices."""
    timeout_ms: Annotated[int, Ge(100), Le(10_000)] = 2000
    """Longest time that an exporter or a TPU runtime may take to answer."""
    proc: str = "/proc"
    """Root of the proc file system, such as a bind mount of the host's in a container."""
    sys: str = "/sys"
    """Root of sysfs, likewise."""
