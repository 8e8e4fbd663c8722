"""What the vendors that are read through sysfs have in common."""

import re
from collections.abc import Iterable
from pathlib import Path

from latencyprism.collectors.host.files import Files

PCIE_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""Transfers of a lane, 10^9 a second, and the generation of PCI Express that has them."""

_NUMBER = re.compile(r"\d+(\.\d+)?")
_CARD = re.compile(r"card\d+")


def text(files: Files, path: str) -> str | None:
    """A file's content without surrounding space; None if it can't be read."""
    content = files.read(path)
    return None if content is None else content.decode(errors="replace").strip()


def number(files: Files, path: str, scale: float = 1.0) -> float | None:
    """A file's number times ``scale``; None if there is none."""
    content = files.read(path)
    try:
        return None if content is None else int(content) * scale
    except ValueError:
        return None


def whole(files: Files, path: str) -> int | None:
    """A file's whole number; None if there is none."""
    value = number(files, path)
    return None if value is None else int(value)


def cards(files: Files, vendor: str) -> list[str]:
    """Folders ``/sys/class/drm/cardN/device`` of a PCI vendor's cards, in order of their number."""
    folder = f"{files.sys}/class/drm"
    names = (name for name in files.names(folder) if _CARD.fullmatch(name))
    devices = (f"{folder}/{name}/device" for name in sorted(names, key=lambda name: int(name[4:])))
    return [device for device in devices if once(files, f"{device}/vendor") == vendor]


def exists(path: str) -> bool:
    """Whether a file or folder is there."""
    return Path(path).exists()


def pci_address(device: str) -> str:
    """Address of a device's folder on the PCI bus, such as ``0000:c1:00.0``."""
    return Path(device).resolve().name


def hwmon(files: Files, device: str) -> str | None:
    """The folder of a device's sensors."""
    names = sorted(name for name in files.names(f"{device}/hwmon") if name.startswith("hwmon"))
    return f"{device}/hwmon/{names[0]}" if names else None


def sensors(files: Files, folder: str | None, kind: str) -> dict[str, str]:
    """Label, or number, of each sensor of a kind (``temp``, ``power``) → its file's beginning."""
    found: dict[str, str] = {}
    if folder is None:
        return found
    for name in sorted(files.names(folder)):
        which, _, what = name.partition("_")
        if which.startswith(kind) and which[len(kind) :].isdigit() and what == "input":
            start = f"{folder}/{which}"
            found[once(files, f"{start}_label") or which[len(kind) :]] = start
    return found


def asleep(files: Files, device: str) -> bool:
    """Whether the kernel has put the device to sleep, so that reading it would wake it."""
    return text(files, f"{device}/power/runtime_status") == "suspended"


def link(files: Files, device: str) -> tuple[int | None, int | None]:
    """Generation and lanes that a device's PCIe link runs at now."""
    speed = _NUMBER.match(text(files, f"{device}/current_link_speed") or "")
    gen = None if speed is None else PCIE_GENERATIONS.get(float(speed[0]))
    return gen, whole(files, f"{device}/current_link_width") or None


def render_node(files: Files, device: str) -> tuple[str, ...]:
    """The device file by which programs compute on a card, if it has one."""
    names = (name for name in files.names(f"{device}/drm") if name.startswith("renderD"))
    return tuple(f"/dev/dri/{name}" for name in names)


def first(values: Iterable[float | None]) -> float | None:
    """The first value that is told."""
    return next((value for value in values if value is not None), None)


def once(files: Files, path: str) -> str | None:
    """Like :func:`text`, for a file that is read only when a device is found; None if empty."""
    content = files.read_once(path)
    return None if content is None else content.decode(errors="replace").strip() or None
