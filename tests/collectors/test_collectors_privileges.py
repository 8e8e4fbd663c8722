import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from latencyprism.collectors.catalogue import may_capture
from latencyprism.collectors.config import CollectorConfig
from latencyprism.collectors.network.config import NetworkConfig
from latencyprism.collectors.privileges import PrivilegesError, drop, needed, permitted

ROOT = pytest.mark.skipif(
    os.geteuid() != 0 or not may_capture() or "CAP_SYS_PTRACE" not in permitted(),
    reason="needs root with CAP_NET_RAW and CAP_SYS_PTRACE",
)


def run(script: str, *arguments: str) -> dict[str, Any]:
    """What a child of this process prints."""
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


DROP = """
import json, os, socket, subprocess, sys, threading
from latencyprism.collectors.privileges import drop, permitted

def tried(call):
    try:
        call()
    except PermissionError:
        return False
    return True

others = f"/proc/{os.getppid()}/fd"
drop(sys.argv[1], keep=sys.argv[2].split(), inherit=sys.argv[3].split())
status = lambda text: dict(line.split(":\\t") for line in text.splitlines())
seen = []
thread = threading.Thread(target=lambda: seen.extend(permitted()))
thread.start(); thread.join()
child = status(subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout)
print(json.dumps({
    "uids": os.getresuid(), "gids": os.getresgid(), "groups": os.getgroups(),
    "kept": sorted(permitted()), "thread": sorted(seen),
    "no_new_privs": status(open("/proc/self/status").read())["NoNewPrivs"],
    "child": int(child["CapEff"], 16),
    "capture": tried(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)),
    "processes": tried(lambda: os.listdir(others) and os.readlink(f"{others}/0")),
    "own": tried(lambda: os.listdir("/proc/self/fd")),
    "root": tried(lambda: os.setuid(0)),
}))
"""


@pytest.mark.root
@ROOT
def test_nothing_is_left_but_what_is_kept() -> None:
    seen = run(DROP, "nobody", "CAP_NET_RAW CAP_SYS_PTRACE CAP_DAC_READ_SEARCH", "CAP_SYS_PTRACE")

    kept = ["CAP_DAC_READ_SEARCH", "CAP_NET_RAW", "CAP_SYS_PTRACE"]
    assert seen["kept"] == seen["thread"] == kept
    assert seen["uids"][0] != 0
    assert len(set(seen["uids"])) == len(set(seen["gids"])) == 1
    assert 0 not in seen["groups"]
    assert seen["no_new_privs"] == "1"
    assert seen["child"] == 1 << 19
    assert (seen["capture"], seen["processes"], seen["own"]) == (True, True, True)
    assert not seen["root"]


@pytest.mark.root
@ROOT
def test_keeping_nothing_leaves_nothing() -> None:
    seen = run(DROP, "65534", "", "")

    assert seen["kept"] == seen["thread"] == []
    assert seen["child"] == 0
    assert (seen["capture"], seen["processes"], seen["root"]) == (False, False, False)


@pytest.mark.root
@ROOT
def test_number_without_an_entry_is_a_user_too() -> None:
    seen = run(DROP, "54321", "CAP_NET_RAW", "")

    assert (seen["uids"], seen["gids"], seen["groups"]) == ([54321] * 3, [54321] * 3, [])


@pytest.mark.root
@ROOT
def test_process_still_ends_with_its_parent() -> None:
    seen = run("""
        import ctypes, json, signal
        from latencyprism.collectors.privileges import drop
        libc = ctypes.CDLL(None)
        libc.prctl(1, signal.SIGTERM)
        drop("nobody", keep=())
        number = ctypes.c_int()
        libc.prctl(2, ctypes.byref(number))
        print(json.dumps({"signal": number.value}))
    """)

    assert seen == {"signal": signal.SIGTERM}


def test_unknown_user_is_named() -> None:
    with pytest.raises(PrivilegesError, match="'no-such-user'"):
        drop("no-such-user", keep=())


def test_root_is_refused() -> None:
    with pytest.raises(PrivilegesError, match="nothing would be given up"):
        drop("0", keep=())


