"""Asks a server that may be an inference server what it is: a few GETs, once."""

import http.client
import json
import socket
import threading
from contextlib import suppress
from typing import Literal

Answer = Literal["yes", "no", "later"]

MAX_BYTES = 2_000_000
"""As much of an answer is read."""
METRICS = (b"vllm:", b"sglang:", b"tgi_", b"llamacpp:", b"lmdeploy:", b"trtllm_", b"nv_inference_")
"""One of these begins a name on the metrics page of an inference server."""
PATHS = ("/metrics", "/v1/models", "/api/version")


def probe(host: str, port: int, *, timeout_s: float) -> Answer:
    """Whether an inference server answers there; ``later`` while it is starting or hangs.

    Blocks up to six times ``timeout_s``: for three connections and three answers. Raises nothing.
    """
    later = False
    for path in PATHS:
        try:
            status, body = _get(host, port, path, timeout_s)
        except (OSError, http.client.HTTPException):
            return "later"
        # A known program that wants a key is what it says it is.
        if status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN) or (
            status == http.client.OK and confirms(path, body)
        ):
            return "yes"
        later |= status in (http.client.BAD_GATEWAY, http.client.SERVICE_UNAVAILABLE)
    return "later" if later else "no"


def _get(host: str, port: int, path: str, timeout_s: float) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    connection.connect()
    # The connection's timeout is that of each read, so an answer that trickles would never end.
    timer = threading.Timer(timeout_s, _end, (connection.sock,))
    timer.start()
    try:
        connection.request("GET", path, headers={"User-Agent": "latencyprism"})
        response = connection.getresponse()
        return response.status, response.read(MAX_BYTES)
    finally:
        timer.cancel()
        connection.close()


def _end(connected: socket.socket) -> None:
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def confirms(path: str, body: bytes) -> bool:
    """Whether an answer at a path is that of an inference server."""
    if path == "/metrics":
        return any(b"\n" + name in b"\n" + body for name in METRICS)
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return False
    key = "data" if path == "/v1/models" else "version"
    return isinstance(answer, dict) and bool(answer.get(key))
