import math
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xpu_fake import near
from xpu_pages import served

from latencyprism.collectors.engine.exposition import ExpositionError
from latencyprism.collectors.xpu import pages
from latencyprism.collectors.xpu.exporters import EXPORTERS
from latencyprism.collectors.xpu.pages import MADE, Pages, Reader
from latencyprism.collectors.xpu.reading import Reading

DATA = Path(__file__).with_name("data")
MIB = 1 << 20


def read(name: str) -> list[Reading]:
    return Reader().read((DATA / f"{name}.prom").read_bytes())


def test_dcgm() -> None:
    first, second, part = read("dcgm")

    assert first == Reading(
        device="GPU-00000000-aaaa-bbbb-cccc-dddddddddddd",
        vendor="nvidia",
        aliases=frozenset({"0000:3b:00.0"}),
        name="NVIDIA H100 80GB HBM3",
        utilisation=near(0.87),
        memory_utilisation=near(0.4),
        memory_used_bytes=61440 * MIB,
        memory_total_bytes=(61440 + 19968 + 512) * MIB,
        core_clock_mhz=1755,
        memory_clock_mhz=2619,
        throttle_reasons=("power_cap",),
        temperature_c=61,
        memory_temperature_c=74,
        power_w=412.5,
        power_limit_w=700,
        ecc_corrected_total=10,
        ecc_uncorrected_total=1,
        pcie_rx_bytes_s=97863601,
        pcie_tx_bytes_s=33011804,
        pcie_replays_total=7,
        link_bytes_s=3000,
        link_errors_total=3,
    )
    assert (part.device, part.parent) == (f"{second.device}/7", second.device)
    assert (part.utilisation, part.memory_total_bytes) == (0.5, 10000 * MIB)
    assert (part.aliases, part.power_w) == (frozenset(), None)


def test_blanks_of_dcgm_are_missing() -> None:
    second = read("dcgm")[1]

    assert (second.memory_temperature_c, second.power_w, second.throttle_reasons) == (None,) * 3
    assert (second.ecc_corrected_total, second.memory_utilisation) == (None, None)
    assert (second.link_errors_total, second.temperature_c) == (None, 33)
    assert second.utilisation == 0.25, "the alternative that is told"


@pytest.mark.parametrize(
    "blank",
    [
        2147483632,
        2147483633,
        2147483634,
        2147483635,
        9223372036854775792,
        9223372036854775793,
        9223372036854775794,
        9223372036854775795,
        "140737488355328.000000",
        "140737488355331.000000",
        "NaN",
        "-1",
        "+Inf",
    ],
)
def test_a_blank_is_counted_and_left_out(blank: object) -> None:
    reader = Reader()
    labels = '{UUID="GPU-1"}'

    (reading,) = reader.read(
        f"DCGM_FI_DEV_GPU_TEMP{labels} {blank}\nDCGM_FI_DEV_SM_CLOCK{labels} 1\n".encode()
    )

    assert (reading.temperature_c, reading.core_clock_mhz) == (None, 1)
    assert reader.counts["values_missing"] == 1


def test_a_new_error_code_is_told_once() -> None:
    reader = Reader()

    def told(code: int) -> int | None:
        page = f'DCGM_FI_DEV_XID_ERRORS{{UUID="GPU-1"}} {code}\n'.encode()
        return reader.read(page)[0].xid

    # What the page shows at first may be from long ago.
    assert [told(code) for code in (31, 31, 79, 79, 0, 48)] == [None, None, 79, None, None, 48]
    assert told(1 << 40) is None


def test_amd() -> None:
    first, second = read("amd")

    assert first == Reading(
        device="c0ff74a1-0000-1000-80e0-c6d49f5b0d86",
        vendor="amd",
        aliases=frozenset({"692409005400"}),
        name="AMD Instinct MI300X OAM",
        utilisation=near(0.91),
        memory_utilisation=near(0.44),
        memory_used_bytes=150000 * MIB,
        memory_total_bytes=196592 * MIB,
        core_clock_mhz=1800,
        memory_clock_mhz=1300,
        throttle_reasons=("power_cap",),
        temperature_c=74,
        memory_temperature_c=66,
        power_w=612,
        ecc_corrected_total=23,
        ecc_uncorrected_total=1,
        pcie_replays_total=4,
        pcie_gen=5,
    )
    assert (second.throttle_reasons, second.core_clock_mhz) == ((), None)


def test_names_of_amd_may_have_capitals_or_a_prefix() -> None:
    page = (DATA / "amd.prom").read_text()
    plain = read("amd")

    assert Reader().read(page.replace("gpu_gfx_activity", "GPU_GFX_ACTIVITY").encode()) == plain
    assert Reader().read(page.replace("\ngpu_", "\namd_gpu_").encode()) == plain


def test_ascend() -> None:
    first, second = read("ascend")

    assert first == Reading(
        device="00000000-11111111-22222222-33333333-44444444",
        vendor="huawei",
        aliases=frozenset({"0000:c1:00.0"}),
        name="910B3-Ascend-V1",
        utilisation=near(0.78),
        memory_utilisation=near(0.35),
        memory_used_bytes=32768 * MIB,
        memory_total_bytes=65536 * MIB,
        core_clock_mhz=1800,
        temperature_c=52,
        memory_temperature_c=48,
        power_w=245.6,
        ecc_corrected_total=12,
        ecc_uncorrected_total=0,
        link_bytes_s=2e9,
        link_errors_total=6,
    )
    assert second.error == "the exporter says that the device is not healthy"
    assert (second.temperature_c, second.link_bytes_s, second.link_errors_total) == (41, None, None)


