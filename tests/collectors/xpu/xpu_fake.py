"""Builds and drives the fake driver library, and an emit that remembers."""

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from latencyprism.schemas.records import XpuSample
from latencyprism.schemas.topics import TELEMETRY_XPU, Topic

HEALTHY = {
    "load": 87,
    "memory_load": 40,
    "memory_total": 80 << 30,
    "memory_used": 60 << 30,
    "temperature": 61,
    "power": 412_500,
    "power_limit": 700_000,
    "sm_clock": 1755,
    "sm_clock_max": 1980,
    "memory_clock": 2619,
    "reasons": 0x001,
    "ecc_corrected": 10,
    "ecc_uncorrected": 0,
    "pcie_rx": 1000,
    "pcie_tx": 2000,
    "pcie_gen": 5,
    "pcie_width": 16,
    "field.82": 74,
    "field.94": 3,
    "events": 0,
}
SLICE = {"memory_total": 10 << 30, "memory_used": 4 << 30}


def build_library(folder: Path) -> Path:
    """The fake as a shared library with the driver's name; skips without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to build the fake driver library with")
    library = folder / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run(
        [
            *(compiler, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-O1", "-pthread"),
            *(source, "-o", library),
        ],
        check=True,
    )
    return library


def near(value: float) -> Any:
    """Equal to a number but for rounding; of any type, to stand in a record."""
    return pytest.approx(value)


@dataclass(slots=True)
class Host:
    """The GPUs that the fake answers for; :meth:`write` after a change."""

    path: Path
    gpus: list[dict[str, int]]
    host: dict[str, int] = field(default_factory=dict)
    slices: dict[int, dict[str, int]] = field(default_factory=dict)
    """MIG slices, by 10 * GPU + place."""

    def write(self) -> None:
        """Replace the file in one step, since the library may be reading it."""
        lines = [f"-1 gpus {len(self.gpus)}", *(f"-1 {k} {v}" for k, v in self.host.items())]
        for number, values in enumerate(self.gpus):
            lines += [f"{number} {name} {value}" for name, value in values.items()]
        for number, values in self.slices.items():
            lines += [f"{100 + number} {name} {value}" for name, value in values.items()]
        new = self.path.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n")
        new.replace(self.path)


@dataclass(slots=True)
class Heard:
    """An emit for one writing thread and one reading."""

    samples: list[XpuSample] = field(default_factory=list)
    watermarks: list[tuple[str, int]] = field(default_factory=list)
    order: list[tuple[str, int]] = field(default_factory=list)
    """Both in the order they came: what it was, and its time."""

    def sample(self, topic: Topic, sample: Any) -> None:
        assert topic is TELEMETRY_XPU
        self.samples.append(sample)
        self.order.append(("sample", sample.observed_at_ns))

    def watermark(self, topic: Topic, instance: str, watermark_ns: int) -> None:
        assert topic is TELEMETRY_XPU
        self.watermarks.append((instance, watermark_ns))
        self.order.append(("watermark", watermark_ns))
