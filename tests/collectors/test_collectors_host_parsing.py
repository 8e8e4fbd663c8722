import socket
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latencyprism.collectors.host import cgroups, files, processes, system, tcp
from latencyprism.collectors.host.clock import clock_error
from latencyprism.collectors.host.files import Files

STAT = b"""cpu  100 20 30 400 50 6 7 8 9 10
cpu0 50 10 15 200 25 3 3 4 4 5
cpu1 50 10 15 200 25 3 4 4 5 5
intr 1 2 3
ctxt 5
procs_running 3
procs_blocked 0
"""


def test_cpu_times_count_idle_and_waiting_for_disk_as_free_and_guests_once() -> None:
    assert system.cpu_times(STAT) == system.CpuTimes(
        total=621, idle=450, steal=8, cpus=2, runnable=3
    )


@pytest.mark.parametrize("text", [None, b"", b"intr 1\n"])
def test_unreadable_stat_is_unknown(text: bytes | None) -> None:
    assert system.cpu_times(text) is None


def test_pressure_is_the_time_in_which_some_waited() -> None:
    text = b"some avg10=1.00 avg60=0.00 avg300=0.00 total=123\nfull avg10=0.00 total=45\n"

    assert system.pressure_us(text) == 123
    assert system.pressure_us(None) is None


def test_available_memory() -> None:
    assert system.available_bytes(b"MemTotal: 9 kB\nMemAvailable:   7 kB\n") == 7168
    assert system.available_bytes(b"MemTotal: 9 kB\n") is None


def test_disks_without_partitions() -> None:
    text = (
        b"   8 0 sda 1 2 10 4 5 6 20 8 0 0 0\n"
        b"   8 1 sda1 1 2 10 4 5 6 20 8 0 0 0\n"
        b" 259 0 nvme0n1 1 2 1 4 5 6 2 8 0 0 0\n"
    )

    assert system.disk_bytes(text, frozenset({"sda", "nvme0n1"})) == (11 * 512, 22 * 512)
    assert system.disk_bytes(text, frozenset()) is None


def test_net_bytes_of_all_interfaces() -> None:
    text = (
        b"head\nhead\n"
        b"    lo: 10 1 0 0 0 0 0 0 10 1 0 0 0 0 0 0\n"
        b"  eth0:5 1 0 0 0 0 0 0 7 1 0 0 0 0 0 0\n"
    )

    assert system.net_bytes(text) == (15, 17)


def test_retransmits_by_the_name_of_the_column() -> None:
    assert system.retransmits(b"Tcp: A RetransSegs B\nTcp: 1 42 -1\n") == 42
    assert system.retransmits(b"Tcp: A B\nTcp: 1 2\n") is None
    assert system.retransmits(None) is None


def test_process_stat_with_any_command() -> None:
    text = b"7 (a) b) (c) D 1 1 1 0 -1 0 11 0 12 0 13 14 0 0 20 0 5 0 777 1000 66 1844674407\n"

    assert processes.parse_stat(text) == processes.Stat(
        state="D",
        minor_faults=11,
        major_faults=12,
        cpu_ticks=27,
        threads=5,
        started_ticks=777,
        rss_pages=66,
    )


def test_context_switches() -> None:
    text = b"Name:\tx\nvoluntary_ctxt_switches:\t12\nnonvoluntary_ctxt_switches:\t3\n"

    assert processes.parse_switches(text) == (12, 3)
    assert processes.parse_switches(b"Name:\tx\n") is None


@pytest.mark.parametrize(
    ("line", "listens", "role"),
    [
        ("VLLM::EngineCore", False, "core"),
        ("VLLM::EngineCore_DP1", False, "core"),
        ("VLLM::Worker_TP0", False, "worker"),
        ("renamed::Worker", False, "worker"),
        ("VLLM::APIServer_0", True, "api"),
        ("/usr/bin/python3 /usr/local/bin/vllm serve model --port 8000", True, "api"),
        ("python -m vllm.entrypoints.openai.api_server", True, "api"),
        ("sglang::scheduler_TP0", False, "core"),
        ("sglang::detokenizer", False, "detokenizer"),
        ("python -m sglang.launch_server --port 30000", True, "api"),
        ("text-generation-router --port 80", True, "api"),
        ("/opt/text-generation-server serve model", False, "worker"),
        ("./llama-server -m model.gguf", True, "server"),
        ("python -c from multiprocessing.spawn import spawn_main", False, "child"),
        ("python -c from multiprocessing.resource_tracker import main", False, None),
    ],
)
def test_role_by_command_line(line: str, listens: bool, role: str | None) -> None:
    assert processes.role_of(line, listens=listens) == role


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"nr_periods 9\nnr_throttled 4\nthrottled_time 5000\n", (5000, 4)),
        (b"usage_usec 1\nnr_periods 9\nnr_throttled 4\nthrottled_usec 5\n", (5000, 4)),
        (b"usage_usec 1\nuser_usec 1\n", None),
        (None, None),
    ],
)
def test_throttling_of_both_versions(text: bytes | None, expected: tuple[int, int] | None) -> None:
    assert cgroups.throttling(text) == expected


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def fake(tmp_path: Path) -> Files:
    return Files(str(tmp_path / "proc"), str(tmp_path / "sys"))


