"""Settings of the kernel source."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

TierName = Literal["run_queue", "sockets", "frames", "tls", "gpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig:
    """Which probes run, and what they may cost. The source itself is off unless enabled."""

    tiers: tuple[TierName, ...] = ("run_queue", "sockets", "frames")
    """Probes that are attached while the source runs. ``tls`` and ``gpu`` put breakpoints into
    functions of the server, some microseconds a call: add them while you need them."""
    interval_ms: Annotated[int, Ge(100), Le(1000)] = 1000
    """Time between two samples of the histograms."""
    discover_s: Annotated[float, Ge(0.2), Le(60)] = 2.0
    """Time between two looks for the servers' processes and libraries."""
    vllm_version: str = ""
    """Version of the engine whose frames are read, such as ``0.32.0``; empty asks its /version."""
    frame_bytes: Annotated[int, Ge(256), Le(32_000)] = 16_384
    """As much is read of each message that the engine sends; longer ones are counted as cut."""
    ring_kib: Literal[64, 128, 256, 512, 1024, 2048, 4096, 8192] = 1024
    """Memory shared with the kernel for frames that were not read yet."""
    max_connections: Annotated[int, Ge(16)] = 16_384
    """Connections and TLS sessions followed; the one unused longest is forgotten beyond it."""
    max_threads: Annotated[int, Ge(256)] = 16_384
    """Threads that wait for a CPU, or for a function, at one moment."""
    calls_s: Annotated[float, Gt(0)] = 3000.0
    """Probed function calls a second of one server above which its functions are left alone until
    the source starts again."""
    measure: bool = False
    """Let the kernel time the probes themselves, for the counts ``ran`` and ``ran_ns`` of each
    tier; takes CAP_SYS_ADMIN."""
    proc: str = "/proc"
    """Root of the proc file system, such as a bind mount of the host's in a container."""
    sys: str = "/sys"
    """Root of the sys file system."""
