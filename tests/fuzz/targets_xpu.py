"""Parsers of what accelerators' drivers, runtimes and exporters say."""

import ctypes
from collections.abc import Iterable
from contextlib import suppress

from google.protobuf.message import DecodeError
from pynvml import c_nvmlFieldValue_t

from latencyprism.collectors.engine.exposition import ExpositionError
from latencyprism.collectors.host.files import Files
from latencyprism.collectors.xpu import sysfs
from latencyprism.collectors.xpu.gpu_metrics import UnknownTableError, decode
from latencyprism.collectors.xpu.nvml import told_values
from latencyprism.collectors.xpu.pages import Reader
from latencyprism.collectors.xpu.reasons import clocks_event_names
from latencyprism.collectors.xpu.tpu import gauges
from latencyprism.collectors.xpu.tpu_messages import MetricResponse

SIZES = {1: 96, 2: 104, 3: 120, 4: 288, 5: 360, 6: 1664, 7: 2208, 8: 3872}


def target_gpu_metrics(data: bytes) -> None:
    """AMD's binary table: as it is, and with a head that fits its size."""
    with suppress(UnknownTableError):
        decode(data)
    if data:
        revision = data[0] % 8 + 1
        size = SIZES[revision]
        decode(size.to_bytes(2, "little") + bytes((1, revision)) + data.ljust(size, b"\0"))


def target_exporter_page(data: bytes) -> None:
    """An exporter's page, and the same values on a page whose series are known."""
    reader = Reader()
    for page in (data, b'DCGM_FI_DEV_FB_USED{UUID="G",GPU_I_ID="1"} ' + data + b"\n", data):
        with suppress(ExpositionError):
            reader.read(page)


def target_tpu_response(data: bytes) -> None:
    """An answer of the TPU runtime."""
    with suppress(DecodeError):
        gauges(MetricResponse.FromString(data))


def target_nvml_fields(data: bytes) -> None:
    """Field values as the driver fills them in, and its bits of clock events."""
    size = ctypes.sizeof(c_nvmlFieldValue_t)
    count = len(data) // size
    told_values((c_nvmlFieldValue_t * count).from_buffer_copy(data[: count * size]))
    clocks_event_names(int.from_bytes(data[:8], "little"))


class _SameEverywhere(Files):
    """Every file has the same content, and every folder the same names."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self._content = content

    def read(self, path: str) -> bytes | None:  # noqa: ARG002 - all are alike
        return self._content

    def read_once(self, path: str) -> bytes | None:  # noqa: ARG002 - all are alike
        return self._content

    def names(self, path: str) -> list[str]:  # noqa: ARG002 - all are alike
        parts: Iterable[bytes] = self._content.split()
        return [part.decode(errors="replace") for part in parts]


def target_sysfs(data: bytes) -> None:
    """Files of the kernel."""
    files = _SameEverywhere(data)
    sysfs.number(files, "", 0.5)
    sysfs.whole(files, "")
    sysfs.link(files, "")
    sysfs.sensors(files, "", "temp")
    sysfs.cards(files, "0x1002")
    sysfs.render_node(files, "")
