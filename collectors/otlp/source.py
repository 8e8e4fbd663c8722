"""The OTLP source: servers for gRPC and HTTP, as long as it runs."""

import socket
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from urllib.parse import urlsplit

from latencyprism.collectors.address import endpoint, in_use_advice
from latencyprism.collectors.otlp.config import OtlpConfig
from latencyprism.collectors.otlp.instances import Instances
from latencyprism.collectors.otlp.receiver import Receiver
from latencyprism.collectors.source import Emit, UnavailableError

BACKLOG = 64


def checked_address(value: str) -> tuple[str, int]:
    """Host and port of ``127.0.0.1:4317``. Raises ValueError naming what is wrong."""
    try:
        parts = urlsplit(f"//{value}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host is None or port is None or parts.path:
        raise ValueError(f"otlp {value!r}: expected an address and a port, such as 127.0.0.1:4317")
    return host, port


def listen(address: tuple[str, int], protocol: str = "HTTP") -> socket.socket:
    """A listening socket. Raises OSError naming the address and, if it is in use, what to do."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        name = f"{address[0]}:{address[1]}"
        setting = f"collectors.otlp.{protocol.lower()}"
        advice = in_use_advice(error, find="ss -ltnp", setting=setting)
        raise type(error)(
            error.errno, f"OTLP cannot listen on {name} for {protocol}: {error.strerror}{advice}"
        ) from error


class OtlpSource:
    """Receives spans; see :class:`~latencyprism.collectors.source.Source`.

    It promises no watermark: what comes tells of requests that ended seconds ago. Raises ValueError
    for a setting that is wrong, :class:`UnavailableError` with both servers off, ImportError
    without the libraries of those that are on.
    """

    name = "otlp"

    def __init__(self, engines: Sequence[str], config: OtlpConfig) -> None:
        if not config.grpc and not config.http:
            raise UnavailableError(
                "neither gRPC nor HTTP is on; set collectors.otlp.grpc or collectors.otlp.http"
            )
        if config.grpc:
            import grpc  # noqa: F401 - to say now that it is missing

            checked_address(config.grpc)
        if config.http:
            import uvicorn  # noqa: F401 - the same

            checked_address(config.http)
        for url in engines:
            endpoint(url)
        self._engines = tuple(engines)
        self._config = config
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> Mapping[str, int]:
        """What was received and refused since the start, by kind; a copy."""
        return dict(self._counts)

    def run(self, emit: Emit, stop: threading.Event) -> None:
        """Receive until ``stop``; returns within 500 ms of it.

        Raises OSError when an address is in use or a host name of an engine does not resolve.
        """
        config = self._config
        max_bytes = config.max_message_kb * 1024
        instances = Instances(self._engines, config.services)
        receiver = Receiver(instances, config, self._counts, emit)
        with ExitStack() as servers:
            if config.grpc:
                from latencyprism.collectors.otlp.grpc import GrpcServer

                # The library tells of an address in use on standard error, and not by whom.
                listen(checked_address(config.grpc), "gRPC").close()
                grpc_server = GrpcServer(receiver, config.grpc, max_bytes=max_bytes)
                servers.callback(grpc_server.close)
            if config.http:
                from latencyprism.collectors.otlp.http import serve

                serve(
                    receiver,
                    listen(checked_address(config.http)),
                    stop,
                    max_bytes=max_bytes,
                    max_connections=config.max_connections,
                )
            else:
                stop.wait()
