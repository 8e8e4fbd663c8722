"""All ways of reading accelerators, nearest first."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Final

from latencyprism.collectors.address import endpoint
from latencyprism.collectors.host.files import Files
from latencyprism.collectors.source import AbsentError, UnavailableError
from latencyprism.collectors.xpu import sysfs
from latencyprism.collectors.xpu.amd import Amd
from latencyprism.collectors.xpu.config import Way as WayName
from latencyprism.collectors.xpu.config import XpuConfig
from latencyprism.collectors.xpu.gaudi import Gaudi
from latencyprism.collectors.xpu.intel import Intel
from latencyprism.collectors.xpu.pages import Pages
from latencyprism.collectors.xpu.poller import Way
from latencyprism.collectors.xpu.reading import Devices
from latencyprism.collectors.xpu.tpu_kinds import ACCELERATOR, host_and_port, kind_of_tpu

DISPLAY: Final[Mapping[str, str]] = {"0x10de": "0x03", "0x1002": "0x03", "0x8086": "0x0380"}
"""PCI vendor (NVIDIA, AMD, Intel) → begin of the class of its display controllers that compute."""


def ways(config: XpuConfig) -> list[Way]:
    """The ways that the settings ask for, those on the machine itself before exporters.

    Raises ValueError for an exporter's URL or a TPU runtime's address that is none.
    """
    for address in config.tpu_addresses:
        host_and_port(address)
    fast_s, slow_s = config.interval_ms / 1000, config.slow_interval_ms / 1000
    near: dict[WayName, tuple[Callable[[], Devices], float]] = {
        "nvidia": (lambda: _nvidia(config), fast_s),
        "amd": (lambda: Amd(config.sys, slow_interval_s=slow_s), fast_s),
        "intel": (lambda: Intel(config.sys), fast_s),
        "gaudi": (lambda: Gaudi(config.sys), fast_s),
        "tpu": (lambda: _tpu(config), slow_s),
    }
    found = [Way(name, *near[name]) for name in dict.fromkeys(config.ways)]
    for url in dict.fromkeys(config.exporters):
        endpoint(url)
        pages = partial(Pages, url, timeout_s=config.timeout_ms / 1000)
        found.append(Way(f"exporter {url}", pages, slow_s))
    return found


def missing(config: XpuConfig) -> UnavailableError | None:
    """Why there is nothing to read here; None when there is. Takes some milliseconds.

    An :class:`AbsentError`, short, where the machine has no accelerator; else what each way lacks.

    An exporter counts as there: it may come up at any time. Raises ValueError as :func:`ways`.
    """
    reasons = []
    for way in ways(config):
        if way.name not in config.ways:
            return None
        try:
            way.open().close()
        except UnavailableError as error:
            reasons.append(f"{way.name}: {error}")
        else:
            return None
    if not reasons:
        return UnavailableError("no way of reading accelerators is enabled")
    if not _on_the_bus(Files(sys=config.sys)):
        return AbsentError(f"no accelerator on this host ({', '.join(config.ways)})")
    return UnavailableError("; ".join(reasons))


def _on_the_bus(files: Files) -> bool:
    """Whether there is a PCI device that could be one, with a driver or without.

    A processing accelerator, or a display controller of a vendor whose ones compute; of Intel not
    the VGA controller, which is part of most of its processors.
    """
    folder = f"{files.sys}/bus/pci/devices"
    for name in files.names(folder):
        kind = sysfs.once(files, f"{folder}/{name}/class") or ""
        vendor = sysfs.once(files, f"{folder}/{name}/vendor") or ""
        if kind.startswith((ACCELERATOR, DISPLAY.get(vendor, ACCELERATOR))):
            return True
    return kind_of_tpu(files) is not None


def _nvidia(config: XpuConfig) -> Devices:
    with _extra("collectors"):
        from latencyprism.collectors.xpu.nvml import Nvml
    return Nvml(config.slow_interval_ms / 1000, rescan_s=config.owners_interval_ms / 1000)


def _tpu(config: XpuConfig) -> Devices:
    if kind_of_tpu(Files(sys=config.sys)) is None:
        raise UnavailableError(f"no TPU in {config.sys}/bus/pci/devices")
    with _extra("tpu"):
        from latencyprism.collectors.xpu.tpu import Tpu
    return Tpu(config.tpu_addresses, config.sys, timeout_s=config.timeout_ms / 1000)


@contextmanager
def _extra(name: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise UnavailableError(f"{error}; install the extra latencyprism[{name}]") from error
