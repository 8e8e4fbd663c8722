"""OTLP over gRPC: ``TraceService.Export``, in a few threads of its own."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NoReturn
from urllib.parse import unquote

import grpc

from latencyprism.collectors.otlp.answers import accepted
from latencyprism.collectors.otlp.receiver import Receiver, ip_address
from latencyprism.collectors.otlp.spans import MalformedError

SERVICE: Final = "opentelemetry.proto.collector.trace.v1.TraceService"
THREADS: Final = 2
MAX_CALLS: Final = 4
"""Calls at once; further ones are answered RESOURCE_EXHAUSTED."""
GRACE_S: Final = 0.2


class GrpcServer:
    """Listens from the start on, until :meth:`close`. Raises OSError when it cannot."""

    def __init__(self, receiver: Receiver, address: str, *, max_bytes: int) -> None:
        self._receiver = receiver
        self._server = grpc.server(
            ThreadPoolExecutor(THREADS, thread_name_prefix="otlp grpc"),
            handlers=[
                grpc.method_handlers_generic_handler(
                    SERVICE, {"Export": grpc.unary_unary_rpc_method_handler(self._export)}
                )
            ],
            maximum_concurrent_rpcs=MAX_CALLS,
            options=[
                ("grpc.max_receive_message_length", max_bytes),
                ("grpc.max_concurrent_streams", MAX_CALLS),
                ("grpc.so_reuseport", 0),  # else a second agent would take half of the spans
            ],
        )
        try:
            self.port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"OTLP cannot listen on {address} for gRPC: {error}") from error
        self._server.start()

    def close(self) -> None:
        """End the calls within 200 ms, and stop to listen."""
        self._server.stop(GRACE_S).wait(2 * GRACE_S)

    def _export(self, body: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            return accepted(self._receiver.take(body, "protobuf", _peer(context)), "protobuf")
        except MalformedError as malformed:
            _abort(context.abort, str(malformed))


def _abort(abort: Callable[[grpc.StatusCode, str], NoReturn], message: str) -> NoReturn:
    abort(grpc.StatusCode.INVALID_ARGUMENT, message)


def _peer(context: grpc.ServicerContext) -> str | None:
    """Address of a peer such as ``ipv4:127.0.0.1:4321`` or ``ipv6:%5B::1%5D:4321``."""
    family, _, rest = unquote(context.peer()).partition(":")
    host = rest.rpartition(":")[0].strip("[]")
    return ip_address(host) if family in ("ipv4", "ipv6") else None
