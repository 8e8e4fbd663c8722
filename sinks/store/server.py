"""ClickHouse's HTTP protocol on loopback, served from chDB."""

import base64
import hmac
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from email import policy
from email.parser import BytesParser
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from latencyprism.sinks.store import compression
from latencyprism.sinks.store.engine import (
    Answer,
    Engine,
    EngineError,
    Limits,
    Request,
    summary_header,
)
from latencyprism.sinks.store.lock import Endpoint, announce, owned

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
IDLE_S = 120.0
COMPRESS_FROM_BYTES = 4096
TRANSPORT_PARAMETERS = frozenset(
    {
        "buffer_size",
        "cancel_http_readonly_queries_on_client_close",
        "client_protocol_version",
        "close_session",
        "compress",
        "database",
        "decompress",
        "default_format",
        "enable_http_compression",
        "http_headers_progress_interval_ms",
        "password",
        "query",
        "query_id",
        "quota_key",
        "role",
        "send_progress_in_http_headers",
        "session_check",
        "session_id",
        "session_timeout",
        "user",
        "wait_end_of_query",
    }
)
"""URL parameters that speak to the HTTP server; all others are settings of the query."""

TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
STATUS = {
    36: HTTPStatus.BAD_REQUEST,  # BAD_ARGUMENTS
    48: HTTPStatus.NOT_IMPLEMENTED,  # NOT_IMPLEMENTED
    60: HTTPStatus.NOT_FOUND,  # UNKNOWN_TABLE
    62: HTTPStatus.BAD_REQUEST,  # SYNTAX_ERROR
    81: HTTPStatus.NOT_FOUND,  # UNKNOWN_DATABASE
    516: HTTPStatus.FORBIDDEN,  # AUTHENTICATION_FAILED
}
"""HTTP status by ClickHouse's error number; 500 for all others."""


class StoreServer(ThreadingHTTPServer):
    """Serves one engine; a thread a connection, at most ``limits.connections`` of them."""

    daemon_threads = False
    block_on_close = True
    request_queue_size = 64

    def __init__(
        self, engine: Engine, limits: Limits, *, port: int, username: str, password: str
    ) -> None:
        super().__init__((LOOPBACK, port), _Handler)
        self.engine = engine
        self.limits = limits
        self.username = username
        self.password = password
        self.running = threading.BoundedSemaphore(limits.queries)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """Address it listens on."""
        return f"http://{LOOPBACK}:{self.server_port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Take a connection, or answer 503 when there are too many."""
        with self._lock:
            full = len(self._open) >= self.limits.connections
            if not full:
                self._open.add(request)
        if full:
            logger.warning("refused a connection: %d are open", self.limits.connections)
            request.sendall(TOO_MANY)
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 signature of the base class
        """Log what a connection's thread died of; called while the exception is handled."""
        logger.error("connection from %s failed", client_address, exc_info=True)  # noqa: LOG014 the base class calls it in its except

    def drain(self) -> None:
        """Let every connection finish the request it is in and start no other."""
        with self._lock:
            for connection in self._open:
                try:
                    connection.shutdown(socket.SHUT_RD)
                except OSError:
                    logger.debug("a connection had gone before it was drained")


