"""``latencyprism stacks`` where there is nothing to take."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from latencyprism.collectors.source import UnavailableError
from latencyprism.collectors.stacks.config import StacksConfig
from latencyprism.collectors.stacks.pyspy import program
from latencyprism.stacks import profiles

ONCE = StacksConfig(duration_s=1)
NO_PROCESS = 99_999_999


def has_py_spy() -> bool:
    try:
        program(ONCE)
    except UnavailableError:
        return False
    return True


pytestmark = pytest.mark.skipif(not has_py_spy(), reason="needs py-spy (extra stacks)")


@pytest.fixture
def shell() -> Iterator[int]:
    """Process id of a program without Python."""
    with subprocess.Popen(["sh", "-c", "sleep 20; true"]) as process:
        yield process.pid
        process.kill()


def test_a_process_without_python_is_an_error_in_words(shell: int) -> None:
    with pytest.raises(LookupError, match=rf"process {shell}: .*other languages"):
        profiles(engine=None, pid=shell, config=ONCE)


def test_the_command_fails_when_no_stack_was_taken() -> None:
    command = ["latencyprism", "stacks", "--pid", str(NO_PROCESS), "--duration", "1"]
    ended = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, timeout=60, check=False
    )

    assert ended.returncode == 2
    assert f"no stacks of pid {NO_PROCESS} could be taken" in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr
