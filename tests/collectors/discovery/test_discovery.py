import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from latencyprism.collectors.discovery import source as source_module
from latencyprism.collectors.discovery.config import DiscoveryConfig
from latencyprism.collectors.discovery.probe import Answer, probe
from latencyprism.collectors.discovery.sockets import held, listeners, own_name, processes
from latencyprism.collectors.discovery.source import Discovery, DiscoverySource
from latencyprism.collectors.publisher import MemoryPublisher

HEAD = "  sl  local rem st tx_queue:rx_queue tr:tm->when retrnsmt uid timeout inode\n"
LOOPBACK, ANY, OTHER = "0100007F", "00000000", "0A00000A"


class Host:
    """A proc file system with processes and sockets, and what answers at their ports."""

    def __init__(self, root: Path) -> None:
        self.proc = root
        self.asked: list[tuple[str, int]] = []
        self.answers: dict[int, Answer] = {}
        self._sockets: dict[int, str] = {}
        (root / "self/net").mkdir(parents=True)
        self._write()

    def process(
        self, pid: int, *arguments: str, parent: int = 1, sockets: tuple[int, ...] = ()
    ) -> None:
        folder = self.proc / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "cmdline").write_bytes(b"".join(a.encode() + b"\0" for a in arguments))
        (folder / "stat").write_text(f"{pid} (a (b) c) S {parent} 1 1 0")
        for number, inode in enumerate(sockets, 3):
            (folder / "fd" / str(number)).symlink_to(f"socket:[{inode}]")

    def listen(self, inode: int, port: int, address: str = ANY) -> None:
        self._sockets[inode] = f" 0: {address}:{port:04X} {ANY}:0000 0A 0:0 0:0 0 0 0 {inode} 1\n"
        self._write()

    def close(self, inode: int) -> None:
        del self._sockets[inode]
        self._write()

    def _write(self) -> None:
        established = f" 9: {LOOPBACK}:1F40 {LOOPBACK}:9999 01 0:0 0:0 0 0 0 777 1\n"
        table = HEAD + "".join(self._sockets.values()) + established
        (self.proc / "self/net/tcp").write_text(table)

    def ask(self, host: str, port: int) -> Answer:
        self.asked.append((host, port))
        return self.answers.get(port, "yes")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def discovery(host: Host, *engines: str, config: DiscoveryConfig | None = None) -> Discovery:
    return Discovery(
        config or DiscoveryConfig(),
        engines,
        proc=host.proc,
        ask=host.ask,
        own_name=lambda: "box",
    )


VLLM = ("/usr/bin/python3", "/opt/bin/vllm", "serve", "m", "--port", "9000")
SERVERS = (
    VLLM,
    ("python", "-m", "vllm.entrypoints.openai.api_server", "--port=9000"),
    ("python3", "-m", "sglang.launch_server", "--port", "9000"),
    ("text-generation-router", "-p", "9000"),
    ("./build/bin/llama-server", "--port", "9000"),
    ("trtllm-serve", "m", "--port", "9000"),
    ("ollama", "serve"),
    ("lmdeploy", "serve", "api_server", "m"),
)


@pytest.mark.parametrize("command", SERVERS, ids=" ".join)
def test_known_programs_are_found_by_what_they_listen_on(
    host: Host, command: tuple[str, ...]
) -> None:
    host.process(10, *command, sockets=(100,))
    host.listen(100, 9000)

    assert discovery(host).look(0) == ("http://box:9000",)
    assert host.asked == [("127.0.0.1", 9000)]


def test_other_programs_are_never_asked(host: Host) -> None:
    host.process(10, "/usr/sbin/nginx", sockets=(100,))
    host.process(11, "bash", "-c", "vllm-bench")
    host.process(12, "vim", "vllm.py", sockets=(101,))
    host.listen(100, 8000)
    host.listen(101, 9000)

    assert discovery(host).look(0) == ()
    assert host.asked == []


def test_ports_inside_a_server_are_left_alone(host: Host) -> None:
    host.process(10, *VLLM, sockets=(100, 101))
    host.process(11, "VLLM::EngineCore", parent=10, sockets=(102,))
    for inode, port in ((100, 9000), (101, 40_001), (102, 40_002)):
        host.listen(inode, port)

    assert discovery(host).look(0) == ("http://box:9000",)
    assert host.asked == [("127.0.0.1", 9000)]


def test_port_is_found_where_a_child_listens_and_nothing_names_it(host: Host) -> None:
    host.process(10, "text-generation-launcher")
    host.process(11, "text-generation-worker", parent=10, sockets=(100, 101))
    host.listen(100, 40_001)
    host.listen(101, 3000)

    assert discovery(host).look(0) == ("http://box:3000",)
    assert host.asked == [("127.0.0.1", 3000)]


