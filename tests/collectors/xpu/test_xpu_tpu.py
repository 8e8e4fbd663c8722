"""TPUs through real gRPC against a runtime of the test's own."""

import socket
import time
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xpu_sysfs import write
from xpu_tpu import Runtime, serving, tpu_machine

from latencyprism.collectors.host.files import Files
from latencyprism.collectors.source import UnavailableError
from latencyprism.collectors.xpu.reading import Reading
from latencyprism.collectors.xpu.tpu import MEMORY_BUSY, METRICS, Tpu, gauges, spread
from latencyprism.collectors.xpu.tpu_kinds import kind_of_tpu
from latencyprism.collectors.xpu.tpu_messages import MetricResponse


def test_devices_are_read(tmp_path: Path) -> None:
    with serving(Runtime()) as address:
        tpu = Tpu([address], str(tpu_machine(tmp_path)))
        readings = tpu.read()
        tpu.close()

    assert len(readings) == 4
    assert readings[0] == Reading(
        device=f"{address}/0",
        vendor="google",
        name="TPU v5e",
        utilisation=0.635,
        memory_used_bytes=9 << 30,
        memory_total_bytes=16 << 30,
        port=int(address.rpartition(":")[2]),
    )
    assert (readings[3].memory_used_bytes, readings[1].utilisation) == (0, 0.0)


@pytest.mark.parametrize("status", [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED])
def test_a_metric_that_a_runtime_lacks_is_asked_for_once(
    tmp_path: Path, status: grpc.StatusCode
) -> None:
    runtime = Runtime(refuse_as=status)
    with serving(runtime) as address:
        tpu = Tpu([address], str(tpu_machine(tmp_path)))
        tpu.read()
        tpu.read()
        assert runtime.asked.count(MEMORY_BUSY) == 1
        runtime.values[MEMORY_BUSY] = {0: 25.0, 1: 101.0, 2: 0.0, 3: 1.0}
        tpu.reopen()
        busy = [reading.memory_utilisation for reading in tpu.read()]
        tpu.close()

    assert busy == [0.25, None, 0.0, 0.01]


def test_without_a_process_on_the_tpu_nothing_is_told(tmp_path: Path) -> None:
    tpu = Tpu(["127.0.0.1:1"], str(tpu_machine(tmp_path)), timeout_s=1)

    with pytest.raises(OSError, match=r"127.0.0.1:1 does not answer.*while a process"):
        tpu.read()
    assert tpu.counts == {"runtimes_silent": 1}
    tpu.close()


def test_a_runtime_that_starts_later_is_found(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    tpu = Tpu([f"127.0.0.1:{port}"], str(tpu_machine(tmp_path)))
    with pytest.raises(OSError, match="does not answer"):
        tpu.read()

    with serving(Runtime(), port):
        deadline = time.monotonic() + 20
        while True:
            try:
                assert len(tpu.read()) == 4
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
    tpu.close()


def test_one_silent_runtime_of_two_does_not_hide_the_other(tmp_path: Path) -> None:
    with serving(Runtime()) as address:
        tpu = Tpu([address, "127.0.0.1:1"], str(tpu_machine(tmp_path)), timeout_s=1)
        assert len(tpu.read()) == 4
        tpu.close()


def test_an_answer_that_is_no_message_is_a_failure(tmp_path: Path) -> None:
    with serving(Runtime(answer=b"\xff\xff\xff")) as address:
        tpu = Tpu([address], str(tpu_machine(tmp_path)))
        with pytest.raises(OSError, match="does not answer"):
            tpu.read()
        tpu.close()


def test_a_machine_without_a_tpu_says_so(tmp_path: Path) -> None:
    network = tmp_path / "bus/pci/devices/0000:00:04.0"
    write(network / "vendor", "0x1ae0")
    write(network / "device", "0x0042")
    write(network / "class", "0x020000")

    with pytest.raises(UnavailableError, match="no TPU"):
        Tpu(["127.0.0.1:8431"], str(tmp_path))


def test_a_newer_tpu_is_known_by_its_class(tmp_path: Path) -> None:
    device = tmp_path / "bus/pci/devices/0000:00:05.0"
    write(device / "vendor", "0x1ae0")
    write(device / "device", "0x0099")
    write(device / "class", "0x120000")

    assert kind_of_tpu(Files(sys=str(tmp_path))) == "TPU 0x0099"


@pytest.mark.parametrize("address", ["", "8431", "localhost:", ":8431", "localhost:port"])
def test_a_wrong_address_is_named(tmp_path: Path, address: str) -> None:
    with pytest.raises(ValueError, match="expected host:port"):
        Tpu([address], str(tpu_machine(tmp_path)))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({0: 1.0, 1: 2.0}, {0: 1.0, 1: 1.0, 2: 2.0, 3: 2.0}),  # chips of two cores
        ({0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}, {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}),
        ({0: 1.0, 1: 2.0, 2: 3.0}, {0: 1.0, 1: 2.0, 2: 3.0}),  # of no use, so left as it is
        ({}, {}),
    ],
)
def test_values_of_chips_are_given_to_their_cores(
    values: dict[int, float], expected: dict[int, float]
) -> None:
    assert spread(values, [0, 1, 2, 3]) == expected


@given(st.binary(max_size=200))
def test_any_bytes_are_taken_or_refused_as_a_whole(content: bytes) -> None:
    from google.protobuf.message import DecodeError

    try:
        response = MetricResponse.FromString(content)
    except DecodeError:
        return
    assert all(isinstance(value, float) for value in gauges(response).values())


def test_metrics_are_asked_for_by_their_public_names() -> None:
    assert METRICS == (
        "tpu.runtime.hbm.memory.total.bytes",
        "tpu.runtime.hbm.memory.usage.bytes",
        "tpu.runtime.tensorcore.dutycycle.percent",
        "tpu.runtime.hbm.utilization.percent",
    )
