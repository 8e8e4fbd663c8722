import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xpu_sysfs import table

from latencyprism.collectors.xpu import gpu_metrics
from latencyprism.collectors.xpu.gpu_metrics import GpuMetrics, UnknownTableError, decode

SIZES = {
    (1, 1): 96,
    (1, 2): 104,
    (1, 3): 120,
    (1, 4): 288,
    (1, 5): 360,
    (1, 6): 1664,
    (1, 7): 2208,
    (1, 8): 3872,
}
"""As a C compiler lays the kernel's structures out."""


def test_layouts_have_the_sizes_of_the_kernels() -> None:
    assert {v: ctypes.sizeof(layout) for v, layout in gpu_metrics._LAYOUTS.items()} == SIZES


@pytest.mark.parametrize("version", SIZES)
def test_a_table_that_the_firmware_left_empty_tells_nothing(version: tuple[int, int]) -> None:
    assert decode(table(*version)) == GpuMetrics()


def test_older_tables_name_what_holds_the_clocks_back() -> None:
    told = decode(
        table(
            1,
            3,
            temperature_hotspot=74,
            temperature_mem=66,
            average_socket_power=612,
            current_gfxclk=1800,
            indep_throttle_status=1 << 0 | 1 << 36 | 1 << 34 | 1 << 62,
        )
    )

    assert told == GpuMetrics(
        throttle_reasons=("power_cap", "thermal", "memory_thermal", "other"),
        hotspot_temperature_c=74,
        memory_temperature_c=66,
        power_w=612,
        core_clock_mhz=1800,
    )
    assert decode(table(1, 3, indep_throttle_status=0)).throttle_reasons == ()


@pytest.mark.parametrize("version", [(1, 6), (1, 7), (1, 8)])
def test_newer_tables_count_for_how_long(version: tuple[int, int]) -> None:
    told = decode(
        table(
            *version,
            curr_socket_power=700,
            prochot_residency_acc=0,
            ppt_residency_acc=123,
            pcie_replay_count_acc=9,
            current_gfxclk=[1300, 2100],
            xgmi_read_data_acc=[10, 0, 5],
            xgmi_write_data_acc=[1],
        )
    )

    assert told.throttle_reasons is None
    assert told.residencies == {"prochot": 0, "power_cap": 123}
    assert (told.power_w, told.core_clock_mhz, told.pcie_replays_total) == (700, 2100, 9)
    assert told.link_bytes_total == 16 * 1024


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (b"", "0 bytes"),
        (b"\x78\x00\x01", "3 bytes"),
        (table(1, 3)[:-1], "119 are here"),
        (b"\x10\x00\x01\x09" + bytes(12), "v1.9 of 16 bytes"),
        (b"\x88\x00\x02\x02" + bytes(132), "v2.2 of 136 bytes"),
        (b"\xa8\x01\x01\x06" + bytes(420), "v1.6 of 424 bytes"),
    ],
)
def test_unknown_tables_are_refused_in_words(bad: bytes, words: str) -> None:
    with pytest.raises(UnknownTableError, match=words):
        decode(bad)


@given(st.sampled_from(sorted(SIZES)), st.data())
def test_any_content_of_a_known_table_is_taken(
    version: tuple[int, int], data: st.DataObject
) -> None:
    size = SIZES[version]
    body = data.draw(st.binary(min_size=size - 4, max_size=size + 8))
    told = decode(size.to_bytes(2, "little") + bytes(version) + body)

    assert told.link_bytes_total is None or told.link_bytes_total >= 0


@given(st.binary(max_size=64))
def test_anything_else_is_refused(content: bytes) -> None:
    with pytest.raises(UnknownTableError):
        decode(content)
