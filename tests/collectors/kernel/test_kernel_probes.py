"""The probes in the real kernel, on processes that the tests start."""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kernel_frames import Engine as FakeEngine
from kernel_support import (
    INSTANCE,
    by_stage,
    child,
    count_between,
    make_setup,
    server,
    skip_unless_permitted,
    tier,
)

from latencyprism.collectors.kernel.arch import this_arch
from latencyprism.collectors.kernel.assembler import Assembler, Reg, Size
from latencyprism.collectors.kernel.bpf import Kernel, VerifierError
from latencyprism.collectors.kernel.config import KernelConfig

pytestmark = pytest.mark.root

SLEEPER = """
    import sys, time
    print("ready", flush=True)
    for line in sys.stdin:
        for _ in range(int(line)):
            time.sleep(0.001)
        print("done", flush=True)
"""


def test_threads_of_watched_processes_alone_are_timed() -> None:
    with tier("run_queue", make_setup()) as probes, child(SLEEPER) as ours, child(SLEEPER) as other:
        probes.follow([server(ours.pid)])
        probes.read(1.0)
        ours.say("50")
        other.say("200")

        (waits,) = probes.read(1.0)[INSTANCE]

    assert waits.stage == "run_queue"
    assert 50 <= waits.count < 100  # a wake-up a sleep, and few others
    assert 0 < waits.sum < 50
    assert sum(waits.counts) == waits.count


def test_a_process_that_left_its_server_is_not_timed_any_more() -> None:
    with tier("run_queue", make_setup()) as probes, child(SLEEPER) as ours:
        probes.follow([server(ours.pid)])
        probes.follow([])
        ours.say("20")

        assert probes.read(1.0) == {INSTANCE: []}


def test_servers_are_told_apart() -> None:
    setup = make_setup(None, "a:1", "b:2")
    with tier("run_queue", setup) as probes, child(SLEEPER) as one, child(SLEEPER) as two:
        probes.follow([server(one.pid, instance="a:1"), server(two.pid, instance="b:2")])
        probes.read(1.0)
        two.say("30")

        waits = probes.read(1.0)

    assert sum(h.count for h in waits["b:2"]) >= 30 > 5 > sum(h.count for h in waits["a:1"])


# Answers each line with a head, then after each pause (ms) a chunk.
ANSWERER = """
    import socket, sys, time
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], listening.fileno(), flush=True)
    client = None
    for line in sys.stdin:
        command, *pauses = line.split()
        if command == "accept":
            client = listening.accept()[0]
        else:
            client.recv(100)
            for pause in pauses:
                time.sleep(int(pause) / 1000)
                client.send(b"chunk")
        print(client.fileno(), flush=True)
"""


def test_replies_and_gaps_of_accepted_connections_are_timed() -> None:
    with tier("sockets", make_setup()) as probes, child(ANSWERER) as answerer:
        port, descriptor = map(int, answerer.first.split())
        probes.follow([server(answerer.pid, listening=[(answerer.pid, descriptor)])])
        with socket.create_connection(("127.0.0.1", port)) as client:
            answerer.say("accept")
            for _ in range(2):
                client.send(b"request")
                answerer.say("answer 20 40 3 3 3")
        stages = by_stage(probes.read(1.0)[INSTANCE])

    assert {stage: stages[stage].count for stage in stages} == {
        "server_reply": 2,
        "server_second_write": 2,
        "server_write_gap": 8,
    }
    assert count_between(stages["server_reply"], 0.02, 10) == 2
    assert count_between(stages["server_second_write"], 0.06, 10) == 2
    assert count_between(stages["server_write_gap"], 0.04, 10) >= 2
    assert stages["server_write_gap"].sum >= 0.003 * 6 + 0.04 * 2


def test_a_connection_from_before_is_followed_from_its_next_request() -> None:
    with tier("sockets", make_setup()) as probes, child(ANSWERER) as answerer:
        port, descriptor = map(int, answerer.first.split())
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted = int(answerer.say("accept"))
            probes.follow(
                [
                    server(
                        answerer.pid,
                        listening=[(answerer.pid, descriptor)],
                        connected=[(answerer.pid, accepted)],
                    )
                ]
            )
            client.send(b"request")
            answerer.say("answer 1")
            stages = by_stage(probes.read(1.0)[INSTANCE])
            probes.follow([])
            client.send(b"request")
            answerer.say("answer 1")
            after = probes.read(1.0)[INSTANCE]

    assert stages["server_reply"].count == 1
    assert after == []