def test_of_unusual_ports_few_are_asked_and_none_once_one_has_answered(host: Host) -> None:
    host.process(10, "tritonserver", sockets=tuple(range(100, 110)))
    for inode in range(100, 110):
        host.listen(inode, 40_000 + inode)
    host.answers = {40_100 + number: "yes" if number == 1 else "later" for number in range(10)}
    looking = discovery(host)
    looking.look(0)
    first = list(host.asked)
    looking.look(1000)

    assert len(first) == source_module.MAX_PORTS
    assert host.asked == first


def test_nothing_is_searched_or_asked_again_while_the_sockets_stay(host: Host) -> None:
    host.process(10, *VLLM, sockets=(100,))
    host.listen(100, 9000)
    looking = discovery(host)
    for now in range(50):
        assert looking.look(now) == ("http://box:9000",)

    assert looking.counts == {"looks": 50, "searches": 1, "questions": 1}


def test_server_that_starts_is_asked_less_and_less_often(host: Host) -> None:
    host.process(10, *VLLM, sockets=(100,))
    host.listen(100, 9000)
    host.answers[9000] = "later"
    looking = discovery(host)
    times = []
    for now in range(1000):
        before = len(host.asked)
        assert looking.look(now) == ()
        if len(host.asked) > before:
            times.append(now)
    host.answers[9000] = "yes"

    assert times == [0, 5, 15, 35, 75, 155, 315, 615, 915]
    assert looking.look(2000) == ("http://box:9000",)


def test_program_that_is_no_server_is_not_asked_again(host: Host) -> None:
    host.process(10, *VLLM, sockets=(100,))
    host.listen(100, 9000)
    host.answers[9000] = "no"
    looking = discovery(host)

    assert [looking.look(now) for now in (0, 1000, 2000)] == [()] * 3
    assert len(host.asked) == 1


def test_server_that_restarts_stays_and_one_that_ends_goes(host: Host) -> None:
    host.process(10, *VLLM, sockets=(100,))
    host.listen(100, 9000)
    looking = discovery(host)
    looking.look(0)
    host.close(100)
    during = looking.look(20)
    host.process(11, *VLLM, sockets=(101,))
    host.listen(101, 9000)
    again = looking.look(25)
    host.close(101)

    assert during == again == ("http://box:9000",)
    assert looking.look(54) == ("http://box:9000",)
    assert looking.look(56) == ()


@pytest.mark.parametrize(
    ("address", "name", "url", "asked"),
    [
        (ANY, "", "http://box:9000", "127.0.0.1"),
        (ANY, "gpu-7", "http://gpu-7:9000", "127.0.0.1"),
        (LOOPBACK, "gpu-7", "http://127.0.0.1:9000", "127.0.0.1"),
        (OTHER, "", "http://10.0.0.10:9000", "10.0.0.10"),
        ("0" * 32, "", "http://box:9000", "::1"),
        ("00000000000000000000000001000000", "", "http://[::1]:9000", "::1"),
        ("0000000000000000FFFF00000100007F", "", "http://127.0.0.1:9000", "127.0.0.1"),
    ],
)
def test_server_is_called_by_where_it_listens(
    host: Host, address: str, name: str, url: str, asked: str
) -> None:
    host.process(10, *VLLM, sockets=(100,))
    host.listen(100, 9000, address)
    looking = discovery(host, config=DiscoveryConfig(host=name))

    assert looking.look(0) == (url,)
    assert host.asked == [(asked, 9000)]


def test_servers_of_the_settings_are_not_found_again(host: Host) -> None:
    host.process(10, *VLLM, sockets=(100,))
    host.listen(100, 9000)

    assert discovery(host, "http://127.0.0.1:9000").look(0) == ()
    assert host.asked == []


def test_programs_can_be_named(host: Host) -> None:
    host.process(10, "/opt/own-engine", "--listen", sockets=(100,))
    host.listen(100, 8000)
    config = DiscoveryConfig(programs=("own-engine",))

    assert discovery(host).look(0) == ()
    assert discovery(host, config=config).look(0) == ("http://box:8000",)


def test_without_the_right_to_look_only_a_named_port_is_asked(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "held", lambda *_: None)
    host.process(10, *VLLM, sockets=(100,))
    host.process(11, "ollama", "serve", sockets=(101,))
    host.listen(100, 9000)
    host.listen(101, 11434)
    looking = discovery(host)

    assert looking.look(0) == ("http://box:9000",)
    assert looking.counts["not permitted"] == 2


