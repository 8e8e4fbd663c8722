"""Which processes are a server's: containers, launchers, Ray; fake machines and real ones."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_machine import HERE, INODE, TABLE_HEAD, FakeMachine, FakeProcess, row
from hypothesis import given
from hypothesis import strategies as st

from latencyprism.collectors.host.counts import Counts
from latencyprism.collectors.host.files import Files
from latencyprism.collectors.host.locate import Locator, Target, addresses, proxied
from latencyprism.collectors.host.ray import RayWorkers
from latencyprism.collectors.host.rhythm import Rhythm
from latencyprism.collectors.host.sampler import HostSampler
from latencyprism.collectors.host.server import THOROUGH, Server, roles_on
from latencyprism.schemas.records import HostSample

PORT = 8000
OTHER, THIRD = 4026532001, 4026532002
CONTAINER = "/system.slice/docker-" + "ab" * 32 + ".scope"
FIB = """Main:
  +-- 172.17.0.0/16 2 0 2
Local:
  +-- 0.0.0.0/0 3 0 5
     |-- 172.17.0.2
        /32 host LOCAL
     |-- 172.17.255.255
        /32 link BROADCAST
"""


class Reopening(Files):
    """A process that died in a fake tree leaves no descriptor that stops to answer."""

    def read(self, path: str) -> bytes | None:
        return self.read_once(path)


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    fake = FakeMachine(tmp_path, PORT)
    fake.listening(None)
    return fake


class Watch:
    """Servers on a fake machine, with all that they share."""

    def __init__(self, machine: FakeMachine) -> None:
        self.machine = machine
        self.files = Reopening(str(machine.proc), str(machine.sys))
        self.counts = Counts()
        self.locator = Locator(self.files, self.counts, diag=False)
        self.ray = RayWorkers(self.files, self.counts)

    def server(self, port: int = PORT, address: str | None = None, instance: str = "a") -> Server:
        target = Target(instance=instance, port=port, address=address)
        return Server(self.files, target, locator=self.locator, ray=self.ray, counts=self.counts)

    def roles(self, server: Server) -> dict[int, str]:
        self.machine.flush()
        server.discover()
        return {pid: process.role for pid, process in server.processes.items()}


@pytest.fixture
def watch(machine: FakeMachine) -> Watch:
    return Watch(machine)


def container(machine: FakeMachine, pid: int, namespace: int, port: int = PORT) -> None:
    """A process that listens in a network namespace of its own."""
    inode = 5000 + pid
    machine.processes[pid] = FakeProcess(inode=inode, namespace=namespace)
    machine.write(f"proc/{pid}/net/tcp", TABLE_HEAD + row(port, inode))


def test_the_only_container_that_listens_on_the_port_is_meant(
    machine: FakeMachine, watch: Watch
) -> None:
    container(machine, 50, OTHER)
    container(machine, 60, THIRD, port=9999)
    server = watch.server()

    assert watch.roles(server) == {50: "server"}
    machine.kill(50)
    assert watch.roles(server) == {}
    assert server.is_here
    server.close()


def test_two_containers_with_the_port_are_told_apart_by_address_only(
    machine: FakeMachine, watch: Watch
) -> None:
    container(machine, 50, OTHER)
    container(machine, 60, THIRD)
    machine.write("proc/60/net/fib_trie", FIB)

    assert watch.roles(watch.server()) == {}
    assert watch.counts["ambiguous_servers"] == 1
    assert watch.roles(watch.server(address="172.17.0.2")) == {60: "server"}


def test_an_address_of_another_machine_is_not_here(machine: FakeMachine, watch: Watch) -> None:
    container(machine, 50, OTHER)
    machine.write("proc/50/net/fib_trie", FIB)
    server = watch.server(address="192.0.2.1")

    assert watch.roles(server) == {}
    assert not server.is_here


def test_a_listener_here_is_preferred_to_one_in_a_container(
    machine: FakeMachine, watch: Watch
) -> None:
    container(machine, 50, OTHER)
    machine.processes[40] = FakeProcess(inode=INODE)
    machine.listening()

    assert watch.roles(watch.server()) == {40: "server"}


def test_docker_s_proxy_leads_to_the_container(machine: FakeMachine, watch: Watch) -> None:
    command = (
        "/usr/bin/docker-proxy -proto tcp -host-ip 0.0.0.0 -host-port 8000 "
        "-container-ip 172.17.0.2 -container-port 80 -use-listen-fd"
    )
    machine.processes[40] = FakeProcess(inode=INODE, command=command)
    machine.listening()
    container(machine, 50, OTHER, port=80)
    machine.write("proc/50/net/fib_trie", FIB)
    server = watch.server()

    assert watch.roles(server) == {50: "server"}
    machine.kill(50)
    assert watch.roles(server) == {40: "server"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("docker-proxy -container-ip 10.0.0.2 -container-port 80", ("10.0.0.2", 80)),
        ("/x/docker-proxy -container-port 80 -proto tcp -container-ip fd00::2", ("fd00::2", 80)),
        ("docker-proxy -container-ip 10.0.0.2", None),
        ("docker-proxy -container-ip 10.0.0.2 -container-port http", None),
        ("my-docker-proxy -container-ip 10.0.0.2 -container-port 80", None),
        ("", None),
    ],
)
def test_command_lines_of_docker_s_proxy(line: str, expected: tuple[str, int] | None) -> None:
    assert proxied(line) == expected


def test_addresses_of_a_namespace() -> None:
    ipv6 = "fd000000000000000000000000000002 02 40 00 80 eth0\nshort\n" + "x" * 32 + " 1\n"

    assert addresses(FIB, ipv6) == {"172.17.0.2", "fd00::2"}


@given(st.text(max_size=200))
def test_no_text_of_namespaces_or_command_lines_raises(text: str) -> None:
    assert addresses(text, text) <= set(text.split()) | addresses("", text)
    assert proxied(text) is None or "docker-proxy" in text


def test_unreadable_holder_is_counted_and_looked_for_again(
    machine: FakeMachine, watch: Watch
) -> None:
    machine.listening()
    server = watch.server()
    assert watch.roles(server) == {}
    assert watch.counts["unreadable_servers"] == 1
    machine.processes[40] = FakeProcess(inode=INODE)

    seen = [watch.roles(server) for _ in range(THOROUGH + 1)]

    assert seen[0] == {}
    assert seen[-1] == {40: "server"}
    assert watch.counts["unreadable_servers"] == 1


def test_what_others_use_is_unknown_while_the_server_can_t_be_looked_at(
    machine: FakeMachine,
) -> None:
    machine.listening()
    read = sampler(machine, Target(instance="a", port=PORT))
    ticks(machine, read, 2)
    machine.user += 50
    machine.idle += 50
    machine.flush()
    (sample,) = read.tick(wall_ns=10**10, monotonic_ns=10**10)
    read.close()

    assert sample.processes == ()
    assert (sample.cpu_busy, sample.cpu_others) == (0.5, None)


def test_shards_of_a_launcher_are_siblings_of_the_listener(
    machine: FakeMachine, watch: Watch
) -> None:
    machine.processes[10] = FakeProcess(command="text-generation-launcher --model-id m")
    machine.processes[11] = FakeProcess(
        ppid=10, command="text-generation-router --port 80", inode=INODE
    )
    machine.processes[12] = FakeProcess(
        ppid=10, command="/opt/text-generation-server serve m --shard 0"
    )
    machine.listening()

    assert watch.roles(watch.server()) == {10: "launcher", 11: "api", 12: "worker"}


def test_all_processes_of_the_container_belong_to_the_server(
    machine: FakeMachine, watch: Watch
) -> None:
    machine.processes[10] = FakeProcess(inode=INODE, cgroup=f"0::{CONTAINER}\n")
    machine.processes[20] = FakeProcess(command="VLLM::EngineCore")
    machine.processes[30] = FakeProcess(command="somebody else")
    machine.write(f"sys/fs/cgroup/unified{CONTAINER}/cgroup.procs", "10\n20\n")
    machine.listening()

    assert watch.roles(watch.server()) == {10: "api", 20: "core"}


SESSION = "/tmp/ray/session_2026-11-30_23-16-24_573342_27501/logs"
IDLE = "ffffffff"


def driver(job: str, session: str = SESSION) -> str:
    return f"{session}/python-core-driver-{job}ffffffffffffffff_27501.log"


def ray_worker(job: str, session: str = SESSION) -> FakeProcess:
    return FakeProcess(
        command="ray::RayWorkerWrapper.execute_method",
        opened=(f"{session}/raylet.out", f"{session}/worker-f2c9-{job}-27650.out"),
    )


def test_ray_s_workers_are_told_by_session_and_job(machine: FakeMachine, watch: Watch) -> None:
    machine.processes[10] = FakeProcess(inode=INODE, opened=(driver("01000000"),))
    machine.processes[20] = ray_worker("01000000")
    machine.processes[21] = ray_worker(IDLE)
    machine.processes[22] = ray_worker("02000000")
    machine.processes[23] = ray_worker(IDLE, session="/tmp/ray/session_other/logs")
    machine.processes[24] = FakeProcess(
        command="ray::IDLE", opened=(f"{SESSION}/worker-aa-{IDLE}-1.out",)
    )
    machine.listening()

    assert watch.roles(watch.server()) == {10: "server", 20: "worker", 21: "worker"}
    assert watch.counts["ambiguous_ray_workers"] == 0


def test_workers_without_a_job_are_nobody_s_when_two_servers_share_a_session(
    machine: FakeMachine, watch: Watch
) -> None:
    machine.processes[10] = FakeProcess(inode=1, opened=(driver("01000000"),))
    machine.processes[11] = FakeProcess(inode=2, opened=(driver("02000000"),))
    machine.processes[20] = ray_worker("01000000")
    machine.processes[21] = ray_worker(IDLE)
    machine.write("proc/net/tcp", TABLE_HEAD + row(PORT, 1) + row(PORT + 1, 2))
    first, second = watch.server(), watch.server(PORT + 1, instance="b")
    watch.roles(second)

    assert watch.roles(first) == {10: "server", 20: "worker"}
    assert watch.counts["ambiguous_ray_workers"] == 1
    assert [watch.roles(second) for _ in range(THOROUGH + 1)][-1] == {11: "server"}


def test_children_of_threads_that_slept_are_not_looked_for_until_a_thorough_look(
    machine: FakeMachine, watch: Watch
) -> None:
    machine.processes[10] = FakeProcess(inode=INODE, waits={10: 0}, runs={10: 1})
    machine.listening()
    server = watch.server()
    watch.roles(server)
    server.processes[10].sweep()
    watch.roles(server)
    machine.processes[20] = FakeProcess(ppid=10)

    assert watch.roles(server) == {10: "server"}
    machine.processes[10].runs[10] += 1
    machine.flush()
    server.processes[10].sweep_next()
    server.processes[10].sweep()
    assert watch.roles(server) == {10: "server", 20: "child"}


def test_a_child_that_is_gone_is_not_a_process_of_the_server(
    machine: FakeMachine, watch: Watch
) -> None:
    machine.processes[10] = FakeProcess(inode=INODE)
    machine.listening()
    machine.flush()
    machine.write("proc/10/task/10/children", "77 ")
    server = watch.server()
    server.discover()

    assert list(server.processes) == [10]


def test_too_many_processes_are_counted(machine: FakeMachine, watch: Watch) -> None:
    machine.processes[10] = FakeProcess(inode=INODE)
    for pid in range(100, 180):
        machine.processes[pid] = FakeProcess(ppid=10)
    machine.listening()

    assert len(watch.roles(watch.server())) == 64
    assert watch.counts["processes_beyond_bound"] == 1


def sampler(machine: FakeMachine, target: Target) -> HostSampler:
    files = Reopening(str(machine.proc), str(machine.sys))
    return HostSampler(files, [target], host="h", counts=Counts(), diag=False)


def ticks(machine: FakeMachine, read: HostSampler, count: int) -> list[HostSample]:
    samples = []
    for tick in range(count):
        machine.flush()
        samples += read.tick(wall_ns=tick * 10**9, monotonic_ns=tick * 10**9)
    return samples


def test_memory_on_nodes_where_no_thread_ran(machine: FakeMachine) -> None:
    machine.write("sys/devices/system/node/online", "0-1\n")
    for node, cpus in ((0, "0-3"), (1, "4-7")):
        machine.write(f"sys/devices/system/node/node{node}/cpulist", f"{cpus}\n")
        machine.write(f"sys/devices/system/node/node{node}/numastat", "numa_miss 5\n")
    machine.processes[10] = FakeProcess(
        inode=INODE, cgroup=f"0::{CONTAINER}\n", cpu=5, waits={10: 1}
    )
    numa_stat = "anon N0=300 N1=100\nfile N0=0 N1=0\n"
    machine.write(f"sys/fs/cgroup/unified{CONTAINER}/memory.numa_stat", numa_stat)
    machine.listening()
    read = sampler(machine, Target(instance="a", port=PORT))

    samples = ticks(machine, read, 15)
    machine.write("sys/devices/system/node/node1/numastat", "numa_miss 12\n")
    later = read.tick(wall_ns=10**12, monotonic_ns=10**12)
    read.close()

    shares = [s.numa_remote_share for s in samples if s.numa_remote_share is not None]
    assert shares == [0.75]
    assert samples[-1].numa_misses == 0
    assert later[0].numa_misses == 7


def test_one_node_has_no_far_memory(machine: FakeMachine) -> None:
    machine.write("sys/devices/system/node/online", "0\n")
    machine.processes[10] = FakeProcess(inode=INODE, waits={10: 1})
    machine.listening()
    read = sampler(machine, Target(instance="a", port=PORT))

    samples = ticks(machine, read, 15)
    read.close()

    assert {(s.numa_misses, s.numa_remote_share) for s in samples} == {(None, None)}


def test_of_a_container_elsewhere_nothing_is_told_until_it_is_here(machine: FakeMachine) -> None:
    read = sampler(machine, Target(instance="a", port=PORT, address="172.17.0.2"))

    assert ticks(machine, read, 3) == []
    assert read.here == []
    container(machine, 50, OTHER)
    machine.write("proc/50/net/fib_trie", FIB)
    machine.flush()
    samples = read.tick(wall_ns=10**12, monotonic_ns=10**12)
    here = read.here
    read.close()

    assert [[p.pid for p in s.processes] for s in samples] == [[50]]
    assert here == ["a"]


def test_dear_things_pace_themselves() -> None:
    rhythm = Rhythm(1_000)
    assert rhythm.due(0)
    rhythm.done(0, cost_ns=0)
    assert [rhythm.due(now) for now in (999, 1_000)] == [False, True]
    rhythm.done(0, cost_ns=5)
    assert [rhythm.due(now) for now in (9_999, 10_000)] == [False, True]
    rhythm.done(0, cost_ns=10**9)
    assert [rhythm.due(now) for now in (59_999, 60_000)] == [False, True]
    rhythm.hasten()
    assert [rhythm.due(now) for now in (199, 200)] == [False, True]
    rhythm.done(0, cost_ns=0, idle=True)
    assert [rhythm.due(now) for now in (1_999, 2_000)] == [False, True]


ISOLATED = """
import socket, sys, time
server = socket.create_server(("0.0.0.0", int(sys.argv[1])))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def isolated() -> Iterator[tuple[int, int]]:
    """Port and process of a server in a network namespace of its own."""
    unshare = shutil.which("unshare")
    if os.geteuid() != 0 or unshare is None:
        pytest.skip("making a network namespace needs root and unshare")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [unshare, "--net", sys.executable, "-c", ISOLATED, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        ready = process.stdout.readline().strip() == b"ready"
        if ready:
            yield port, process.pid
        process.kill()
    if not ready:
        pytest.skip("a network namespace can't be made here")


@pytest.mark.root
def test_a_server_in_a_real_network_namespace_is_found_and_its_sockets_told(
    isolated: tuple[int, int],
) -> None:
    port, pid = isolated
    counts = Counts()
    read = HostSampler(Files(), [Target(instance="a", port=port)], host="h", counts=counts)
    read.tick(wall_ns=0, monotonic_ns=0)
    (sample,) = read.tick(wall_ns=10**10, monotonic_ns=10**10)
    read.close()

    assert [process.pid for process in sample.processes] == [pid]
    assert (sample.connections, sample.accept_queue) == (0, 0)
    assert counts["netlink_errors"] == 0
    assert roles_on(Files(), port) == {pid: "server"}


def test_the_own_process_is_found_by_its_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        began = time.monotonic()
        roles = roles_on(Files(), listening.getsockname()[1])

    assert roles[os.getpid()] in {"server", "api"}
    assert time.monotonic() - began < 5


def test_namespace_of_the_fake_machine_is_its_own(machine: FakeMachine, watch: Watch) -> None:
    machine.processes[40] = FakeProcess(inode=INODE, namespace=HERE)
    machine.write("proc/40/net/tcp", TABLE_HEAD + row(PORT, INODE))

    assert watch.roles(watch.server()) == {}