def test_other_threads_are_refused_because_they_would_keep_theirs() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with pytest.raises(PrivilegesError, match="threads run"):
            drop("65534", keep=())
    finally:
        stop.set()
        thread.join()


def test_sources_need_what_they_use() -> None:
    processes = {"CAP_DAC_READ_SEARCH", "CAP_SYS_PTRACE"}
    engine = CollectorConfig(engines=("http://h:1",), sources=("engine",))
    network = replace(engine, sources=("engine", "network"))
    containers = replace(network, network=NetworkConfig(namespaces=("blue",)))

    assert needed(engine) == set()
    assert needed(replace(engine, engines=())) == processes  # to look for servers
    assert needed(network) == {"CAP_NET_RAW"}
    assert needed(containers) == {"CAP_NET_RAW", "CAP_SYS_ADMIN", "CAP_SYS_PTRACE"}
    assert needed(replace(engine, sources=("host",))) == processes


class Answers(BaseHTTPRequestHandler):
    """An inference server that answers one request."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(b"vllm:num_requests_running 0\n", "text/plain")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(b'{"usage": {"prompt_tokens": 3, "completion_tokens": 1}}', "application/json")

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@contextmanager
def server() -> Iterator[int]:
    served = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=served.serve_forever)
    thread.start()
    try:
        yield served.server_port
    finally:
        served.shutdown()
        thread.join()
        served.server_close()


AGENT = """
import json, os, sys, threading
from collections import Counter
from latencyprism.collectors.agent import Agent, set_by_signals
from latencyprism.collectors.config import CollectorConfig
from latencyprism.collectors.network.config import NetworkConfig
from latencyprism.collectors.privileges import drop, needed
from latencyprism.collectors.publisher import MemoryPublisher
import signal

url = sys.argv[1]
changed = NetworkConfig(part_interval_ms=50)
first = CollectorConfig(engines=(url,), sources=("host", "network"))
second = CollectorConfig(engines=(url,), sources=("host", "network"), network=changed)
publisher = MemoryPublisher()
agent = Agent(first, publisher, reread=lambda: (second, ()))
agent.prepare()
drop("nobody", keep=needed(first))
stop = threading.Event()

def tell():
    for line in sys.stdin:
        publisher.flush()
        requests = [s for p in publisher.packs if p.topic.name == "telemetry.requests"
                    for s in p.pack.samples]
        hosts = [s for p in publisher.packs if p.topic.name == "telemetry.host"
                 for s in p.pack.samples]
        print(json.dumps({
            "uid": os.getuid(),
            "states": {s.name: s.state for s in agent.status().sources},
            "requests": len({r.request_id for r in requests if r.state == "complete"}),
            "pids": sorted({p.pid for s in hosts for p in s.processes}),
        }), flush=True)
    stop.set()

threading.Thread(target=tell, daemon=True).start()
with set_by_signals({signal.SIGHUP: agent.reload}):
    agent.run(stop)
"""


@pytest.mark.root
@ROOT
def test_capture_goes_on_without_privileges_and_after_a_reload() -> None:
    with server() as port:
        process = subprocess.Popen(
            [sys.executable, "-c", AGENT, f"http://127.0.0.1:{port}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None

        def told() -> dict[str, Any]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("tell\n")
            process.stdin.flush()
            answer: dict[str, Any] = json.loads(process.stdout.readline())
            return answer

        def seen_after_asking(requests: int) -> dict[str, Any]:
            deadline = time.monotonic() + 15
            while (answer := told())["requests"] < requests or not answer["pids"]:
                assert time.monotonic() < deadline, answer
                ask(port)
                time.sleep(0.1)
            return answer

        try:
            first = seen_after_asking(1)
            process.send_signal(signal.SIGHUP)
            time.sleep(1.5)
            second = seen_after_asking(first["requests"] + 2)
        finally:
            process.stdin.close()
            process.wait(10)
            process.stdout.close()

    assert first["uid"] != 0
    assert first["states"] == second["states"] == {"host": "running", "network": "running"}
    assert os.getpid() in first["pids"]
    assert process.returncode == 0


def ask(port: int) -> None:
    connection = HTTPConnection("127.0.0.1", port)
    body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 1})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    connection.getresponse().read()
    connection.close()
