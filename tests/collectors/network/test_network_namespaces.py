import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest
from network_wire import STREAM_END, STREAM_HEAD, chunk, delta
from test_network_capture import Heard, may_capture, times, wait_for

from latencyprism.collectors.namespaces import call_in
from latencyprism.collectors.network.config import NetworkConfig
from latencyprism.collectors.network.namespaces import (
    NEEDS,
    Assignment,
    Namespace,
    Namespaces,
    listening_ports,
)
from latencyprism.collectors.network.ring import Ring
from latencyprism.collectors.network.source import NetworkSource
from latencyprism.collectors.network.targets import Watch

HEADER = (
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout\n"
)
CONTAINER = "0123456789abcdef" * 4


def row(port: int, state: str = "0A") -> str:
    return f"   0: 0100007F:{port:04X} 00000000:0000 {state} 00000000:00000000 00:0 0 0 0 1 1 0\n"


class Machine:
    """A made-up ``/proc`` and ``/run/netns``; namespaces are files, told apart by their inodes."""

    def __init__(self, root: Path) -> None:
        self.proc, self.names = root / "proc", root / "netns"
        self.names.mkdir()
        self.process("self", "own", 22)

    def process(self, pid: str, space: str, *ports: int, cgroup: str = "/") -> None:
        folder = self.proc / pid
        (folder / "ns").mkdir(parents=True)
        (folder / "net").mkdir()
        file = self.proc.parent / space
        file.touch()
        (folder / "ns/net").symlink_to(file)
        (folder / "net/tcp").write_text(HEADER + "".join(map(row, ports)))
        (folder / "cgroup").write_text(f"0::{cgroup}\n")

    @property
    def spaces(self) -> Namespaces:
        return Namespaces(proc=self.proc, named=self.names)

    def at(self, name: str) -> Namespace:
        found = Namespace.at(str(self.proc.parent / name))
        assert found is not None
        return found


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def watch(port: int, address: str = "127.0.0.1") -> Watch:
    return Watch(instance=f"{address}:{port}", port=port, addresses=(address,))


def decide(
    machine: Machine, names: Sequence[str], watches: Sequence[Watch], counts: Counter[str]
) -> dict[Namespace | None, list[Watch]]:
    assignment = Assignment(names, spaces=machine.spaces, here=watches)
    return dict(assignment.decide(watches, counts))


def test_listening_ports_of_both_tables(tmp_path: Path) -> None:
    (tmp_path / "tcp").write_text(HEADER + row(8000) + row(80) + row(9, "01") + row(7))
    (tmp_path / "tcp6").write_text(HEADER + row(8001).replace("0100007F", "0" * 32))

    assert listening_ports(tmp_path) == {8000, 80, 8001}
    assert listening_ports(tmp_path / "none") == set()


def test_a_namespace_has_many_names(machine: Machine) -> None:
    machine.process("7", "a", cgroup=f"/system.slice/docker-{CONTAINER}.scope")
    machine.process("8", "b")
    (machine.names / "blue").symlink_to(machine.proc.parent / "b")
    spaces = machine.spaces

    assert spaces.named("7") == spaces.named(CONTAINER[:12]) == machine.at("a")
    assert spaces.named("blue") == spaces.named(str(machine.names / "blue")) == machine.at("b")
    for nothing in ("9", "red", "/no/such/file", "abcdefabcdef", CONTAINER[:11]):
        assert spaces.named(nothing) is None


def test_each_other_namespace_is_found_once(machine: Machine) -> None:
    for pid, space in (("1", "own"), ("2", "a"), ("3", "a"), ("4", "b"), ("meminfo", "c")):
        machine.process(pid, space)

    assert set(machine.spaces.all()) == {machine.at("a"), machine.at("b")}


def test_without_names_everything_is_watched_here(machine: Machine) -> None:
    machine.process("7", "a", 8000)

    assert decide(machine, (), [watch(8000)], Counter()) == {None: [watch(8000)]}