def test_xpum_tells_of_a_card_what_its_tiles_tell() -> None:
    (card,) = read("xpum")

    assert card == Reading(
        device="0000:4d:00.0",
        vendor="intel",
        aliases=frozenset({"01000000-0000-0000-0000-000000030000"}),
        name="Intel(R) Data Center GPU Max 1550",
        utilisation=0.6,
        memory_utilisation=near(0.3),
        memory_used_bytes=41_000_000_000,
        core_clock_mhz=1550,
        temperature_c=58,
        memory_temperature_c=63,
        power_w=420.5,
        ecc_corrected_total=3,
        ecc_uncorrected_total=1,
    )


def test_habana() -> None:
    (device,) = read("habana")

    assert device == Reading(
        device="01P0-HL2080A0-15-TNBS84-03-04-00",
        vendor="habana",
        aliases=frozenset({"0000:33:00.0"}),
        utilisation=near(0.72),
        memory_used_bytes=84_000_000_000,
        memory_total_bytes=96 << 30,
        core_clock_mhz=1500,
        core_clock_max_mhz=1650,
        temperature_c=55,
        power_w=410,
        power_limit_w=600,
        pcie_replays_total=2,
        pcie_width=16,
    )


def test_every_field_of_the_tables_is_one_of_a_reading() -> None:
    known = set(Reading.__dataclass_fields__) | MADE

    for exporter in EXPORTERS:
        for name in exporter.columns:
            assert name in known or name.startswith("violation."), (exporter.name, name)


def test_a_page_of_another_shape_later_is_taken() -> None:
    reader = Reader()
    whole = (DATA / "dcgm.prom").read_bytes()
    reader.read((DATA / "amd.prom").read_bytes())

    assert [r.vendor for r in reader.read(whole)] == ["nvidia"] * 3
    assert reader.read(whole) == [*reader.read(whole)]
    assert [r.vendor for r in reader.read((DATA / "amd.prom").read_bytes())] == ["amd"] * 2


def test_a_page_without_accelerators_tells_nothing() -> None:
    reader = Reader()

    assert reader.read(b'up 1\ngpu_clock{gpu_index="0",clock_type="system"} 300\n') == []
    assert reader.counts["series_without_device"] == 1


def test_a_page_with_too_many_devices_is_cut_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_DEVICES", 3)
    reader = Reader()
    page = "".join(f'DCGM_FI_DEV_GPU_TEMP{{UUID="{n}"}} 1\n' for n in range(5))

    assert len(reader.read(page.encode())) == 3
    assert reader.counts["devices_too_many"] == 2


NUMBERS = st.one_of(
    st.floats(),
    st.integers(-(1 << 70), 1 << 70),
    st.sampled_from([0, 1, 2147483634, 9223372036854775794]),
)
METRICS = sorted(
    name for e in EXPORTERS for cs in e.columns.values() for c in cs for name in c.names
)
LABELS = st.dictionaries(
    st.sampled_from(
        ["UUID", "GPU_I_ID", "gpu_uuid", "vdie_id", "pci_bdf", "sub_dev", "clock_type"]
    ),
    st.sampled_from(["", "0", "1", "system", "0000:01:00.0"]),
)


@given(st.lists(st.tuples(st.sampled_from(METRICS), LABELS, NUMBERS), max_size=30))
def test_any_values_make_readings_that_can_be_published(
    rows: list[tuple[str, dict[str, str], float]],
) -> None:
    lines = [
        f"{name}{{" + ",".join(f'{k}="{v}"' for k, v in labels.items()) + f"}} {number}\n"
        for name, labels, number in rows
    ]
    for reading in Reader().read("".join(lines).encode()):
        for name in (*pages.WHOLE, *pages.SHARES, "power_w", "link_bytes_s", "xid"):
            value = getattr(reading, name)
            assert value is None or (math.isfinite(value) and 0 <= value < 1 << 62), name
        for name in pages.SHARES:
            assert (getattr(reading, name) or 0) <= 1


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(page: bytes) -> None:
    with suppress(ExpositionError):
        assert Reader().read(page) == []


def test_an_exporter_is_read_over_http() -> None:
    page = (DATA / "habana.prom").read_bytes()
    with served({"/metrics": page, "/elsewhere": page}) as url:
        for exporter in (Pages(url), Pages(f"{url}/elsewhere")):
            assert len(exporter.read()) == 1
            exporter.close()
        wrong = Pages(f"{url}/nothing")
        with pytest.raises(OSError, match=r"nothing: HTTP 404"):
            wrong.read()
        wrong.close()
    away = Pages("http://127.0.0.1:1")
    with pytest.raises(OSError, match=r"127.0.0.1:1"):
        away.read()


def test_a_page_that_is_no_page_is_a_failure() -> None:
    with served({"/metrics": b"<html>\n"}) as url:
        exporter = Pages(url)
        with pytest.raises(OSError, match="HTML"):
            exporter.read()
        exporter.close()


def test_a_wrong_url_is_named() -> None:
    with pytest.raises(ValueError, match="localhost:9400"):
        Pages("localhost:9400")
