from dataclasses import replace
from pathlib import Path

import pytest
from xpu_sysfs import amd_card, intel_card
from xpu_tpu import tpu_machine

from latencyprism.collectors.source import AbsentError
from latencyprism.collectors.xpu import ways as finding
from latencyprism.collectors.xpu.config import XpuConfig
from latencyprism.collectors.xpu.source import unavailable
from latencyprism.collectors.xpu.ways import ways


def test_the_machine_itself_comes_before_exporters() -> None:
    config = XpuConfig(
        ways=("amd", "nvidia", "amd"), exporters=("http://a:9400", "http://b:5000/metrics")
    )

    assert [way.name for way in ways(config)] == [
        "amd",
        "nvidia",
        "exporter http://a:9400",
        "exporter http://b:5000/metrics",
    ]


def pci_device(sys: Path, vendor: str, kind: str) -> None:
    folder = sys / "bus/pci/devices/0000:3b:00.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{kind}\n")


@pytest.mark.parametrize("device", [None, ("0x1a03", "0x030000"), ("0x8086", "0x030000")])
def test_a_machine_without_accelerators_is_told_so_in_a_few_words(
    tmp_path: Path, device: tuple[str, str] | None
) -> None:
    if device:
        pci_device(tmp_path, *device)
    absent = unavailable(XpuConfig(ways=("amd", "intel"), sys=str(tmp_path)))

    assert isinstance(absent, AbsentError)
    assert str(absent) == "no accelerator on this host (amd, intel)"


@pytest.mark.parametrize(
    ("vendor", "kind"),
    [
        ("0x10de", "0x030200"),
        ("0x1002", "0x030000"),
        ("0x8086", "0x038000"),
        ("0x1da3", "0x120000"),
    ],
)
def test_of_a_device_without_a_driver_every_way_is_told(
    tmp_path: Path, vendor: str, kind: str
) -> None:
    pci_device(tmp_path, vendor, kind)
    config = XpuConfig(ways=("amd", "intel", "gaudi", "tpu"), sys=str(tmp_path))

    reason = unavailable(config)

    assert reason is not None
    assert not isinstance(reason, AbsentError)
    for name in ("amd: no card", "intel: no card", "gaudi: no device", "tpu: no TPU"):
        assert name in str(reason)


@pytest.mark.parametrize("make", [amd_card, intel_card, tpu_machine])
def test_one_device_of_any_kind_is_enough(tmp_path: Path, make: object) -> None:
    make(tmp_path)  # type: ignore[operator]
    config = XpuConfig(ways=("amd", "intel", "gaudi", "tpu"), sys=str(tmp_path))

    assert unavailable(config) is None


def test_an_exporter_is_enough(tmp_path: Path) -> None:
    config = XpuConfig(ways=("amd",), sys=str(tmp_path), exporters=("http://127.0.0.1:1",))

    assert unavailable(config) is None


def test_a_missing_module_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "latencyprism.collectors.xpu.tpu", None)
    config = XpuConfig(ways=("tpu",), sys=str(tpu_machine(tmp_path)))

    assert "install the extra latencyprism[tpu]" in str(unavailable(config))


def test_no_way_at_all_is_said() -> None:
    assert (
        str(unavailable(replace(XpuConfig(), ways=())))
        == "no way of reading accelerators is enabled"
    )
    assert finding.ways(replace(XpuConfig(), ways=())) == []


def test_a_wrong_url_is_named() -> None:
    with pytest.raises(ValueError, match="localhost:9400"):
        ways(XpuConfig(exporters=("localhost:9400",)))
    with pytest.raises(ValueError, match="expected host:port"):
        ways(XpuConfig(tpu_addresses=("8431",)))