def test_a_server_is_watched_where_it_listens_and_nowhere_else(machine: Machine) -> None:
    machine.process("7", "a", 8000)
    machine.process("8", "b", 8000, 9000)
    watches = [watch(8000), watch(9000), watch(22), watch(1)]
    counts: Counter[str] = Counter()

    decided = decide(machine, ("7", "8"), watches, counts)

    assert decided == {
        None: [watch(22), watch(1)],
        machine.at("a"): [watch(8000)],
        machine.at("b"): [watch(9000)],
    }
    assert counts == {}


def test_auto_looks_for_what_should_be_here_and_is_not(machine: Machine) -> None:
    machine.process("7", "a", 22, 8000, 7000)
    remote = watch(7000, "10.0.0.6")
    assignment = Assignment(("auto",), spaces=machine.spaces, here=[watch(22), watch(8000)])

    decided = assignment.decide([watch(22), watch(8000), remote], Counter())

    assert decided == {None: [watch(22), remote], machine.at("a"): [watch(8000)]}


def test_auto_does_not_choose_between_two(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.process("7", "a", 8000)
    machine.process("8", "b", 8000)
    assignment = Assignment(("auto",), spaces=machine.spaces, here=[watch(8000)])

    for _ in range(2):
        assert assignment.decide([watch(8000)], Counter()) == {None: [watch(8000)]}

    assert len(caplog.records) == 1
    assert "port 8000 is listened on in 2 namespaces" in caplog.text


def test_what_is_not_there_is_counted_told_once_and_found_later(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    counts: Counter[str] = Counter()
    assignment = Assignment(("7",), spaces=machine.spaces, here=[])
    for _ in range(3):
        assert assignment.decide([watch(8000)], counts) == {None: [watch(8000)]}
    machine.process("7", "a", 8000)

    assert assignment.decide([watch(8000)], counts) == {
        None: [],
        machine.at("a"): [watch(8000)],
    }
    assert counts == {"namespaces not found": 3}
    assert len(caplog.records) == 1


def test_a_name_for_this_namespace_changes_nothing(machine: Machine) -> None:
    machine.process("1", "own", 8000)

    assert decide(machine, ("1",), [watch(8000)], Counter()) == {None: [watch(8000)]}


def test_the_same_by_another_process_is_the_same(machine: Machine) -> None:
    machine.process("7", "a")
    machine.process("8", "a")

    first, second = machine.spaces.named("7"), machine.spaces.named("8")
    assert first == second
    assert first is not None
    assert second is not None
    assert first.path != second.path


# ---------------------------------------------------------------- real namespaces

SERVER = f"""
import socket, sys, time
listener = socket.create_server(("0.0.0.0", int(sys.argv[1])))
print("ready", flush=True)
while True:
    connection, _ = listener.accept()
    connection.recv(65536)
    connection.sendall({STREAM_HEAD!r})
    for _ in range(5):
        time.sleep(0.02)
        connection.sendall({chunk(delta(content=" token"))!r})
    connection.sendall({STREAM_END!r})
    connection.close()
"""


def may_make_namespaces() -> bool:
    if not may_capture() or shutil.which("ip") is None or shutil.which("unshare") is None:
        return False
    made = subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False)
    return made.returncode == 0


def real(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that makes network namespaces."""
    reason = "making network namespaces needs CAP_SYS_ADMIN, CAP_NET_RAW, ip and unshare"
    skip = pytest.mark.skipif(not may_make_namespaces(), reason=reason)
    return cast("Callable[..., None]", pytest.mark.root(skip(test)))


@contextmanager
def server(port: int, name: str | None = None) -> Iterator[subprocess.Popen[str]]:
    """A server in a namespace of its own, or in one that has a name."""
    up = "ip link set lo up; exec"
    enter = ["ip", "netns", "exec", name] if name else ["unshare", "-n"]
    process = subprocess.Popen(
        [*enter, "sh", "-c", f'{up} "$0" "$@"', sys.executable, "-c", SERVER, str(port)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def named() -> Iterator[str]:
    """A namespace of ``ip netns``."""
    name = f"latencyprism-test-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def ask(pid: int, port: int) -> None:
    """One exchange inside the namespace of a process."""

    def talk() -> None:
        with socket.create_connection(("127.0.0.1", port)) as client:
            body = b'{"model":"m"}'
            client.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b"
                % (len(body), body)
            )
            while client.recv(65536):
                pass

    call_in(f"/proc/{pid}/ns/net", talk)


@contextmanager
def watching(port: int, *namespaces: str) -> Iterator[tuple[Heard, NetworkSource]]:
    source = NetworkSource(
        [f"http://127.0.0.1:{port}"], NetworkConfig(namespaces=namespaces, ring_mib=1)
    )
    heard, stop = Heard(), threading.Event()
    thread = threading.Thread(target=source.run, args=(heard, stop))
    thread.start()
    try:
        wait_for(lambda: heard.watermarks or not thread.is_alive())
        yield heard, source
    finally:
        stop.set()
        thread.join(5)


def drained(heard: Heard) -> None:
    now_ns = time.time_ns()
    wait_for(lambda: min(heard.watermarks.values()) > now_ns)


@real
@pytest.mark.parametrize("how", ["process", "name", "path", "auto"])
def test_a_server_in_another_namespace_is_seen(how: str) -> None:
    port = free_port()
    with named() as name, server(port, name if how == "name" else None) as process:
        spec = {"process": str(process.pid), "name": name, "auto": "auto"}.get(
            how, f"/proc/{process.pid}/ns/net"
        )
        with watching(port, spec) as (heard, source):
            ask(process.pid, port)
            drained(heard)

    (parts,) = heard.exchanges()
    assert (parts[-1].state, parts[-1].instance) == ("complete", f"127.0.0.1:{port}")
    assert len(times(parts)) == 5
    assert source.counts == {"exchanges": 1}
    assert heard.late == 0


@real
def test_nothing_is_seen_of_a_namespace_that_is_not_named() -> None:
    port = free_port()
    with server(port) as process, watching(port) as (heard, source):
        ask(process.pid, port)
        drained(heard)

    assert heard.samples == []
    assert source.counts == {}


@real
def test_a_container_that_is_started_again_is_found_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("latencyprism.collectors.network.source.PLACES_S", 0.2)
    port = free_port()
    with server(port) as process, watching(port, "auto") as (heard, source):
        ask(process.pid, port)
        drained(heard)
        process.kill()
        process.wait()
        with server(port) as again:
            began = time.monotonic()
            while len(heard.exchanges()) < 2:
                ask(again.pid, port)
                drained(heard)
                assert time.monotonic() - began < 5

    assert [parts[-1].state for parts in heard.exchanges()] == ["complete"] * 2
    assert source.counts["exchanges"] == 2


@real
def test_a_ring_stays_in_the_namespace_in_which_it_was_made() -> None:
    port = free_port()
    with server(port) as process:
        ring = call_in(
            f"/proc/{process.pid}/ns/net",
            lambda: Ring("lo", [port], ring_mib=1, block_timeout_ms=5),
        )
        ask(process.pid, port)
        found: list[bytes] = []
        wait_for(lambda: ring.drain(lambda _, b, at, end: found.append(b[at:end])) and found)
        ring.close()

    assert any(b"/v1/chat/completions" in packet for packet in found)


@real
def test_what_is_not_permitted_names_what_it_takes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: str, _: object) -> None:
        raise PermissionError(1, "Operation not permitted", path)

    monkeypatch.setattr("latencyprism.collectors.network.source.call_in", refuse)
    port = free_port()
    with server(port) as process:
        config = NetworkConfig(namespaces=(str(process.pid),), ring_mib=1)
        source = NetworkSource([f"http://127.0.0.1:{port}"], config)
        with pytest.raises(PermissionError, match=r"CAP_SYS_ADMIN .* CAP_NET_RAW"):
            source.run(Heard(), threading.Event())
        assert source.counts == {"namespaces not permitted": 1}

        caplog.set_level(logging.WARNING)
        both = [f"http://127.0.0.1:{port}", f"http://127.0.0.1:{free_port()}"]
        source = NetworkSource(both, config)
        stop = threading.Event()
        heard = Heard()
        thread = threading.Thread(target=source.run, args=(heard, stop))
        thread.start()
        wait_for(lambda: len(heard.watermarks) == 2)  # the other one is watched all the same
        stop.set()
        thread.join()
        assert NEEDS in caplog.text
