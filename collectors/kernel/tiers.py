"""All kinds of probes by their names."""

from collections.abc import Callable, Mapping
from typing import Final

from latencyprism.collectors.kernel.config import TierName
from latencyprism.collectors.kernel.functions import Gpu, Tls
from latencyprism.collectors.kernel.tier import Setup, Tier
from latencyprism.collectors.kernel.tracepoints import Frames, RunQueue, Sockets

TIERS: Final[Mapping[TierName, Callable[[Setup], Tier]]] = {
    "run_queue": RunQueue,
    "sockets": Sockets,
    "frames": Frames,
    "tls": Tls,
    "gpu": Gpu,
}
