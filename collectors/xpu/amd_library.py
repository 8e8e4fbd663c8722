"""AMD's own library (the module amdsmi), for tables of a kernel newer than what is known here.

It is heavy and optional, and tells nothing that sysfs does not, save that it is as new as the
driver it came with. So it is loaded only when a card has a table of an unknown revision.
"""

import contextlib
import io
import logging
from typing import Any, Self

from latencyprism.collectors.xpu.gpu_metrics import GpuMetrics, metrics_of

logger = logging.getLogger(__name__)


class AmdLibrary:
    """The cards of this host as the library sees them."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._handles: dict[str, Any] = {}

    @classmethod
    def load(cls) -> Self | None:
        """The library, or None, saying so once in the log, where it is not installed or fails."""
        try:
            # Without its shared library the module prints advice and fails as it likes.
            with contextlib.redirect_stdout(io.StringIO()):
                import amdsmi
            amdsmi.amdsmi_init()
            loaded = cls(amdsmi)
            loaded._find()
        except Exception as error:  # noqa: BLE001 - it fails as it likes where it lacks its library
            logger.info("AMD's library is not used: %s: %s", type(error).__name__, error)
            return None
        return loaded

    def metrics(self, address: str) -> GpuMetrics | None:
        """A card's table, by its PCI address; None when the library does not tell it."""
        handle = self._handles.get(address)
        if handle is None:
            return None
        try:
            return metrics_of(self._module.amdsmi_get_gpu_metrics_info(handle))
        except self._module.AmdSmiException as error:
            logger.debug("AMD's library does not tell of %s: %s", address, error)
            return None

    def close(self) -> None:
        """Give the library back."""
        with contextlib.suppress(self._module.AmdSmiException):
            self._module.amdsmi_shut_down()

    def _find(self) -> None:
        for handle in self._module.amdsmi_get_processor_handles():
            address = self._module.amdsmi_get_gpu_device_bdf(handle)
            self._handles[str(address).lower()] = handle
