"""What is known of TPUs without any library: which one a machine has, and how to reach it."""

from typing import Final

from latencyprism.collectors.host.files import Files
from latencyprism.collectors.xpu import sysfs

PCI_VENDOR: Final = "0x1ae0"
KINDS: Final = {
    "0x0027": "TPU v2 or v3",
    "0x005e": "TPU v4",
    "0x0062": "TPU v5p",
    "0x0063": "TPU v5e",
    "0x006f": "TPU v6e",
    "0x0076": "TPU7x",
}
"""PCI device → what it is. Other devices of the vendor are network and storage."""
ACCELERATOR: Final = "0x12"
"""How the PCI class of a processing accelerator begins."""


def kind_of_tpu(files: Files) -> str | None:
    """What TPU this machine has, None if it has none."""
    folder = f"{files.sys}/bus/pci/devices"
    for name in sorted(files.names(folder)):
        at = f"{folder}/{name}"
        if sysfs.once(files, f"{at}/vendor") == PCI_VENDOR:
            device = sysfs.once(files, f"{at}/device") or ""
            if device in KINDS:
                return KINDS[device]
            if (sysfs.once(files, f"{at}/class") or "").startswith(ACCELERATOR):
                return f"TPU {device}"
    return None


def host_and_port(address: str) -> tuple[str, int]:
    """Parts of a TPU runtime's address. Raises ValueError naming an address that is none."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"TPU runtime {address!r}: expected host:port")
    return host, int(port)
