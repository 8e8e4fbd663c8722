"""Children are awaited, revived with backoff, and end with their parent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from latencyprism.children import FIRST_BACKOFF_S, Child, ChildError, Supervisor


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    found = Supervisor(tmp_path)
    yield found
    found.stop()


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_ready_content_is_returned(supervisor: Supervisor, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    text = f"import pathlib, time; pathlib.Path({str(ready)!r}).write_text('8123'); time.sleep(60)"

    child = supervisor.program("store", python(text), ready)

    assert child.wait_ready(20) == "8123"


def test_a_child_that_ends_early_shows_its_log(supervisor: Supervisor, tmp_path: Path) -> None:
    child = supervisor.program("sink", python("raise SystemExit('no store')"), tmp_path / "ready")

    with pytest.raises(ChildError, match=r"sink ended with status 1:\nno store"):
        child.wait_ready(20)


def test_a_child_that_hangs_is_reported(supervisor: Supervisor, tmp_path: Path) -> None:
    child = supervisor.program("x", python("import time; time.sleep(60)"), tmp_path / "ready")

    with pytest.raises(ChildError, match="x was not ready within 0 s"):
        child.wait_ready(0.1)


def test_revive_waits_for_the_backoff(tmp_path: Path) -> None:
    child = Child("x", python(""), tmp_path / "log")
    child.start()
    assert child.process is not None
    child.process.wait()

    assert not child.revive(100.0)
    assert not child.revive(100.0 + FIRST_BACKOFF_S / 2)
    assert child.revive(100.0 + FIRST_BACKOFF_S)
    assert child.restarts == 1
    child.process.wait()


def test_stop_kills_what_ignores_sigterm(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    text = (
        "import pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"pathlib.Path({str(ready)!r}).touch(); time.sleep(60)"
    )
    child = Child("stubborn", python(text), tmp_path / "log", ready)
    child.start()
    child.wait_ready(20)

    child.stop(0.1)

    assert child.process is not None
    assert child.process.returncode == -signal.SIGKILL


def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    child = (
        "import os, pathlib, time; from latencyprism.children import die_with_parent;"
        "die_with_parent(os.getppid());"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); time.sleep(60)"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen(python(parent))
    deadline = time.monotonic() + 20
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)

    process.kill()
    process.wait()

    pid = int(pid_file.read_text())
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    gone = not Path(f"/proc/{pid}").exists()
    if not gone:
        os.kill(pid, signal.SIGKILL)
    assert gone
