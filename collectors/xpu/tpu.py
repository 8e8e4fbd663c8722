"""Google TPUs through the metric service of the runtime (libtpu) in the serving process.

The service answers on a local port for as long as a process uses the TPU. That process is found by
the port, so its TPU is told to its server.
"""

import ipaddress
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import grpc

from latencyprism.collectors.host.files import Files
from latencyprism.collectors.source import UnavailableError
from latencyprism.collectors.xpu.reading import Reading
from latencyprism.collectors.xpu.tpu_kinds import host_and_port, kind_of_tpu
from latencyprism.collectors.xpu.tpu_messages import GET_METRIC, MetricRequest, MetricResponse

VENDOR: Final = "google"
MEMORY_TOTAL: Final = "tpu.runtime.hbm.memory.total.bytes"
MEMORY_USED: Final = "tpu.runtime.hbm.memory.usage.bytes"
DUTY_CYCLE: Final = "tpu.runtime.tensorcore.dutycycle.percent"
MEMORY_BUSY: Final = "tpu.runtime.hbm.utilization.percent"
METRICS: Final = (MEMORY_TOTAL, MEMORY_USED, DUTY_CYCLE, MEMORY_BUSY)

MAX_DEVICES: Final = 256
"""Devices taken from one runtime; a host has at most 8 chips."""
_RECONNECT: Final = (
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 5000),
)
"""A server that starts is seen within seconds; by default, after up to two minutes."""
_REFUSED: Final = frozenset(
    (
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.INVALID_ARGUMENT,
    )
)
"""How runtimes of other versions answer for a metric they do not have."""


class Tpu:
    """The TPUs of the processes whose runtimes answer at ``addresses`` (``host:port``).

    Raises :class:`UnavailableError` on a machine without one, ValueError for an address that is
    none.
    """

    def __init__(
        self, addresses: Sequence[str], sys: str = "/sys", *, timeout_s: float = 2.0
    ) -> None:
        files = Files(sys=sys)
        self._name = kind_of_tpu(files)
        if self._name is None:
            raise UnavailableError(f"no TPU in {sys}/bus/pci/devices")
        self._timeout_s = timeout_s
        self._runtimes = [_Runtime(address, self._name, timeout_s) for address in addresses]
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> Mapping[str, int]:
        """What failed, by kind."""
        return self._counts

    def read(self) -> list[Reading]:
        """The devices of the runtimes that answer. Raises OSError when none does."""
        found: list[Reading] = []
        failures: list[str] = []
        for runtime in self._runtimes:
            try:
                found += runtime.read()
            except OSError as error:
                self._counts["runtimes_silent"] += 1
                failures.append(str(error))
        if not found and failures:
            raise OSError("; ".join(failures))
        return found

    def reopen(self) -> None:
        """Connections are made anew by themselves; metrics once refused are asked for again."""
        for runtime in self._runtimes:
            runtime.refused.clear()

    def close(self) -> None:
        """Close the connections."""
        for runtime in self._runtimes:
            runtime.close()


class _Runtime:
    def __init__(self, address: str, name: str, timeout_s: float) -> None:
        host, port = host_and_port(address)
        self._address = address
        self._name = name
        self._port = port if _is_loopback(host) else None
        self._timeout_s = timeout_s
        self._channel = grpc.insecure_channel(address, options=_RECONNECT)
        self._call = self._channel.unary_unary(
            GET_METRIC,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=MetricResponse.FromString,
        )
        self.refused: set[str] = set()

    def read(self) -> list[Reading]:
        values = {name: self._values(name) for name in METRICS if name not in self.refused}
        total, used = values.get(MEMORY_TOTAL, {}), values.get(MEMORY_USED, {})
        devices = sorted({*total, *used} or values.get(DUTY_CYCLE, {}))[:MAX_DEVICES]
        duty = spread(values.get(DUTY_CYCLE, {}), devices)
        busy = spread(values.get(MEMORY_BUSY, {}), devices)
        return [
            Reading(
                device=f"{self._address}/{device}",
                vendor=VENDOR,
                name=self._name,
                utilisation=_share(duty.get(device)),
                memory_utilisation=_share(busy.get(device)),
                memory_used_bytes=_bytes(used.get(device)),
                memory_total_bytes=_bytes(total.get(device)),
                port=self._port,
            )
            for device in devices
        ]

    def close(self) -> None:
        self._channel.close()

    def _values(self, name: str) -> dict[int, float]:
        """Device → value; empty for a metric that the runtime does not have."""
        try:
            response = self._call(MetricRequest(metric_name=name), timeout=self._timeout_s)
        except grpc.RpcError as error:
            status = error.code()
            if status not in _REFUSED:
                self.refused.clear()  # the next process may have another version
                raise OSError(
                    f"TPU runtime at {self._address} does not answer: {status.name}; it does only "
                    "while a process uses the TPU"
                ) from error
            self.refused.add(name)
            return {}
        return gauges(response)


def gauges(response: Any) -> dict[int, float]:
    """Device → value of an answer; entries without a device or a value are left out."""
    found: dict[int, float] = {}
    for metric in response.metric.metrics:
        device = metric.attribute.value
        kind = metric.gauge.WhichOneof("value")
        if device.WhichOneof("attr") == "int_attr" and kind is not None:
            found[device.int_attr] = float(getattr(metric.gauge, kind))
    return found


def spread(values: Mapping[int, float], devices: Sequence[int]) -> dict[int, float]:
    """Values of chips given to their cores: some runtimes count devices by core, others by chip."""
    if not values or set(devices) <= values.keys():
        return dict(values)
    cores, rest = divmod(len(devices), len(values))
    if rest or not cores:
        return dict(values)
    chips = [values[chip] for chip in sorted(values)]
    return {device: chips[place // cores] for place, device in enumerate(devices)}


def _share(percent: float | None) -> float | None:
    return percent / 100 if percent is not None and 0 <= percent <= 100 else None


def _bytes(value: float | None) -> int | None:
    return int(value) if value is not None and 0 <= value < 1 << 62 else None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
