"""Runs py-spy on one process for a bounded time and folds what it saw.

py-spy reads the memory of the other process without stopping it (``--nonblocking``); neither its
code nor its arguments are touched. It needs the same user as that process, or CAP_SYS_PTRACE.
"""

import re
import shutil
import subprocess
import sysconfig
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from latencyprism.collectors.source import UnavailableError
from latencyprism.collectors.stacks.config import StacksConfig
from latencyprism.collectors.stacks.stages import Profile, fold

START_S = 10.0
"""Time that py-spy may take beside sampling: it reads the symbols of a large program first."""
POLL_S = 0.05
MAX_BYTES = 16_000_000
LONGEST_ERROR = 300

_ERRORS = re.compile(r"Errors: (\d+)")
_HINTS = (
    (
        re.compile(r"find python version|not a python|Failed to find a python", re.IGNORECASE),
        "py-spy finds no Python in it: the stacks of servers in other languages cannot be taken",
    ),
    (
        re.compile(r"permission denied|operation not permitted", re.IGNORECASE),
        "not permitted: run as the server's user or with CAP_SYS_PTRACE (a container needs it too)",
    ),
    (re.compile(r"no such (process|file)", re.IGNORECASE), "the process has ended"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What came of sampling one process."""

    profile: Profile | None
    failed: int
    """Stacks that could not be taken."""
    duration_s: float
    error: str | None


def program(config: StacksConfig) -> str:
    """Path of py-spy. Raises :class:`UnavailableError` saying how to get it."""
    beside = shutil.which("py-spy", path=sysconfig.get_path("scripts"))
    found = config.program or beside or shutil.which("py-spy")
    if not found or not Path(found).is_file():
        raise UnavailableError(
            f"{found or 'py-spy'} is not there; install the extra latencyprism[stacks]"
        )
    return found


def sample(pid: int, config: StacksConfig, stop: threading.Event | None = None) -> Sampled:
    """Take stacks of one process for the configured time; blocks for that and up to ``START_S``.

    ``stop`` ends it early, which is told as an error. Raises :class:`UnavailableError` without
    py-spy.
    """
    stop = stop or threading.Event()
    with tempfile.TemporaryDirectory(prefix="latencyprism-") as folder:
        out = Path(folder) / "stacks"
        command = [
            *(program(config), "record", "--nonblocking", "--idle", "--nolineno"),
            *("--rate", str(config.rate_hz), "--duration", str(config.duration_s)),
            *("--format", "raw", "--output", str(out), "--pid", str(pid)),
        ]
        began = time.monotonic()
        said, error = _run(command, config.duration_s + START_S, stop)
        took_s = time.monotonic() - began
        try:
            with out.open(errors="replace") as file:
                text = file.read(MAX_BYTES)
        except OSError:
            return Sampled(profile=None, failed=0, duration_s=took_s, error=error or _reason(said))
    profile = fold(text)
    failed = sum(int(count) for count in _ERRORS.findall(said))
    if not profile.samples:
        return Sampled(
            profile=None, failed=failed, duration_s=took_s, error=error or "no stack was taken"
        )
    return Sampled(profile=profile, failed=failed, duration_s=took_s, error=error)


def _run(command: list[str], timeout_s: float, stop: threading.Event) -> tuple[str, str | None]:
    """What it said, and why it was ended early, if it was."""
    error = None
    deadline = time.monotonic() + timeout_s
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
        ) as process,
    ):
        while process.poll() is None:
            if time.monotonic() > deadline:
                error = f"py-spy did not end within {timeout_s:g} s"
            elif stop.wait(POLL_S):
                error = "ended early"
            if error:
                process.kill()
                process.wait()
        said.seek(0)
        return said.read(MAX_BYTES).decode(errors="replace"), error


def _reason(said: str) -> str:
    for pattern, hint in _HINTS:
        if pattern.search(said):
            return hint
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return next((li for li in lines if "rror" in li), " ".join(lines))[:LONGEST_ERROR]
