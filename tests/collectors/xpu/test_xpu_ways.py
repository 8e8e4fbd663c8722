from dataclasses import replace
from pathlib import Path

import pytest
from xpu_sysfs import amd_card, intel_card
from xpu_tpu import tpu_machine

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


def test_what_is_missing_is_told_of_every_way(tmp_path: Path) -> None:
    config = XpuConfig(ways=("amd", "intel", "gaudi", "tpu"), sys=str(tmp_path))

    reason = unavailable(config)

    assert reason is not None
    for name in ("amd: no card", "intel: no card", "gaudi: no device", "tpu: no TPU"):
        assert name in reason


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
    assert unavailable(replace(XpuConfig(), ways=())) == "no way of reading accelerators is enabled"
    assert finding.ways(replace(XpuConfig(), ways=())) == []


def test_a_wrong_url_is_named() -> None:
    with pytest.raises(ValueError, match="localhost:9400"):
        ways(XpuConfig(exporters=("localhost:9400",)))
    with pytest.raises(ValueError, match="expected host:port"):
        ways(XpuConfig(tpu_addresses=("8431",)))