class _Refused(Exception):  # noqa: N818 control flow inside this module
    """An answer that is no result."""

    def __init__(self, status: HTTPStatus, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.code = code


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "latencyprism-store"
    wbufsize = 1 << 16
    disable_nagle_algorithm = True
    timeout = IDLE_S
    server: StoreServer

    def do_GET(self) -> None:
        self._answer(readonly=True)

    def do_POST(self) -> None:
        self._answer(readonly=False)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 name of the base class
        logger.debug(format, *args)

    def _answer(self, *, readonly: bool) -> None:
        query = dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))
        started = time.monotonic()
        try:
            if urlsplit(self.path).path == "/ping":
                self._send(HTTPStatus.OK, b"Ok.\n", {})
                return
            self._check_origin()
            self._check_credentials(query)
            with self.server.running:
                request = self._request(query, readonly=readonly)
                answer = self.server.engine.execute(request)
            self._send_answer(answer, query)
        except EngineError as e:
            status = STATUS.get(e.code, HTTPStatus.INTERNAL_SERVER_ERROR)
            self._send_error(status, str(e), e.code)
        except _Refused as e:
            self.close_connection = True  # the body may be unread
            self._send_error(e.status, str(e), e.code)
        except (ConnectionError, TimeoutError) as e:
            self.close_connection = True
            logger.info("the client left after %.3f s: %s", time.monotonic() - started, e)

    def _check_origin(self) -> None:
        """Keep web pages from using a browser on this machine to reach the store."""
        host = (self.headers.get("Host") or LOOPBACK).rsplit(":", 1)[0]
        if self.headers.get("Origin") or host not in (LOOPBACK, "localhost"):
            raise _Refused(HTTPStatus.FORBIDDEN, "this store answers no web pages, only programs")

    def _check_credentials(self, query: Mapping[str, str]) -> None:
        if not self.server.password:
            return
        user, password = self._credentials(query)
        if user != self.server.username or not hmac.compare_digest(
            password.encode(), self.server.password.encode()
        ):
            raise _Refused(
                HTTPStatus.FORBIDDEN,
                f"Code: 516. DB::Exception: {user}: Authentication failed: password is incorrect, "
                "or there is no user with such name. (AUTHENTICATION_FAILED)",
                516,
            )

    def _credentials(self, query: Mapping[str, str]) -> tuple[str, str]:
        scheme, _, token = (self.headers.get("Authorization") or "").partition(" ")
        if scheme.lower() == "basic":
            try:
                user, _, password = base64.b64decode(token).decode().partition(":")
            except ValueError as e:
                raise _Refused(HTTPStatus.BAD_REQUEST, f"Authorization is not Basic: {e}") from e
            return user, password
        return (
            self.headers.get("X-ClickHouse-User") or query.get("user", "default"),
            self.headers.get("X-ClickHouse-Key") or query.get("password", ""),
        )

    def _request(self, query: dict[str, str], *, readonly: bool) -> Request:
        body = self._body()
        if (self.headers.get("Content-Type") or "").startswith("multipart/form-data"):
            query |= self._form(body)
            body = b""
        head = query.get("query", "").encode()
        return Request(
            sql=head + b"\n" + body if head and body else head or body,
            database=query.get("database") or self.headers.get("X-ClickHouse-Database") or "",
            parameters={
                name.removeprefix("param_"): value
                for name, value in query.items()
                if name.startswith("param_")
            },
            settings={
                name: value
                for name, value in query.items()
                if name not in TRANSPORT_PARAMETERS and not name.startswith("param_")
            },
            format=query.get("default_format")
            or self.headers.get("X-ClickHouse-Format")
            or "TabSeparated",
            readonly=readonly,
        )

    def _body(self) -> bytes:
        limit = self.server.limits.body_bytes
        if "chunked" in (self.headers.get("Transfer-Encoding") or "").lower():
            raw = b"".join(self._chunks(limit))
        else:
            length = self.headers.get("Content-Length") or "0"
            if not length.isdecimal():
                raise _Refused(HTTPStatus.BAD_REQUEST, f"Content-Length {length!r} is no number")
            if int(length) > limit:
                raise _Refused(*_too_large(f"the body has {length} bytes, more than {limit}"))
            raw = self._read(int(length))
        try:
            return compression.decompress(raw, self.headers.get("Content-Encoding") or "", limit)
        except compression.TooLargeError as e:
            raise _Refused(*_too_large(str(e))) from e
        except compression.UnknownEncodingError as e:
            raise _Refused(HTTPStatus.BAD_REQUEST, str(e)) from e

    def _chunks(self, limit: int) -> Iterator[bytes]:
        total = 0
        while True:
            line = self.rfile.readline(128)
            try:
                size = int(line.split(b";")[0], 16)
            except ValueError as e:
                raise _Refused(HTTPStatus.BAD_REQUEST, f"{line!r} is no size of a chunk") from e
            total += size
            if total > limit or size < 0:
                raise _Refused(*_too_large(f"the body has more than {limit} bytes"))
            if size == 0:
                while self.rfile.readline(1024) not in (b"\r\n", b"\n", b""):
                    pass  # trailers
                return
            yield self._read(size)
            self.rfile.readline(2)

    def _read(self, size: int) -> bytes:
        data = self.rfile.read(size)
        if len(data) < size:
            raise ConnectionResetError(f"{len(data)} of {size} bytes of the body came")
        return data

    def _form(self, body: bytes) -> dict[str, str]:
        """Fields of a multipart form, in which clients put a query with large parameters."""
        head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
        message = BytesParser(policy=policy.HTTP).parsebytes(head + body)
        fields: dict[str, str] = {}
        for part in message.iter_parts():
            name = part.get_param("name", header="content-disposition")
            if part.get_filename() is not None:
                raise _Refused(
                    HTTPStatus.NOT_IMPLEMENTED,
                    "Code: 48. DB::Exception: this store takes no external data with a query",
                    48,
                )
            content = part.get_payload(decode=True)
            fields[str(name)] = content.decode() if isinstance(content, bytes) else ""
        return fields

    def _send_answer(self, answer: Answer, query: Mapping[str, str]) -> None:
        headers = {
            "X-ClickHouse-Summary": summary_header(answer.summary),
            "X-ClickHouse-Query-Id": query.get("query_id", ""),
        }
        if answer.format:
            headers["X-ClickHouse-Format"] = answer.format
        body = answer.body
        if query.get("enable_http_compression") == "1" and len(body) >= COMPRESS_FROM_BYTES:
            encoding = compression.choose(self.headers.get("Accept-Encoding") or "")
            if encoding:
                headers["Content-Encoding"] = encoding
                body = compression.compress(body, encoding)
        self._send(HTTPStatus.OK, body, headers)

    def _send_error(self, status: HTTPStatus, text: str, code: int | None) -> None:
        headers = {"X-ClickHouse-Exception-Code": str(code)} if code else {}
        try:
            self._send(status, text.encode(errors="replace") + b"\n", headers)
        except OSError as e:
            self.close_connection = True
            logger.info("the client left before it heard %s: %s", text[:80], e)

    def _send(self, status: HTTPStatus, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        self.send_header("X-ClickHouse-Server-Display-Name", "latencyprism-store")
        self.send_header("X-ClickHouse-Timezone", time.tzname[0])
        for name, value in headers.items():
            self.send_header(name, value.replace("\r", " ").replace("\n", " "))
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()


def _too_large(text: str) -> tuple[HTTPStatus, str, int]:
    return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"Code: 307. DB::Exception: {text}", 307


@contextmanager
def running_store(
    directory: Path,
    *,
    port: int = 0,
    username: str = "default",
    password: str = "",
    limits: Limits | None = None,
) -> Iterator[StoreServer]:
    """The store of a folder, answering while the block runs; then it ends what it is in.

    A process can hold one at a time, since chDB keeps one folder a process. The engine's local
    time is made UTC for the whole process. Raises
    :class:`~latencyprism.sinks.store.lock.DirectoryTakenError` when another process has the
    folder, OSError when the port is taken or the folder cannot be written.
    """
    os.environ["TZ"] = "UTC"
    time.tzset()
    limits = limits or Limits()
    with owned(directory):
        engine = Engine(directory, limits)
        try:
            with StoreServer(
                engine, limits, port=port, username=username, password=password
            ) as server:
                serving = threading.Thread(target=server.serve_forever, args=(0.1,), name="store")
                serving.start()
                try:
                    announce(directory, Endpoint(url=server.url, pid=os.getpid()))
                    yield server
                finally:
                    server.shutdown()
                    serving.join()
                    server.drain()
        finally:
            engine.close()


def serve_store(
    directory: Path | str,
    *,
    port: int = 0,
    username: str = "default",
    password: str = "",
    limits: Limits | None = None,
    ready: Callable[[int], object] | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Serve the folder until SIGTERM, SIGINT or ``stop``; blocks.

    ``ready`` is called with the port once queries are answered. Signals are taken over only in
    the main thread. Requests under way are answered before it returns. Raises what
    :func:`running_store` raises.
    """
    stop = stop or threading.Event()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
    with running_store(
        Path(directory), port=port, username=username, password=password, limits=limits
    ) as server:
        logger.info("store of %s at %s", directory, server.url)
        if ready is not None:
            ready(server.server_port)
        stop.wait()
        logger.info("store of %s stops", directory)
