"""What is said when a store cannot be reached or used."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from latencyprism.sinks.client import connect
from latencyprism.sinks.config import StoreConfig
from latencyprism.sinks.errors import StoreAuthError, StoreAwayError, StoreVersionError


@contextmanager
def answering(*answers: tuple[int, str, str]) -> Iterator[str]:
    """A server that gives (status, error number, body), the last for ever; its address."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            status, code, body = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status)
            if code:
                self.send_header("X-ClickHouse-Exception-Code", code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 of the base class
            """Keep test output clean."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_nobody_listens() -> None:
    with pytest.raises(StoreAwayError, match=r"http://127\.0\.0\.1:1 does not answer.*refused"):
        connect(StoreConfig(url="http://127.0.0.1:1"))


def test_no_process_serves_the_folder(tmp_path: Path) -> None:
    with pytest.raises(StoreAwayError, match=r"sinks\.store --directory"):
        connect(StoreConfig(directory=str(tmp_path)))


@pytest.mark.parametrize("url", ["localhost:8123", "tcp://host:9000", "http://"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ValueError, match=r"store\.url .*http://host:8123"):
        connect(StoreConfig(url=url))


def test_neither_address_nor_folder() -> None:
    with pytest.raises(ValueError, match=r"neither store\.url nor store\.directory"):
        connect(StoreConfig())


def test_a_wrong_password() -> None:
    text = "Code: 516. DB::Exception: default: Authentication failed. (AUTHENTICATION_FAILED)"
    with (
        answering((403, "516", text)) as url,
        pytest.raises(StoreAuthError, match=r"store\.username, store\.password") as refused,
    ):
        connect(StoreConfig(url=url))
    assert refused.value.code == 516


def test_something_else_answers() -> None:
    with (
        answering((404, "", "<html>not here</html>")) as url,
        pytest.raises(StoreVersionError, match="no ClickHouse"),
    ):
        connect(StoreConfig(url=url))
    with (
        answering((200, "", "<html>hello</html>")) as url,
        pytest.raises(StoreVersionError, match="no ClickHouse"),
    ):
        connect(StoreConfig(url=url))


def test_a_server_that_is_too_old() -> None:
    version = (200, "", "18.16.1\tUTC\n")
    unknown = (500, "47", "Code: 47. DB::Exception: Unknown identifier: readonly")
    with (
        answering(version, unknown) as url,
        pytest.raises(StoreVersionError, match=r"24\.10 or newer is needed"),
    ):
        connect(StoreConfig(url=url))


def test_a_store_that_is_overloaded_is_away() -> None:
    text = "Code: 202. DB::Exception: Too many simultaneous queries"
    with (
        answering((500, "202", text)) as url,
        pytest.raises(StoreAwayError, match="cannot do it now") as away,
    ):
        connect(StoreConfig(url=url))
    assert away.value.code == 202


def test_a_password_is_not_shown() -> None:
    assert "secret" not in repr(StoreConfig(password="secret"))
