"""The detect bench counts over all recordings as the scoring protocol does over one."""

import math

import pytest

from latencyprism.bench.detect import Count, _figures, f1, measure


def count(name: str = "a", **values: int) -> Count:
    numbers = {"faults": 4, "found": 3, "false_alarms": 0, "workload_called_fault": 0} | values
    return Count(name=name, delays_s=(1.0, 2.0, 4.0), placed=3, rightly_placed=2, **numbers)


@pytest.mark.parametrize(
    ("faults", "found", "wrong", "expected"),
    [(4, 4, 0, 1.0), (4, 2, 0, 2 / 3), (4, 4, 4, 2 / 3), (4, 0, 3, 0.0)],
)
def test_f1_is_the_harmonic_mean_of_precision_and_recall(
    faults: int, found: int, wrong: int, expected: float
) -> None:
    assert f1(faults, found, wrong) == pytest.approx(expected)


def test_f1_without_faults_is_nothing() -> None:
    assert math.isnan(f1(0, 0, 2))


def test_recordings_are_counted_together() -> None:
    quiet = Count(
        name="base",
        faults=0,
        found=0,
        false_alarms=1,
        workload_called_fault=0,
        delays_s=(),
        placed=0,
        rightly_placed=0,
    )

    figures = _figures("real", [count(), count("b", workload_called_fault=1), quiet])

    assert figures["real.recall"].value == pytest.approx(6 / 8)
    assert figures["real.precision"].value == pytest.approx(6 / 8)
    assert figures["real.f1"].value == pytest.approx(2 * 6 / (8 + 6 + 2))
    assert figures["real.base_alarms"].value == 1
    assert figures["real.workload_called_fault"].value == 1
    assert figures["real.delay_p50_s"].value == pytest.approx(2.0)
    assert figures["real.place_top1"].value == pytest.approx(4 / 6)


def test_without_recordings_it_is_skipped_with_the_reason() -> None:
    figures, skipped = measure([])

    assert figures == {}
    assert "no recording was given" in skipped["real.f1"]
