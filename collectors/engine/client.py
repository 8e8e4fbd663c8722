"""Fetches pages over one kept-alive connection, and says in words why there is none."""

import http.client
import json
import os
import socket
import ssl
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args
from urllib.parse import SplitResult, urljoin, urlsplit

from latencyprism.collectors.address import endpoint, port_of

MAX_BYTES = 8_000_000
"""Longest answer that is read, and longest page that a compressed one may become."""
REDIRECTS = 3
"""Most redirects followed, all of them on the same server."""
HINTS = {
    401: "the page wants a token; set token_env or token_file",
    403: "the token, or its absence, is refused",
    404: "no metrics there; SGLang needs --enable-metrics",
    501: "metrics are off; llama.cpp needs --metrics",
}
JSON_HINT = "JSON, not metrics; TensorRT-LLM has them at /prometheus/metrics, other engines may"

Refusal = Literal[
    "unreachable",
    "timeout",
    "http_status",
    "redirect",
    "token",
    "encoding",
    "oversized",
    "truncated",
    "not_metrics",
]
"""Why there is no page."""
REFUSALS: tuple[Refusal, ...] = get_args(Refusal)


class ScrapeError(Exception):
    """No usable answer; the message says why."""

    def __init__(self, kind: Refusal, message: str, *, elsewhere: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.elsewhere = elsewhere
        """Whether the server is up and the page may be at another path."""


class Answer(NamedTuple):
    """What a server sent, decoded."""

    content_type: str
    body: bytes


def no_token() -> str | None:
    """For servers that ask for none."""
    return None


def token_source(env: str, file: str) -> Callable[[], str | None]:
    """Reads the bearer token where it is kept, each time anew, because tokens are replaced.

    What it returns raises ScrapeError when there is none there.
    """

    def read() -> str:
        try:
            token = Path(file).read_text().strip() if file else os.environ.get(env, "")
        except (OSError, UnicodeDecodeError) as error:
            raise ScrapeError("token", f"token_file {file}: {error}") from error
        if not token.isascii() or not token.isprintable() or not token:
            where = f"token_file {file}" if file else f"environment {env}"
            raise ScrapeError("token", f"{where} holds no token")
        return token

    return read if env or file else no_token


class Client:
    """One kept-alive connection to one server; used by one thread, aborted by another."""

    def __init__(
        self,
        url: str,
        timeout_s: float,
        *,
        token: Callable[[], str | None] = no_token,
        ssl_ca: str = "",
    ) -> None:
        """Raises ValueError for a URL or an authority's file that is wrong."""
        parts = endpoint(url)
        self.origin = _origin(parts)
        self._base = parts.path.rstrip("/")
        self._token = token
        self._aborted = False
        self._socket: socket.socket | None = None
        self._response: http.client.HTTPResponse | None = None
        """Both of the newest request: the connection forgets them before an answer that ends it has
        come."""
        host = str(parts.hostname)
        self._connection: http.client.HTTPConnection
        if parts.scheme == "https":
            try:
                context = ssl.create_default_context(cafile=ssl_ca or None)
            except OSError as error:
                raise ValueError(f"ssl_ca {ssl_ca!r}: {error}") from error
            self._connection = http.client.HTTPSConnection(
                host, parts.port, timeout=timeout_s, context=context
            )
        else:
            self._connection = http.client.HTTPConnection(host, parts.port, timeout=timeout_s)

    def get(self, path: str) -> Answer:
        """The answer at a path below the base URL; blocks up to the timeout for each read.

        Raises ScrapeError.
        """
        self._aborted = False
        try:
            return self._follow(self._base + path)
        except http.client.IncompleteRead as error:
            self.close()
            message = f"truncated after {len(error.partial)} bytes"
            raise ScrapeError("truncated", message) from error
        except TimeoutError as error:
            self.close()
            raise ScrapeError("timeout", str(error) or "timed out") from error
        except (OSError, UnicodeError, http.client.HTTPException) as error:
            self.close()
            raise ScrapeError("unreachable", str(error) or type(error).__name__) from error

    def _follow(self, target: str) -> Answer:
        for _ in range(REDIRECTS + 1):
            response = self._request(target)
            body = self._read(response)
            if response.status not in (301, 302, 303, 307, 308):
                return _answer(response, body)
            target = self._redirected(target, response.getheader("Location") or "")
        raise ScrapeError("redirect", f"redirected more than {REDIRECTS} times")

    def _redirected(self, target: str, location: str) -> str:
        scheme, host, port = self.origin
        base = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        try:
            parts = urlsplit(urljoin(base + target, location))
            same = _origin(parts) == self.origin
        except ValueError:
            same = False
        if not location or not same:
            # Elsewhere the token is nobody's business, nor can it be the engine's own page.
            raise ScrapeError(
                "redirect", f"redirected to {location[:200]!r}; set it in pages if it is right"
            )
        return f"{parts.path}?{parts.query}" if parts.query else parts.path or "/"

    def _request(self, target: str) -> http.client.HTTPResponse:
        reused = self._connection.sock is not None
        try:
            return self._ask(target)
        except (http.client.RemoteDisconnected, ConnectionError):
            if not reused or self._aborted:
                raise
        # The server closed the idle connection, as it may at any time.
        self.close()
        return self._ask(target)

    def _ask(self, target: str) -> http.client.HTTPResponse:
        headers = {"Accept": "text/plain;version=0.0.4", "User-Agent": "latencyprism"}
        token = self._token()
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        self._connection.request("GET", target, headers=headers)
        self._socket = self._connection.sock
        self._response = self._connection.getresponse()
        return self._response

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        body = response.read(MAX_BYTES + 1)
        if len(body) > MAX_BYTES:
            self.close()
            raise ScrapeError("oversized", f"answer of more than {MAX_BYTES} bytes")
        if response.length:  # what read(n) leaves unsaid when the connection ended early
            self.close()
            missing = f"truncated after {len(body)} bytes, {response.length} missing"
            raise ScrapeError("truncated", missing)
        if response.will_close:
            self.close()
        return body

    def abort(self) -> None:
        """Make a :meth:`get` that is under way in another thread fail at once."""
        self._aborted = True
        for sock in (self._connection.sock, self._socket):
            if sock is not None:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; the next :meth:`get` opens a new one."""
        self._connection.close()
        if self._response is not None:
            self._response.close()
        self._socket = self._response = None


def checked_page(content_type: str, body: bytes) -> bytes:
    """A body that can be a whole metrics page. Raises ScrapeError for one that can't."""
    start = body[:1000].lstrip()[:1]
    if content_type == "text/html" or start == b"<":
        raise ScrapeError("not_metrics", "the answer is HTML, not metrics")
    if content_type == "application/json" or start == b"[":
        raise ScrapeError("not_metrics", f"the answer is {JSON_HINT}", elsewhere=True)
    if body.startswith(b"\x1f\x8b"):
        raise ScrapeError("encoding", "the page is compressed, but does not say so")
    if not body.strip():
        raise ScrapeError("not_metrics", "the page is empty")
    if not body.endswith((b"\n", b"# EOF")):
        raise ScrapeError("truncated", f"truncated: no line end after {len(body)} bytes")
    openmetrics = content_type == "application/openmetrics-text"
    if openmetrics and not body.rstrip().endswith(b"# EOF"):
        raise ScrapeError("truncated", f"truncated: no # EOF after {len(body)} bytes")
    return body


def parsed_json(body: bytes) -> Any:
    """A JSON body. Raises ScrapeError for anything else."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ScrapeError("not_metrics", f"the answer is not JSON: {error}") from error


def _origin(parts: SplitResult) -> tuple[str, str, int]:
    return parts.scheme, str(parts.hostname), port_of(parts.geturl())


def _answer(response: http.client.HTTPResponse, body: bytes) -> Answer:
    if response.status != http.client.OK:
        raise ScrapeError(
            "http_status",
            f"HTTP {response.status}: {HINTS.get(response.status, response.reason)}",
            elsewhere=response.status == http.client.NOT_FOUND,
        )
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    return Answer(response.headers.get_content_type(), decoded(body, encoding))


def decoded(body: bytes, encoding: str) -> bytes:
    """A body without its content encoding. Raises ScrapeError, for one that grows too large too."""
    if encoding in ("identity", ""):
        return body
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise ScrapeError("encoding", f"the page is encoded as {encoding[:50]!r}, unasked")
    # 32 more than the window's bits: the header says which of the two formats it is.
    decoder = zlib.decompressobj(zlib.MAX_WBITS + 32)
    try:
        page = decoder.decompress(body, MAX_BYTES + 1)
    except zlib.error as error:
        raise ScrapeError("encoding", f"the page is no {encoding}: {error}") from error
    if len(page) > MAX_BYTES:
        raise ScrapeError("oversized", f"page of more than {MAX_BYTES} bytes, decoded")
    if not decoder.eof:
        raise ScrapeError("truncated", f"truncated: {encoding} ends after {len(page)} bytes")
    return page
