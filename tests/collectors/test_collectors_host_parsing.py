from pathlib import Path

import pytest
from fake_machine import TABLE_HEAD, row

from latencyprism.collectors.host import cgroups, files, numa, processes, system, tcp, threads
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


def test_cpu_ticks_count_idle_and_waiting_for_disk_as_free_and_guests_once() -> None:
    assert system.cpu_ticks(STAT) == (621, 450, 8)
    assert system.runnable(STAT) == 3


@pytest.mark.parametrize("text", [b"", b"intr 1\n"])
def test_unreadable_stat_is_unknown(text: bytes) -> None:
    assert system.cpu_ticks(text) is None
    assert system.runnable(text) is None


def test_pressure_is_the_time_in_which_some_waited() -> None:
    text = b"some avg10=1.00 avg60=0.00 avg300=0.00 total=123\nfull avg10=0.00 total=45\n"

    assert system.pressure_us(text) == (123,)
    assert system.pressure_us(b"") is None


def test_available_memory() -> None:
    assert system.available_bytes(b"MemTotal: 9 kB\nMemAvailable:   7 kB\n") == 7168
    assert system.available_bytes(b"MemTotal: 9 kB\n") is None


def test_disks_without_partitions() -> None:
    text = (
        b"   8 0 sda 1 2 10 4 5 6 20 8 0 30 0\n"
        b"   8 1 sda1 1 2 10 4 5 6 20 8 0 0 0\n"
        b" 259 0 nvme0n1 1 2 1 4 5 6 2 8 0 40 0\n"
    )

    assert system.disk_table(text, {"sda", "nvme0n1"}) == {
        "sda": (10 * 512, 20 * 512, 30),
        "nvme0n1": (512, 2 * 512, 40),
    }
    assert system.disk_table(b"", {"sda"}) == {}
    assert system.disk_totals(b"1 2 10 4 5 6 20 8 0 30 0\n") == (10 * 512, 20 * 512, 30)
    assert system.disk_totals(b"1 2\n") is None


def test_net_bytes_of_all_interfaces() -> None:
    text = (
        b"head\nhead\n"
        b"    lo: 10 1 0 0 0 0 0 0 10 1 0 0 0 0 0 0\n"
        b"  eth0:5 1 0 0 0 0 0 0 7 1 0 0 0 0 0 0\n"
    )

    assert system.net_bytes(text) == (15, 17)
    assert system.net_bytes(b"") is None


def test_retransmits_by_the_name_of_the_column() -> None:
    assert system.retransmits(b"Ip: A\nIp: 1\nTcp: A RetransSegs B\nTcp: 1 42 -1\n") == (42,)
    assert system.retransmits(b"Tcp: A B\nTcp: 1 2\n") is None
    assert system.retransmits(b"Tcp: A RetransSegs\nTcp: 1\n") is None
    assert system.retransmits(b"") is None


def test_process_stat_with_any_command() -> None:
    text = (
        b"7 (a) b) (c) D 1 1 1 0 -1 0 11 0 12 0 13 14 0 0 20 0 5 0 777 1000 66 1844674407 "
        b"0 0 0 0 0 0 0 0 0 0 0 0 17 6 0 0\n"
    )

    assert processes.parse_stat(text) == processes.Stat(
        state="D",
        minor_faults=11,
        major_faults=12,
        cpu_ticks=27,
        threads=5,
        started_ticks=777,
        rss_pages=66,
        cpu=6,
    )
    assert processes.parse_stat(b"") is None
    assert processes.parse_stat(b"7 (a) D 1 1\n") is None


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
        ("text-generation-launcher --model-id m", False, "launcher"),
        ("ray::RayWorkerWrapper.execute_method", False, "worker"),
        ("ray::DPEngineCoreActor", False, "core"),
        ("/usr/bin/ollama runner --model m --port 4000", False, "worker"),
        ("python3 /usr/local/bin/trtllm-serve model", True, "api"),
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
        (b"", None),
    ],
)
def test_throttling_of_both_versions(text: bytes, expected: tuple[int, int] | None) -> None:
    assert cgroups.throttling(text) == expected


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_listeners_of_a_port_and_no_others(tmp_path: Path) -> None:
    table = write(
        tmp_path / "tcp",
        TABLE_HEAD + row(8000, 11) + row(8001, 12) + row(8000, 21) + row(8000, 13, state="01"),
    )

    assert list(tcp.listening(str(table), 8000)) == [11, 21]
    assert list(tcp.listening(str(tmp_path / "none"), 8000)) == []


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
    assert reader.read(paths[2]) == b"new"
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


def test_a_file_is_parsed_only_when_it_changed(tmp_path: Path) -> None:
    path = write(tmp_path / "x", "1")
    parsed: list[bytes] = []

    def parse(data: bytes) -> bytes:
        parsed.append(data)
        return data

    file = files.Parsed(Files(), str(path), parse)

    assert [file.read(), file.read()] == [b"1", b"1"]
    path.write_text("2")
    assert file.read() == b"2"
    assert parsed == [b"", b"1", b"2"]


def test_growth_is_unknown_at_first_and_after_a_reset(tmp_path: Path) -> None:
    path = write(tmp_path / "x", "5 5")
    growth = files.Growth(
        Files(), str(path), lambda data: tuple(map(int, data.split())) if data else None
    )

    assert growth.read() is None
    assert growth.read() == (0, 0)
    path.write_text("7 3")
    assert growth.read() == (2, None)
    path.write_text("")
    assert growth.read() is None


def test_no_more_than_so_much_is_read_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 100_000)
    path = write(tmp_path / "long", "x" * 500_000)

    data = Files().read_once(str(path))

    assert data is not None
    assert 100_000 <= len(data) <= 100_000 + files.CHUNK


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-2,5\n", [0, 1, 2, 5]), ("0\n", [0]), ("", []), ("x,3-,2-a,1", [1])],
)
def test_node_lists(text: str, expected: list[int]) -> None:
    assert numa.node_numbers(text) == expected


def test_pages_that_missed_their_node() -> None:
    assert numa.numa_miss(b"numa_hit 5\nnuma_miss 7\nnuma_foreign 9\n") == (7,)
    assert numa.numa_miss(b"") is None


def test_schedstat() -> None:
    assert threads.parse_schedstat(b"12 34 5\n") == (12, 34)
    assert threads.parse_schedstat(b"") is None


def test_the_kernel_tells_its_clock_error() -> None:
    state = clock_error()

    assert state is not None
    assert 0 <= state[0] <= 16_000_000