def test_own_sockets_and_processes_are_seen() -> None:
    proc = Path("/proc")
    with socket.create_server(("127.0.0.1", 0)) as server:
        inode = os.fstat(server.fileno()).st_ino
        found = listeners(proc)[inode]
        own = next(process for process in processes(proc) if process.pid == os.getpid())

        assert (str(found.address), found.port) == server.getsockname()
        assert own.parent == os.getppid()
        assert "pytest" in own.command
        assert inode in (held(proc, os.getpid()) or ())
    assert held(proc, 2**22 + 1) == set()
    assert inode not in listeners(proc)


def test_both_ways_to_list_the_sockets_agree(tmp_path: Path) -> None:
    (tmp_path / "self").symlink_to("/proc/self")
    with socket.create_server(("127.0.0.1", 0)), socket.create_server(("0.0.0.0", 0)):
        deadline = time.monotonic() + 10
        while listeners() != listeners(tmp_path):  # others come and go on this machine
            assert time.monotonic() < deadline


def test_own_name_is_an_address_of_this_machine() -> None:
    name = own_name()
    with socket.create_server((name, 0)) as server:
        assert server.getsockname()[1] > 0

    assert name in (socket.gethostname(), "127.0.0.1")


Pages = dict[str, tuple[int, bytes]]


@contextmanager
def answering(pages: Pages) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = pages.get(self.path, (404, b"no"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("pages", "answer"),
    [
        ({"/metrics": (200, b"# HELP x y\nvllm:num_requests_running 0\n")}, "yes"),
        ({"/metrics": (200, b"python_info 1\n")}, "no"),
        ({"/metrics": (401, b"key?")}, "yes"),
        ({"/metrics": (501, b"off"), "/v1/models": (200, b'{"data": [{"id": "m"}]}')}, "yes"),
        ({"/api/version": (200, b'{"version": "0.5"}')}, "yes"),
        ({"/v1/models": (200, b"<html>"), "/api/version": (200, b"[1]")}, "no"),
        ({"/metrics": (503, b"loading"), "/v1/models": (503, b"loading")}, "later"),
        ({}, "no"),
    ],
)
def test_server_is_recognised_by_its_answers(pages: Pages, answer: str) -> None:
    with answering(pages) as port:
        assert probe("127.0.0.1", port, timeout_s=5) == answer


def test_server_that_hangs_or_does_not_speak_http_is_asked_later() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert probe("127.0.0.1", port, timeout_s=0.05) == "later"
    assert probe("127.0.0.1", port, timeout_s=0.05) == "later"


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.0 200 OK\r\n\r\n"])
def test_answer_that_trickles_holds_up_no_search(head: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        answer = threading.Thread(target=_trickle, args=(server, head))
        answer.start()
        began = time.monotonic()
        assert probe("127.0.0.1", server.getsockname()[1], timeout_s=0.1) == "later"
        assert time.monotonic() - began < 2
        answer.join(5)
        assert not answer.is_alive()


def _trickle(server: socket.socket, head: bytes) -> None:
    connected, _ = server.accept()
    with connected, suppress(OSError):
        connected.sendall(head)
        for _ in range(200):
            connected.sendall(b"a: b\r\n")
            time.sleep(0.02)


PROGRAM = textwrap.dedent("""
    from http.server import BaseHTTPRequestHandler, HTTPServer
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"llamacpp:requests_processing 0\\n")
        def log_message(self, *_):
            pass
    server = HTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
""")


def test_running_server_is_found_and_its_end_is_seen() -> None:
    seen, gone, stop = threading.Event(), threading.Event(), threading.Event()
    found: list[tuple[str, ...]] = []

    def take(urls: tuple[str, ...]) -> None:
        found.append(urls)
        (seen if urls else gone).set()

    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "stands-for-a-server"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        config = DiscoveryConfig(interval_s=0.5, grace_s=0, programs=(" stands-for-a-server$",))
        source = DiscoverySource(config, (), take)
        thread = threading.Thread(target=source.run, args=(MemoryPublisher(), stop))
        thread.start()
        try:
            assert seen.wait(10)
            assert source.counts["servers"] == 1
        finally:
            process.terminate()
        try:
            assert gone.wait(10)
        finally:
            stop.set()
            thread.join(2)

    assert not thread.is_alive()
    assert found == [(url,), ()]


def test_look_can_be_wished_or_not() -> None:
    auto = DiscoveryConfig()

    assert auto.wanted(())
    assert not auto.wanted(("http://h:1",))
    assert replace(auto, enabled="on").wanted(("http://h:1",))
    assert not replace(auto, enabled="off").wanted(())