def test_connections_of_others_are_not_timed() -> None:
    with tier("sockets", make_setup()) as probes, child(ANSWERER) as answerer:
        probes.follow([server(answerer.pid)])  # watched, but not what it listens on
        with socket.create_connection(("127.0.0.1", int(answerer.first.split()[0]))) as client:
            answerer.say("accept")
            client.send(b"request")
            answerer.say("answer 1 1")

        assert probes.read(1.0) == {INSTANCE: []}


TALKER = """
    import socket, sys
    ours, theirs = socket.socketpair()
    print("ready", flush=True)
    for line in sys.stdin:
        direction, data = line.split()
        data = bytes.fromhex(data)
        if direction == "in":
            theirs.sendall(data)
            ours.recv(1 << 16)
        else:
            ours.sendall(data)
            theirs.recv(1 << 20)
        print("done", flush=True)
"""


def test_steps_come_of_what_an_engine_core_sends() -> None:
    setup = make_setup()
    with tier("frames", setup) as probes, child(TALKER) as core:
        probes.version(INSTANCE, "0.32.0")
        probes.follow([server(core.pid, role="core")])
        fake = FakeEngine(time.monotonic_ns())
        core.say("in " + fake.add("cmpl-a", prompt=300).hex())
        first_ns = fake.now_ns = time.monotonic_ns()
        core.say("out " + fake.step({"cmpl-a": 1}, joined={"cmpl-a": 300}).hex())
        second_ns = fake.now_ns = time.monotonic_ns()
        core.say("out " + fake.step({"cmpl-a": 1}, finished=["cmpl-a"]).hex())
        probes.drain()

        (steps,) = probes.steps(time.monotonic_ns() + 10**9).values()

    assert [(step.joined, step.prefill_tokens) for step in steps] == [(1, 300), (0, 0)]
    assert [(step.decode_sequences, step.context_tokens) for step in steps] == [(0, 0), (1, 301)]
    assert [step.left for step in steps] == [0, 1]
    assert [
        abs(step.end_ns - at) < 1000 for step, at in zip(steps, (first_ns, second_ns), strict=True)
    ]
    assert steps[1].start_ns == steps[0].end_ns
    assert setup.counts["requests"] == 1


def test_an_engine_of_an_unknown_version_is_counted_and_not_read() -> None:
    setup = make_setup()
    with tier("frames", setup) as probes, child(TALKER) as core:
        probes.version(INSTANCE, "7.1.0")
        probes.follow([server(core.pid, role="core")])
        core.say("out " + FakeEngine(time.monotonic_ns()).step({"cmpl-a": 1}).hex())
        probes.drain()

        assert probes.steps(time.monotonic_ns() + 10**9) == {}
    assert setup.counts == {"vLLM 7.1.0 not known": 1}


def test_an_engine_that_comes_back_as_an_unknown_version_is_not_read_any_more() -> None:
    with tier("frames", make_setup()) as probes, child(TALKER) as core:
        probes.version(INSTANCE, "0.32.0")
        probes.follow([server(core.pid, role="core")])
        probes.version(INSTANCE, "0.99.0")
        probes.follow([server(core.pid, role="core")])
        core.say("out " + FakeEngine(time.monotonic_ns()).step({"cmpl-a": 1}).hex())
        probes.drain()

        assert probes.steps(time.monotonic_ns() + 10**9) == {}


def test_a_full_ring_is_counted_and_the_engine_goes_on_afterwards() -> None:
    setup = make_setup(KernelConfig(ring_kib=64))
    with tier("frames", setup) as probes, child(TALKER) as core:
        probes.version(INSTANCE, "0.32.0")
        probes.follow([server(core.pid, role="core")])
        fake = FakeEngine(time.monotonic_ns())
        flood = {f"cmpl-{number}": 1 for number in range(200)}
        for _ in range(12):
            fake.now_ns = time.monotonic_ns()
            core.say("out " + fake.step(flood).hex())
        probes.drain()
        assert probes.lost() > 0
        assert probes.lost() == 0
        probes.steps(time.monotonic_ns() + 10**9)

        for _ in range(3):
            fake.now_ns = time.monotonic_ns()
            core.say("out " + fake.step({"cmpl-1": 1}).hex())
        probes.drain()

        (steps,) = probes.steps(time.monotonic_ns() + 10**9).values()
    assert len(steps) == 2  # where the first of the three began is not known


