import socket
from pathlib import Path
from sys import modules

import pytest

from latencyprism.collectors import doctor
from latencyprism.collectors.discovery.source import Discovery
from latencyprism.collectors.doctor import Finding, examine
from latencyprism.collectors.source import UnavailableError
from latencyprism.collectors.stacks.config import StacksConfig


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host that permits everything that files can permit."""
    proc, sys = tmp_path / "proc", tmp_path / "sys"
    write(proc / "sys/kernel/osrelease", "6.1.0-13-amd64")
    write(proc / "self/status", "Name:\tx\nCapEff:\t000001ffffffffff")
    write(proc / "self/schedstat", "123 45 6")
    write(proc / "self/mounts", f"proc {proc} proc rw,nosuid 0 0")
    write(proc / "sys/kernel/perf_event_paranoid", "2")
    write(proc / "net/tcp", "head")
    for kind in ("cpu", "memory", "io"):
        write(proc / "pressure" / kind, "some total=1")
    (proc / "7/fd").mkdir(parents=True)
    write(proc / "7/comm", "haproxy")
    write(sys / "fs/cgroup/cgroup.controllers", "cpu memory")
    write(sys / "kernel/btf/vmlinux", "types")
    write(sys / "bus/event_source/devices/uprobe/type", "9")
    amd = sys / "class/drm/card0/device"
    for name, content in {
        "vendor": "0x1002",
        "gpu_busy_percent": "3",
        "mem_info_vram_used": "5",
        "mem_info_vram_total": "9",
        "drm/renderD128/dev": "226:128",
        "hwmon/hwmon0/freq1_input": "1800000000",
        "hwmon/hwmon0/temp1_input": "60000",
        "hwmon/hwmon0/temp1_label": "edge",
        "hwmon/hwmon0/power1_average": "90000000",
        "ras/umc_err_count": "ue: 0\nce: 0",
    }.items():
        write(amd / name, content)
    # Version 1.3 of 120 bytes; nothing is told but that no limit is in force.
    (amd / "gpu_metrics").write_bytes(b"\x78\0\x01\x03" + b"\xff" * 108 + bytes(8))
    return tmp_path


def found(root: Path) -> dict[str, Finding]:
    findings = examine(str(root / "proc"), str(root / "sys"), str(root / "dev"))
    return {finding.name: finding for finding in findings}


NAMES = {
    "kernel",
    "inference servers",
    "packet capture",
    "other network namespaces",
    "eBPF",
    "performance counters",
    "processes of others",
    "run-queue waits",
    "pressure stall information",
    "control groups",
    "TCP connections",
    "NVIDIA GPUs",
    "AMD GPUs",
    "Intel GPUs",
    "Gaudi accelerators",
    "Google TPUs",
    "gateways",
    "spans",
    "call stacks",
    "clock",
    "kernel probes: run_queue",
    "kernel probes: sockets",
    "kernel probes: frames",
    "kernel probes: tls",
    "kernel probes: gpu",
}
ABSENT = {"Intel GPUs", "Gaudi accelerators", "Google TPUs", "inference servers"}
FROM_FILES = NAMES - {"packet capture", "spans", "call stacks", "NVIDIA GPUs", "clock"} - ABSENT


def test_open_host_permits_everything(root: Path) -> None:
    findings = found(root)

    assert {name: findings[name].state for name in FROM_FILES} == dict.fromkeys(FROM_FILES, "yes")
    assert all(findings[name].advice == "" for name in FROM_FILES)


def test_bare_host_tells_what_is_lost_and_what_to_do(tmp_path: Path) -> None:
    findings = found(tmp_path)

    assert set(findings) == NAMES
    for name in (FROM_FILES | ABSENT) - {"kernel"}:
        assert findings[name].state == "no", name
        assert findings[name].lost
        assert findings[name].advice


@pytest.mark.parametrize(
    ("release", "state"),
    [("6.18.44-fc", "yes"), ("5.8", "yes"), ("5.4.0-100", "partly"), ("3.10.0", "no")],
)
def test_kernel_versions(root: Path, release: str, state: str) -> None:
    write(root / "proc/sys/kernel/osrelease", release)

    assert found(root)["kernel"].state == state


@pytest.mark.parametrize(
    ("bits", "state"),
    [(0, "no"), (1 << 39, "partly"), (1 << 39 | 1 << 38, "yes"), (1 << 21, "yes")],
)
def test_capabilities_for_ebpf(root: Path, bits: int, state: str) -> None:
    write(root / "proc/self/status", f"CapEff:\t{bits:016x}")

    assert found(root)["eBPF"].state == state


def test_counters_open_to_all_need_no_capability(root: Path) -> None:
    write(root / "proc/self/status", "CapEff:\t0000000000000000")
    assert found(root)["performance counters"].state == "no"
    write(root / "proc/sys/kernel/perf_event_paranoid", "-1")
    assert found(root)["performance counters"].state == "yes"


def test_hidden_processes_are_told(root: Path) -> None:
    proc = root / "proc"
    (proc / "8").mkdir()
    write(proc / "self/mounts", f"proc {proc} proc rw,hidepid=2 0 0")
    finding = found(root)["processes of others"]

    assert finding.state == "partly"
    assert "1 of 2" in finding.seen
    assert "hidepid=2" in finding.seen


def test_pressure_of_some_kinds_is_partly(root: Path) -> None:
    (root / "proc/pressure/io").unlink()

    assert found(root)["pressure stall information"].state == "partly"


def test_version_1_control_groups(root: Path) -> None:
    (root / "sys/fs/cgroup/cgroup.controllers").unlink()
    write(root / "sys/fs/cgroup/cpu,cpuacct/cpu.stat", "nr_periods 0")

    finding = found(root)["control groups"]
    assert (finding.state, "version 1" in finding.seen) == ("yes", True)


@pytest.mark.parametrize(
    ("error", "state"),
    [((5000.0, True), "yes"), ((50_000.0, True), "partly"), ((1.0, False), "partly"), (None, "no")],
)
def test_clock(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: tuple[float, bool] | None,
    state: str,
) -> None:
    monkeypatch.setattr(doctor, "clock_error", lambda: error)

    assert found(root)["clock"].state == state


@pytest.mark.parametrize("allowed", [True, False])
def test_packet_capture(root: Path, monkeypatch: pytest.MonkeyPatch, *, allowed: bool) -> None:
    monkeypatch.setattr(doctor, "may_capture", lambda: allowed)

    finding = found(root)["packet capture"]
    assert finding.state == ("yes" if allowed else "no")
    assert ("CAP_NET_RAW" in finding.advice) is not allowed


def test_refused_inet_diag_is_partly(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise OSError("protocol not supported")

    monkeypatch.setattr(doctor, "InetDiag", refuse)
    finding = found(root)["TCP connections"]

    assert finding.state == "partly"
    assert "protocol not supported" in finding.seen


def test_accelerators_are_named_with_what_they_do_not_tell(root: Path) -> None:
    (root / "sys/class/drm/card0/device/gpu_metrics").unlink()
    (root / "sys/class/drm/card0/device/hwmon/hwmon0/power1_average").unlink()
    finding = found(root)["AMD GPUs"]

    assert (finding.state, finding.seen) == (
        "partly",
        "1 x amd device; not told: throttling, power",
    )
    assert "/sys" in finding.advice


def test_an_accelerator_that_fails_is_told(root: Path) -> None:
    device = root / "sys/class/accel/accel0/device"
    write(device / "status", "Malfunction")
    write(device / "pci_addr", "0000:33:00.0")
    finding = found(root)["Gaudi accelerators"]

    assert finding.state == "partly"
    assert "0000:33:00.0: status: Malfunction" in finding.seen


def test_a_tpu_without_a_server_is_told(root: Path) -> None:
    device = root / "sys/bus/pci/devices/0000:00:05.0"
    write(device / "vendor", "0x1ae0")
    write(device / "device", "0x0063")
    finding = found(root)["Google TPUs"]

    assert finding.state == "no"
    assert "does not answer" in finding.seen


def test_nvidia_says_what_is_missing_and_which_devices_there_are(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(modules, "latencyprism.collectors.xpu.nvml", None)
    write(root / "dev/nvidia0", "")
    finding = found(root)["NVIDIA GPUs"]

    assert finding.state == "no"
    assert "latencyprism[collectors]" in finding.seen
    assert "device files nvidia0" in finding.seen


def test_this_host_is_examined() -> None:
    findings = examine()

    assert {finding.name for finding in findings} == NAMES
    assert all(finding.seen for finding in findings)


def test_a_receiver_that_has_the_ports_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        monkeypatch.setattr(doctor, "OTLP_PORTS", (taken,))
        finding = found(root)["spans"]

    assert (finding.state, str(taken) in finding.seen) == ("partly", True)
    assert "collectors.otlp.grpc" in finding.advice


def test_inference_servers_are_told(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    class Found(Discovery):
        def look(self, now_s: float) -> tuple[str, ...]:  # noqa: ARG002 - as it is called
            self.counts["not permitted"] = 2
            return ("http://gpu-7:8000",)

    monkeypatch.setattr(doctor, "Discovery", Found)
    finding = found(root)["inference servers"]

    assert finding.state == "yes"
    assert finding.seen == "http://gpu-7:8000; 2 programs could not be looked into"


def test_call_stacks_need_py_spy_and_a_capability(
    monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    monkeypatch.setattr(doctor, "program", lambda _: "/usr/bin/py-spy")
    assert found(root)["call stacks"].state == "yes"
    write(root / "proc/self/status", "CapEff:\t0000000000000000")
    assert found(root)["call stacks"].state == "partly"

    def missing(_: StacksConfig) -> str:
        raise UnavailableError("py-spy is not there")

    monkeypatch.setattr(doctor, "program", missing)
    assert found(root)["call stacks"].state == "no"
