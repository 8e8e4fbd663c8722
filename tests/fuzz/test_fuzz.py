"""Every parser of bytes from outside takes any bytes: it reads them or refuses them, in time."""

import time

import pytest
from fuzzing import HERE, targets
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

TARGETS = targets()
SLOW_S = 1.0
"""More for a few KiB is no parser but a denial of service."""


def test_every_file_offers_a_target() -> None:
    modules = {target.__module__ for target in TARGETS.values()}
    assert modules == {path.stem for path in HERE.glob("targets_*.py")}
    assert modules


@pytest.mark.parametrize("name", TARGETS)
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.binary(max_size=4096) | st.text(max_size=1024).map(str.encode))
def test_any_bytes_are_read_or_refused(name: str, data: bytes) -> None:
    began = time.thread_time()
    TARGETS[name](data)
    assert time.thread_time() - began < SLOW_S