def test_groups_of_version_2_up_to_the_root(tmp_path: Path) -> None:
    write(tmp_path / "proc/7/cgroup", "0::/kubepods/pod1/app\n")
    root = tmp_path / "sys/fs/cgroup"
    deep = [
        write(root / "kubepods/pod1/app/cpu.stat"),
        write(root / "kubepods/pod1/cpu.stat"),
        write(root / "cpu.stat"),
    ]

    assert cgroups.cpu_groups(fake(tmp_path), 7) == [str(path) for path in deep]


def test_group_of_version_1_where_it_has_the_cpu_controller(tmp_path: Path) -> None:
    write(tmp_path / "proc/7/cgroup", "4:cpu,cpuacct:/lab\n2:memory:/other\n0::/\n")
    write(tmp_path / "sys/fs/cgroup/unified/cpu.stat")
    own = write(tmp_path / "sys/fs/cgroup/cpu,cpuacct/lab/cpu.stat")

    assert cgroups.cpu_groups(fake(tmp_path), 7) == [str(own)]
    assert cgroups.cpu_groups(fake(tmp_path), 8) == []


def test_listeners_of_a_port_and_no_others(tmp_path: Path) -> None:
    head = "  sl  local_address rem_address st tx rx tr tm retrnsmt uid timeout inode\n"
    row = "   0: 0100007F:{port:04X} 00000000:0000 {st} 0:0 0:0 0 0 0 {inode} 1\n"
    write(
        tmp_path / "proc/net/tcp",
        head
        + row.format(port=8000, st="0A", inode=11)
        + row.format(port=8001, st="0A", inode=12)
        + row.format(port=8000, st="01", inode=13),
    )
    write(
        tmp_path / "proc/net/tcp6",
        head + row.format(port=8000, st="0A", inode=21).replace("0100007F", "0" * 32),
    )

    assert tcp.listeners(fake(tmp_path), 8000) == {11, 21}
    assert tcp.listeners(Files(str(tmp_path / "none")), 8000) == set()


def test_kept_files_show_new_content_and_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_OPEN", 2)
    reader = Files()
    paths = [str(write(tmp_path / str(i), "old")) for i in range(3)]
    for path in paths:
        assert reader.read(path) == b"old"
        Path(path).write_text("new")
        assert reader.read(path) == b"new"

    assert len(reader._open) == 2
    assert reader.read(str(tmp_path / "missing")) is None
    assert reader.read_once(str(tmp_path)) is None
    assert reader.names(str(tmp_path / "missing")) == []
    reader.close()
    assert reader._open == {}


def test_long_tables_are_read_to_the_end(tmp_path: Path) -> None:
    path = write(tmp_path / "long", "x" * 200_001)
    reader = Files()
    data = reader.read(str(path))
    reader.close()

    assert data == b"x" * 200_001
    assert Files().read_once(str(path)) == data


def info(rtt_us: int, length: int = 232) -> bytes:
    return bytes(68) + struct.pack("=I", rtt_us) + bytes(length - 72)


def diag(attributes: bytes) -> bytes:
    body = bytes(72) + attributes
    return struct.pack("=IHHII", 16 + len(body), 20, 2, 1, 0) + body


def attribute(kind: int, data: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(data), kind) + data + bytes(-len(data) % 4)


DONE = struct.pack("=IHHIIi", 20, 3, 2, 1, 0, 0)


def test_round_trips_of_a_netlink_dump() -> None:
    odd = attribute(5, b"abc")
    data = diag(odd + attribute(2, info(120))) + diag(attribute(2, info(80, 104)) + odd)

    assert tcp.round_trips(data) == ([120, 80], False)
    assert tcp.round_trips(data + DONE) == ([120, 80], True)
    assert tcp.round_trips(diag(b"")) == ([], False)


def test_refused_dump_raises() -> None:
    with pytest.raises(OSError, match="inet_diag"):
        tcp.round_trips(struct.pack("=IHHIIi", 20, 2, 0, 1, 0, -2))


@given(st.binary(max_size=300))
def test_no_datagram_hangs_or_raises_anything_else(data: bytes) -> None:
    try:
        found, _ = tcp.round_trips(data)
    except (OSError, struct.error):
        return
    assert len(found) <= len(data)


def test_round_trip_of_a_real_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        probe = tcp.TcpProbe()
        idle = probe.rtt_us(port)
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.sendall(b"x")
            client.recv(1)
            rtt_us = probe.rtt_us(port)
            accepted.close()
        probe.close()

    assert idle is None
    assert rtt_us is not None
    assert 0 < rtt_us < 1e6


def test_the_kernel_tells_its_clock_error() -> None:
    state = clock_error()

    assert state is not None
    assert 0 <= state[0] <= 16_000_000
