"""A TPU runtime's metric service for tests, with real gRPC."""

from collections.abc import Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from xpu_sysfs import write

from latencyprism.collectors.xpu.tpu_messages import PACKAGE, MetricRequest, MetricResponse

HEALTHY: Mapping[str, Mapping[int, float]] = {
    "tpu.runtime.hbm.memory.total.bytes": dict.fromkeys(range(4), 16 << 30),
    "tpu.runtime.hbm.memory.usage.bytes": {0: 9 << 30, 1: 8 << 30, 2: 7 << 30, 3: 0},
    "tpu.runtime.tensorcore.dutycycle.percent": {0: 63.5, 1: 0.0, 2: 100.0, 3: 1.0},
}


@dataclass(slots=True)
class Runtime:
    """What the service answers; a metric that is not there is refused."""

    values: dict[str, Mapping[int, float]] = field(default_factory=lambda: dict(HEALTHY))
    refuse_as: grpc.StatusCode = grpc.StatusCode.NOT_FOUND
    asked: list[str] = field(default_factory=list)
    answer: Any = None
    """Bytes to send instead of an answer."""

    def get(self, request: Any, context: Any) -> Any:
        self.asked.append(request.metric_name)
        values = self.values.get(request.metric_name)
        if values is None:
            context.abort(self.refuse_as, "no such metric")
        response = MetricResponse()
        response.metric.name = request.metric_name
        for device, value in values.items() if values else ():
            metric = response.metric.metrics.add()
            metric.attribute.key = "device-id"
            metric.attribute.value.int_attr = device
            if isinstance(value, int):
                metric.gauge.as_int = value
            else:
                metric.gauge.as_double = value
        return response

    def encode(self, response: Any) -> bytes:
        return bytes(response.SerializeToString() if self.answer is None else self.answer)


@contextmanager
def serving(runtime: Runtime, port: int = 0) -> Iterator[str]:
    """Serve it; gives the address."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    method = grpc.unary_unary_rpc_method_handler(
        runtime.get,
        request_deserializer=MetricRequest.FromString,
        response_serializer=runtime.encode,
    )
    service = f"{PACKAGE}.RuntimeMetricService"
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {"GetRuntimeMetric": method}),)
    )
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        server.stop(None).wait()


def tpu_machine(sys: Path) -> Path:
    """A machine with a TPU v5e and the network card that has the same vendor."""
    devices = sys / "bus/pci/devices"
    for address, device, kind in (("04", "0x0042", "0x020000"), ("05", "0x0063", "0x120000")):
        write(devices / f"0000:00:{address}.0/vendor", "0x1ae0")
        write(devices / f"0000:00:{address}.0/device", device)
        write(devices / f"0000:00:{address}.0/class", kind)
    return sys
