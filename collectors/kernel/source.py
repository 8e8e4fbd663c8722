"""The kernel source: a thread that attaches the probes, follows the servers and reads the maps."""

import errno
import logging
import platform
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Final

from latencyprism.collectors.host.files import Files
from latencyprism.collectors.host.source import targets
from latencyprism.collectors.kernel import btf
from latencyprism.collectors.kernel.arch import this_arch
from latencyprism.collectors.kernel.bpf import UPROBE, Kernel, kernel_version
from latencyprism.collectors.kernel.config import KernelConfig
from latencyprism.collectors.kernel.needs import Machine, missing
from latencyprism.collectors.kernel.servers import Servers
from latencyprism.collectors.kernel.tier import Setup, Tier
from latencyprism.collectors.kernel.tiers import TIERS
from latencyprism.collectors.kernel.versions import Versions
from latencyprism.collectors.kernel.watch import SOURCE, Watch
from latencyprism.collectors.privileges import permitted
from latencyprism.collectors.source import Emit, UnavailableError

logger = logging.getLogger(__name__)

TICK_S: Final = 0.05


def unavailable(config: KernelConfig) -> str | None:
    """Why this machine permits none of the tiers that are set, and what to do; None when it may
    permit one.
    """
    lacks = missing(examine(config.proc, config.sys))
    if not config.tiers or not all(lacks[tier] for tier in config.tiers):
        return None
    wants = dict.fromkeys(lack for tier in config.tiers for lack in lacks[tier])
    return f"kernel probes need {'; '.join(wants)}; as root, or with the capabilities given"


def examine(proc: str, sys: str, capabilities: Set[str] | None = None) -> Machine:
    """This machine; ``capabilities`` are those of this thread unless given. Raises nothing."""
    files = Files(proc, sys)
    return Machine(
        version=kernel_version(files.text(f"{proc}/sys/kernel/osrelease").strip() or None),
        arch=platform.machine(),
        capabilities=permitted() if capabilities is None else capabilities,
        btf=Path(sys, btf.VMLINUX).exists(),
        uprobes=Path(sys, UPROBE).exists(),
        pid_namespace=files.link(f"{proc}/1/ns/pid") or None,  # may be another user's
        lockdown=files.text(f"{sys}/kernel/security/lockdown") or None,
    )


class KernelSource:
    """Watches the servers of the base URLs on this machine by probes in the kernel."""

    name = SOURCE

    def __init__(
        self,
        engines: Sequence[str],
        config: KernelConfig,
        *,
        host: str | None = None,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._engines = tuple(engines)
        self._config = config
        self._host = host or socket.gethostname()
        self._wall_ns = wall_ns
        self._monotonic_ns = monotonic_ns
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> Mapping[str, int]:
        """See :meth:`Counting.counts`."""
        return dict(self._counts)

    def run(self, emit: Emit, stop: threading.Event) -> None:
        """See :meth:`Source.run`; waits for ``stop`` when there is no server to look for.

        Raises UnavailableError when this machine refuses every tier.
        """
        servers = targets(self._engines)
        if not servers:
            stop.wait()
            return
        reason = unavailable(self._config)
        if reason is not None:
            raise UnavailableError(reason)
        arch = this_arch()
        with ExitStack() as stack:
            files = Files(self._config.proc, self._config.sys)
            stack.callback(files.close)
            types = cache(self._read_btf)
            setup = Setup(
                kernel=Kernel(arch, self._config.sys),
                arch=arch,
                btf=types,
                files=files,
                config=self._config,
                instances=tuple(dict.fromkeys(server.instance for server in servers)),
                counts=self._counts,
            )
            tiers = open_tiers(setup)
            types.cache_clear()  # megabytes that nobody asks again
            for tier in tiers:
                stack.callback(tier.close)
            if self._config.measure:
                self._measure(setup.kernel, stack)
            found = Servers(files, servers)
            stack.callback(found.close)
            watch = Watch(
                tiers,
                found.find,
                Versions(self._engines, self._config.vllm_version, stop).answers,
                setup,
                host=self._host,
                wall_ns=self._wall_ns,
                monotonic_ns=self._monotonic_ns,
            )
            while not stop.is_set():
                watch.tick(emit)
                stop.wait(TICK_S)

    def _measure(self, kernel: Kernel, stack: ExitStack) -> None:
        try:
            stack.callback(kernel.count_runtime().close)
        except PermissionError as refused:
            self._counts["measure refused"] += 1
            logger.warning("Probes are not measured: %s; that takes CAP_SYS_ADMIN", refused)

    def _read_btf(self) -> btf.Btf:
        return btf.Btf(Path(self._config.sys, btf.VMLINUX).read_bytes())


def open_tiers(setup: Setup) -> list[Tier]:
    """The tiers of the settings that this kernel permits; the others are logged and counted.

    Raises UnavailableError saying why when it permits none.
    """
    tiers: list[Tier] = []
    reasons = []
    for name in dict.fromkeys(setup.config.tiers):
        try:
            tiers.append(TIERS[name](setup))
        except (OSError, btf.BtfError) as refused:
            reason = f"{name}: {explain(refused)}"
            setup.counts[f"{name} refused"] += 1
            logger.warning("Kernel probes of tier %s", reason)
            reasons.append(reason)
        except BaseException:
            for tier in tiers:
                tier.close()
            raise
    if not tiers:
        raise UnavailableError("; ".join(reasons) or "no tier of kernel probes is enabled")
    return tiers


def explain(refused: Exception) -> str:
    """Why a tier can't be had, and what to do."""
    number = refused.errno if isinstance(refused, OSError) else None
    if number == errno.EPERM:
        advice = (
            "give CAP_BPF and CAP_PERFMON (in a container with a profile that allows bpf and "
            "perf_event_open), or run as root"
        )
    elif isinstance(refused, btf.BtfError | FileNotFoundError):
        advice = (
            "the kernel must be built with CONFIG_DEBUG_INFO_BTF, and for functions CONFIG_UPROBES"
        )
    elif number == errno.ENOMEM:
        advice = "raise the limit of locked memory (ulimit -l) or of the control group"
    else:
        advice = "leave the tier out of the settings"
    return f"{refused}; {advice}"