TLS_SERVER = """
    import socket, ssl, sys, time
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(sys.argv[1], sys.argv[2])
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    sys.stdin.readline()
    with context.wrap_socket(listening.accept()[0], server_side=True) as client:
        for _ in range(2):
            client.recv(1000)
            time.sleep(0.01)
            client.send(b"HTTP/1.1 200 OK\\r\\n\\r\\n")
            time.sleep(0.03)
            for _ in range(4):
                client.send(b"1f\\r\\ndata: {\\"text\\": \\"x\\"}\\n\\n\\r\\n")
                client.send(b"a comment, which is no event")
                time.sleep(0.005)
            client.send(b"end")
    print("done", flush=True)
"""


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-subj", "/CN=localhost", "-days", "2", "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return str(certificate), str(key)


def test_events_inside_tls_are_timed(certificate: tuple[str, str]) -> None:
    setup = make_setup()
    with tier("tls", setup) as probes, child(TLS_SERVER, *certificate) as answerer:
        probes.follow([server(answerer.pid)])
        if not setup.counts["tls functions attached"]:
            pytest.skip("this Python's OpenSSL names no functions")
        context = ssl.create_default_context(cafile=certificate[0])
        assert answerer.process.stdin is not None
        answerer.process.stdin.write("\n")
        answerer.process.stdin.flush()
        with (
            socket.create_connection(("127.0.0.1", int(answerer.first)), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as client,
        ):
            for _ in range(2):
                client.send(b"POST /v1/completions HTTP/1.1\r\n\r\n")
                received = b""
                while not received.endswith(b"end"):
                    received += client.recv(4096)
        answerer.hear()
        stages = by_stage(probes.read(1.0)[INSTANCE])

    assert {stage: stages[stage].count for stage in stages} == {
        "tls_reply": 2,
        "tls_first_event": 2,
        "tls_write": 6,
    }
    assert count_between(stages["tls_reply"], 0.01, 10) == 2
    assert count_between(stages["tls_first_event"], 0.04, 10) == 2
    assert count_between(stages["tls_write"], 0.005, 10) == 6


GPU_USER = """
    import ctypes, sys, threading
    runtime = ctypes.CDLL(sys.argv[1])
    print("ready", flush=True)
    def work(syncs):
        for _ in range(syncs):
            runtime.cudaGraphLaunch(None, None)
            runtime.cudaLaunchKernel()
            runtime.cudaStreamSynchronize(None)
    for line in sys.stdin:
        threads = [threading.Thread(target=work, args=(int(line),)) for _ in range(2)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print("done", flush=True)
"""


@pytest.fixture
def fake_cudart(tmp_path: Path) -> str:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    library = tmp_path / "libcudart.so.12"
    source = Path(__file__).with_name("fake_cudart.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    return str(library)


def test_waits_for_the_gpu_are_timed_in_every_thread(fake_cudart: str) -> None:
    setup = make_setup()
    with (
        tier("gpu", setup) as probes,
        child(GPU_USER, fake_cudart) as user,
        child(GPU_USER, fake_cudart) as other,
    ):
        probes.follow([server(user.pid)])
        user.say("10")
        other.say("10")
        stages = by_stage(probes.read(1.0)[INSTANCE])
        probes.follow([])
        user.say("1")
        after = probes.read(1.0)[INSTANCE]

    assert setup.counts["gpu functions attached"] == 2
    assert {stage: stages[stage].count for stage in stages} == {
        "gpu_sync": 20,
        "gpu_graph_launch": 20,
    }
    assert count_between(stages["gpu_sync"], 0.005, 10) == 20
    assert count_between(stages["gpu_graph_launch"], 0.0003, 10) == 20
    assert after == []


def test_functions_that_are_called_too_often_are_left_alone(fake_cudart: str) -> None:
    setup = make_setup(KernelConfig(calls_s=10))
    with tier("gpu", setup) as probes, child(GPU_USER, fake_cudart) as user:
        probes.follow([server(user.pid)])
        user.say("10")
        assert by_stage(probes.read(1.0)[INSTANCE])["gpu_sync"].count == 20
        probes.follow([server(user.pid)])
        user.say("10")

        assert probes.read(1.0) == {INSTANCE: []}
    assert setup.counts["gpu servers left alone"] == 1


def test_probes_are_taken_off_soon_after_their_tier_is_closed(fake_cudart: str) -> None:
    wait_until_no_function_is_probed()  # by tests before
    with child(GPU_USER, fake_cudart) as user:
        with tier("gpu", make_setup()) as probes:
            probes.follow([server(user.pid)])
            attached = probed_functions()
            began = time.monotonic()
        took_s = time.monotonic() - began
        wait_until_no_function_is_probed()

    assert attached == 4  # a call and a return each
    assert took_s < 0.2


def probed_functions() -> int:
    """How many perf events this process holds."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists the folder
            found += "perf_event" in str(link.readlink())
    return found


def wait_until_no_function_is_probed() -> None:
    deadline = time.monotonic() + 20
    while probed_functions():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_library_that_is_loaded_later_is_found(fake_cudart: str) -> None:
    late = """
        import ctypes, sys
        print("ready", flush=True)
        for line in sys.stdin:
            runtime = ctypes.CDLL(sys.argv[1])
            runtime.cudaStreamSynchronize(None)
            print("done", flush=True)
    """
    with tier("gpu", make_setup()) as probes, child(late, fake_cudart) as user:
        probes.follow([server(user.pid)])
        user.say()
        probes.follow([server(user.pid)])
        user.say()

        assert by_stage(probes.read(1.0)[INSTANCE])["gpu_sync"].count == 1


def test_a_refused_program_says_what_the_verifier_minds() -> None:
    skip_unless_permitted("gpu")
    assembler = Assembler()
    assembler.load(Size.U64, Reg.R0, Reg.R9, 0)
    assembler.exit()

    with pytest.raises(VerifierError, match=r"program broken.*R9 !read_ok"):
        Kernel(this_arch()).load_uprobe("broken", assembler.assemble())


HOLDER = """
    import sys, threading
    from latencyprism.collectors.kernel.config import KernelConfig
    from latencyprism.collectors.kernel.source import KernelSource
    from kernel_support import Heard
    class Told(Heard):
        def sample(self, topic, sample):
            print("sample", flush=True)
            sys.stdin.readline()
    KernelSource([sys.argv[1]], KernelConfig(tiers=("run_queue", "sockets"), interval_ms=100)).run(
        Told(), threading.Event())
"""


def programs() -> int:
    """How many of our programs the kernel holds."""

    class NextId(ctypes.Structure):
        _fields_ = (
            ("start", ctypes.c_uint32),
            ("next", ctypes.c_uint32),
            ("flags", ctypes.c_uint32),
        )

    class FdById(ctypes.Structure):
        _fields_ = (
            ("id", ctypes.c_uint32),
            ("unused", ctypes.c_uint32),
            ("flags", ctypes.c_uint32),
        )

    class Info(ctypes.Structure):
        _fields_ = (("fd", ctypes.c_uint32), ("length", ctypes.c_uint32), ("info", ctypes.c_void_p))

    kernel, found, at = Kernel(this_arch()), 0, NextId()
    while True:
        try:
            kernel.bpf(11, at, "next program")
        except FileNotFoundError:
            return found
        at.start = at.next
        try:
            descriptor = kernel.bpf(13, FdById(id=at.next), "program")
        except FileNotFoundError:
            continue
        info = ctypes.create_string_buffer(208)
        kernel.bpf(15, Info(fd=descriptor, length=208, info=ctypes.addressof(info)), "information")
        os.close(descriptor)
        found += info.raw[64:80].rstrip(b"\0") in (b"switched", b"woken", b"woken_new", b"sockets")


def test_nothing_stays_in_the_kernel_when_the_agent_is_killed() -> None:
    skip_unless_permitted("run_queue", "sockets")
    before = programs()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        paths = os.pathsep.join((str(Path(__file__).parent), *sys.path))
        with child(HOLDER, url, env={**os.environ, "PYTHONPATH": paths}) as holder:
            assert holder.first == "sample"
            assert programs() == before + 4
            os.kill(holder.pid, signal.SIGKILL)
            holder.process.wait()

    deadline = time.monotonic() + 5
    while programs() > before and time.monotonic() < deadline:
        time.sleep(0.02)  # the kernel frees programs after a grace period
    assert programs() == before
